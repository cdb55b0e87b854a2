"""The forms in which a model runs, and how a result is compared with the dense model's."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

import torch_blocked
from zoo.inputs import Inputs, converted
from zoo.row import Row, Size

# A result may be this many times as far from the reference as the dense model in float32 is ...
ERROR_FACTOR = 20.0
# ... or this far, relative to the largest value, where that happens to be nearly exact.
RELATIVE_FLOOR = 2e-5
# The same of forms in other types, which compare themselves with something nearer; their integers
# may differ, because rounding decides them.
FLOORS = {"bfloat16": math.inf, "int8": math.inf}
# What these may be off by. In bfloat16 all values are rounded. A graph of bytes may be off from
# itself run op by op: a number between two bytes may go the other way. Deep networks with random
# weights amplify both, as much as they amplify a rounding of their weights and inputs.
ROUNDED, FLIPS = 0.15, 0.05

Call = Callable[[Inputs], Any]


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """The results for inputs by position or by keyword. Random numbers start from one seed."""
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def eager(model: nn.Module, example: Inputs, tune: bool) -> Call:
    def blocked(value: Tensor) -> Tensor:
        return value.to_blocked() if 3 <= value.dim() <= 5 else value

    return lambda inputs: call(model, converted(inputs, blocked))


def optimized(model: nn.Module, example: Inputs, tune: bool) -> Call:
    module = _optimize(model, example, tune)
    return lambda inputs: call(module, inputs)


def bfloat16(model: nn.Module, example: Inputs, tune: bool) -> Call:
    """All that has kernels in bfloat16, also at sizes that come later. Raises Wrong at a size at
    which it is further from the model than ROUNDED, and than rounded weights and inputs bring."""
    by_name = example if isinstance(example, dict) else {}
    with harness.bfloat16_everywhere():
        module = torch_blocked.optimize(
            model,
            () if by_name else example,
            example_kwargs=by_name,
            tune=tune,
            verify=False,
            dtype=torch.bfloat16,
        )
    object.__setattr__(module, "_computes", "narrow")
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = _in_bfloat16(parameter.data)

    def run(inputs: Inputs) -> Any:
        result, moved = call(module, inputs), call(rounded, converted(inputs, _in_bfloat16))
        _check_near(result, call(model, inputs), moved, ROUNDED)
        return result

    return run


def int8(model: nn.Module, example: Inputs, tune: bool) -> Call:
    """Raises Wrong at a size at which it is not the quantizer's graph run op by op."""
    by_name = example if isinstance(example, dict) else {}
    quantized = torch_blocked.quantize(model, [example])
    fast = torch_blocked.optimize(
        quantized, () if by_name else example, example_kwargs=by_name, tune=tune, verify=False
    )

    def run(inputs: Inputs) -> Any:
        result, moved = call(fast, inputs), call(quantized, converted(inputs, _one_byte_off))
        _check_near(result, call(quantized, inputs), moved, FLIPS)
        return result

    return run


def _check_near(result: Any, own: Any, moved: Any, least: float) -> None:
    """Raises Wrong if a result is further from its own model than `least`, and than twice what
    moves the model: other weights or inputs. Where the model also returns integers, codes say, and
    rounding has chosen others, the numbers that follow from them are not compared."""
    triples = list(zip(leaves(result), leaves(own), leaves(moved), strict=True))
    numbers = [(path, x, y, z) for (path, x), (_, y), (_, z) in triples if isinstance(y, Tensor)]
    if any(not y.is_floating_point() and not torch.equal(x, y) for _, x, y, _ in numbers):
        return
    for path, ours, right, other in numbers:
        if right.is_floating_point():
            error, amplified = distance(ours, right), distance(other, right)
            if not error <= max(least, 2 * amplified):
                raise Wrong(f"{path or 'result'} is off by {error:.2g}; rounding: {amplified:.2g}")


def _in_bfloat16(value: Tensor) -> Tensor:
    return value.bfloat16().to(value.dtype) if value.is_floating_point() else value


