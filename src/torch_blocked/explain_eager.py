"""Runs a model op by op on blocked tensors, and explains each op."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torch_blocked import _C, module_paths
from torch_blocked.explain_layers import Layer, Run, is_blocked_tag, split_reason
from torch_blocked.formats import format_of
from torch_blocked.schema import is_view_op
from torch_blocked.shadow import DenseView
from torch_blocked.tensor import BlockedTensor, to_blocked, to_dense

# The first run packs the weights; the least time of the others counts.
_RUNS = 4
_NO_KERNEL = "no blocked kernel for this op"  # as the dispatch says it
_REGISTER = "use ops that have one, or give it a blocked form by torch_blocked.register"
_ARGUMENTS = "give it arguments that its kernel takes, or use another op"
_QUANTIZE = "quantize the model by torch_blocked.quantize instead"
_NO_IMAGE = "nothing to do: it is no image"


class _Ops(TorchDispatchMode):
    """Records every op that reaches the dispatcher while it is on, its time and its inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = _state_of(model)
        self.layers: list[Layer] = []
        self.makers: dict[int, int] = {}  # of a tensor's id, the layer that made it
        self.kept: list[Any] = []  # so that no other tensor gets the id of one
        self.physical: set[int] = set()  # addresses of memory of blocked tensors

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        position = _C.trace_start()
        start = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            ms = 1e3 * (time.perf_counter() - start)
            events = _C.trace_stop(position)
        self.note(func, args, kwargs, result, ms, events)
        return result

    def note(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        ms: float,
        events: list[_C.Event],
    ) -> None:
        operands = [each for each in pytree.arg_tree_leaves(*args, **kwargs) if _is_value(each)]
        read = [each for each in operands if id(each) not in self.state]
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        if operands and not read and is_view_op(func):  # of a transposed weight, say
            self.state |= {id(each) for each in results}
            self.kept.append(results)
            return
        if not results or (not read and not results[0].numel()):  # unused results of some ops
            return
        if read and all(self._is_physical(each) for each in read):  # a part of a blocked op
            self._keep_physical(results)
            self.layers[-1].ms += ms
            return
        place, line = module_paths.place()
        reorders = [each for each in events if each.kind == _C.Kind.reorder]
        layer = Layer(
            module=place,
            op=str(func.overloadpacket).removeprefix("aten."),
            kind="layer",
            dims_in=[list(each.shape) for each in read],
            dims_out=list(results[0].shape),
            dtype=_word(results[0].dtype),
            format_in=_format(read[0]) if read else "",
            format_out=_format(results[0]),
            implementation=_implementation(func, results[0]),
            ms=ms,
            reads=list(dict.fromkeys(self.makers.get(id(each), -1) for each in read)),
            line=line,
            flops=_flops(func, args, kwargs, result),
            bytes=float(sum(_bytes(each) for each in (*read, *results))),
            inner_reorders=len(reorders),
        )
        self._keep_physical(
            [each._physical for each in (*read, *results) if isinstance(each, BlockedTensor)]
        )
        self._explain(layer, events, read, results[0])
        for each in results:
            self.makers[id(each)] = len(self.layers)
        self.kept.append((read, results))
        self.layers.append(layer)

    def _is_physical(self, tensor: Tensor) -> bool:
        if isinstance(tensor, BlockedTensor | DenseView):
            return False
        return _address(tensor) in self.physical - {0}

    def _keep_physical(self, tensors: list[Tensor]) -> None:
        self.physical |= {_address(each) for each in tensors}
        self.kept.append(tensors)

    def _explain(
        self, layer: Layer, events: list[_C.Event], read: list[Tensor], result: Tensor
    ) -> None:
        fallback = next((each for each in events if each.kind == _C.Kind.fallback), None)
        if fallback is not None:
            layer.reason, layer.advice = _why_fallback(fallback.detail, result)
            layer.implementation = "aten"
            return
        reads_blocks = any(isinstance(each, BlockedTensor) for each in read)
        layer.blocked = is_blocked_tag(layer.format_out) or (
            reads_blocks and not layer.inner_reorders
        )
        if layer.blocked:
            if layer.implementation == "aten":  # a sum, say, that reads blocks
                layer.implementation = "torch_blocked"
            return
        dense = next((i for i in layer.reads if i >= 0 and not self.layers[i].blocked), None)
        maker = _named(self.layers[dense]) if dense is not None else ""
        layer.reason, layer.advice = _why_dense(read, result, maker)


def _state_of(model: nn.Module) -> set[int]:
    """The ids of the model's tensors: parameters, buffers and attributes."""
    held = [vars(each) for each in model.modules()]
    tensors = (each for each in pytree.tree_leaves(held) if isinstance(each, Tensor))
    return {id(each) for each in (*model.parameters(), *model.buffers(), *tensors)}


