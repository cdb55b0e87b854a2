"""Factories with `format=`, and a tag where torch takes a memory format."""

import pytest
import torch

import torch_blocked as tb

DIMS = (2, 17, 3, 4)
OF_SIZE = ("empty", "zeros", "ones", "rand", "randn")


def same_values(name, *arguments, **options):
    """Torch's own and ours, drawn from the same seed."""
    torch.manual_seed(0)
    theirs = getattr(torch, name)(*arguments)
    torch.manual_seed(0)
    ours = getattr(tb, name)(*arguments, **options)
    if name.startswith("empty"):
        theirs = torch.zeros_like(theirs)
    assert torch.equal(ours.to_dense(), theirs.to(ours.dtype).contiguous())
    return ours


@pytest.mark.parametrize("name", OF_SIZE)
def test_of_a_size(name):
    assert same_values(name, DIMS, format="nChw8c").format == "nChw8c"
    assert same_values(name, *DIMS).block == tb.native_blocks()[0]
    double = getattr(tb, name)(DIMS, dtype=torch.float64, requires_grad=True)
    assert double.dtype == torch.float64 and double.requires_grad and double.is_leaf
    with pytest.raises(ValueError, match=f"torch_blocked::{name}: expected 3 to 5 dims"):
        getattr(tb, name)(2, 17)


def test_full_randint_and_normal():
    assert same_values("full", DIMS, 3.5, format="nChw16c").format == "nChw16c"
    assert same_values("full", DIMS, 3, format="nChw8c").dtype == torch.int64
    assert same_values("randint", -5, 9, DIMS, format="nChw8c").dtype == torch.int64
    assert same_values("randint", 9, DIMS, format="nChw8c").block == 8
    assert tb.randint(0, 9, DIMS, dtype=torch.int8).dtype == torch.int8
    assert same_values("normal", 3.0, 0.5, DIMS, format="nChw8c").format == "nChw8c"
    assert tb.normal(0, 1, DIMS, dtype=torch.float64, requires_grad=True).requires_grad
    with pytest.raises(ValueError, match="torch_blocked::normal: expected 3 to 5 dims"):
        tb.normal(0, 1, (2, 17))


@pytest.mark.parametrize("name", [f"{name}_like" for name in OF_SIZE])
@pytest.mark.parametrize("blocked", (False, True))
def test_like_another(name, blocked):
    x = torch.randn(DIMS, dtype=torch.float64)
    x = x.to_blocked("nChw4c") if blocked else x
    made = getattr(tb, name)(x)
    assert made.shape == x.shape and made.dtype == x.dtype
    assert made.block == (4 if blocked else tb.native_blocks()[0])
    assert getattr(tb, name)(x, format="nChw32c", dtype=torch.int8 if "rand" not in name else None
                             ).format == "nChw32c"  # fmt: skip


def test_full_like():
    made = tb.full_like(torch.zeros(DIMS, dtype=torch.int32), 7, format="nChw8c")
    assert made.dtype == torch.int32 and (made.to_dense() == 7).all()


@pytest.mark.parametrize("bounds", [(9,), (-5, 9)])
def test_randint_like(bounds):
    for x in (torch.zeros(DIMS), torch.zeros(DIMS, dtype=torch.int16).to_blocked("nChw4c")):
        torch.manual_seed(0)
        theirs = torch.randint_like(x, *bounds)
        torch.manual_seed(0)
        made = tb.randint_like(x, *bounds)
        assert made.dtype == x.dtype and made.format == getattr(x, "format", made.format)
        assert made.to_dense().min() == (bounds[0] if len(bounds) > 1 else 0)
        if not tb.is_blocked(x):
            assert torch.equal(made.to_dense(), theirs)
    assert tb.randint_like(x, 9, format="nChw32c", dtype=torch.uint8).dtype == torch.uint8


@pytest.mark.parametrize("name", ["new_empty", "new_zeros", "new_ones", "new_full"])
def test_new_tensors_of_a_blocked_one(name):
    """They have its format and dtype where they can: of as many dims."""
    x = torch.randn(DIMS, dtype=torch.float64).to_blocked("nChw4c")
    value = (7,) if name == "new_full" else ()
    made = getattr(x, name)((1, 9, 2, 2), *value)
    assert made.format == "nChw4c" and made.dtype == torch.float64 and made.shape == (1, 9, 2, 2)
    assert getattr(x, name)((1, 9, 2, 2), *value, dtype=torch.int8).dtype == torch.int8
    assert not tb.is_blocked(getattr(x, name)((3,), *value))
    if name != "new_empty":
        expected = getattr(x.to_dense(), name)((1, 9, 2, 2), *value)
        assert torch.equal(made.to_dense(), expected)


