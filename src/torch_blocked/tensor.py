"""BlockedTensor: a torch.Tensor whose memory is blocked over the channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from torch_blocked import _C
from torch_blocked.arguments import checked_dtype, checked_tensor
from torch_blocked.descriptor import blocks_of, canonical_tag, checked_tag
from torch_blocked.dispatch import dispatch, never_compiled
from torch_blocked.export import modes_seen
from torch_blocked.order import in_order, known_when_traced, memory_order
from torch_blocked.raw_memory import (
    array_for_numpy,
    as_array,
    capsule,
    refuse_address,
    shown_storage,
)
from torch_blocked.tag_methods import add_tag_methods

_ops = torch.ops.torch_blocked
_DATA: Any = Tensor.data  # the descriptor

_BLOCKS = _C.Format.BLOCKS
# The beginnings of the names of blocked formats, by number of dims. The block follows; it is a
# symbol in a traced program.
_PREFIXES = {ndim: _C.Format.blocked(8).name(ndim).removesuffix("8c") for ndim in (3, 4, 5)}
_MEMORY_FORMATS = {
    torch.contiguous_format: False,
    torch.channels_last: True,
    torch.channels_last_3d: True,
}


class BlockedTensor(Tensor):
    """Activations [N, C, *spatial] in nC*<b>c, one to three spatial dims.

    Its dims, dtype and autograd behaviour are those of the dense tensor; only the memory differs:
    `_physical` is an ordinary contiguous tensor [N, ceil(C/b), *spatial, b], and its lanes beyond
    C (the zero tail) are always 0. Make one with `x.to_blocked()`, leave it with `y.to_dense()`.

    Every torch op accepts it. Ops with a blocked kernel (`torch_blocked.ops`) keep the format; any
    other runs on a dense copy, counted by `torch_blocked.profile()` and refused under
    `torch_blocked.strict()`.

    BlockedTensor(physical, channels) wraps a physical tensor that already has a zero tail. Raises
    ValueError unless that has 4 to 6 dims, blocks of 4, 8, 16 or 32, and as many blocks as the
    channels need. With TORCH_BLOCKED_CHECK=1 it raises RuntimeError if the tail is not zero.

    Source: oneDNN, "Understanding Memory Formats" (blocked layout and its zero padding)."""

    _physical: Tensor
    _channels: int

    @staticmethod
    def __new__(cls: type[BlockedTensor], physical: Tensor, channels: int) -> BlockedTensor:
        if type(physical) is Tensor:
            return _C.wrap(cls, physical, channels)
        _check_traced(physical, channels)
        sizes = physical.shape
        self: BlockedTensor = Tensor._make_wrapper_subclass(
            cls,
            (sizes[0], channels, *sizes[2:-1]),
            dtype=physical.dtype,
            device=physical.device,
        )
        _C.deny_memory(self)
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
        """The physical tensor for a reader outside the dispatcher. A view may renew it first."""
        return self._physical

    def _check_tail(self, op: str) -> None:
        """Raises RuntimeError if `op` left values in the tail, which is a defect of this
        library."""
        if not tail_is_zero(self):
            raise RuntimeError(
                f"torch_blocked::{op}: expected a zero tail beyond channel {self._channels}, "
                f"got other values in {self.format}; report this as a bug"
            )

    @property
    def physical_shape(self) -> torch.Size:
        """Sizes in memory: [N, ceil(C/block), *spatial, block]."""
        return self._physical.shape

    def to_dense(  # type: ignore[override]
        self,
        dtype: torch.dtype | None = None,
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """The same values as an ordinary tensor, contiguous or channels-last. Differentiable.

        memory_format: torch.contiguous_format, torch.channels_last (4 dims) or
            torch.channels_last_3d (5 dims).
        Raises ValueError for a memory format of another number of dims."""
        return to_dense(self, dtype, memory_format=memory_format)

    def is_contiguous(
        self, memory_format: torch.memory_format | str = torch.contiguous_format
    ) -> bool:
        """Like Tensor.is_contiguous of the dense tensor. For a tag: whether that is the format."""
        if not isinstance(memory_format, str):
            return super().is_contiguous(memory_format=memory_format)
        same = canonical_tag(memory_format) == canonical_tag(self.format)
        return same and self._physical.is_contiguous()

    def contiguous(
        self, memory_format: torch.memory_format | str = torch.contiguous_format
    ) -> Tensor:
        """`self` if the same view of a dense tensor is contiguous, else a copy. For a tag: the
        tensor in that format."""
        if isinstance(memory_format, str):
            return to_format(self, memory_format)
        if memory_format is torch.contiguous_format and type(self._physical) is Tensor:
            if not self._physical.is_contiguous() or self._dense_strides():
                copy: Any = self.clone()
                physical = copy._physical.contiguous()
                # Two views, because strides of dims of size 1 may still be those of the slice.
                copy._physical = physical.view(-1).view(physical.shape)
                blocked: Tensor = copy
                return blocked
        return super().contiguous(memory_format=memory_format)

    def _dense_strides(self) -> list[int] | None:
        """The strides of the same slice of a dense tensor, which decide the dims that a view can
        join. None if it can join all, or if elements overlap."""
        if forward_ad._current_level >= 0:
            return None  # a tangent must have its primal's strides, and that may be no slice
        physical, block = self._physical, self.block
        sizes, strides = physical.shape, physical.stride()
        if strides[-1] != 1 or any(s == 0 and n > 1 for n, s in zip(sizes, strides, strict=True)):
            return None
        batch, channel, *spatial = (stride // block for stride in strides[:-1])
        images, blocks, *pixels = sizes[:-1]
        reach = 1 + sum((n - 1) * s for n, s in zip(pixels, spatial, strict=True))
        # The stride of a dim of size 1 may mean nothing, as in a sum with a transposed tensor.
        if blocks == 1 and (channel < reach or (images > 1 and batch % channel)):
            channel = batch if images > 1 else reach
        whole = images == 1 or batch == blocks * channel
        channels = self._channels if whole else batch // channel * block
        found = [channels * channel, channel, *spatial]
        return None if is_contiguous(self.shape, found) else found

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        if isinstance(self._physical, torch._subclasses.FakeTensor) or self.is_meta:
            values = "..."
        else:
            values = tensor_contents or _values_text(self)
        return f"BlockedTensor({values}, shape={tuple(self.shape)}, format={self.format})"

    @property  # type: ignore[override]
    def data(self) -> BlockedTensor:
        """The same memory without the graph."""
        # Nothing counts writes through it, so views renew each time.
        self._physical.gave_data = True  # type: ignore[attr-defined]
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: BlockedTensor) -> None:
        if not isinstance(value, BlockedTensor):
            raise TypeError(
                f"torch_blocked::data: expected a blocked tensor, got a dense one of dims "
                f"{tuple(value.shape)}; assign value.to_blocked()"
            )
        _DATA.__set__(self, value)  # the dims and the dtype
        self._physical, self._channels = value._read(), value._channels

    # These methods of torch end in a data pointer without passing the dispatcher. If they promise
    # values, they use a dense copy; if they promise memory, they refuse (raw_memory.py).

    def data_ptr(self) -> NoReturn:
        """Raises RuntimeError, because a reader of the address would take blocks for dense rows."""
        refuse_address("data_ptr", f"{self.format} {tuple(self.shape)}")

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage without an address; its `resize_(0)` frees the physical tensor's memory."""
        storage = super().untyped_storage()
        plain = type(self._physical) is Tensor
        return shown_storage(storage, self._physical) if plain else storage

    def share_memory_(self) -> BlockedTensor:
        self._physical.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self._physical.is_shared())

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as a NumPy array. It is read-only, because writes would not reach
        the tensor. With force=True it is writable, and the caller's own."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "torch_blocked::numpy: expected a tensor that does not require grad, got one that "
                "does; call .detach().numpy(), or .numpy(force=True)"
            )
        return as_array(self.detach().to_dense(), force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.requires_grad:
            self.numpy()  # refuses
        return array_for_numpy(self.detach().to_dense(), dtype, copy)

    def tolist(self) -> list[Any]:
        return self.detach().to_dense().tolist()

    def apply_(self, function: Callable[..., Any]) -> BlockedTensor:
        return self._through_dense(lambda dense: dense.apply_(function))

    def map_(self, other: Tensor, function: Callable[..., Any]) -> BlockedTensor:
        other = other.to_dense() if isinstance(other, BlockedTensor) else other
        return self._through_dense(lambda dense: dense.map_(other, function))

    def _through_dense(self, write: Callable[[Tensor], Tensor]) -> BlockedTensor:
        """Runs an in-place function on a dense copy and takes its values."""
        with torch.no_grad():
            self.copy_(write(self.detach().to_dense()))
        return self

    def __dlpack__(self, **arguments: Any) -> Any:
        """The capsule of a dense copy. Raises BufferError if copying is not allowed."""
        return capsule(self.detach().to_dense(), arguments)

    def __dlpack_device__(self) -> Any:
        return self._physical.__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "torch_blocked::deepcopy: expected a leaf tensor, got one with grad_fn; "
                "detach it first"
            )
        if id(self) not in memo:
            copy = BlockedTensor(self._physical.detach().clone(), self._channels)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        copied: BlockedTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves dense values and a tag, so that any block size, CPU or version can load them."""
        if self.grad_fn is not None:
            raise RuntimeError(
                "torch_blocked::save: expected a leaf tensor, got one with grad_fn; detach it first"
            )
        return _rebuild, (self.detach().to_dense(), self.format, self.requires_grad)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    @never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(BlockedTensor, func, types, args, kwargs or {})

    # What torch.compile needs: the inner tensors by name, and the way back.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_physical"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], _context: Any, outer_size: Any, _outer_stride: Any
    ) -> BlockedTensor:
        return BlockedTensor(inner["_physical"], outer_size[1])


class ExportedTensor(BlockedTensor):
    """A blocked tensor while torch.export traces. Ops on it return the same class."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch.export keeps a result that is a subclass as a constant without values.
        if not torch.compiler.is_exporting():
            raise RuntimeError(
                "torch_blocked::export: expected a program that returns dense tensors, got one "
                "that returns a blocked one, which torch.export cannot; return x.to_dense()"
            )
        with torch._C.DisableTorchFunctionSubclass(), modes_seen(False):
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        types = [BlockedTensor if t is ExportedTensor else t for t in types]
        with modes_seen(torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0):
            result = dispatch(BlockedTensor, func, types, args, kwargs or {})
        return pytree.tree_map_only(BlockedTensor, exported, result)


