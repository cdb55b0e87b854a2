"""oneDNN's question `any`: which formats does a module's implementation want?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_blocked import _C
from torch_blocked.descriptor import Descriptor
from torch_blocked.formats import CONTIGUOUS, format_of

__all__ = ["WantedFormats", "wanted_formats"]

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# Layers that compute in the format of their input.
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LocalResponseNorm,
)
_POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)


@dataclass(frozen=True)
class WantedFormats:
    """The formats that an implementation takes and gives. Compare descriptors with `==`, and
    reorder if they differ.

    implementation: one of our names, oneDNN's name of its kernel, or "keeps" for a layer that
        computes in the format of its input.
    src, dst: the descriptors of the input and of the result, [N, C, *spatial]; for a linear layer
        [rows, features].
    weights: the descriptor of the weights, with oneDNN's dims (G,) O, I, *kernel; for a linear
    layer
        [O, I]. None if there are no weights, or if no descriptor can describe the packed ones, such
        as Winograd's."""

    implementation: str
    src: Descriptor
    weights: Descriptor | None
    dst: Descriptor


def wanted_formats(
    module: nn.Module, input: Tensor, implementation: str | None = None
) -> WantedFormats:
    """The formats that `module` wants for `input`: oneDNN's question `any`.

    module: a convolution, transposed convolution or linear layer of torch.nn; or a batch, group,
        instance or local response norm or a pooling, which keep the format of their input.
    input: dense or blocked [N, C, *spatial]; for a linear layer [..., features]. Its sizes and
    dtype
        count, and its format for layers that keep it. No values are read.
    implementation: None asks what this library would choose by estimates on this CPU. "onednn" asks
        oneDNN, with `any` for src, weights and dst; it may answer with a slow `ref`. Another of our
        names asks that implementation.
    Raises TypeError for other modules and for a dtype that is not the weights', ValueError for
    sizes that do not fit, NotImplementedError if the implementation has no kernel."""
    if isinstance(module, _CONVOLUTIONS):
        _check_dtype(module.weight, input)
        return _presented(_ask_convolution(module, input, implementation))
    if isinstance(module, nn.Linear):
        _check_dtype(module.weight, input)
        return _presented(_ask_linear(module, input, implementation))
    if isinstance(module, _NORMS + _POOLS):
        return _kept(module, input, implementation)
    _fail(
        TypeError,
        "a convolution, linear layer, norm or pooling of torch.nn",
        type(module).__name__,
        "ask its layers one by one",
    )


def _ask_convolution(module: Any, input: Tensor, implementation: str | None) -> _C.WantedFormats:
    return _C.convolution_wants(
        tuple(input.shape),
        module.weight.detach(),
        None if module.bias is None else module.bias.detach(),
        module.stride,
        _padding(module),
        module.dilation,
        module.transposed,
        module.output_padding,
        module.groups,
        implementation,
    )


def _padding(module: Any) -> Sequence[int]:
    if module.padding_mode != "zeros":
        _fail(
            NotImplementedError,
            "padding_mode 'zeros'",
            repr(module.padding_mode),
            "pad in a step of its own and ask for padding 0",
        )
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if module.padding == "same":
        both = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(size % 2 for size in both):
            _fail(
                NotImplementedError,
                "as much padding before as behind",
                f"'same' for kernel {module.kernel_size}",
                "pad in a step of its own and ask for padding 0",
            )
        return [size // 2 for size in both]
    padding: Sequence[int] = module.padding
    return padding


def _ask_linear(module: nn.Linear, input: Tensor, implementation: str | None) -> _C.WantedFormats:
    if input.dtype != torch.float32:
        _fail(NotImplementedError, "float32", str(input.dtype), "other dtypes run in ATen")
    if input.dim() < 1 or input.shape[-1] != module.in_features:
        _fail(
            ValueError,
            f"an input of {module.in_features} features",
            str(tuple(input.shape)),
            "the last dim has the features",
        )
    rows = input.shape[:-1].numel()
    return _C.linear_wants(
        rows, module.in_features, module.out_features, module.bias is not None, implementation
    )


def _kept(module: nn.Module, input: Tensor, implementation: str | None) -> WantedFormats:
    if implementation is not None:
        _fail(
            ValueError,
            "no implementation for a layer that keeps the format of its input",
            repr(implementation),
            "leave it out",
        )
    dims = tuple(input.shape)
    if isinstance(module, _POOLS):
        with torch.no_grad():
            output = module(torch.empty(dims, dtype=input.dtype, device="meta"))
        dims = tuple((output[0] if isinstance(output, tuple) else output).shape)
    format = format_of(input)
    if format == "strided":
        format = CONTIGUOUS.get(input.dim(), "abcdefghijkl"[: input.dim()])
    return WantedFormats("keeps", Descriptor.of(input), None, Descriptor(dims, input.dtype, format))


def _check_dtype(weight: Tensor, input: Tensor) -> None:
    if input.dtype != weight.dtype:
        _fail(
            TypeError,
            f"an input of the weights' dtype, {weight.dtype}",
            str(input.dtype),
            "convert one of them",
        )


def _presented(wanted: _C.WantedFormats) -> WantedFormats:
    weights = None if wanted.weights is None else Descriptor._wrap(wanted.weights)
    return WantedFormats(
        wanted.implementation, Descriptor._wrap(wanted.src), weights, Descriptor._wrap(wanted.dst)
    )


def _fail(error: type[Exception], expected: str, got: str, remedy: str) -> NoReturn:
    raise error(f"torch_blocked::wanted_formats: expected {expected}, got {got}; {remedy}")