def _why_fallback(detail: str, result: Tensor) -> tuple[str, str]:
    """Why an op ran on a dense copy, from the detail of its event, and what to do about it."""
    reason = detail.partition(": ")[2] or detail
    if reason == _NO_KERNEL:
        return _quantized("result", result) or (reason, _REGISTER)
    what, advice = split_reason(reason)
    return what, advice or _ARGUMENTS


def _why_dense(read: list[Tensor], result: Tensor, maker: str) -> tuple[str, str]:
    """Why an op without a handler of ours gave a dense result, and what to do about it. maker: the
    layer that made the dense tensor that it reads; "" if there is none."""
    if not read:
        return "it reads no activation", "nothing to do: no image goes through it"
    told = _of_no_format("input", read[0]) or _of_no_format("result", result)
    if told:
        return told
    if any(isinstance(each, BlockedTensor) for each in read):
        return "its result is a dense view, which is a copy", "to_blocked() after it goes back"
    if maker:
        return f"its input is dense, from {maker}", "to_blocked() after that goes back"
    return "its input is dense", "call to_blocked() on it"


def _of_no_format(what: str, tensor: Tensor) -> tuple[str, str] | None:
    """Why a tensor can have no blocked format, and what to do about it; None if it can."""
    if not 3 <= tensor.dim() <= 5:
        return f"its {what} has {tensor.dim()} dims, and blocked formats 3 to 5", _NO_IMAGE
    return _quantized(what, tensor)


def _quantized(what: str, tensor: Tensor) -> tuple[str, str] | None:
    if not tensor.is_quantized:
        return None
    return f"its {what} is {_word(tensor.dtype)}, which no blocked tensor is", _QUANTIZE


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor)


def _address(tensor: Tensor) -> int:
    """The address of its memory; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _named(layer: Layer) -> str:
    return f"{layer.op} of {layer.module}" if layer.module else layer.op


def _format(tensor: Tensor) -> str:
    if not 3 <= tensor.dim() <= 5 or tensor.layout != torch.strided:
        return ""
    return format_of(tensor) or ""


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _implementation(func: OpOverload, result: Tensor) -> str:
    if not result.numel():
        return "none"
    if not isinstance(result, BlockedTensor):
        return "aten"
    family = func.overloadpacket.__name__.lstrip("_")
    known = family in _C.implementations()
    return _C.last_implementation(family) if known else "torch_blocked"


def _flops(func: OpOverload, args: Any, kwargs: Any, result: Any) -> float:
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count else 0.0


def _moved(
    ops: _Ops, op: str, source: Tensor, move: Callable[[Tensor], Tensor], why: str
) -> Tensor:
    """`source` in another format; the reorder gets an entry of its own in the list."""
    start = time.perf_counter()
    result = move(source)
    ms = 1e3 * (time.perf_counter() - start)
    reorder = Layer(
        module="",
        op=op,
        kind="reorder",
        dims_in=[list(source.shape)],
        dims_out=list(source.shape),
        dtype=_word(source.dtype),
        format_in=_format(source),
        format_out=_format(result),
        implementation="torch_blocked",
        ms=ms,
        reads=[ops.makers.get(id(source), -1)],
        bytes=2.0 * _bytes(source),
        reason=why,
    )
    ops.makers[id(result)] = len(ops.layers)
    ops.kept.append((source, result))
    ops.layers.append(reorder)
    return result


def _blocked_inputs(value: Any, ops: _Ops, notes: list[str]) -> Any:
    """`value` as a user would pass it for a blocked run; tensors that cannot be blocked stay."""

    def blocked(each: Tensor) -> Tensor:
        if isinstance(each, BlockedTensor):
            return each
        try:
            return _moved(ops, "to_blocked", each, to_blocked, "the input of the model")
        except (ValueError, TypeError, NotImplementedError) as error:
            notes.append(f"the input stays dense: {error}")
            return each

    return pytree.tree_map_only(Tensor, blocked, value)


def eager(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """The fastest of some runs of the model on blocked inputs; the first packs the weights."""
    runs = [_run(model, args, kwargs) for _ in range(_RUNS)]
    return min(runs[1:], key=lambda run: run.ms)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    ops, notes = _Ops(model), list[str]()
    with torch.no_grad():
        blocked_args = _blocked_inputs(args, ops, notes)
        blocked_kwargs = _blocked_inputs(kwargs, ops, notes)
        try:
            with module_paths.known(), module_paths.from_here(), ops:
                results = model(*blocked_args, **blocked_kwargs)
        except Exception as error:  # an op that takes dense tensors only, written in C++, say
            notes.append(f"the run ends here: {str(error).splitlines()[0]}")
            results = None
        for each in pytree.tree_leaves(results):
            if isinstance(each, BlockedTensor):
                _moved(ops, "to_dense", each, to_dense, "the result of the model")
    return Run(ops.layers, "; ".join(dict.fromkeys(notes)))