def exported(value: BlockedTensor) -> ExportedTensor:
    """`value` in the form that torch.export can trace."""
    if isinstance(value, ExportedTensor):
        return value
    return ExportedTensor(value._physical, value._channels)


def _check_traced(physical: Tensor, channels: int) -> None:
    """The checks of _C.wrap for a traced tensor. It checks only known numbers, because a question
    about a symbol would bind the program to its answer."""
    if not isinstance(physical, Tensor):
        raise TypeError(
            f"torch_blocked::BlockedTensor: expected a physical tensor, got "
            f"{type(physical).__name__}; make it with to_blocked"
        )
    sizes = physical.shape
    lanes = sizes[-1] if len(sizes) in (4, 5, 6) else 0
    if type(lanes) is int and lanes not in _BLOCKS:
        raise ValueError(
            "torch_blocked::BlockedTensor: expected a physical tensor [N, ceil(C/b), *spatial, b] "
            f"of 4 to 6 dims with b = 4, 8, 16 or 32, got {list(sizes)}; make it with to_blocked"
        )
    if not all(type(size) is int for size in (channels, sizes[1], sizes[-1])):
        return
    blocks = blocks_of(channels, sizes[-1])
    if channels < 0 or sizes[1] != blocks:
        raise ValueError(
            f"torch_blocked::BlockedTensor: expected ceil(C/b) = {blocks} blocks for "
            f"C = {channels}, got {sizes[1]} in {list(sizes)}; pass the logical channel count"
        )


