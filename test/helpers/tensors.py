"""Small dense tensors of fixed numbers, and blocked ones made dense."""

import torch

import torch_blocked

DIMS = (2, 17, 6, 5)

TAG = "nChw8c"


def random_dense(*dims, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims or DIMS, generator=generator, dtype=dtype)


def as_dense(value):
    return value.to_dense() if torch_blocked.is_blocked(value) else value
