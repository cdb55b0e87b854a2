"""What format a tensor has, by its tag."""

from __future__ import annotations

from torch import Tensor

from torch_blocked import _C
from torch_blocked.arguments import checked_tensor
from torch_blocked.order import known_when_traced
from torch_blocked.tensor import BlockedTensor

# Plain tags by number of dims: contiguous and channels-last.
CONTIGUOUS = {ndim: _C.Format.PLAIN.name(ndim) for ndim in (3, 4, 5)}
CHANNELS_LAST = {ndim: _C.Format.CHANNELS_LAST.name(ndim) for ndim in (3, 4, 5)}


def is_blocked(tensor: object) -> bool:
    """Whether `tensor` is a BlockedTensor."""
    return isinstance(tensor, BlockedTensor)


def format_of(tensor: Tensor) -> str:
    """The tag of a tensor's memory format: "nChw16c", "nchw", "nhwc", ...; "strided" if none fits.

    tensor: strided, of any dtype and rank, or blocked. If several tags fit, for C = 1 or a single
        pixel say, the contiguous one is returned, or else channels-last."""
    if isinstance(tensor, BlockedTensor):
        return tensor.format
    ndim = checked_tensor("format_of", tensor).dim()
    if ndim in CONTIGUOUS:  # these questions may be asked of symbols in a traced program
        if tensor.is_contiguous():
            return CONTIGUOUS[ndim]
        if tensor.movedim(1, -1).is_contiguous():
            return CHANNELS_LAST[ndim]
    return _name_of(tuple(tensor.shape), tensor.stride())


@known_when_traced
def _name_of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> str:
    desc = _C.Descriptor(sizes, "u8", None, strides, [], [], [], [], True)  # any type will do
    return desc.activation_name() or "strided"
