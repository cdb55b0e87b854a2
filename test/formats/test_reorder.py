"""Reorders between dense tensors of any strides, channels-last and blocked ones: exact values, a
zero tail, one pass, gradients; and the names of formats."""

import itertools
import re
import warnings

import pytest
import torch
from helpers.draws import crossed
from helpers.problems import BATCHES, CHANNELS, SPATIAL

import torch_blocked
from torch_blocked.formats import CHANNELS_LAST, CONTIGUOUS
from torch_blocked.tensor import BlockedTensor, format_name, tail_is_zero

pytestmark = pytest.mark.filterwarnings("ignore:torch_blocked")  # of test results

BLOCKS = (4, 8, 16, 32)
NDIMS = (3, 4, 5)
# What oneDNN reorders, and what ATen does for us.
ONEDNN_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int8,
    torch.uint8,
)
# Between blocked formats oneDNN has these on every CPU; others may take two passes.
ONE_PASS_DTYPES = (torch.float32, torch.int32, torch.int8, torch.uint8)
OTHER_DTYPES = (torch.float64, torch.int64, torch.int16, torch.bool, torch.complex64)
DTYPES = ONEDNN_DTYPES + OTHER_DTYPES
MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def batches_of(dtype):
    """All of them for the type that networks have."""
    return BATCHES if dtype == torch.float32 else (3,)


