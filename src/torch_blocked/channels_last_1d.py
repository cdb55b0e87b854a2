"""Channels-last for one spatial dim, which PyTorch has for two and three only.

A tensor [N, C, W] with the strides of [N, W, C] is, with a dim of 1 put in, PyTorch's own
channels_last [N, C, 1, W]. So the 1-D layers run as their 2-D counterparts, without a copy.

Source: Intel Extension for PyTorch, "Channels Last". The functions replace its
torch.xpu.to_channels_last_1d and torch.xpu.is_contiguous_channels_last_1d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked.arguments import checked_tensor
from torch_blocked.tensor import BlockedTensor, to_dense

_Value = TypeVar("_Value", Tensor, nn.Module)


def to_channels_last_1d(value: _Value) -> _Value:
    """Converts a tensor, or the weights of a module, to nwc.

    value: a tensor [N, C, W] of any dtype, or a module. Returns the tensor with strides
        [W*C, 1, C], or itself if it has them. These layers keep the strides: conv1d, batch norm,
        pooling, concatenation, linear and nearest upsampling, and all pointwise ops. A module is
        changed in place and returned, as by `Module.to(memory_format=...)`. Its parameters stay
        parameters, and it gives the same results for any input.
    Raises ValueError for a tensor of another rank, TypeError for anything else."""
    if isinstance(value, nn.Module):
        for tensor in [*value.parameters(), *value.buffers()]:
            if tensor.dim() == 3 and tensor.is_floating_point():
                tensor.data = _nwc(tensor.data)
        return value
    if not isinstance(value, Tensor):
        raise TypeError(
            "torch_blocked::to_channels_last_1d: expected a tensor or a module, got "
            f"{type(value).__name__}; convert the tensors in it one by one"
        )
    if value.dim() != 3:
        raise ValueError(
            f"torch_blocked::to_channels_last_1d: expected 3 dims [N, C, W], got "
            f"{tuple(value.shape)}; use torch.channels_last or torch.channels_last_3d"
        )
    if isinstance(value, BlockedTensor):
        value = to_dense(value)
    return value if isinstance(value, ChannelsLast1d) else _nwc(value).as_subclass(ChannelsLast1d)


def is_contiguous_channels_last_1d(tensor: Tensor) -> bool:
    """Whether `tensor` is [N, C, W] stored as [N, W, C], without gaps.

    Where C or W is 1, that is the same memory as contiguous, and the answer is yes for both."""
    checked_tensor("is_contiguous_channels_last_1d", tensor)
    if tensor.dim() != 3 or tensor.layout != torch.strided or isinstance(tensor, BlockedTensor):
        return False
    # From sizes and strides alone: no op may run while torch.compile looks at its inputs.
    n, c, w = tensor.shape
    of_n, of_c, of_w = tensor.stride()
    dense = (c == 1 or of_c == 1) and (w == 1 or of_w == c) and (n == 1 or of_n == w * c)
    return dense or tensor.numel() == 0


class ChannelsLast1d(Tensor):
    """An ordinary strided tensor in nwc. Its class makes the 1-D layers keep the format."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            layer = _LAYERS.get(func)
            if layer is None:
                out = func(*args, **(kwargs or {}))
            else:
                out = layer(*args, **(kwargs or {}))
            return pytree.tree_map_only(Tensor, _marked, out)

    def _plain(self) -> Tensor:
        """The same memory, as an ordinary leaf."""
        return self.detach().as_subclass(Tensor).requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict) -> ChannelsLast1d:
        if not self.is_leaf:
            raise RuntimeError(
                "torch_blocked::deepcopy: expected a leaf tensor, got one with grad_fn; "
                "detach it first"
            )
        if id(self) not in memo:
            copy = self._plain().detach().clone().as_subclass(ChannelsLast1d)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """Saves it as an ordinary tensor with its strides."""
        return self._plain().__reduce_ex__(protocol)


def _marked(tensor: Tensor) -> Tensor:
    """A plain nwc tensor becomes a ChannelsLast1d; anything else stays as it is."""
    if type(tensor) is Tensor and is_contiguous_channels_last_1d(tensor):
        return tensor.as_subclass(ChannelsLast1d)
    return tensor


