"""Methods of torch.Tensor that take a tag too, where torch's take a memory format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_blocked.descriptor import canonical_tag

# Methods that convert to another type or device, or return `self` if nothing changes. Not every
# torch has every device.
CONVERSIONS = (
    *("bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "double", "float", "half"),
    *("int", "long", "short", "to", "type", "cpu", "cuda", "ipu", "mtia", "xpu"),
)
# Methods that write to `self`, which keeps its format.
IN_PLACE = ("resize_", "resize_as_")

Move = Callable[[Any, str], Tensor]


def add_tag_methods(cls: type[Tensor], to_format: Move) -> None:
    """Adds these methods to `cls`. to_format: torch_blocked.to_format."""
    for names, made in ((CONVERSIONS, _converting), (("clone",), _cloning), (IN_PLACE, _in_place)):
        for name in names:
            if hasattr(Tensor, name):
                method = made(name, getattr(Tensor, name), to_format)
                method.__name__, method.__qualname__ = name, f"{cls.__name__}.{name}"
                method.__doc__ = f"Like Tensor.{name}; `memory_format` may be a tag: 'nChw16c'."
                setattr(cls, name, method)


def _converting(name: str, torchs: Callable[..., Any], to_format: Move) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        tag = kwargs.get("memory_format")
        if not isinstance(tag, str):
            return torchs(self, *args, **kwargs)
        del kwargs["memory_format"]
        bare = name == "to" and not args and not kwargs  # torch's method refuses such a call
        made = self if bare else torchs(self, *args, **kwargs)
        return to_format(made, tag) if isinstance(made, Tensor) else made  # type() returns a str

    return method


def _cloning(name: str, torchs: Callable[..., Any], to_format: Move) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        tag = kwargs.get("memory_format")
        if not isinstance(tag, str):
            return torchs(self, *args, **kwargs)
        copy = to_format(self, tag)
        return torchs(self) if copy is self else copy

    return method


def _in_place(name: str, torchs: Callable[..., Any], to_format: Move) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        tag = kwargs.get("memory_format")
        if not isinstance(tag, str):
            return torchs(self, *args, **kwargs)
        if canonical_tag(tag) != canonical_tag(self.format):
            raise NotImplementedError(
                f"torch_blocked::{name}: expected the format that the tensor has, {self.format}, "
                f"got {tag}; call to_format on the result"
            )
        del kwargs["memory_format"]
        return torchs(self, *args, **kwargs)

    return method
