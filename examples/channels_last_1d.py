"""The move from Intel Extension for PyTorch's channels-last for 1-D to stock PyTorch on the CPU.

    torch.xpu.to_channels_last_1d(x)             ->  torch_blocked.to_channels_last_1d(x)
    torch.xpu.to_channels_last_1d(model)         ->  torch_blocked.to_channels_last_1d(model)
    torch.xpu.is_contiguous_channels_last_1d(x)  ->  torch_blocked.is_contiguous_channels_last_1d(x)

    python examples/channels_last_1d.py

The model is the one of the extension's own document. Exits with 1 if the format is lost on the way
or the values differ from those of contiguous tensors.
Source: Intel Extension for PyTorch, "Channels Last 1D support on XPU"."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import torch_blocked


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(3, 3, kernel_size=3, stride=1, padding=1, bias=False), nn.BatchNorm1d(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def main() -> int:
    torch.manual_seed(0)
    model, test_input = Model().eval(), torch.rand(2, 3, 4)
    with torch.no_grad():
        expected = model(test_input)
        test_input = torch_blocked.to_channels_last_1d(test_input)
        model = torch_blocked.to_channels_last_1d(model)
        result = model(test_input)
    kept = torch_blocked.is_contiguous_channels_last_1d(result)
    same = torch.allclose(result, expected, atol=1e-6)
    print(f"input {tuple(test_input.shape)}, strides {test_input.stride()}")
    print(f"result {tuple(result.shape)}, strides {result.stride()}")
    print(f"channels-last kept: {kept}; values as before: {same}")
    return 0 if kept and same else 1


if __name__ == "__main__":
    sys.exit(main())
