"""Which implementation runs: a forced one, by the families' lists."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F

from torch_blocked import _C

# By the number of spatial dims, and whether it is transposed.
FUNCTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


@contextmanager
def forced(implementation: str, family: str = "convolution") -> Iterator[None]:
    """A family's problems run by this implementation; "" for the one the library chooses."""
    _C.force_implementation(family, implementation)
    try:
        yield
    finally:
        _C.force_implementation(family, "")