def contiguous_strides(shape: torch.Size) -> list[int]:
    return [shape[d + 1 :].numel() for d in range(len(shape))]


def is_contiguous(shape: torch.Size, strides: list[int]) -> bool:
    """Whether the strides are those of a contiguous tensor, in dims where strides count."""
    each = zip(shape, strides, contiguous_strides(shape), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in each)


def format_name(ndim: int, block: int) -> str:
    return f"{_PREFIXES[ndim]}{block}c"


def _values_text(tensor: BlockedTensor) -> str:
    with torch.no_grad():
        dense = _ops.to_dense(tensor._read(), tensor._channels)
    text: str = torch._tensor_str._tensor_str(dense, indent=len("BlockedTensor("))
    if tensor.requires_grad:
        text += f", grad_fn=<{tensor.grad_fn.name()}>" if tensor.grad_fn else ", requires_grad=True"
    return text


def tail_is_zero(tensor: BlockedTensor) -> bool:
    """Whether all lanes beyond C are 0, as they must be."""
    return bool(_ops.tail_is_zero(tensor._physical, tensor._channels))


@known_when_traced
def default_block() -> int:
    """The block that runs fastest on this CPU: 16 with AVX-512, else 8."""
    return _C.native_blocks()[0]


@known_when_traced
def block_of(tag: str, ndim: int) -> int:
    return _parsed_block(checked_tag(tag), ndim)


