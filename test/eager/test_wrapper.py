"""BlockedTensor(physical, channels) believes nothing: rank, block, count and tail are checked."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_blocked import _C, BlockedTensor

pytestmark = pytest.mark.any_isa

RANK = "expected a physical tensor .* of 4 to 6 dims with b = 4, 8, 16 or 32"
COUNT = r"expected ceil\(C/b\) = .* blocks for C = "
# name: (physical shape, channels, message)
WRONG = {
    "rank-3": ((2, 5, 8), 5, RANK),
    "rank-7": ((2, 1, 1, 1, 1, 1, 8), 5, RANK),
    "rank-0": ((), 1, RANK),
    "block-7": ((2, 2, 5, 5, 7), 9, RANK),
    "block-64": ((2, 1, 5, 5, 64), 9, RANK),
    "block-0": ((2, 1, 5, 5, 0), 0, RANK),
    "too-many-channels": ((2, 2, 5, 5, 8), 17, COUNT),
    "too-few-channels": ((2, 2, 5, 5, 8), 8, COUNT),
    "no-channels": ((2, 2, 5, 5, 8), 0, COUNT),
    "negative": ((2, 2, 5, 5, 8), -9, COUNT),
    "enormous": ((2, 2, 5, 5, 8), 2**63 - 1, COUNT),
    "channels-of-no-blocks": ((2, 0, 5, 5, 8), 1, COUNT),
}  # fmt: skip


@pytest.mark.parametrize("traced", (False, True))
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name, traced):
    shape, channels, message = WRONG[name]
    with FakeTensorMode() if traced else torch.no_grad():
        physical = torch.zeros(shape)
    with pytest.raises(ValueError, match=message) as caught:
        BlockedTensor(physical, channels)
    assert str(caught.value).startswith("torch_blocked::BlockedTensor: expected ")


@pytest.mark.parametrize("channels", (9, 15, 16))
def test_what_fits_is_taken(channels):
    physical = torch.zeros(2, 2, 5, 5, 8)
    assert BlockedTensor(physical, channels).shape == (2, channels, 5, 5)
    assert BlockedTensor(physical.to("meta"), channels).shape == (2, channels, 5, 5)


@pytest.mark.parametrize(
    "physical",
    (
        torch.zeros(2, 2, 5, 8).to_sparse(),
        torch.quantize_per_tensor(torch.zeros(2, 2, 5, 8), 0.1, 0, torch.qint8),
        None, 3, [1, 2],
    ),
    ids=("sparse", "quantized", "none", "int", "list"),
)  # fmt: skip
def test_what_is_no_plain_tensor_is_refused(physical):
    with pytest.raises(TypeError, match="torch_blocked::BlockedTensor: expected"):
        BlockedTensor(physical, 9)


@pytest.mark.parametrize("arguments", ((), (BlockedTensor,), (1, 2, 3), (BlockedTensor, None, 9)))
def test_the_binding_itself_takes_anything(arguments):
    with pytest.raises(TypeError):
        _C.wrap(*arguments)


def test_channels_are_an_int():
    with pytest.raises(TypeError):
        BlockedTensor(torch.zeros(2, 2, 5, 5, 8), "nine")
    with pytest.raises(OverflowError):
        BlockedTensor(torch.zeros(2, 2, 5, 5, 8), 2**64)


@pytest.mark.parametrize("value", (1.0, float("nan")))
def test_a_dirty_tail_is_refused_when_asked_for(value):
    """The suite runs with TORCH_BLOCKED_CHECK=1."""
    physical = torch.zeros(2, 2, 5, 5, 8)
    physical[1, 1, 4, 4, 7] = value
    assert BlockedTensor(physical, 16).block == 8, "without a tail all lanes are channels"
    with pytest.raises(RuntimeError, match="expected a zero tail beyond channel 15"):
        BlockedTensor(physical, 15)
    code = (
        "import torch, torch_blocked;"
        "torch_blocked.BlockedTensor(torch.ones(2, 2, 5, 5, 8), 15); print('believed')"
    )
    environment = os.environ | {"TORCH_BLOCKED_CHECK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "believed\n"


def test_the_check_of_a_traced_tensor_asks_nothing_of_symbols():
    shapes = ShapeEnv()
    symbols = [shapes.create_unbacked_symint() for _ in range(4)]
    with FakeTensorMode(shape_env=shapes):
        n, blocks, height, width = symbols  # a question about one of these raises
        for count in (2, blocks):
            tensor = BlockedTensor(torch.empty(n, count, height, width, 8), 9)
            assert type(tensor.shape[0]) is torch.SymInt and tensor.shape[1] == 9
