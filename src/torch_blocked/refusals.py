"""Refusals of module methods that an optimized module lacks, and errors that users ask for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor


def refuse_state_dict() -> NoReturn:
    raise NotImplementedError(
        "torch_blocked::state_dict: expected a model with parameters, got an optimized one, "
        "whose weights are folded and packed; use the model's state_dict(), or save(path)"
    )


def refuse_in_parts(reason: str, advice: str, kind: type[Exception]) -> NoReturn:
    raise kind(
        "torch_blocked::optimize: expected a model that is captured whole, got one that runs in "
        f"parts ({reason}); {advice}"
    )


def refuse_conversion(fn: Callable[[Tensor], Tensor]) -> None:
    """Raises NotImplementedError if `fn` changes the type, or moves to another device."""
    probe = fn(torch.zeros(1))
    if probe.dtype != torch.float32 or probe.device.type != "cpu":
        raise NotImplementedError(
            f"torch_blocked::optimize: expected float32 on the CPU, got {probe.dtype} on "
            f"{probe.device}; convert the model and optimize it again"
        )


def refuse_training() -> NoReturn:
    raise NotImplementedError(
        "torch_blocked::optimize: expected inference, got train(); train the model that was "
        "optimized, on x.to_blocked(), and optimize it again"
    )


# Parts of errors that the user's own settings cause. Running the model's own ops would hide them,
# and end the process where there are no threads.
_ASKED_FOR = (
    "torch_blocked::register: ",
    "torch_blocked.strict()",
    "force_implementation(",
    "in the memory of the CPU",
    "call torch.set_num_threads(",
)


def is_asked_for(error: Exception) -> bool:
    """Whether an error reports a wrong registration, a refusal by strict() or by a forced
    implementation, a model that was moved to another device, or more threads than there are."""
    return any(words in str(error) for words in _ASKED_FOR)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the system refused memory. torch says so in a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


# The blocked form of another library's op in a step's description: "(my::op [1, 8] by my::form)".
_BY_FORM = re.compile(r" by (?!aten::|torch_blocked::)(\w+::[\w.]+)\)")


def whose_defect(step: str) -> str:
    """Advice for a step whose result differs from the model's."""
    form = _BY_FORM.search(step)
    if form:
        return f"Correct {form[1]}, a blocked form that was registered: it computes something else"
    return "Please report this with the model, it is a defect of torch_blocked"
