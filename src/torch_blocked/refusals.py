"""What modules are asked for that an optimized one does not have, and errors that are asked for."""

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
    """Raises NotImplementedError if it makes other types, or moves to another device."""
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


# How errors begin or end that the user's own settings make. The model's own ops would hide them.
_ASKED_FOR = (
    "torch_blocked::register: ",
    "torch_blocked.strict()",
    "force_implementation(",
    "in the memory of the CPU",
)


def is_asked_for(error: Exception) -> bool:
    """Whether an error tells of a wrong registration, of what strict() or a forced implementation
    refuses, or of a model that was moved to another device."""
    return any(words in str(error) for words in _ASKED_FOR)


# The blocked form of another library's op, in the words for a step: "(my::op [1, 8] by my::form)".
_BY_FORM = re.compile(r" by (?!aten::|torch_blocked::)(\w+::[\w.]+)\)")


def whose_defect(step: str) -> str:
    """What to do about a step whose result is not the model's."""
    form = _BY_FORM.search(step)
    if form:
        return f"Correct {form[1]}, a blocked form that was registered: it computes something else"
    return "Please report this with the model, it is a defect of torch_blocked"