def random_tensor(dims, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(dims, generator=generator) * 50
    if dtype.is_complex:
        return torch.complex(values, values.flip(0))
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def physical_of(dense, block):
    """The definition: [N, C, *spatial] -> [N, ceil(C/b), *spatial, b], zeros beyond C."""
    n, channels, *spatial = dense.shape
    blocks = -(-channels // block)
    padded = torch.zeros(n, blocks * block, *spatial, dtype=dense.dtype)
    padded[:, :channels] = dense
    return padded.unflatten(1, (blocks, block)).movedim(2, -1).contiguous()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.bool or not expected.numel():
        assert torch.equal(actual, expected)
    else:
        assert torch.equal(bits(actual), bits(expected))


def channels_last(dense):
    return dense.movedim(1, -1).contiguous().movedim(-1, 1)


# Strides that tensors of the dims of `x` can have; the values are those of x unless it is expanded
# or overlaps.
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels-last": channels_last,
    "expanded-batch": lambda x: x[:1].expand(x.shape),
    "expanded-channels": lambda x: x[:, :1].expand(x.shape),
    "expanded-width": lambda x: x[..., :1].expand(x.shape),
    "expanded-all": lambda x: x.flatten()[:1].reshape([1] * x.dim()).expand(x.shape),
    "every-second-channel": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "inner-channels": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "every-second-pixel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every-third-image": lambda x: x.repeat_interleave(3, 0)[::3],
    "cropped": lambda x: torch.nn.functional.pad(x, (1, 2) * (x.dim() - 2))[
        (..., *(slice(1, -2) for _ in x.shape[2:]))
    ],
    "reversed-dims": lambda x: x.permute(*range(x.dim())[::-1]).contiguous().permute(
        *range(x.dim())[::-1]
    ),
    "batch-and-channels-swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "spatial-swapped": lambda x: x.transpose(2, -1).contiguous().transpose(2, -1),
    "channels-last-sliced": lambda x: channels_last(torch.cat([x, x], 1))[:, : x.shape[1]],
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (1, 1, *range(1, x.dim() - 1))),
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("ndim", NDIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, ndim):
    for channels, batch, block in crossed(2, CHANNELS, BATCHES, BLOCKS):
        base = random_tensor((batch, channels, *SPATIAL[ndim]))
        if not base.numel() and layout in ("expanded-all", "overlapping"):
            continue  # there is nothing to expand
        dense = LAYOUTS[layout](base)
        with torch_blocked.profile() as p:
            blocked = dense.to_blocked(format_name(ndim, block))
        assert p.reorders == (dense.numel() > 0), p.table()
        assert blocked.shape == dense.shape
        assert blocked.physical_shape == (batch, -(-channels // block), *SPATIAL[ndim], block)
        assert_same_bits(blocked._physical, physical_of(dense, block))


@pytest.mark.parametrize("ndim", NDIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trips(dtype, ndim):
    """Dense -> blocked -> contiguous and channels-last, each in one pass."""
    for channels, batch, block in crossed(2, CHANNELS, batches_of(dtype), BLOCKS):
        dense = random_tensor((batch, channels, *SPATIAL[ndim]), dtype)
        blocked = dense.to_blocked(format_name(ndim, block))
        assert_same_bits(blocked._physical, physical_of(dense, block))
        for tag in (CONTIGUOUS[ndim], CHANNELS_LAST[ndim]):
            with torch_blocked.profile() as p:
                back = torch_blocked.to_format(blocked, tag)
            assert p.reorders == (dense.numel() > 0), p.table()
            assert_same_bits(back, dense)
            if batch and channels > 1:
                assert torch_blocked.format_of(back) == tag


@pytest.mark.parametrize("ndim", NDIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocked_to_other_blocked(dtype, ndim):
    blocks = list(itertools.permutations(BLOCKS, 2))
    for channels, batch, (source, target) in crossed(2, CHANNELS, batches_of(dtype), blocks):
        dense = random_tensor((batch, channels, *SPATIAL[ndim]), dtype)
        blocked = dense.to_blocked(format_name(ndim, source))
        with torch_blocked.profile() as p:
            other = blocked.to_blocked(format_name(ndim, target))
        passes = p.reorders if dense.numel() else 1
        assert passes == 1 or (dtype not in ONE_PASS_DTYPES and passes == 2), p.table()
        assert other.format == format_name(ndim, target)
        assert_same_bits(other._physical, physical_of(dense, target))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ndim", NDIMS)
def test_channels_last_needs_no_hop(ndim, block):
    """One reorder each way, straight between the two formats; no ref kernel, no fallback."""
    dense = channels_last(random_tensor((2, 33, *SPATIAL[ndim])))
    tag = format_name(ndim, block)
    with torch_blocked.profile() as p:
        blocked = dense.to_blocked(tag)
        back = torch_blocked.to_format(blocked, CHANNELS_LAST[ndim])
    dims = [2, 33, *SPATIAL[ndim]]
    assert [event.detail for event in p.events] == [
        f"{CHANNELS_LAST[ndim]} -> {tag} {dims}",
        f"{tag} -> {CHANNELS_LAST[ndim]} {dims}",
    ]
    assert back.stride() == dense.stride()
    assert_same_bits(back, dense)
    if ndim in MEMORY_FORMATS:
        with torch_blocked.profile() as p:
            back = blocked.to_dense(memory_format=MEMORY_FORMATS[ndim])
        assert p.reorders == 1
        assert back.is_contiguous(memory_format=MEMORY_FORMATS[ndim])
        assert_same_bits(back, dense)


@pytest.mark.parametrize("layout", ("contiguous", "channels-last"))
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_conversion_is_that_of_to(source, target, layout):
    """Both ways and between blocks, for values that the target can hold."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand((2, 17, 3, 5), generator=generator) * 120
    if torch.uint8 not in (source, target):
        values -= 60
    dense = LAYOUTS[layout](values.to(source))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the imaginary part is dropped
        expected = dense.to(target)
        for block in (8, 16):
            tag = format_name(4, block)
            blocked = dense.to_blocked(tag)
            other = format_name(4, 24 - block)
            for result in (
                dense.to_blocked(tag, target).to_dense(),
                blocked.to_dense(target),
                blocked.to_dense(target, memory_format=torch.channels_last),
                blocked.to_blocked(other, target).to_dense(),
                blocked.to(target).to_dense(),
            ):
                assert_same_bits(result, expected)
        assert tail_is_zero(blocked.to_blocked(other, target))


@pytest.mark.parametrize("target", [t for t in DTYPES if t.is_floating_point], ids=str)
def test_conversion_keeps_infinities_and_nan(target):
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38, -1e38, 1e-40, -0.0, 65504.0])
    dense = values.reshape(1, 8, 1, 1).repeat(2, 3, 3, 5)
    result = dense.to_blocked("nChw16c", target).to_dense()
    # The CPU's own conversion to bfloat16 makes 0 of subnormal numbers.
    smallest = torch.finfo(torch.float32).tiny if target == torch.bfloat16 else 0
    torch.testing.assert_close(result, dense.to(target), rtol=0, atol=smallest, equal_nan=True)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "dims", ((2, 9, 0), (2, 9, 0, 7), (2, 9, 5, 0), (0, 9, 5, 7), (2, 0, 5, 7), (2, 9, 3, 0, 4))
)
def test_empty_tensors(dims, block):
    dense = torch.empty(dims)
    blocked = dense.to_blocked(format_name(len(dims), block))
    assert blocked.shape == dims
    assert tail_is_zero(blocked)
    assert torch.equal(blocked.to_dense(), dense)
    other = blocked.to_blocked(format_name(len(dims), 4 if block == 8 else 8))
    assert torch.equal(torch_blocked.to_format(other, CHANNELS_LAST[len(dims)]), dense)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "channels-last", "cropped"))
def test_threads_do_not_change_results(layout, dtype):
    """A size that is shared among threads."""
    dense = LAYOUTS[layout](random_tensor((3, 33, 57, 59), dtype))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            blocked = dense.to_blocked("nChw16c")
            results.append((blocked._physical, blocked.to_blocked("nChw8c")._physical))
            assert_same_bits(blocked.to_dense(), dense)
            assert_same_bits(blocked.to_dense(memory_format=torch.channels_last), dense)
    finally:
        torch.set_num_threads(threads)
    for first, second in results:
        assert_same_bits(first, physical_of(dense, 16))
        assert_same_bits(second, physical_of(dense, 8))


def test_conjugated_and_negative_views():
    dense = random_tensor((2, 9, 3, 5), torch.complex64)
    for view in (dense.conj(), dense.conj().imag):
        assert_same_bits(view.to_blocked("nChw8c").to_dense(), view.resolve_conj().resolve_neg())


# --- gradients


def double(*dims):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(dims, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("ndim", NDIMS)
@pytest.mark.parametrize("block", (4, 8, 16))
def test_reorders_are_differentiable(block, ndim):
    tag, other = format_name(ndim, block), format_name(ndim, 32)
    x = double(2, 5, *range(2, ndim))

    def there_and_back(x):
        return torch_blocked.to_dense(x.to_blocked(tag).to_blocked(other))

    def through_channels_last(x):
        blocked = channels_last(x).to_blocked(tag)
        return torch_blocked.to_format(blocked * blocked, CHANNELS_LAST[ndim])

    for function in (there_and_back, through_channels_last):
        assert torch.autograd.gradcheck(function, (x,), fast_mode=ndim == 5)
        assert torch.autograd.gradgradcheck(function, (x,), fast_mode=True)


def test_conversions_are_differentiable():
    """Each in float64 both ways; the one that rounds has the gradient of `to`."""
    x = double(2, 9, 3, 4)

    def to_complex(x):
        return x.to_blocked("nChw8c", torch.complex128).to_dense()

    assert torch.autograd.gradcheck(to_complex, (x,))
    for convert in (
        lambda x: x.to_blocked("nChw8c", torch.float32).to_dense(),
        lambda x: x.to_blocked("nChw8c").to_blocked("nChw16c", torch.float32).to_dense(),
        lambda x: x.to_blocked("nChw8c").to_dense(torch.float32),
        lambda x: x.to_blocked("nChw8c").to(torch.float32).to_dense(),
    ):
        weights = torch.arange(216, dtype=torch.float32).reshape(2, 9, 3, 4)
        (grad,) = torch.autograd.grad((convert(x) * weights).sum(), x)
        assert_same_bits(grad, weights.double())


def test_gradient_has_the_format_of_its_tensor():
    dense = torch.randn(2, 9, 3, 5, requires_grad=True)
    blocked = torch.randn(2, 9, 3, 5).to_blocked("nChw8c").requires_grad_()
    (
        dense.to_blocked("nChw8c") * blocked.to_blocked("nChw16c").to_dense()
    ).to_dense().sum().backward()
    assert not torch_blocked.is_blocked(dense.grad)
    assert blocked.grad.format == "nChw8c"
    assert torch.equal(dense.grad, blocked.detach().to_dense())
    assert torch.equal(blocked.grad.to_dense(), dense.detach())


# --- names


@pytest.mark.parametrize("ndim", NDIMS)
def test_to_format_takes_every_tag(ndim):
    dense = random_tensor((2, 17, *SPATIAL[ndim]))
    letters = "abcde"[:ndim]
    names = {
        CONTIGUOUS[ndim]: (CONTIGUOUS[ndim], letters),
        CHANNELS_LAST[ndim]: (CHANNELS_LAST[ndim], "a" + letters[2:] + "b"),
    }
    for block in BLOCKS:
        tag = format_name(ndim, block)
        names[tag] = (tag, f"aB{letters[2:]}{block}b")
    for source, target in itertools.product(names, repeat=2):
        start = torch_blocked.to_format(dense, source)
        for spelling in names[target]:
            result = torch_blocked.to_format(start, spelling)
            assert torch_blocked.format_of(result) == target
            assert torch_blocked.is_blocked(result) == target.endswith("c") * ("C" in target)
            assert torch.equal(result, start)
            if source == target:
                assert result is start or torch.equal(result, start)


def test_same_format_is_the_same_tensor():
    blocked = torch.randn(2, 9, 3, 5).to_blocked("nChw8c")
    with torch_blocked.profile() as p:
        assert blocked.to_blocked("nChw8c") is blocked
        assert blocked.to_blocked("aBcd8b", torch.float32) is blocked
        assert torch_blocked.to_format(blocked, "nChw8c") is blocked
    assert p.reorders == 0


def test_to_dense_of_a_dense_tensor():
    dense = torch.randn(2, 9, 3, 5)
    assert torch_blocked.to_dense(dense) is dense
    back = torch_blocked.to_dense(dense, torch.float64, memory_format=torch.channels_last)
    assert back.dtype == torch.float64
    assert back.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("tensor", "tag"),
    (
        (torch.empty(2, 3, 4), "ncw"),
        (torch.empty(2, 4, 3).transpose(1, 2), "nwc"),
        (torch.empty(2, 3, 4, 5), "nchw"),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), "nhwc"),
        (torch.empty(2, 3, 4, 5, 6), "ncdhw"),
        (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), "ndhwc"),
        (torch.empty(2, 1, 4, 5), "nchw"),
        (torch.empty(2, 3, 1, 1), "nchw"),
        (torch.empty(2, 3, 4, 5)[:, :, ::2], "strided"),
        (torch.empty(2, 3, 1, 1).expand(2, 3, 4, 5), "strided"),
        (torch.empty(2, 3, 4, 5).permute(1, 2, 3, 0), "dabc"),
        (torch.empty(3, 4, 5, 2).permute(3, 0, 1, 2), "chwn"),
        (torch.empty(7), "a"),
        (torch.empty(2, 3), "nc"),
        (torch.empty(2, 3, dtype=torch.int64).t(), "cn"),
        (torch.empty(2, 3)[:, ::2], "strided"),
        (torch.empty(()), "strided"),
        (torch.empty(1, 1, 1, 1, 1, 1), "abcdef"),
        (torch.empty((1,) * 13), "strided"),  # there are tags of up to 12 dims
    ),
)
def test_format_of_dense_tensors(tensor, tag):
    assert torch_blocked.format_of(tensor) == tag


def test_default_format_is_the_fastest():
    best = torch_blocked.native_blocks()[0]
    for ndim in NDIMS:
        dense = random_tensor((2, 17, *SPATIAL[ndim]))
        tag = {3: f"nCw{best}c", 4: f"nChw{best}c", 5: f"nCdhw{best}c"}[ndim]
        assert dense.to_blocked().format == tag
        assert torch_blocked.to_blocked(dense).format == tag
        assert torch_blocked.zeros(2, 17, *SPATIAL[ndim]).format == tag
    isa = torch_blocked.env()["isa"]
    assert torch_blocked.native_blocks() == {"amx": [16, 8], "avx512": [16, 8]}.get(isa, [8])


@pytest.mark.parametrize("make", (torch_blocked.empty, torch_blocked.zeros, torch_blocked.ones))
def test_factories(make):
    for size in ((2, 9, 3, 5), ([2, 9, 3, 5],), (torch.Size((2, 9, 3, 5)),)):
        made = make(*size, format="nChw8c", dtype=torch.float64, requires_grad=True)
        assert (made.shape, made.format, made.dtype) == ((2, 9, 3, 5), "nChw8c", torch.float64)
        assert made.requires_grad and made.is_leaf
        assert tail_is_zero(made)
        if make is not torch_blocked.empty:
            assert torch.equal(made, getattr(torch, make.__name__)(2, 9, 3, 5, dtype=torch.float64))


def test_randn_follows_the_seed():
    torch.manual_seed(7)
    blocked = torch_blocked.randn(2, 9, 3, 5, format="nChw8c")
    torch.manual_seed(7)
    assert torch.equal(blocked.to_dense(), torch.randn(2, 9, 3, 5))


# --- errors

X = torch.zeros(2, 9, 3, 5)
BLOCKED_TAG = (
    "torch_blocked::to_blocked: expected a tag blocked over the channels such as nChw16c, got {} "
    "for 4 dims; use to_format for plain formats"
)
TO_DENSE = (
    "torch_blocked::to_dense: expected torch.contiguous_format, or the channels-last format of "
    "4 dims, got {}; use to_format for nwc"
)
RANK = (
    "torch_blocked::to_blocked: expected a tensor [N, C, *spatial] with 3 to 5 dims, got {}; "
    "unsqueeze it to the rank of its network"
)


@pytest.mark.parametrize(
    ("call", "sentence"),
    (
        (lambda: X.to_blocked("nchw"), BLOCKED_TAG.format("nchw")),
        (lambda: X.to_blocked("nhwc"), BLOCKED_TAG.format("nhwc")),
        (lambda: X.to_blocked("nCw8c"), BLOCKED_TAG.format("nCw8c")),
        (lambda: X.to_blocked("nCdhw16c"), BLOCKED_TAG.format("nCdhw16c")),
        (lambda: X.to_blocked("OIhw16i16o"), BLOCKED_TAG.format("OIhw16i16o")),
        (lambda: X.to_blocked("aBcd64b"), BLOCKED_TAG.format("aBcd64b")),
        (lambda: X.to_blocked("NChw16n16c"), BLOCKED_TAG.format("NChw16n16c")),
        (lambda: X[0, 0].to_blocked(), RANK.format("[3, 5]")),
        (lambda: X[None, None].to_blocked(), RANK.format("[1, 1, 2, 9, 3, 5]")),
        (
            lambda: X[0, 0].to_blocked("nChw8c"),
            "torch_blocked::to_blocked: expected a tag blocked over the channels and 3 to 5 dims, "
            "got nChw8c for 2 dims; use to_format for plain formats",
        ),
        (
            lambda: X.to_blocked().to_dense(memory_format=torch.channels_last_3d),
            TO_DENSE.format("torch.channels_last_3d"),
        ),
        (
            lambda: X.to_blocked().to_dense(memory_format=torch.preserve_format),
            TO_DENSE.format("torch.preserve_format"),
        ),
        (
            lambda: torch_blocked.zeros(2, 9),
            "torch_blocked::zeros: expected 3 to 5 dims [N, C, *spatial], got (2, 9); use torch's "
            "own factories for other ranks",
        ),
    ),
)
def test_bad_values(call, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()


@pytest.mark.parametrize(
    "tag", ("", "nChw", "nope", "nChw0c", "nChw16", "aBcd16", "16c", "nChw16C")
)
def test_tags_that_are_none(tag):
    for function in (X.to_blocked, lambda tag: torch_blocked.to_format(X, tag)):
        with pytest.raises(ValueError, match=r"^torch_blocked::\w+: expected .*, got .*"):
            function(tag)


@pytest.mark.parametrize("convert", (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn))
def test_wrong_kinds(convert):
    tensor = convert(X)
    sentence = (
        f"torch_blocked::to_blocked: expected a strided tensor, got layout {tensor.layout}; "
        "call .to_dense() first"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        tensor.to_blocked()


def test_a_blocked_tensor_has_its_class():
    assert isinstance(X.to_blocked(), BlockedTensor)
    assert isinstance(X.to_blocked(), torch.Tensor)
    assert torch_blocked.is_blocked(X.to_blocked())
    assert not torch_blocked.is_blocked(X)
    assert not torch_blocked.is_blocked(None)
