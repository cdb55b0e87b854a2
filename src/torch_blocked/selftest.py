"""`python -m torch_blocked selftest`: whether this installation works on this machine.

Each check compares with dense tensors in float64 and takes about a second."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked import _C
from torch_blocked.optimized_module import OptimizedModule

# Largest error, relative to the largest value: of float32, and of int8 compared with float32.
_FLOAT32, _INT8 = 2e-5, 0.1


class _NotRun(Exception):
    """A check needs something that is not installed."""


class _Block(nn.Module):
    """Convolutions of several kinds around a residual sum, with 17 channels: a block has a tail."""

    def __init__(self, channels: int = 17) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 34, 1),
            nn.BatchNorm2d(34),
            nn.ReLU6(),
            nn.Conv2d(34, 34, 3, padding=1, groups=34),
            nn.SiLU(),
            nn.Conv2d(34, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 17, 3, stride=2, padding=1),
        _Block(),
        nn.MaxPool2d(2),
        _Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(17, 10),
    ).eval()


def _input(batch: int = 2, height: int = 33, width: int = 30) -> Tensor:
    return torch.randn(batch, 3, height, width)


def _error(model: nn.Module, x: Tensor, result: Tensor) -> float:
    expected = copy.deepcopy(model).double()(x.double())
    return float((result - expected).abs().max() / expected.abs().max())


def _agree(model: nn.Module, x: Tensor, result: Tensor, bound: float = _FLOAT32) -> str:
    error = _error(model, x, result)
    assert error <= bound, f"an error of {error:.1e}, at most {bound:.0e} was expected"
    return f"error {error:.0e}"


def formats() -> str:
    """Tensors into each format and back, with a zero tail."""
    x = torch.randn(2, 17, 5, 7)
    tags = ["nchw", "nhwc", *(f"nChw{block}c" for block in (4, 8, 16, 32))]
    for tag in tags:
        y = torch_blocked.to_format(x, tag)
        assert torch_blocked.format_of(y) == tag, f"{tag} became {torch_blocked.format_of(y)}"
        dense = y.to_dense() if torch_blocked.is_blocked(y) else y
        assert torch.equal(dense, x), f"{tag} changes values"
    return ", ".join(tags)


def eager() -> str:
    """A network on a blocked input, and its gradients."""
    model, x = _network(), _input()
    with torch.no_grad(), torch_blocked.profile() as p:
        result = model(torch_blocked.to_blocked(x))
    said = _agree(model, x, result)
    model(torch_blocked.to_blocked(x)).square().sum().backward()
    dense = copy.deepcopy(model)
    dense.zero_grad()
    dense(x).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, f"no gradient of {name}"
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-3), f"gradient of {name}"
    return f"{said}, {p.fallbacks} fallbacks"


def optimized() -> str:
    """The network planned at once, also for another size."""
    model, x = _network(), _input()
    fast = torch_blocked.optimize(model, x)
    other = _input(1, 48, 41)
    _agree(model, other, fast(other))
    return f"{_agree(model, x, fast(x))}, runs: {fast.choice}"


def compiled() -> str:
    """The same by torch.compile."""
    model, x = _network(), _input()
    with torch.no_grad():
        result: Tensor = torch.compile(model, backend="torch_blocked")(x)
    return _agree(model, x, result)


def saved() -> str:
    """The planned network written to a file and read back."""
    model, x = _network(), _input()
    file = io.BytesIO()
    fast = torch_blocked.optimize(model, x, tune=False)
    assert isinstance(fast, OptimizedModule), "the network is not captured whole"
    fast.save(file)
    size = file.tell()
    file.seek(0)
    return f"{_agree(model, x, torch_blocked.load(file)(x))}, {size / 1024:.0f} KiB"


def int8() -> str:
    """The network quantized."""
    if importlib.util.find_spec("torchao") is None:
        raise _NotRun("torchao is not installed")
    model, x = _network(), _input(1, 32, 32)
    quantized = torch_blocked.quantize(model, [_input(1, 32, 32) for _ in range(4)])
    return _agree(model, x, torch_blocked.optimize(quantized, x)(x), _INT8)


CHECKS: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (formats, eager, optimized, compiled, saved, int8)
}


def run(args: argparse.Namespace | None = None) -> int:
    """Runs every check and prints a line for each. Returns 1 if one fails."""
    print(
        f"torch_blocked {torch_blocked.__version__}, torch {torch.__version__}, {_C.isa()}, "
        f"{torch.get_num_threads()} threads"
    )
    passed = failed = 0
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                word = check()
            passed += 1
        except _NotRun as reason:
            word = f"not run: {reason}"
        except Exception as error:  # any failure is a result to report
            failed += 1
            word = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name:10} {time.perf_counter() - start:5.1f} s  {word}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)
