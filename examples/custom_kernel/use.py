"""Runs a model with the op of kernel.cpp: eager on blocked tensors, compiled, and optimized, and
explains it.

$ cmake -S examples/custom_kernel -B build/custom_kernel \\
    -DCMAKE_PREFIX_PATH="$(python -c 'import torch_blocked as tb; print(tb.cmake_prefix())')"
$ cmake --build build/custom_kernel
$ python examples/custom_kernel/use.py build/custom_kernel/libcustom_kernel.so"""

import sys

import torch
from torch import nn

import torch_blocked as tb  # before the library: it brings what that is linked to


class StarReLU(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels) + 0.5)
        self.bias = nn.Parameter(torch.randn(channels))

    def forward(self, x):
        return torch.ops.custom_kernel.star_relu(x, self.scale, self.bias)


def main(library: str) -> int:
    torch.ops.load_library(library)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 33, 3, padding=1), StarReLU(33), nn.Conv2d(33, 16, 3, padding=1)
    ).eval()
    x = torch.randn(1, 16, 28, 28)
    with torch.no_grad():
        expected = model(x)
        with tb.strict():  # which raises where an op runs on a dense copy
            eager = model(x.to_blocked("nChw8c"))
        compiled = torch.compile(model, backend="torch_blocked")
        optimized = tb.optimize(model, x)
        results = {"eager": eager.to_dense(), "compiled": compiled(x), "optimized": optimized(x)}
    print(tb.explain(optimized, x).table())
    right = {name: torch.allclose(y, expected, atol=1e-4) for name, y in results.items()}
    print(", ".join(f"{name}: {'right' if ok else 'WRONG'}" for name, ok in right.items()))
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
