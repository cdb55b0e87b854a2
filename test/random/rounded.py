"""A model with every number rounded to bfloat16: how far a right plan in bfloat16 may be off."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def rounded(value):
    """The nearest bfloat16 numbers, in the tensor's own type."""
    is_number = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.bfloat16().to(value.dtype) if is_number else value


class Rounding(TorchDispatchMode):
    """Rounds all results of float32 that an op makes. Views and in-place ops keep their memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        schema = func._schema
        if any(each.alias_info is not None for each in (*schema.returns, *schema.arguments)):
            return results
        return pytree.tree_map(rounded, results)


def in_bfloat16(model: torch.nn.Module, *args):
    """The results of the model with its parameters, inputs and the results of its ops rounded."""
    kept = {name: each.detach().clone() for name, each in model.state_dict().items()}
    try:
        model.load_state_dict({name: rounded(each) for name, each in kept.items()})
        with torch.no_grad(), Rounding():
            return model(*map(rounded, args))
    finally:
        model.load_state_dict(kept)
