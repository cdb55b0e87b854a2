"""Bad arguments of our ops, called directly: one sentence and the right exception, never a signal.
Many rows are inputs that crash other libraries."""

import re

import pytest
import torch
from helpers.direct_calls import (
    GRAD,
    GRID,
    HUGE,
    INDEX,
    OPS,
    OTHER_BLOCK,
    PHYSICAL,
    SAMPLED,
    STATISTICS,
    TRANSPOSED,
    WEIGHT,
    X,
    batch_norm,
    batch_norm_backward,
    batch_norm_training,
    convolution,
    convolution_backward,
    grid_sampler,
    grid_sampler_backward,
    group_norm,
    group_norm_backward,
    random,
    resample,
)
from helpers.op_examples import EXAMPLES

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]


DIRECT = {
    "convolution": {
        "stride-0": (ValueError, lambda: convolution(stride=(0, 0))),
        "stride-negative": (ValueError, lambda: convolution(stride=(1, -1))),
        "stride-of-3-dims": (ValueError, lambda: convolution(stride=(1, 1, 1))),
        "stride-missing": (ValueError, lambda: convolution(stride=())),
        "padding-negative": (ValueError, lambda: convolution(padding=(-1, 0))),
        "dilation-0": (ValueError, lambda: convolution(dilation=(0, 1))),
        "dilation-beyond-input": (ValueError, lambda: convolution(dilation=(5, 1))),
        "output-padding-negative": (
            ValueError,
            lambda: convolution(weight=TRANSPOSED, transposed=True, output_padding=(-1, 0)),
        ),
        "output-padding-large": (
            ValueError,
            lambda: convolution(weight=TRANSPOSED, transposed=True, output_padding=(1, 1)),
        ),
        "groups-0": (ValueError, lambda: convolution(groups=0)),
        "groups-negative": (ValueError, lambda: convolution(groups=-1)),
        "groups-3": (ValueError, lambda: convolution(groups=3)),
        "groups-huge": (ValueError, lambda: convolution(groups=HUGE)),
        "groups-3-transposed": (
            ValueError,
            lambda: convolution(weight=TRANSPOSED, transposed=True, groups=3),
        ),
        "channels-negative": (ValueError, lambda: convolution(channels=-1)),
        "channels-0": (ValueError, lambda: convolution(channels=0)),
        "channels-too-many": (ValueError, lambda: convolution(channels=17)),
        "channels-huge": (ValueError, lambda: convolution(channels=2**63 - 1)),
        "channels-not-the-weight's": (ValueError, lambda: convolution(channels=9)),
        "weight-of-3-dims": (ValueError, lambda: convolution(weight=WEIGHT[0])),
        "weight-scalar": (ValueError, lambda: convolution(weight=torch.tensor(1.0))),
        "weight-without-output": (ValueError, lambda: convolution(weight=WEIGHT[:0])),
        "weight-without-input": (ValueError, lambda: convolution(weight=WEIGHT[:, :0])),
        "weight-without-kernel": (ValueError, lambda: convolution(weight=WEIGHT[:, :, :0])),
        "weight-too-large": (ValueError, lambda: convolution(weight=random(8, 16, 11, 3))),
        "weight-double": (TypeError, lambda: convolution(weight=WEIGHT.double())),
        "weight-int": (TypeError, lambda: convolution(weight=WEIGHT.int())),
        "bias-size": (ValueError, lambda: convolution(bias=torch.ones(7))),
        "bias-2-dims": (ValueError, lambda: convolution(bias=torch.ones(8, 1))),
        "bias-double": (TypeError, lambda: convolution(bias=torch.ones(8).double())),
        "input-dense": (ValueError, lambda: convolution(input=X)),
        "input-1-dim": (ValueError, lambda: convolution(input=PHYSICAL.flatten())),
        "input-block-7": (ValueError, lambda: convolution(input=random(2, 2, 9, 9, 7))),
        "input-without-width": (ValueError, lambda: convolution(input=PHYSICAL[:, :, :, :0])),
    },
    "to_blocked": {
        "block-0": (ValueError, lambda: OPS.to_blocked(X, 0)),
        "block-7": (ValueError, lambda: OPS.to_blocked(X, 7)),
        "block-negative": (ValueError, lambda: OPS.to_blocked(X, -8)),
        "block-huge": (ValueError, lambda: OPS.to_blocked(X, HUGE)),
        "2-dims": (ValueError, lambda: OPS.to_blocked(X[0, 0], 8)),
        "6-dims": (ValueError, lambda: OPS.to_blocked(X[None, None], 8)),
    },
    "to_dense": {
        "channels-too-many": (ValueError, lambda: OPS.to_dense(PHYSICAL, 17)),
        "channels-too-few": (ValueError, lambda: OPS.to_dense(PHYSICAL, 8)),
        "channels-negative": (ValueError, lambda: OPS.to_dense(PHYSICAL, -5)),
        "channels-huge": (ValueError, lambda: OPS.to_dense(PHYSICAL, HUGE)),
        "dense": (ValueError, lambda: OPS.to_dense(X, 16)),
    },
    "reblock": {
        "block-5": (ValueError, lambda: OPS.reblock(PHYSICAL, 16, 5)),
        "channels": (ValueError, lambda: OPS.reblock(PHYSICAL, 99, 8)),
    },
    "clear_tail_": {
        "channels": (ValueError, lambda: OPS.clear_tail_(PHYSICAL, 99)),
        "dense": (ValueError, lambda: OPS.clear_tail_(X, 16)),
    },
    "tail_is_zero": {
        "channels": (ValueError, lambda: OPS.tail_is_zero(PHYSICAL, 99)),
        "dense": (ValueError, lambda: OPS.tail_is_zero(X, 16)),
    },
    "batch_norm_inference": {
        "mean-size": (ValueError, lambda: batch_norm(mean=torch.ones(15))),
        "var-2-dims": (ValueError, lambda: batch_norm(var=torch.ones(16, 1))),
        "weight-size": (ValueError, lambda: batch_norm(weight=torch.ones(1))),
        "bias-empty": (ValueError, lambda: batch_norm(bias=torch.ones(0))),
        "weight-double": (NotImplementedError, lambda: batch_norm(weight=torch.ones(16).double())),
        "input-double": (NotImplementedError, lambda: batch_norm(input=PHYSICAL.double())),
        "channels": (ValueError, lambda: batch_norm(channels=99)),
    },
    "batch_norm_training": {
        "mean-size": (ValueError, lambda: batch_norm_training(mean=torch.ones(15))),
        "var-2-dims": (ValueError, lambda: batch_norm_training(var=torch.ones(16, 1))),
        "weight-size": (ValueError, lambda: batch_norm_training(weight=torch.ones(1))),
        "input-double": (
            NotImplementedError, lambda: batch_norm_training(input=PHYSICAL.double()),
        ),
        "channels": (ValueError, lambda: batch_norm_training(channels=99)),
        "dense": (ValueError, lambda: batch_norm_training(input=X)),
    },
    "batch_norm_backward": {
        "grad-dims": (ValueError, lambda: batch_norm_backward(grad=PHYSICAL[:1])),
        "grad-block": (
            ValueError, lambda: batch_norm_backward(grad=X.to_blocked("nChw16c")._physical),
        ),
        "mean-size": (ValueError, lambda: batch_norm_backward(mean=torch.ones(15))),
        "weight-size": (ValueError, lambda: batch_norm_backward(weight=torch.ones(1))),
        "channels": (ValueError, lambda: batch_norm_backward(channels=99)),
        "dense": (ValueError, lambda: batch_norm_backward(input=X, grad=X)),
    },
    "convolution_backward": {
        "grad-channels": (ValueError, lambda: convolution_backward(grad=GRAD[:, :0])),
        "grad-width": (ValueError, lambda: convolution_backward(grad=GRAD[:, :, :, :6])),
        "grad-batch": (ValueError, lambda: convolution_backward(grad=GRAD[:1])),
        "grad-block": (ValueError, lambda: convolution_backward(grad=GRAD.reshape(2, -1, 7, 7, 4))),
        "grad-double": (TypeError, lambda: convolution_backward(grad=GRAD.double())),
        "grad-dense": (ValueError, lambda: convolution_backward(grad=X)),
        "weight-double": (TypeError, lambda: convolution_backward(weight=WEIGHT.double())),
        "weight-channels": (ValueError, lambda: convolution_backward(weight=WEIGHT[:, :9])),
        "stride-0": (ValueError, lambda: convolution_backward(stride=(0, 0))),
        "padding-negative": (ValueError, lambda: convolution_backward(padding=(-1, 0))),
        "dilation-0": (ValueError, lambda: convolution_backward(dilation=(0, 1))),
        "groups-0": (ValueError, lambda: convolution_backward(groups=0)),
        "channels": (ValueError, lambda: convolution_backward(channels=99)),
    },
    "slice_channels": {
        "start-negative": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 16, -1, 3)),
        "length-negative": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 16, 3, -1)),
        "beyond": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 16, 10, 7)),
        "start-beyond": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 16, 17, 0)),
        "huge": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 16, HUGE, HUGE)),
        "overflow": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 16, 2**63 - 8, 16)),
        "channels": (ValueError, lambda: OPS.slice_channels(PHYSICAL, 99, 0, 1)),
        "dense": (ValueError, lambda: OPS.slice_channels(X, 16, 0, 1)),
    },
    "concat_channels": {
        "counts": (ValueError, lambda: OPS.concat_channels([PHYSICAL], [16, 16])),
        "batch": (ValueError, lambda: OPS.concat_channels([PHYSICAL, PHYSICAL[:1]], [16, 16])),
        "channels": (ValueError, lambda: OPS.concat_channels([PHYSICAL], [99])),
        "negative": (ValueError, lambda: OPS.concat_channels([PHYSICAL, PHYSICAL], [16, -16])),
        "dense": (ValueError, lambda: OPS.concat_channels([X, X], [16, 16])),
        "dtypes": (
            TypeError, lambda: OPS.concat_channels([PHYSICAL, PHYSICAL.double()], [16, 16])
        ),
        "blocks": (
            ValueError,
            lambda: OPS.concat_channels([PHYSICAL, X.to_blocked("nChw16c")._physical], [16, 16]),
        ),
    },
    "gather_channels": {
        "negative": (ValueError, lambda: OPS.gather_channels(PHYSICAL, 16, [0, -2])),
        "beyond": (ValueError, lambda: OPS.gather_channels(PHYSICAL, 16, [16])),
        "huge": (ValueError, lambda: OPS.gather_channels(PHYSICAL, 16, [HUGE])),
        "channels": (ValueError, lambda: OPS.gather_channels(PHYSICAL, 99, [0])),
        "double": (
            NotImplementedError, lambda: OPS.gather_channels(PHYSICAL.double(), 16, [0]),
        ),
        "dense": (ValueError, lambda: OPS.gather_channels(X, 16, [0])),
    },
    "pixel_shuffle": {
        "factor-0": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL, 16, 0)),
        "factor-negative": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL, 16, -2)),
        "factor-3": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL, 16, 3)),
        "factor-overflow": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL, 16, 2**32)),
        "factor-huge": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL, 16, HUGE)),
        "channels": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL, 99, 2)),
        "1-D": (ValueError, lambda: OPS.pixel_shuffle(PHYSICAL[:, :, 0], 16, 2)),
    },
    "pixel_unshuffle": {
        "factor-0": (ValueError, lambda: OPS.pixel_unshuffle(PHYSICAL, 16, 0)),
        "factor-2": (ValueError, lambda: OPS.pixel_unshuffle(PHYSICAL, 16, 2)),
        "factor-overflow": (ValueError, lambda: OPS.pixel_unshuffle(PHYSICAL[:, :, :0], 16, 2**32)),
        "channels": (ValueError, lambda: OPS.pixel_unshuffle(PHYSICAL, 99, 3)),
        "double": (NotImplementedError, lambda: OPS.pixel_unshuffle(PHYSICAL.double(), 16, 3)),
    },
    "pick_channels": {
        "beyond": (ValueError, lambda: OPS.pick_channels(PHYSICAL, 16, INDEX + 16)),
        "negative": (ValueError, lambda: OPS.pick_channels(PHYSICAL, 16, INDEX - 2)),
        "index-dims": (ValueError, lambda: OPS.pick_channels(PHYSICAL, 16, INDEX[:1])),
        "index-int32": (ValueError, lambda: OPS.pick_channels(PHYSICAL, 16, INDEX.int())),
        "channels": (ValueError, lambda: OPS.pick_channels(PHYSICAL, 99, INDEX)),
    },
    "place_channels": {
        "beyond": (ValueError, lambda: OPS.place_channels(X[:, 0], INDEX + 3, 3, 8)),
        "index-dims": (ValueError, lambda: OPS.place_channels(X[:, 0], INDEX[:1], 3, 8)),
        "channels-negative": (ValueError, lambda: OPS.place_channels(X[:, 0], INDEX, -1, 8)),
        "channels-huge": (ValueError, lambda: OPS.place_channels(X[:, 0], INDEX, HUGE, 8)),
        "block-7": (ValueError, lambda: OPS.place_channels(X[:, 0], INDEX, 3, 7)),
        "5-dims": (ValueError, lambda: OPS.place_channels(PHYSICAL, INDEX, 3, 8)),
    },
    "softmax": {
        "dim-4": (ValueError, lambda: OPS.softmax(PHYSICAL, 16, 4, False)),
        "dim-negative": (ValueError, lambda: OPS.softmax(PHYSICAL, 16, -1, False)),
        "channels": (ValueError, lambda: OPS.softmax(PHYSICAL, 99, 1, False)),
        "double": (NotImplementedError, lambda: OPS.softmax(PHYSICAL.double(), 16, 1, False)),
    },
    "softmax_backward": {
        "dim-huge": (ValueError, lambda: OPS.softmax_backward(PHYSICAL, PHYSICAL, 16, HUGE, False)),
        "grad-batch": (
            ValueError, lambda: OPS.softmax_backward(PHYSICAL[:1], PHYSICAL, 16, 1, False),
        ),
        "grad-block": (
            ValueError, lambda: OPS.softmax_backward(OTHER_BLOCK, PHYSICAL, 16, 1, False),
        ),
    },
    "sum_channels": {
        "channels": (ValueError, lambda: OPS.sum_channels(PHYSICAL, 99)),
        "int": (NotImplementedError, lambda: OPS.sum_channels(PHYSICAL.int(), 16)),
    },
    "argmax_channels": {
        "channels": (ValueError, lambda: OPS.argmax_channels(PHYSICAL, 99, False)),
        "no-channels": (
            NotImplementedError, lambda: OPS.argmax_channels(PHYSICAL[:, :0], 0, False),
        ),
    },
    "group_norm": {
        "groups-0": (ValueError, lambda: group_norm(groups=0)),
        "groups-3": (ValueError, lambda: group_norm(groups=3)),
        "groups-huge": (ValueError, lambda: group_norm(groups=HUGE)),
        "weight-size": (ValueError, lambda: group_norm(weight=torch.ones(15))),
        "input-double": (NotImplementedError, lambda: group_norm(input=PHYSICAL.double())),
        "no-pixels": (NotImplementedError, lambda: group_norm(input=PHYSICAL[:, :, :0])),
        "channels": (ValueError, lambda: group_norm(channels=99)),
    },
    "group_norm_backward": {
        "groups-0": (ValueError, lambda: group_norm_backward(groups=0)),
        "grad-batch": (ValueError, lambda: group_norm_backward(grad=PHYSICAL[:1])),
        "grad-block": (ValueError, lambda: group_norm_backward(grad=OTHER_BLOCK)),
        "mean-size": (ValueError, lambda: group_norm_backward(mean=STATISTICS[:1])),
        "rstd-double": (ValueError, lambda: group_norm_backward(rstd=STATISTICS.double())),
    },
    "resample": {
        "size": (ValueError, lambda: resample(size=(5,))),
        "scales": (ValueError, lambda: resample(scales=(2.0,))),
        "interpolation": (ValueError, lambda: resample(interpolation=4)),
        "cubic-of-3-dims": (
            ValueError, lambda: resample(PHYSICAL[:, :, None], 16, (5, 5, 6), 3, (0.0, 0.0, 0.0)),
        ),
        "nothing": (ValueError, lambda: resample(size=(5, 0))),
        "no-pixels": (ValueError, lambda: resample(input=PHYSICAL[:, :, :0])),
        "double": (NotImplementedError, lambda: resample(PHYSICAL.double())),
    },
    "grid_sampler": {
        "grid-dims": (ValueError, lambda: grid_sampler(grid=GRID[0])),
        "grid-batch": (ValueError, lambda: grid_sampler(grid=GRID[:1])),
        "grid-of-3-dims": (ValueError, lambda: grid_sampler(grid=torch.zeros(2, 3, 4, 3))),
        "grid-double": (NotImplementedError, lambda: grid_sampler(grid=GRID.double())),
        "mode": (ValueError, lambda: grid_sampler(mode=3)),
        "padding": (ValueError, lambda: grid_sampler(padding=-1)),
        "no-pixels": (ValueError, lambda: grid_sampler(input=PHYSICAL[:, :, :0])),
    },
    "grid_sampler_backward": {
        "grad-points": (ValueError, lambda: grid_sampler_backward(grad=SAMPLED[:, :, :2])),
        "grad-dense": (ValueError, lambda: grid_sampler_backward(grad=X)),
        "mode": (ValueError, lambda: grid_sampler_backward(mode=HUGE)),
    },
}  # fmt: skip