def test_every_factory_says_what_it_takes():
    others = ("full", "full_like", "randint", "randint_like", "normal")
    for name in (*OF_SIZE, *(f"{name}_like" for name in OF_SIZE), *others):
        factory = getattr(tb, name)
        assert factory.__name__ == name and "format: a tag" in factory.__doc__


def test_there_is_one_for_each_of_torchs_that_takes_a_size_or_a_tensor():
    """But for those that ask for strides or memory of one's own."""
    theirs = {name for name in dir(torch) if name.endswith("_like") and name[0] != "_"}
    theirs |= {name.removesuffix("_like") for name in theirs}
    assert theirs and all(callable(getattr(tb, name)) for name in theirs)


# --- a tag where torch takes a memory format


def test_tags_as_memory_formats_of_blocked_tensors():
    x = torch.randn(DIMS)
    y = x.to_blocked("nChw8c")
    assert y.to(memory_format="nChw8c") is y and y.contiguous(memory_format="aBcd8b") is y
    assert y.to(memory_format="nChw16c").format == "nChw16c"
    wide = y.to(torch.float64, memory_format="nChw16c")
    assert wide.dtype == torch.float64 and wide.format == "nChw16c"
    assert tb.format_of(y.contiguous(memory_format="nhwc")) == "nhwc"
    assert torch.equal(y.to(memory_format="chwn"), x)
    assert y.is_contiguous(memory_format="nChw8c") and y.is_contiguous(memory_format="aBcd8b")
    assert not y.is_contiguous(memory_format="nChw16c")
    assert not y.is_contiguous(memory_format="nchw")
    assert y.is_contiguous() and not y.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="expected"):
        y.to(memory_format="nChw12c")


def test_a_tag_is_differentiable():
    x = torch.randn(DIMS, requires_grad=True)
    x.to_blocked("nChw8c").to(memory_format="nChw16c").square().sum().backward()
    assert torch.allclose(x.grad, 2 * x)


def test_tags_compile():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(y):
        z = y.to(memory_format="nChw16c") + 1
        z = z if y.is_contiguous() else z * 2
        return z.to(torch.float64), z.contiguous()

    y = torch.randn(DIMS).to_blocked("nChw8c")
    wide, plain = run(y)
    assert wide.format == "nChw16c" and wide.dtype == torch.float64
    assert torch.equal(plain.to_dense(), y.to_dense() + 1)


def _takes_a_memory_format(name: str) -> bool:
    """Whether torch's method of a dense tensor of this machine does."""
    arguments = (torch.empty(1),) if name in ("type_as", "resize_as_") else ()
    arguments = ((1, 1, 1, 1),) if name == "resize_" else arguments
    if name.startswith("_") or not callable(getattr(torch.Tensor, name)):
        return False
    try:
        method = getattr(torch.ones(1, 1, 1, 1), name)
        method(*arguments, memory_format="no memory format")
    except Exception as error:
        return "memory_format' must be torch.memory_format" in str(error)
    return False


# All methods of torch's, so that a new one is met here.
METHODS = sorted(filter(_takes_a_memory_format, set(dir(torch.Tensor)) - {"to_sparse", "backward"}))
BY_DEVICE = {"cuda", "xpu", "ipu", "mtia"}


def test_the_methods_with_a_memory_format_are_found():
    assert {"clone", "float", "cfloat", "cpu", "resize_", "is_contiguous"} <= set(METHODS)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", sorted(set(METHODS) - BY_DEVICE))
@pytest.mark.parametrize("tag", ["nChw8c", "nChw16c", "aBcd8b", "nhwc", "nchw", "chwn"])
def test_methods_take_a_tag_where_torchs_take_a_memory_format(name, tag):
    x = torch.randn(2, 17, 3, 4)
    y = x.to_blocked("nChw8c")
    arguments = {"resize_": (x.shape,), "resize_as_": (x,)}.get(name, ())
    own = tb.canonical_tag(tag) == tb.canonical_tag("nChw8c")
    if name.startswith("resize") and not own:
        with pytest.raises(NotImplementedError, match=f"^torch_blocked::{name}: expected the form"):
            getattr(y, name)(*arguments, memory_format=tag)
        return
    z = getattr(y, name)(*arguments, memory_format=tag)
    if name == "is_contiguous":
        assert z is own
    elif name != "type":  # which says the type's name
        assert tb.format_of(z) == tb.format_of(tb.to_format(x, tag))
        expected = getattr(x, name)(*arguments)
        dense = z.to_dense() if tb.is_blocked(z) else z
        assert z.dtype == expected.dtype and torch.equal(dense.cdouble(), expected.cdouble())
    assert name != "clone" or z is not y