def _nwc(tensor: Tensor) -> Tensor:
    """`tensor` [N, C, W] with strides [W*C, 1, C], also where C or W is 1."""
    n, c, w = tensor.shape
    if tensor.stride() == (w * c, 1, c):
        return tensor
    rows = tensor.transpose(1, 2).contiguous()
    return rows.as_strided((n, w, c), (w * c, c, 1)).transpose(1, 2)


# --- the layers, with a dim H = 1: [N, C, W] -> [N, C, 1, W] -> [N, C, out]


def _image(input: Tensor) -> Tensor:
    return _nwc(input).unsqueeze(2)


def _row(image: Tensor) -> Tensor:
    return _nwc(image.squeeze(2))


def _batched(layer: Callable, plain: Callable) -> Callable:
    """`layer` for a batch; without one, [C, W], or for any other rank, the op itself."""

    def run(input, *args, **kwargs):
        if input.dim() != 3:
            return plain(input, *args, **kwargs)
        return layer(input, *args, **kwargs)

    return run


def _pair(value, along_h: int):
    """A 1-D argument for H and W; words such as "same" hold for both."""
    if isinstance(value, str):
        return value
    return (along_h, value[0] if isinstance(value, (tuple, list)) else value)


def _conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    out = torch.conv2d(
        _image(input), _image(weight), bias,
        _pair(stride, 1), _pair(padding, 0), _pair(dilation, 1), groups,
    )  # fmt: skip
    return _row(out)


def _conv_transpose1d(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    out = torch.conv_transpose2d(
        _image(input), _image(weight), bias, _pair(stride, 1), _pair(padding, 0),
        _pair(output_padding, 0), groups, _pair(dilation, 1),
    )  # fmt: skip
    return _row(out)


def _batch_norm(input, *args, **kwargs):
    return _row(F.batch_norm(_image(input), *args, **kwargs))


def _max_pool1d(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
):
    out = F.max_pool2d(
        _image(input), _pair(kernel_size, 1), None if stride is None else _pair(stride, 1),
        _pair(padding, 0), _pair(dilation, 1), ceil_mode, return_indices,
    )  # fmt: skip
    return pytree.tree_map(_row, out)


def _max_pool1d_with_indices(input, kernel_size, stride=None, *args, **kwargs):
    kwargs["return_indices"] = True
    return _max_pool1d(input, kernel_size, stride, *args[:3], **kwargs)


def _avg_pool1d(
    input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True
):
    out = F.avg_pool2d(
        _image(input), _pair(kernel_size, 1), None if not stride else _pair(stride, 1),
        _pair(padding, 0), ceil_mode, count_include_pad,
    )  # fmt: skip
    return _row(out)


def _adaptive_avg_pool1d(input, output_size):
    return _row(F.adaptive_avg_pool2d(_image(input), _pair(output_size, 1)))


def _interpolate(input, size=None, scale_factor=None, mode="nearest", *args, **kwargs):
    out = F.interpolate(
        _image(input),
        None if size is None else _pair(size, 1),
        None if scale_factor is None else _pair(scale_factor, 1),
        {"linear": "bilinear"}.get(mode, mode),
        *args,
        **kwargs,
    )
    return _row(out)


def _cat(tensors, dim=0, *, out=None):
    if out is not None or any(tensor.dim() != 3 for tensor in tensors) or not -3 <= dim < 3:
        return torch.cat(tensors, dim, out=out)
    dim %= 3
    return _row(torch.cat([_image(tensor) for tensor in tensors], dim + (dim == 2)))


_LAYERS: dict[Callable, Callable] = {
    torch.conv1d: _batched(_conv1d, torch.conv1d),
    torch.conv_transpose1d: _batched(_conv_transpose1d, torch.conv_transpose1d),
    F.batch_norm: _batched(_batch_norm, F.batch_norm),
    F.max_pool1d: _batched(_max_pool1d, F.max_pool1d),
    F.max_pool1d_with_indices: _batched(_max_pool1d_with_indices, F.max_pool1d_with_indices),
    torch.max_pool1d: _batched(_max_pool1d, torch.max_pool1d),
    torch.avg_pool1d: _batched(_avg_pool1d, torch.avg_pool1d),
    torch.adaptive_avg_pool1d: _batched(_adaptive_avg_pool1d, torch.adaptive_avg_pool1d),
    F.interpolate: _batched(_interpolate, F.interpolate),
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
}