def _one_byte_off(value: Tensor) -> Tensor:
    """With one number changed by a hundredth of the largest."""
    if not value.is_floating_point() or value.numel() == 0:
        return value
    changed = value.clone()
    changed.view(-1)[value.numel() // 2] += 0.01 * value.abs().max()
    return changed


def compiled(model: nn.Module, example: Inputs, tune: bool) -> Call:
    module = torch.compile(model, backend="torch_blocked")
    return lambda inputs: call(module, inputs)


def loaded(model: nn.Module, example: Inputs, tune: bool) -> Call:
    module = _optimize(model, example, tune)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tb"
        module.save(path)
        module = torch_blocked.load(path)
    return lambda inputs: call(module, inputs)


# Each makes, from a model and the example inputs, what is then called at every size.
FORMS: dict[str, Callable[[nn.Module, Inputs, bool], Call]] = {
    "eager": eager,
    "optimized": optimized,
    "bfloat16": bfloat16,
    "int8": int8,
    "compiled": compiled,
    "loaded": loaded,
}


_made: dict[nn.Module, nn.Module] = {}


def _optimize(model: nn.Module, example: Inputs, tune: bool) -> nn.Module:
    """Made once for a model: what ran optimized is what is saved. Nothing is verified there, else
    the model itself would take the place of a plan that is wrong."""
    if model not in _made:
        by_name = example if isinstance(example, dict) else {}
        _made[model] = torch_blocked.optimize(
            model,
            () if by_name else example,
            example_kwargs=by_name,
            tune=tune,
            verify=False,
        )
    return _made[model]


@dataclasses.dataclass(frozen=True)
class Expected:
    """The dense model's results at one size."""

    size: Size
    inputs: Inputs
    reference: Any  # in float64 where the model converts
    float32: Any  # the results' types, shapes and structure, and how exact float32 is


def built(row: Row) -> nn.Module:
    """The row's model in evaluation mode. Parameters of one value each, such as norms' and
    residual scales that start at 0, hide what they multiply; they get random values, and so do the
    statistics of batch norms."""
    torch.manual_seed(0)
    model = row.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter == parameter.flatten()[0]).all():
                parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer += 0.1 * torch.randn_like(buffer)
            elif name.endswith("running_var"):
                buffer *= 0.75 + 0.5 * torch.rand_like(buffer)
    return model


def expectations(row: Row, model: nn.Module) -> list[Expected]:
    """The dense results at all sizes. Raises what the model raises in float32."""
    exact = _exact(row, model)
    result = []
    for index, size in enumerate(row.sizes):
        torch.manual_seed(index)
        inputs = row.inputs(*size)
        float32 = call(model, inputs)
        reference = call(exact, converted(inputs, Tensor.double)) if exact else float32
        result.append(Expected(size, inputs, reference, float32))
    return result


def _exact(row: Row, model: nn.Module) -> nn.Module | None:
    """The model in float64, or None if it does not convert."""
    if row.reference != torch.float64:
        return None
    exact = copy.deepcopy(model).double()
    try:
        call(exact, converted(row.inputs(*row.sizes[0]), Tensor.double))
    except RuntimeError:  # it makes float32 tensors of its own
        return None
    return exact


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a result holds, each with its place, in which containers name their type."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        items = [(str(name), each) for name, each in value.items()]
    elif dataclasses.is_dataclass(value):
        items = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        items = [(str(i), each) for i, each in enumerate(value)]
    else:
        yield path, value
        return
    yield f"{path}:{kind}", len(items)
    for name, each in items:
        yield from leaves(each, f"{path}.{name}")


class Wrong(Exception):
    """A result differs from the dense one; the message says how."""


def compare(found: Any, expected: Expected, form: str = "optimized") -> float:
    """The largest relative error of a form. Raises Wrong."""
    found, reference = list(leaves(found)), list(leaves(expected.reference))
    float32 = list(leaves(expected.float32))
    if [path for path, _ in found] != [path for path, _ in float32]:
        raise Wrong(f"structure {_kinds(found)}, not {_kinds(float32)}")
    errors = [0.0]
    for (path, ours), (_, exact), (_, dense) in zip(found, reference, float32, strict=True):
        if isinstance(dense, Tensor):
            errors.append(_error(path or "result", ours, exact, dense, FLOORS.get(form)))
        elif ours != dense:
            raise Wrong(f"{path} is {ours!r:.40}, not {dense!r:.40}")
    return max(errors)


def _kinds(entries: list[tuple[str, Any]]) -> str:
    return ", ".join(path for path, _ in entries)[:80]


def _error(path: str, ours: Any, exact: Tensor, dense: Tensor, floor: float | None) -> float:
    if not isinstance(ours, Tensor):
        raise Wrong(f"{path} is {type(ours).__name__}, not a tensor")
    ours = _dense(ours)
    if ours.dtype != dense.dtype or ours.shape != dense.shape:
        raise Wrong(
            f"{path} is {ours.dtype} {list(ours.shape)}, not {dense.dtype} {list(dense.shape)}"
        )
    if not dense.is_floating_point():
        different = int((ours != dense).sum())
        if different and floor is None:
            raise Wrong(f"{path} differs in {different} of {dense.numel()} elements")
        return 0.0
    error, limit = distance(ours, exact), distance(dense, exact)
    limit = max(floor or RELATIVE_FLOOR, ERROR_FACTOR * limit)
    if not error <= limit:
        raise Wrong(f"{path} by {error:.2g}")
    return error


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if torch_blocked.is_blocked(value) else value


def distance(value: Tensor, exact: Tensor) -> float:
    """The largest difference relative to the largest value; infinite if one is finite where the
    other is not, or the shapes differ."""
    value, exact = value.double(), exact.double()
    if value.shape != exact.shape:
        return math.inf
    finite = exact.isfinite()
    if not torch.equal(value[~finite].nan_to_num(), exact[~finite].nan_to_num()):
        return math.inf
    if not value[finite].isfinite().all():
        return math.inf
    if not finite.any():
        return 0.0
    difference = (value - exact)[finite].abs().max()
    return float(difference / exact[finite].abs().max().clamp_min(1e-30))
