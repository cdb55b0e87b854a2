"""Checks of arguments that users give, and the sentences that refuse the wrong ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# What to do with a value of another type, by the name of its class; "": of any other.
_INSTEAD_OF_TENSOR = {
    "ndarray": "torch.from_numpy(array) is a tensor",
    "list": "torch.tensor(values) is a tensor",
    "": "give a torch.Tensor",
}
_INSTEAD_OF_EXAMPLE = {
    "ndarray": "torch.from_numpy(array) is a tensor",
    "Size": "give a tensor of that shape, torch.randn(shape) say",
    "dict": "give arguments by name as example_kwargs",
    "NoneType": "give a tensor like those that will come",
    "": "put the model's arguments into a tuple",
}


def name_of(value: object) -> str:
    return type(value).__name__


def _advice(table: dict[str, str], value: object) -> str:
    return table.get(name_of(value), table[""])


def checked_tensor(op: str, input: Any) -> Tensor:
    """`input`. Raises TypeError if it is no tensor."""
    if not isinstance(input, Tensor):
        model = "optimize(model, example_inputs) is for models"
        advice = model if isinstance(input, nn.Module) else _advice(_INSTEAD_OF_TENSOR, input)
        raise TypeError(f"torch_blocked::{op}: expected a tensor, got {name_of(input)}; {advice}")
    return input


def checked_dtype(op: str, dtype: Any) -> torch.dtype | None:
    """`dtype`. Raises TypeError if it is neither a torch.dtype nor None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"torch_blocked::{op}: expected dtype as a torch.dtype, got {dtype!r}; "
            "such as torch.bfloat16"
        )
    return dtype


def check_flag(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"torch_blocked::{op}: expected {name} as True or False, got {value!r}; give one"
        )


def check_model(op: str, model: object) -> None:
    """Raises TypeError if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torch_blocked::{op}: expected a torch.nn.Module, got {name_of(model)}; "
            "call it in the forward of one"
        )


def checked_example(
    op: str, model: nn.Module, inputs: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and named arguments. Raises TypeError for other types, for a
    shape instead of a tensor, and for no inputs where the model takes some."""
    if not isinstance(inputs, Tensor | tuple) or isinstance(inputs, torch.Size):
        raise TypeError(
            f"torch_blocked::{op}: expected example_inputs as a tensor or a tuple of arguments, "
            f"got {name_of(inputs)}; {_advice(_INSTEAD_OF_EXAMPLE, inputs)}"
        )
    if not isinstance(kwargs, dict | None):
        raise TypeError(
            f"torch_blocked::{op}: expected example_kwargs as a dict of arguments by name, got "
            f"{name_of(kwargs)}; arguments without names are example_inputs"
        )
    args, kwargs = inputs if isinstance(inputs, tuple) else (inputs,), kwargs or {}
    is_shape = all(type(each) is int for each in args) and (args or not kwargs)
    if is_shape and not _takes(model, args, kwargs):
        shape = "give a tensor of that shape, torch.randn(shape) say"
        raise TypeError(
            f"torch_blocked::{op}: expected example_inputs as {name_of(model)} takes them, got "
            f"{args or 'none'}; {shape if args else 'give a tensor like those that will come'}"
        )
    return args, kwargs


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the forward has arguments of this number and these names."""
    if isinstance(model, torch.jit.ScriptModule):
        method: Any = model.forward
        return bool(args or kwargs) or len(method.schema.arguments) == 1  # itself
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # the signature is unknown
        pass
    return True


def _by_position(model: nn.Module, named: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments by name as a call without names has them, up to the last one that is given. Raises
    TypeError if the forward has none of such names."""
    parameters = inspect.signature(model.forward).parameters.values()
    places = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [each.name for each in places]
    unknown = [name for name in named if name not in names]
    if unknown:
        raise TypeError(
            f"torch_blocked::quantize: expected names among {', '.join(names)}, got "
            f"{', '.join(map(str, unknown))}; give arguments that the forward has"
        )
    last = max((names.index(name) + 1 for name in named), default=0)
    given = [named.get(each.name, each.default) for each in places[:last]]
    missing = [
        name for name, each in zip(names, given, strict=False) if each is inspect.Parameter.empty
    ]
    if missing or not named:
        wanted, got = ", ".join(missing or names[:1]), ", ".join(named) or "none"
        raise TypeError(
            f"torch_blocked::quantize: expected the argument {wanted}, got {got}; give it too"
        )
    return tuple(given)


def checked_calibration(calibration: Any, model: nn.Module) -> list[tuple[Any, ...]]:
    """The arguments of each call. Raises TypeError if `calibration` is no list of inputs, and
    ValueError if it is empty."""
    several = (
        "expected calibration as several inputs, each a tensor, a tuple of arguments or a dict of "
        "them by name"
    )
    if isinstance(calibration, Tensor | dict | str) or not isinstance(calibration, Iterable):
        raise TypeError(
            f"torch_blocked::quantize: {several}, got {name_of(calibration)}; put them into a list"
        )
    cases = []
    for each in calibration:
        if isinstance(each, dict) and all(isinstance(name, str) for name in each):
            cases.append(_by_position(model, each))
            continue
        is_shape = isinstance(each, tuple) and each and all(type(item) is int for item in each)
        if not isinstance(each, Tensor | tuple) or is_shape:
            got = f"the shape {tuple(each)}" if is_shape else f"one of type {name_of(each)}"
            raise TypeError(
                f"torch_blocked::quantize: {several}, got {got}; give tensors with values like "
                "those that will come"
            )
        cases.append(each if isinstance(each, tuple) else (each,))
    if not cases:
        raise ValueError(
            "torch_blocked::quantize: expected calibration inputs, got none; give some that are "
            "like those that will come"
        )
    return cases


def checked_paths(op: str, keep: Any) -> tuple[str, ...]:
    """`keep` as paths of modules. Raises TypeError for anything else."""
    is_list = isinstance(keep, Iterable) and not isinstance(keep, str)
    paths = tuple(keep) if is_list else ()
    if not is_list or not all(isinstance(each, str) for each in paths):
        raise TypeError(
            f"torch_blocked::{op}: expected keep as paths of modules, got {name_of(keep)}; put "
            "names from named_modules() into a list"
        )
    return paths


def checked_modules(op: str, model: nn.Module, keep: Any) -> list[str]:
    """`keep` as paths of modules that the model has. Raises TypeError and ValueError."""
    paths = checked_paths(op, keep)
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    if wrong := [path for path in paths if path not in known]:
        raise ValueError(
            f"torch_blocked::{op}: expected keep as paths of modules of the model, got "
            f"{wrong[0]!r}; take them from named_modules()"
        )
    return list(paths)


def checked_target(target: Any) -> Any:
    """`target` of quantize(). Raises TypeError for what is no number and no function, and
    ValueError for a number that is no relative error."""
    wanted = "expected target as the largest relative error of results, or as a function"
    if target is not None and not callable(target):
        if not isinstance(target, int | float) or isinstance(target, bool):
            raise TypeError(
                f"torch_blocked::quantize: {wanted}, got {target!r}; give 0.01, or a function "
                "that says whether a quantized graph is accurate enough"
            )
        if not 0 < target < 1:
            raise ValueError(
                f"torch_blocked::quantize: {wanted}, got {target}; it is more than 0 and less "
                "than 1"
            )
    return target


def check_no_autocast(op: str) -> None:
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError(
            f"torch_blocked::{op}: expected a call outside of torch.autocast, got one within; "
            "dtype=torch.bfloat16 of optimize() computes in it"
        )
