"""A captured model op by op in float64. Comparing with it shows how far rounding moves the model's
own results, and how far other results are off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_blocked.captured import VALUE, Capture, Node, overload_of

# Types of numbers by ATen's numbering, and the wide type for each.
_WIDE = {
    **dict.fromkeys((torch.float16, torch.float32, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_WIDE_NUMBERS = {5: 7, 6: 7, 15: 7, 9: 10}
_NUMBERED = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}
# Arguments by these names are types.
_TYPES = {"dtype", "out_dtype"}
# Ops that read the bytes of a number, which differ in float64.
_BITS = {("aten::view", "dtype")}


def in_float64(
    captured: Capture, inputs: Sequence[Tensor], *, step: float = 0, shift: bool = False
) -> list[Any] | None:
    """The forward's results as a flat list; None if an op does not run in float64.

    step: the largest relative change by rounding; each number is changed by a random part of it.
    shift: all numbers of a result are also shifted together, by a part of the largest."""
    try:
        return interpreted(captured, inputs, lambda *_: None, step=step, shift=shift)
    except Exception:  # an op with number types of its own, say
        return None


def interpreted(
    captured: Capture,
    inputs: Sequence[Tensor],
    seen: Callable[[int, Any], None],
    *,
    step: float = 0,
    shift: bool = False,
) -> list[Any]:
    """The same. seen: called with each input and result of an op, and its number, when it is there;
    it is dropped after its last reader. Raises what an op raises that does not run in float64."""
    random = torch.Generator().manual_seed(0)

    def rounded(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = _wide(value)
        if not step or not value.is_floating_point() or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=random, dtype=torch.float64).sub_(0.5).mul_(2)
        moved = torch.addcmul(value, value, noise, value=step)
        largest = value.abs().nan_to_num_(0, 0, 0).max()
        return moved + step * largest * _signed(random) if shift else moved

    values = {value: rounded(each) for value, each in zip(captured.inputs, inputs, strict=True)}
    for value, each in values.items():
        seen(value, each)
    values |= {value: _wide(each) for value, each in captured.constants.items()}
    for node, last in zip(captured.nodes, _last_reads(captured), strict=True):
        _run(node, values, rounded)
        for value in node.outputs:
            seen(value, values[value])
        for value in last:
            values.pop(value, None)
    return [values[each[1]] if _is_value(each) else each for each in captured.outputs]


def _signed(random: torch.Generator) -> float:
    return 2 * torch.rand((), generator=random).item() - 1


def _wide(value: Tensor) -> Tensor:
    return value.to(_WIDE.get(value.dtype, value.dtype))


def _run(node: Node, values: dict[int, Any], rounded: Callable[[Any], Any]) -> None:
    op = overload_of(node)
    if (node.name, node.overload) in _BITS:
        raise NotImplementedError(node.name)
    names = [each.name for each in op._schema.arguments]
    args = [
        _wide_type(each) if name in _TYPES else _given(each, values)
        for name, each in zip(names, node.arguments, strict=False)
    ]
    positional = sum(not each.kwarg_only for each in op._schema.arguments)
    kwargs = dict(zip(names[positional:], args[positional:], strict=False))
    try:
        results = op(*args[:positional], **kwargs)
    except Exception:  # an op of float32 only
        narrow = [_narrow(each) for each in args]
        results = op(
            *narrow[:positional], **dict(zip(names[positional:], narrow[positional:], strict=False))
        )
    flat = _flat(results)
    for value, each in zip(node.outputs, flat, strict=True):
        values[value] = rounded(each)


def types_named(node: Node) -> list[torch.dtype]:
    """The types that a node's arguments ask for."""
    names = [each.name for each in overload_of(node)._schema.arguments]
    given = [v for name, v in zip(names, node.arguments, strict=False) if name in _TYPES]
    return [
        _NUMBERED.get(each, each)
        for each in given
        if each is not None and (isinstance(each, torch.dtype) or each in _NUMBERED)
    ]


def _flat(results: Any) -> list[Any]:
    if isinstance(results, (list, tuple)):
        return [leaf for each in results for leaf in _flat(each)]
    return [results]


def _wide_type(dtype: Any) -> Any:
    return (
        _WIDE.get(dtype, dtype)
        if isinstance(dtype, torch.dtype)
        else _WIDE_NUMBERS.get(dtype, dtype)
    )


def _is_value(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] == VALUE


def _given(entry: Any, values: dict[int, Any]) -> Any:
    if _is_value(entry):
        return values[entry[1]]
    return [_given(each, values) for each in entry] if isinstance(entry, list) else entry


def _narrow(given: Any) -> Any:
    if isinstance(given, list):
        return [_narrow(each) for each in given]
    is_wide = isinstance(given, Tensor) and given.dtype == torch.float64
    return given.float() if is_wide else given


def _reads(entry: Any) -> list[int]:
    if _is_value(entry):
        return [entry[1]]
    return [value for each in entry for value in _reads(each)] if isinstance(entry, list) else []


def _last_reads(captured: Capture) -> list[list[int]]:
    """For each node, the values that nothing reads after it."""
    needed = {each[1] for each in captured.outputs if _is_value(each)}
    last: list[list[int]] = []
    for node in reversed(captured.nodes):
        mine = {value for each in node.arguments for value in _reads(each)} | set(node.outputs)
        last.append(list(mine - needed))
        needed |= mine
    return last[::-1]
