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


def test_full_and_randint():
    assert same_values("full", DIMS, 3.5, format="nChw16c").format == "nChw16c"
    assert same_values("full", DIMS, 3, format="nChw8c").dtype == torch.int64
    assert same_values("randint", -5, 9, DIMS, format="nChw8c").dtype == torch.int64
    assert tb.randint(0, 9, DIMS, dtype=torch.int8).dtype == torch.int8


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


def test_every_factory_says_what_it_takes():
    for name in (*OF_SIZE, *(f"{name}_like" for name in OF_SIZE), "full", "full_like", "randint"):
        factory = getattr(tb, name)
        assert factory.__name__ == name and "format: a tag" in factory.__doc__


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
