"""BlockedTensor: a torch.Tensor whose memory is blocked over the channels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_blocked import _C

# TORCH_BLOCKED_CHECK=1: verify the zero tail of every blocked result.
CHECK_TAIL = os.environ.get("TORCH_BLOCKED_CHECK", "0") not in ("", "0")

# Set by torch_blocked.ops.table, which needs BlockedTensor first.
dispatch: Callable[..., Any] = NotImplemented

_SPATIAL = {3: "w", 4: "hw", 5: "dhw"}


class BlockedTensor(Tensor):
    """Activations [N, C, *spatial] in nC*<b>c, one to three spatial dims.

    Its dims, dtype and autograd behaviour are those of the dense tensor; only the memory differs:
    `_physical` is an ordinary contiguous tensor [N, ceil(C/b), *spatial, b], and its lanes beyond
    C (the zero tail) are always 0. Make one with `x.to_blocked()`, leave it with `y.to_dense()`.

    Every torch op accepts it. Ops with a blocked kernel (`torch_blocked.ops`) keep the format; any
    other runs on a dense copy, counted by `torch_blocked.profile()` and refused under
    `torch_blocked.strict()`.

    Source: oneDNN, "Understanding Memory Formats" (blocked layout and its zero padding)."""

    _physical: Tensor
    _channels: int

    @staticmethod
    def __new__(cls, physical: Tensor, channels: int) -> BlockedTensor:
        sizes = physical.shape
        self = Tensor._make_wrapper_subclass(
            cls,
            (sizes[0], channels, *sizes[2:-1]),
            dtype=physical.dtype,
            device=physical.device,
        )
        self._physical = physical
        self._channels = channels
        return self

    @property
    def format(self) -> str:
        """The format tag as oneDNN spells it: "nChw16c"."""
        return format_name(self.dim(), self.block)

    @property
    def block(self) -> int:
        """Channels in a block: 4, 8, 16 or 32."""
        return self._physical.shape[-1]

    def _read(self) -> Tensor:
        """The physical tensor for a reader outside the dispatcher; views may renew it first."""
        return self._physical

    @property
    def physical_shape(self) -> torch.Size:
        """Sizes in memory: [N, ceil(C/block), *spatial, block]."""
        return self._physical.shape

    def to_dense(
        self,
        dtype: torch.dtype | None = None,
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """The same values as an ordinary tensor, contiguous or channels-last. Differentiable."""
        from torch_blocked.formats import to_dense

        return to_dense(self, dtype, memory_format=memory_format)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        if isinstance(self._physical, torch._subclasses.FakeTensor):
            values = "..."
        else:
            values = tensor_contents or _values_text(self)
        return f"BlockedTensor({values}, shape={tuple(self.shape)}, format={self.format})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        return dispatch(func, types, args, kwargs or {})

    # What torch.compile needs: the inner tensors by name, and the way back.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_physical"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, outer_size, _outer_stride) -> BlockedTensor:
        return BlockedTensor(inner["_physical"], outer_size[1])


def format_name(ndim: int, block: int) -> str:
    return f"nC{_SPATIAL[ndim]}{block}c"


def _values_text(tensor: BlockedTensor) -> str:
    with torch.no_grad():
        dense = torch.ops.torch_blocked.to_dense(tensor._read(), tensor._channels)
    text = torch._tensor_str._tensor_str(dense, indent=len("BlockedTensor("))
    if tensor.requires_grad:
        text += f", grad_fn=<{tensor.grad_fn.name()}>" if tensor.grad_fn else ", requires_grad=True"
    return text


def tail_is_zero(tensor: BlockedTensor) -> bool:
    """Whether the lanes beyond C are all 0, as they must be."""
    return torch.ops.torch_blocked.tail_is_zero(tensor._physical, tensor._channels)


def check_tail(op: str, tensor: BlockedTensor) -> None:
    """Raises RuntimeError if an op left something in the tail: a defect of this library."""
    if not tail_is_zero(tensor):
        raise RuntimeError(
            f"torch_blocked::{op}: expected a zero tail beyond channel {tensor._channels}, "
            f"got other values in {tensor.format}; report this as a bug"
        )


def default_block() -> int:
    """The block that runs fastest on this CPU: 16 with AVX-512, else 8."""
    return _C.native_blocks()[0]