@lru_cache(maxsize=256)
def _parsed_block(tag: str, ndim: int) -> int:
    format = _C.Format.of(tag, ndim)
    if format is None or not format.block:
        wanted = f" such as {format_name(ndim, 16)}" if 3 <= ndim <= 5 else " and 3 to 5 dims"
        raise ValueError(
            f"torch_blocked::to_blocked: expected a tag blocked over the channels{wanted}, got "
            f"{_C.shortened(tag)} for {ndim} dims; use to_format for plain formats"
        )
    return format.block


def to_blocked(
    input: Tensor, format: str | None = None, dtype: torch.dtype | None = None
) -> BlockedTensor:
    """`input` [N, C, *spatial] in a blocked format. Differentiable.

    input: dense with any strides, or blocked; 3 to 5 dims; any dtype but quantized ones.
    format: a tag such as "nChw16c" or "aBcd8b" (blocks of 4, 8, 16 or 32); None takes the block
        that is fastest on this CPU: 16 with AVX-512, else 8.
    dtype: of the result; the conversion is that of `Tensor.to`.
    Returns a BlockedTensor of physical shape [N, ceil(C/b), *spatial, b], or `input` itself if it
    already has that format and dtype.
    Raises ValueError for a tag that is not blocked over the channels or has another rank, TypeError
    for a sparse, mkldnn or quantized tensor.
    Source: oneDNN, "Understanding Memory Formats"."""
    dtype = checked_dtype("to_blocked", dtype) or checked_tensor("to_blocked", input).dtype
    block = default_block() if format is None else block_of(format, input.dim())
    if isinstance(input, BlockedTensor) and input.block == block and input.dtype == dtype:
        return input
    if input.layout != torch.strided:
        raise TypeError(
            f"torch_blocked::to_blocked: expected a strided tensor, got layout {input.layout}; "
            "call .to_dense() first"
        )
    if input.is_quantized:
        raise TypeError(
            f"torch_blocked::to_blocked: expected numbers as they are, got {input.dtype} with a "
            "scale and a zero point; call .dequantize() or .int_repr() first"
        )
    blocked: BlockedTensor = ToBlocked.apply(input, block, dtype)  # type: ignore[no-untyped-call]
    return blocked


def to_format(input: Tensor, tag: str) -> Tensor:
    """`input` in the format `tag`. Differentiable.

    tag: the dims in memory order ("nhwc", "chwn", "ba", ...; 1 to 12 dims) for a strided tensor, or
        blocks of channels ("nChw16c") for a blocked one.
    Returns `input` itself if it has the format, else a copy with the same dims and dtype.
    Raises ValueError for other tags, and for tags of another rank than `input`."""
    order = memory_order(checked_tag(tag), checked_tensor("to_format", input).dim())
    if order is None:
        return to_blocked(input, tag)
    if isinstance(input, BlockedTensor):
        channels_last = input.dim() in _PREFIXES and order[-1] == 1
        input = ToDense.apply(input, channels_last, input.dtype)  # type: ignore[no-untyped-call]
    return in_order(input, order)


add_tag_methods(BlockedTensor, to_format)