def refused_by_any(op):
    """What every op but empty_like refuses in place of an argument of its first example: rows for
    ops that have none of their own."""
    args, kwargs = EXAMPLES[op][0]
    function = getattr(OPS, op).default
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False))

    def rows(name, value, error=ValueError):
        return error, lambda: function(**{**given, **kwargs, name: value})

    integers = [name for name, value in given.items() if type(value) is int]
    first = given[names[0]]
    return {
        "channels": rows("channels", 99),
        "dense": rows(names[0], X),
        "block": rows(names[0], first.flatten(-2)),
        "double": rows(names[0], first.double(), NotImplementedError),
        **{f"{name}-negative": rows(name, -1) for name in integers},
        **({"batch": rows(names[0], first[:1])} if names[0] == "grad_output" else {}),
    }


DIRECT |= {op: refused_by_any(op) for op in EXAMPLES if op not in DIRECT and op != "empty_like"}
DIRECT_CASES = [(op, name) for op, rows in DIRECT.items() for name in rows]


@pytest.mark.parametrize(("op", "name"), DIRECT_CASES)
def test_direct_calls_say_what_is_wrong(op, name):
    """torch_blocked::<op or its family>: expected <rule>, got <value>[; <what to do>]."""
    error, call = DIRECT[op][name]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    sentence = str(caught.value)
    match = re.fullmatch(r"torch_blocked::(\w+): expected ([^\n]+), got ([^\n]+)", sentence)
    assert match, sentence
    family, expected, got = match.groups()
    assert op.startswith(family)
    assert expected != got.partition(";")[0], "it says nothing"


@pytest.mark.parametrize(
    ("call", "sentence"),
    (
        (
            lambda: convolution(stride=(0, 0)),
            "torch_blocked::convolution: expected stride >= 1, got [0, 0]",
        ),
        (
            lambda: convolution(groups=3),
            "torch_blocked::convolution: expected a weight for 16 input channels in 3 groups, got "
            "[8, 16, 3, 3]",
        ),
        (
            lambda: OPS.to_dense(PHYSICAL, 17),
            "torch_blocked::to_dense: expected ceil(C/b) = 3 blocks for C = 17, got 2 in "
            "[2, 2, 9, 9, 8]; pass the logical channel count",
        ),
        (
            lambda: batch_norm(mean=torch.ones(15)),
            "torch_blocked::batch_norm: expected running_mean of size [16], got [15]; one value "
            "per channel",
        ),
    ),
)
def test_whole_sentences(call, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()
