"""Blocked (nChw8c, nChw16c) and channels-last CPU tensors for PyTorch."""

import importlib
from typing import Any

from torch_blocked import environment

environment.check()  # imports torch, then the C++ library, or says in one sentence why not

import torch  # noqa: E402

from torch_blocked import ops as _ops  # noqa: E402, F401  fills the ops table
from torch_blocked._C import clear_packed_weights, native_blocks  # noqa: E402
from torch_blocked.channels_last import channels_last_losses  # noqa: E402
from torch_blocked.channels_last_1d import (  # noqa: E402
    is_contiguous_channels_last_1d,
    to_channels_last_1d,
)
from torch_blocked.compare import Comparison, compare  # noqa: E402
from torch_blocked.cpp import cmake_prefix  # noqa: E402
from torch_blocked.descriptor import Descriptor, canonical_tag, physical_shape  # noqa: E402
from torch_blocked.environment import env  # noqa: E402
from torch_blocked.explain import Explanation, explain  # noqa: E402
from torch_blocked.factories import (  # noqa: E402
    empty,
    empty_like,
    full,
    full_like,
    normal,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    zeros,
    zeros_like,
)
from torch_blocked.formats import format_of, is_blocked  # noqa: E402
from torch_blocked.loading import load  # noqa: E402
from torch_blocked.memory import Memory  # noqa: E402
from torch_blocked.ops.local_response_norm import local_response_norm  # noqa: E402
from torch_blocked.ops.register import register  # noqa: E402
from torch_blocked.optimize import optimize  # noqa: E402
from torch_blocked.prepack import prepack  # noqa: E402
from torch_blocked.profile import profile  # noqa: E402
from torch_blocked.strict import strict  # noqa: E402
from torch_blocked.tensor import BlockedTensor, to_blocked, to_dense, to_format  # noqa: E402
from torch_blocked.wanted_formats import WantedFormats, wanted_formats  # noqa: E402


def __getattr__(name: str) -> Any:
    """Imports the names that need torchao when they are first asked for; nothing else needs it."""
    if name not in ("TorchBlockedQuantizer", "quantize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        quantizer = importlib.import_module("torch_blocked.quantizer")
    except ImportError as error:
        raise ImportError(
            f"torch_blocked::{name}: expected torchao to be installed, got {error}; "
            "pip install torch_blocked[quantize]"
        ) from error
    return getattr(quantizer, name)


# The one thing added to torch; BlockedTensor brings its own to_dense.
torch.Tensor.to_blocked = to_blocked  # type: ignore[attr-defined]

__version__ = environment.package_version()

__all__ = [
    "BlockedTensor",
    "Comparison",
    "Descriptor",
    "Explanation",
    "Memory",
    "TorchBlockedQuantizer",
    "WantedFormats",
    "canonical_tag",
    "channels_last_losses",
    "clear_packed_weights",
    "cmake_prefix",
    "compare",
    "empty",
    "empty_like",
    "env",
    "explain",
    "format_of",
    "full",
    "full_like",
    "is_blocked",
    "is_contiguous_channels_last_1d",
    "load",
    "local_response_norm",
    "native_blocks",
    "normal",
    "ones",
    "ones_like",
    "optimize",
    "physical_shape",
    "prepack",
    "profile",
    "quantize",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "register",
    "strict",
    "to_blocked",
    "to_channels_last_1d",
    "to_dense",
    "to_format",
    "wanted_formats",
    "zeros",
    "zeros_like",
]
