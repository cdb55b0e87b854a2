"""The arguments of a call of an optimized model: which capture serves them, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from torch_blocked import _C, structure
from torch_blocked.shadow import DenseView
from torch_blocked.tensor import BlockedTensor
from torch_blocked.watched import WatchedTensor


@dataclass
class Call:
    """The arguments of a call. A capture serves one structure, and one value of each argument that
    is no tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    constants: tuple[Any, ...]
    spec: Any
    inputs: _C.Inputs

    @property
    def signature(self) -> tuple[Any, Any]:
        return self.spec, self.constants


def call_of(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> Call:
    """Raises TypeError for tensors that are refused (checked_inputs)."""
    spec: Any
    if kwargs or not all(isinstance(each, Tensor) for each in args):
        leaves, spec = structure.flatten((args, kwargs))
    else:
        leaves, spec = list(args), len(args)
    constants = tuple((type(each), each) for each in leaves if not isinstance(each, Tensor))
    return Call(args, kwargs, leaves, hashable(constants), spec, checked_inputs(leaves, dtype))


def dense(value: Any) -> Any:
    return pytree.tree_map_only(BlockedTensor, BlockedTensor.to_dense, value)


def run_if_lazy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the model once if it has lazy modules, which get their weights by that. Raises what the
    model raises."""
    tensors = (each for of in (model.parameters, model.buffers) for each in of())
    if not any(map(is_lazy, tensors)):
        return
    with torch.no_grad():
        model(*dense(args), **dense(kwargs))


def checked_inputs(leaves: list[Any], dtype: torch.dtype | None = None) -> _C.Inputs:
    """The tensors among the arguments of a call, with floating-point values in `dtype`. Raises
    TypeError for a tensor without memory of its own: meta, fake, sparse, nested, or of
    torch.func."""
    return _C.Inputs(leaves, dtype, BlockedTensor, DenseView, WatchedTensor)


def refuse_tracing() -> None:
    """Raises inside a tracer: it does not see our kernels, so results would become constants."""
    keys = torch._C._TorchDispatchModeKey
    modes = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    if torch._C._get_tracing_state() is None and not (
        torch._C._len_torch_dispatch_stack()
        and any(torch._C._get_dispatch_mode(each) is not None for each in modes)
    ):
        return
    raise NotImplementedError(
        "torch_blocked::optimize: expected a call, got one that torch.export, make_fx or "
        "torch.jit.trace records; trace the model that was optimized"
    )


def named(metas: list[Any], signature: tuple[Any, Any]) -> str:
    """Tensors and other arguments in words: "float32 [1, 3, 8, 8], 2, by name or nested"."""
    tensors = [f"{str(dtype).removeprefix('torch.')} {list(dims)}" for dims, dtype in metas]
    spec, constants = signature
    more = [] if isinstance(spec, int) else ["by name or nested"]
    return ", ".join([*tensors, *(repr(each)[:40] for _, each in constants), *more]) or "none"


def hashable(constants: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        hash(constants)
    except TypeError:
        return tuple((kind, _content(each)) for kind, each in constants)
    return constants


def _content(value: Any) -> Any:
    """The whole content of a value, to compare by: the text of a large array leaves most out."""
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return str(value.dtype), value.shape, value.tobytes()
    return repr(value)
