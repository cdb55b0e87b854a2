"""What ATen refuses of a dense tensor is refused of a blocked one, with the same kind of exception;
and where ATen puts NaN, NaN is."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import torch_blocked

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]

DIMS = (2, 16, 6, 5)
TAGS = {3: "nCw8c", 4: "nChw8c", 5: "nCdhw8c"}


def random_dense(*dims, seed=0):
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def blocked(x):
    return x.to_blocked(TAGS[x.dim()])


def gradient_of(dims):
    """The backward formulas, given a gradient of `dims`."""
    arguments = [[8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3]
    backward = torch.ops.aten.convolution_backward.default
    weight = random_dense(8, 16, 3, 3)
    return lambda x: backward(like(x, torch.ones(dims)), x, weight, *arguments)


def like(x, other):
    return blocked(other) if torch_blocked.is_blocked(x) and other.dim() in TAGS else other


PINNED = {
    "empty_like": lambda x: torch.empty_like(x, pin_memory=True),
    "zeros_like": lambda x: torch.zeros_like(x, pin_memory=True),
    "ones_like": lambda x: torch.ones_like(x, pin_memory=True),
    "full_like": lambda x: torch.full_like(x, 3, pin_memory=True),
    "randn_like": lambda x: torch.randn_like(x, pin_memory=True),
    "new_full": lambda x: x.new_full(x.shape, 3, pin_memory=True),
}

CASES = {
    "mean of int": (DIMS, lambda x: x.int().mean()),
    "mean as int": (DIMS, lambda x: x.mean(dtype=torch.int32)),
    "mean over C as int": (DIMS, lambda x: x.mean(1, dtype=torch.int32)),
    "mean over C of int": (DIMS, lambda x: x.int().mean((1, 2))),
    "mean of int over rows": (DIMS, lambda x: x.long().mean((2,))),
    "var over C of int": (DIMS, lambda x: x.int().var(1)),
    "std over C of int": (DIMS, lambda x: x.int().std((1, 2, 3))),
    "std_mean over C of int": (DIMS, lambda x: torch.std_mean(x.int(), (1,))),
    "contiguous 3d of 4": (DIMS, lambda x: x.contiguous(memory_format=torch.channels_last_3d)),
    "clone 3d of 4": (DIMS, lambda x: x.clone(memory_format=torch.channels_last_3d)),
    "to 3d of 4": (DIMS, lambda x: x.to(memory_format=torch.channels_last_3d)),
    "contiguous of 3": ((2, 16, 6), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "clone of 5": ((2, 8, 2, 6, 5), lambda x: x.clone(memory_format=torch.channels_last)),
    "max_pool of no channels": ((2, 0, 6, 6), lambda x: F.max_pool2d(x, 2)),
    "avg_pool of no channels": ((2, 0, 6, 6), lambda x: F.avg_pool2d(x, 2)),
    "adaptive max of no channels": ((2, 0, 6, 6), lambda x: F.adaptive_max_pool2d(x, 2)),
    "max_pool3d of no channels": ((2, 0, 4, 6, 6), lambda x: F.max_pool3d(x, 2)),
    "nearest of no channels": ((2, 0, 6, 6), lambda x: F.interpolate(x, scale_factor=2)),
    "reflection of no channels": ((2, 0, 6, 6), lambda x: F.pad(x, (1,) * 4, mode="reflect")),
    "pixel_unshuffle by 0": ((0, 16, 6, 5), lambda x: F.pixel_unshuffle(x, 0)),
    "pixel_unshuffle by no factor": ((0, 16, 6, 5), lambda x: F.pixel_unshuffle(x, 5)),
    "group norm of other pixels": (
        DIMS,
        lambda x: torch.ops.aten.native_group_norm(x, None, None, 2, 16, -1, 4, 1e-5),
    ),
    "gradient of fewer channels": (DIMS, gradient_of((2, 7, 4, 3))),
    "gradient of more channels": (DIMS, gradient_of((2, 9, 4, 3))),
    "gradient of fewer dims": (DIMS, gradient_of((2, 8, 4))),
    "gradient of other pixels": (DIMS, gradient_of((2, 8, 3, 3))),
    **{
        f"{name} pinned of {'no ' * (not images)}images": ((images, *DIMS[1:]), function)
        for images in (0, 2)
        for name, function in PINNED.items()
    },
    "empty_like sparse": (DIMS, lambda x: torch.empty_like(x, layout=torch.sparse_coo)),
    "full_like sparse": (DIMS, lambda x: torch.full_like(x, 3, layout=torch.sparse_coo)),
    "cat of out": (DIMS, lambda x: torch.cat([x, x], out=x)),
    "cat of a part of out": (DIMS, lambda x: torch.cat([x[:1]], out=x)),
    "stack of out": (DIMS, lambda x: torch.stack([x, x], out=x)),
    "stack of other ranks": (DIMS, lambda x: torch.stack([torch.zeros(16, 1, 1), x], -5)),
    "index_select of out": (DIMS, lambda x: torch.index_select(x, 1, torch.tensor([0]), out=x)),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_as_dense(name):
    dims, function = CASES[name]
    dense = random_dense(*dims)
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as theirs:
        function(dense.clone())
    with pytest.raises(type(theirs.value)):
        function(blocked(dense))


TAKEN = {
    "adaptive average of no channels": ((2, 0, 6, 6), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "pool of no images": ((0, 8, 6, 6), lambda x: F.max_pool2d(x, 2)),
    "sum as int": (DIMS, lambda x: x.sum(1, dtype=torch.int32)),
    "mean of int as float": (DIMS, lambda x: x.int().mean((1, 2), dtype=torch.float32)),
    "logsumexp of int": (DIMS, lambda x: x.int().logsumexp(1)),
    "shuffle of no images": ((0, 16, 6, 5), lambda x: torch.channel_shuffle(x.long(), 4)),
    "native shuffle of no images": (
        (0, 16, 6, 5),
        lambda x: torch.ops.aten.native_channel_shuffle(x.long(), 4),
    ),
    "logsumexp of no images": ((0, 16, 6, 5), lambda x: x.logsumexp((0, 1))),
    "logsumexp of no pixels": ((2, 16, 0, 5), lambda x: x.logsumexp((1, 2), keepdim=True)),
    "norm of one channel": ((2, 1, 6, 5), lambda x: torch.linalg.vector_norm(x, 1e-5, 1)),
    "norm of one image": ((1, 1, 6, 5), lambda x: torch.linalg.vector_norm(x, 1e-5, (0, 1))),
    "cat of disjoint parts": (
        (4, *DIMS[1:]),
        lambda x: torch.cat([x[:1], x[1:2]], out=x[2:]),
    ),
    "zeros_like sparse": (DIMS, lambda x: torch.zeros_like(x, layout=torch.sparse_coo)),
    "zeros_like strided": (DIMS, lambda x: torch.zeros_like(x, layout=torch.strided)),
    "channels last": (DIMS, lambda x: x.contiguous(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_as_dense(name):
    dims, function = TAKEN[name]
    dense = random_dense(*dims)
    ours, theirs = function(blocked(dense)), function(dense.clone())
    ours = ours.to_dense() if torch_blocked.is_blocked(ours) else ours
    torch.testing.assert_close(ours, theirs)


BACKWARDS = {
    "batch_norm": lambda x, g: torch.ops.aten.native_batch_norm_backward(
        g, x, None, None, None, torch.zeros(16), torch.ones(16), True, 1e-5, [True] * 3
    ),
    "group_norm": lambda x, g: torch.ops.aten.native_group_norm_backward(
        g, x, torch.zeros(2, 4), torch.ones(2, 4), None, 2, 16, 30, 4, [True] * 3
    ),
    "softmax": lambda x, g: torch.ops.aten._softmax_backward_data(g, x, 1, torch.float32),
    "grid_sampler": lambda x, g: torch.ops.aten.grid_sampler_2d_backward(
        g, x, torch.zeros(2, 6, 5, 2), 0, 0, False, [True] * 2
    ),
    "glu": lambda x, g: torch.ops.aten.glu_backward(g, x, 2),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_of_other_channels_have_no_kernel(name):
    """15 channels take as many blocks as 16. What ATen makes of them is its own."""
    x = blocked(random_dense(*DIMS))
    gradient = random_dense(2, 15, *((3, 5) if name == "glu" else (6, 5)))
    with torch_blocked.strict(), pytest.raises(NotImplementedError, match="with 16 channels"):
        BACKWARDS[name](x, blocked(gradient))


# A norm or a layer, called with two parameters, None or of some shape.
native = torch.ops.aten.native_layer_norm
WITH_PARAMETERS = {
    "batch norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "of the running": lambda x, w, b: F.batch_norm(x, torch.zeros(16), torch.ones(16), w, b),
    "running statistics": lambda x, w, b: F.batch_norm(x, w, b, None, None, True),
    "group norm": lambda x, w, b: F.group_norm(x, 4, w, b),
    "instance norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "layer norm": lambda x, w, b: native(x, (6, 5), w, b, 1e-5),
    "layer norm of rows": lambda x, w, b: native(x, (5,), w, b, 1e-5),
    "layer norm of all": lambda x, w, b: native(x, DIMS[1:], w, b, 1e-5),
    "convolution": lambda x, w, b: F.conv2d(x, torch.ones(16, 16, 1, 1), w if b is None else b),
    "loss": lambda x, w, b: torch.ops.aten.nll_loss2d_forward(
        x, torch.ones(2, 6, 5, dtype=torch.int64), w if b is None else b, 1, -1
    ),
}
SHAPES = ((16,), (15,), (1,), (), (6, 5), (1, 5), (6, 1), (5,), (1, 1, 1), DIMS[1:], (16, 1, 1))


def outcome(function, x, parameters):
    try:
        results = function(x, *(each if each is None else each.clone() for each in parameters))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return type(error)
    results = results if isinstance(results, (list, tuple)) else [results]
    return [each.to_dense() if torch_blocked.is_blocked(each) else each for each in results]


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_of_another_shape(name):
    """Shapes that happen to broadcast are refused, too."""
    x, function = random_dense(*DIMS), WITH_PARAMETERS[name]
    taken = 0
    for shapes in itertools.product((None, *SHAPES), repeat=2):
        parameters = [None if each is None else random_dense(*each).abs() for each in shapes]
        expected, actual = (outcome(function, each, parameters) for each in (x, blocked(x)))
        if isinstance(expected, list):
            taken += 1
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        else:
            assert isinstance(actual, type) and issubclass(actual, expected), (shapes, actual)
    assert taken


WITHOUT_A_VALUE_EACH = {
    "weight": lambda x, a, b: norm(x, b, a, None, None, True, 0.1, 1e-5),
    "bias": lambda x, a, b: norm(x, a, b, None, None, True, 0.1, 1e-5),
    "running mean": lambda x, a, b: norm(x, a, a, b, a, False, 0.1, 1e-5),
    "running variance": lambda x, a, b: norm(x, a, a, a, b, True, 0.1, 1e-5),
    "no running": lambda x, a, b: norm(x, a, a, None, None, False, 0.1, 1e-5),
    "gradient, weight": lambda x, a, b: gradient(x, x, b, a, a, a, a, True, 1e-5, [True] * 3),
    "gradient, mean": lambda x, a, b: gradient(x, x, a, a, a, b, a, True, 1e-5, [True] * 3),
    "gradient, variance": lambda x, a, b: gradient(x, x, a, a, b, a, a, False, 1e-5, [True] * 3),
    "gradient, no running": lambda x, a, b: gradient(
        x, x, a, None, None, a, a, False, 1e-5, [True] * 3
    ),
    "gradient, no mean": lambda x, a, b: gradient(
        x, x, a, None, None, None, a, True, 1e-5, [True] * 3
    ),
}
norm, gradient = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward


@pytest.mark.parametrize("name", WITHOUT_A_VALUE_EACH)
def test_a_batch_norm_reads_a_value_for_each_channel(name):
    """Called directly, ATen reads beyond memory."""
    x, parameter = blocked(random_dense(*DIMS)), torch.ones(16)
    with pytest.raises(RuntimeError, match="torch_blocked::native_batch_norm: expected"):
        WITHOUT_A_VALUE_EACH[name](x, parameter, parameter[:3])


# --- NaN in a grid

# ATen's own kernel reads outside the image for NaN, and may crash.
UNDEFINED = {
    (4, "bilinear", "border", "nan"),
    (4, "bilinear", "reflection", "nan"),
    (4, "bilinear", "reflection", "inf"),
}
GRIDS = [
    (ndim, mode, padding, value)
    for ndim in (4, 5)
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for value in ("nan", "inf", "-inf", "1e20")
    if (ndim, mode, padding, value.strip("-")) not in UNDEFINED and (ndim, mode) != (5, "bicubic")
]


@pytest.mark.parametrize(("ndim", "mode", "padding", "value"), GRIDS)
def test_nan_stays_where_aten_puts_it(ndim, mode, padding, value):
    spatial = (4, 6, 5)[5 - ndim :]
    image = random_dense(1, 9, *spatial) + 2
    grid = random_dense(1, *(1, 4, 4)[5 - ndim :], ndim - 2, seed=1).tanh() * 0.8
    points = grid.view(-1, ndim - 2)
    points[0, 0] = points[1, 1] = points[2] = float(value)
    results = []
    for convert in (lambda x: x, blocked):
        x = convert(image.clone()).requires_grad_()
        at = grid.clone().requires_grad_()
        out = F.grid_sample(x, at, mode, padding, align_corners=False)
        out.backward(convert(random_dense(*out.shape, seed=2)))
        results.append([y.to_dense() if torch_blocked.is_blocked(y) else y
                        for y in (out.detach(), x.grad, at.grad)])  # fmt: skip
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)


# --- tags

USES = {
    "to_blocked": lambda tag: random_dense(*DIMS).to_blocked(tag),
    "to_format": lambda tag: torch_blocked.to_format(random_dense(*DIMS), tag),
    "canonical_tag": torch_blocked.canonical_tag,
    "Descriptor": lambda tag: torch_blocked.Descriptor(DIMS, torch.float32, tag),
    "physical_shape": lambda tag: torch_blocked.physical_shape(DIMS, tag),
    "zeros": lambda tag: torch_blocked.zeros(*DIMS, format=tag),
}


@pytest.mark.parametrize("tag", (b"nChw8c", bytearray(b"nChw8c"), 5, ["nChw8c"]), ids=repr)
@pytest.mark.parametrize("use", USES)
def test_a_tag_is_a_string(use, tag):
    with pytest.raises(TypeError, match=r"^torch_blocked::format_tag: expected a string"):
        USES[use](tag)


LONG = {
    "letters": "x" * 10**6,
    "blocks": "aBcd8b" + "8b" * 300_000,
    "digits": "aBcd" + "9" * 10**6 + "b",
    "accents": "é" * 500_000,
    "odd accents": "a" + "é" * 500_000,
}


@pytest.mark.parametrize("tag", LONG)
@pytest.mark.parametrize("use", USES)
def test_errors_do_not_repeat_long_values(use, tag):
    with pytest.raises(ValueError, match="^torch_blocked::") as error:
        USES[use](LONG[tag])
    assert len(str(error.value)) < 1000
    assert LONG[tag][:40] in str(error.value) or tag == "digits"


def test_errors_do_not_repeat_long_arguments():
    for tag in (b"x" * 10**6, ["a"] * 10**5):
        with pytest.raises(TypeError) as error:
            torch_blocked.canonical_tag(tag)
        assert len(str(error.value)) < 1000
