"""What handlers take: contracts are read at import, and say in a sentence what they decline."""

import pytest
import torch

import torch_blocked
from torch_blocked.dispatch import OPS_TABLE, Declined
from torch_blocked.ops.contract import implements

pytestmark = pytest.mark.any_isa

X = torch.arange(2 * 17 * 4 * 6.0).view(2, 17, 4, 6).to_blocked("nChw8c")
DENSE = torch.zeros(2, 17, 4, 6)


@pytest.fixture
def checked():
    """A handler that gives its arguments back, by its contract."""

    def make(takes):
        def handler(func, input, other=None, *more, device=None, **options):
            return [input, other, *more, device, options]

        return implements(takes=takes)(handler)

    return make


TAKEN = {
    "blocked": ("input: blocked", 5, 5),
    "dim": ("input: blocked, other: dim", -1, 3),
    "spatial": ("input: blocked, other: spatial dim", -2, 2),
    "but-c": ("input: blocked, other: dim but C", -4, 0),
    "new": ("input: blocked, other: new dim", -1, 4),
    "dims": ("input: blocked, other: dims", (-1, 0), [3, 0]),
    "kept": ("input: blocked, other: kept format", torch.preserve_format, torch.preserve_format),
    "alike": ("input: blocked, other: alike", DENSE, DENSE),
    "dense": ("input: blocked, other: dense", None, None),
    "strided": ("input: blocked, other: strided", torch.strided, torch.strided),
    "unpinned": ("input: blocked, other: unpinned", False, False),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_fits_reaches_the_handler(checked, name):
    contract, given, comes = TAKEN[name]
    result = checked(contract)(None, X, given, 7, device="cpu", pin_memory=False)
    assert result == [X, comes, 7, "cpu", {"pin_memory": False}]


def test_blocked_tensors_come_dense(checked):
    result = checked("input: blocked, other: dense")(None, X, X)[1]
    assert type(result) is torch.Tensor and torch.equal(result, X.to_dense())


DECLINED = {
    "blocked": ("input: blocked", (DENSE,), "expected input blocked, got Tensor"),
    "dim": ("input: blocked, other: dim", (X, 4), "expected a dim from -4 to 3, got 4"),
    "dim-below": ("input: blocked, other: dim", (X, -5), "expected a dim from -4 to 3, got -5"),
    "spatial": ("input: blocked, other: spatial dim", (X, -3), "expected a spatial dim, got -3"),
    "but-c": ("input: blocked, other: dim but C", (X, -3), "expected a dim other than C"),
    "new": ("input: blocked, other: new dim", (X, 5), "expected a dim from -5 to 4, got 5"),
    "dims": ("input: blocked, other: dims", (X, (1, -3)), "expected different dims"),
    "kept": (
        "input: blocked, other: kept format",
        (X, torch.channels_last),
        "expected no memory format, got torch.channels_last",
    ),
    "rank": (
        "input: blocked, other: alike",
        (X, DENSE[0]),
        "expected other with the rank and dtype of input",
    ),
    "dtype": (
        "input: blocked, other: alike",
        (X, DENSE.double()),
        "expected other with the rank and dtype of input",
    ),
    "device": ("input: blocked, device: cpu", (X, 0), "expected the CPU, got meta"),
    "layout": (
        "input: blocked, other: strided",
        (X, torch.sparse_coo),
        "expected a strided tensor, got torch.sparse_coo",
    ),
    "pinned": ("input: blocked, other: unpinned", (X, True), "expected memory that is not pinned"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_does_not_fit_is_declined(checked, name):
    contract, args, sentence = DECLINED[name]
    with pytest.raises(Declined) as error:
        checked(contract)(None, *args, device="meta")
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    "contract", ("unknown: blocked", "input: bloked", "other: dim", "input", "input: blocked,")
)
def test_a_contract_that_says_nothing_known_is_refused_at_import(checked, contract):
    with pytest.raises(ValueError, match="torch_blocked::implements: expected one of"):
        checked(contract)


def test_the_reason_reaches_the_user():
    """And ATen's own words follow, from the dense copy."""
    with torch_blocked.strict():
        with pytest.raises(NotImplementedError, match="expected a dim from -4 to 3, got 7"):
            X.softmax(7)
    with torch_blocked.profile() as p, pytest.raises(IndexError, match="Dimension out of range"):
        X.softmax(7)
    (event,) = (each for each in p.events if each.kind.name == "fallback")
    assert event.detail == "nChw8c (2, 17, 4, 6): expected a dim from -4 to 3, got 7"


def test_handlers_keep_their_names_and_words():
    handler = OPS_TABLE[torch.ops.aten.convolution.default]
    assert handler.__name__ == "convolution" and "packed for its kernel" in handler.__doc__
