"""Ops of other packages, whose schemas need not say which arguments they write.

PyTorch's own collectives (`c10d`) are of this kind, and any op that somebody registers may be. Such
an op gets a dense stand-in for a blocked tensor. Afterwards the stand-in is compared with its
former values, and writes are copied back. A collective may write after it has returned; then this
happens when its result is waited for (collectives.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_blocked.schema import written_arguments

# Namespaces of ops whose schemas are complete: PyTorch tests its own, and our tests check ours.
_TOLD = {"aten", "prims", "torch_blocked"}

# Ops whose results and writes are complete only after `wait_tensor`.
_ARRIVING = {"_c10d_functional"}

# Ops of PyTorch's own packages that write nothing and are frequent in models.
_KNOWN = {
    "torchvision",
    "quantized_decomposed",
    "quantized",
    "_quantized",
    "mkl",
    "mkldnn",
    "mkldnn_prepacked",
    "onednn",
    "sparse",
}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_foreign(func: OpOverload) -> bool:
    return func.namespace not in _TOLD


def may_write_untold(name: str) -> bool:
    """Whether the op of this name ("my_package::op") may write without its schema saying so."""
    return name.partition("::")[0] not in _TOLD | _KNOWN


class Untold(TorchDispatchMode):
    """Finds the first foreign op, as `op`, that writes an argument without its schema saying so.
    Its writes are undone when the mode ends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = ""
        self._written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_write_untold(func.name()):
            return func(*args, **kwargs)
        told = {id(each) for each in written_arguments(func, args, kwargs)}
        given = [
            (each, each.detach().clone())
            for each in pytree.arg_tree_leaves(*args, **kwargs)
            if isinstance(each, Tensor) and each.layout == torch.strided and id(each) not in told
        ]
        out = func(*args, **kwargs)
        written = [(each, before) for each, before in given if not _same_bits(each, before)]
        if written and not self.op:
            self.op = str(func)
        self._written += written
        return out

    def put_back(self) -> None:
        for tensor, before in reversed(self._written):
            tensor.copy_(before)


class StandIn(NamedTuple):
    """A dense tensor that an op gets in place of an argument, and the argument, which takes the
    values that are written."""

    argument: Tensor
    dense: Tensor
    take: Callable[[Tensor], None]


class Writes:
    """The writes of a foreign op to its stand-ins. finish() copies them back once they are made."""

    def __init__(self, stand_ins: Sequence[StandIn]) -> None:
        self.stand_ins = stand_ins
        self._before = [each.dense.detach().clone() for each in stand_ins]
        self._is_finished = False

    def finish(self) -> None:
        """Copies the writes back. All stand-ins are compared first, because arguments may share
        memory."""
        if self._is_finished:
            return
        self._is_finished = True
        each = zip(self.stand_ins, self._before, strict=True)
        written = [
            (argument, dense.detach().clone(), take)
            for (argument, dense, take), before in each
            if not _same_bits(dense, before)
        ]
        with torch.no_grad():
            for argument, value, take in written:
                take(value)
                if not argument.is_inference():
                    torch.autograd.graph.increment_version(argument)

    def restored(self, value: Any) -> Any:
        """`value` with the arguments in place of their stand-ins."""
        arguments = {id(each.dense): each.argument for each in self.stand_ins}
        return pytree.tree_map_only(Tensor, lambda t: arguments.get(id(t), t), value)


# Set by collectives.py: handles the result of an op that may write after it has returned.
WAITING: list[Callable[[Any, Writes], Any]] = []


def run(func: OpOverload, args: Any, kwargs: Any, stand_ins: Sequence[StandIn]) -> Any:
    """The result of a foreign op, whose arguments already hold the stand-ins."""
    if func.namespace in _ARRIVING and func.name().endswith("::wait_tensor"):
        return _arrived(func, stand_ins)
    writes = Writes(stand_ins)
    out = func(*args, **kwargs)
    if func.namespace in _ARRIVING:
        for each in stand_ins:
            each.argument._arriving = writes  # type: ignore[attr-defined]
        return writes.restored(out)
    if any(isinstance(each, torch.ScriptObject) for each in pytree.tree_leaves(out)):
        (waiting,) = WAITING
        return waiting(writes.restored(out), writes)
    writes.finish()
    return writes.restored(out)


def _arrived(func: OpOverload, stand_ins: Sequence[StandIn]) -> Any:
    """`wait_tensor` of an argument. The op it waits for wrote to an earlier stand-in."""
    argument = stand_ins[0].argument
    writes: Writes | None = vars(argument).pop("_arriving", None)
    if writes is not None:
        for each in writes.stand_ins:
            func(each.dense)
        writes.finish()
    return argument


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same bits: 0.0 is not -0.0, and a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_quantized:
        return torch.equal(a, b)
    a, b = (each.detach().resolve_conj().resolve_neg() for each in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integer = _INTEGERS[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))