def to_dense(
    input: Tensor,
    dtype: torch.dtype | None = None,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """`input` as an ordinary strided tensor. Differentiable.

    memory_format: torch.contiguous_format, torch.channels_last (4 dims) or torch.channels_last_3d
        (5 dims). Channels-last is one reorder from the blocked format.
    dtype: of the result; None keeps the dtype of `input`.
    A tensor that is not blocked goes through `Tensor.to`, which may return it unchanged.
    Raises ValueError for a memory format of another number of dims."""
    if not isinstance(input, BlockedTensor):
        dtype = dtype or checked_tensor("to_dense", input).dtype
        return input.to(dtype=dtype, memory_format=memory_format)
    channels_last = _MEMORY_FORMATS.get(memory_format)
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format, input.dim())
    if channels_last is None or rank != input.dim():
        raise ValueError(
            "torch_blocked::to_dense: expected torch.contiguous_format, or the channels-last "
            f"format of {input.dim()} dims, got {memory_format}; use to_format for nwc"
        )
    dtype = checked_dtype("to_dense", dtype) or input.dtype
    dense: Tensor = ToDense.apply(input, channels_last, dtype)  # type: ignore[no-untyped-call]
    return dense


def _rebuild(dense: Tensor, format: str, requires_grad: bool) -> BlockedTensor:
    """Makes a blocked tensor of loaded data; torch.load(weights_only=True) may call it.

    Raises ValueError if the file's tag is no blocked format of that rank."""
    blocked = to_blocked(dense, format)
    blocked.requires_grad_(requires_grad)
    return blocked


torch.serialization.add_safe_globals([_rebuild])


def _to_process(tensor: BlockedTensor) -> Any:
    """For torch.multiprocessing: both processes share the memory, as for any tensor."""
    if tensor.grad_fn is not None:
        return tensor.__reduce_ex__(None)  # refuses
    return _from_process, (tensor._physical, tensor._channels, tensor.requires_grad)


def _from_process(physical: Tensor, channels: int, requires_grad: bool) -> BlockedTensor:
    blocked = BlockedTensor(physical, channels)
    blocked.requires_grad_(requires_grad)
    return blocked


ForkingPickler.register(BlockedTensor, _to_process)


def wrapper_class() -> type[BlockedTensor]:
    return ExportedTensor if torch.compiler.is_exporting() else BlockedTensor


_NO_VMAP = (
    "torch_blocked::{0}: expected a tensor outside torch.vmap, got one that it batches; "
    "call {0} before torch.vmap or after it"
)


def _tangent_by(
    reorder: type[torch.autograd.Function], tangent: Tensor | None, arguments: tuple[Any, ...]
) -> Any:
    """The tangent in the format of its primal. Tangents that vmap batches, for jacfwd and hessian,
    stay dense, because they have a dim more than any blocked format."""
    if tangent is None:
        return None
    inner = tangent
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):
        if torch._C._functorch.is_batchedtensor(inner):
            return tangent.to(arguments[-1])
        inner = torch._C._functorch.get_unwrapped(inner)
    return reorder.apply(tangent, *arguments)


class ToBlocked(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, block: int, dtype: torch.dtype) -> BlockedTensor:
        if isinstance(input, BlockedTensor):
            physical = _ops.reblock(input._read(), input._channels, block, dtype=dtype)
        else:
            physical = _ops.to_blocked(input, block, dtype=dtype)
        return wrapper_class()(physical, input.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input = inputs[0]
        ctx.dtype = input.dtype
        ctx.block = input.block if isinstance(input, BlockedTensor) else None
        ctx.result = inputs[1:]  # its block and dtype

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> Any:
        return _tangent_by(ToBlocked, tangent, ctx.result)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise NotImplementedError(_NO_VMAP.format("to_blocked"))

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.block is None:
            return to_dense(grad, ctx.dtype).contiguous(), None, None  # see ops.fallback.regular
        return to_blocked(grad, format_name(grad.dim(), ctx.block), ctx.dtype), None, None


class ToDense(torch.autograd.Function):
    @staticmethod
    def forward(input: BlockedTensor, channels_last: bool, dtype: torch.dtype) -> Tensor:
        dense: Tensor = _ops.to_dense(
            input._read(), input._channels, channels_last=channels_last, dtype=dtype
        )
        return dense

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.format, ctx.dtype = inputs[0].format, inputs[0].dtype
        ctx.result = inputs[1:]  # whether channels-last, and its dtype

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> Any:
        return _tangent_by(ToDense, tangent, ctx.result)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise NotImplementedError(_NO_VMAP.format("to_dense"))

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> Any:
        return to_blocked(grad, ctx.format, ctx.dtype), None, None
