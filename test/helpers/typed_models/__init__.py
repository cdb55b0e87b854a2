"""Small models that meddle with types, so that not every number of theirs can become bfloat16.

TYPED has them by name; each entry makes a model in evaluation mode and its arguments."""

from . import (  # noqa: F401
    algebra,
    attention,
    casts,
    factories,
    foreign,
    images,
    positions,
    precision,
    results,
    spectra,
    states,
    stored,
)
from .table import TYPED

__all__ = ["TYPED"]
