"""A blocked tensor is a torch.Tensor: what it says of itself, every op on it, in-place writes,
mixing with other formats, and strict mode."""

import copy
import io
import pickle
import threading
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import DIMS, TAG, as_dense, random_dense
from torch import nn
from torch.utils import _pytree as pytree

import torch_blocked
from torch_blocked.ops import fallback
from torch_blocked.tensor import BlockedTensor, tail_is_zero

pytestmark = pytest.mark.filterwarnings("ignore:torch_blocked")


def assert_same(actual, expected, **tolerance):
    """Blocked or dense results, also in tuples and lists, against dense ones."""
    actual, expected = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs
            continue
        if torch_blocked.is_blocked(ours):
            assert tail_is_zero(ours)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(as_dense(ours), theirs, **tolerance)


# --- what it says of itself


def test_repr():
    x = torch.arange(12.0).reshape(1, 3, 2, 2).to_blocked(TAG)
    values = (
        "BlockedTensor([[[[ 0.,  1.],\n"
        "                 [ 2.,  3.]],\n\n"
        "                [[ 4.,  5.],\n"
        "                 [ 6.,  7.]],\n\n"
        "                [[ 8.,  9.],\n"
        "                 [10., 11.]]]]"
    )
    assert repr(x) == f"{values}, shape=(1, 3, 2, 2), format=nChw8c)"
    assert str(x) == f"{x}" == repr(x)
    x.requires_grad_()
    assert repr(x) == f"{values}, requires_grad=True, shape=(1, 3, 2, 2), format=nChw8c)"
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    with torch_blocked.profile() as p:
        repr(x)
    assert p.fallbacks == 0


def test_repr_of_many_values_and_of_fakes():
    assert "..." in repr(torch_blocked.zeros(2, 64, 56, 56))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch_blocked.zeros(*DIMS, format=TAG))
        assert repr(fake) == "BlockedTensor(..., shape=(2, 17, 6, 5), format=nChw8c)"


def test_tensors_without_values():
    meta = torch.randn(2, 17, 6, 5).to_blocked("nChw8c").to("meta")
    assert repr(meta) == "BlockedTensor(..., shape=(2, 17, 6, 5), format=nChw8c)"
    assert meta.relu().format == "nChw8c" and meta.relu().is_meta
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2, 17, 6, 5).to_blocked("nChw8c"))
        assert torch_blocked.tensor.tail_is_zero(fake)


def test_data_is_replaced_by_blocked_only():
    x = torch.randn(2, 17, 6, 5).to_blocked("nChw8c").requires_grad_()
    other = torch.randn(3, 9, 4, 4)
    x.data = other.to_blocked("nChw16c")
    assert x.shape == (3, 9, 4, 4) and x.format == "nChw16c" and x.requires_grad
    assert torch.equal(x.detach().to_dense(), other)
    assert torch.equal((x * 2).to_dense(), other * 2)
    x.data.zero_()
    assert not x.detach().to_dense().any()
    with pytest.raises(TypeError, match=r"torch_blocked::data: .*; assign value.to_blocked\(\)"):
        x.data = other


def test_properties():
    x = random_dense().to_blocked(TAG)
    assert x.format == TAG
    assert x.block == 8
    assert x.physical_shape == torch.Size((2, 3, 6, 5, 8))
    assert type(x) is BlockedTensor
    assert x.device == torch.device("cpu")
    assert x.layout == torch.strided
    for ndim, tag in ((3, "nCw32c"), (4, "nChw4c"), (5, "nCdhw16c")):
        made = torch_blocked.zeros(*range(2, 2 + ndim), format=tag)
        assert made.format == tag


def test_it_has_the_dims_of_the_dense_tensor():
    dense = random_dense(dtype=torch.float64)
    x = dense.to_blocked(TAG)
    assert x.shape == dense.shape
    assert x.size() == dense.size() and x.size(1) == 17
    assert x.dim() == x.ndim == 4
    assert x.numel() == dense.numel() and len(x) == 2
    assert x.stride() == dense.stride()
    assert x.storage_offset() == 0
    assert x.is_contiguous() and x.dtype == torch.float64 and x.element_size() == 8
    assert x.is_floating_point() and not x.is_complex() and x.is_leaf


def test_free_functions_and_methods_agree():
    dense = random_dense()
    for x in (dense.to_blocked(TAG), torch_blocked.to_blocked(dense, TAG)):
        assert torch.equal(x.to_dense(), dense)
        assert torch.equal(torch_blocked.to_dense(x), dense)
        assert x.to_dense(torch.float64).dtype == torch.float64
    as_double = dense.to_blocked(TAG, torch.float64)
    assert as_double.dtype == torch.float64
    assert torch.equal(as_double.to_dense(), dense.double())


def test_flatten_and_unflatten():
    x = random_dense().to_blocked(TAG)
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    assert all(type(value) is torch.Tensor for value in inner.values())
    same = BlockedTensor.__tensor_unflatten__(inner, context, x.shape, x.stride())
    assert same.format == x.format and same.shape == x.shape
    assert same._physical is x._physical


def test_copies_are_independent():
    x = random_dense().to_blocked(TAG)
    for other in (x.clone(), copy.deepcopy(x), copy.copy(x).clone(), x * 1):
        other.zero_()
        assert torch.equal(x.to_dense(), random_dense())


# --- every op

OPS = {
    "matmul": lambda x: x @ x.transpose(2, 3),
    "bmm": lambda x: torch.bmm(x[0], x[1].mT),
    "linear": lambda x: F.linear(x, torch.ones(3, 5), torch.ones(3)),
    "einsum": lambda x: torch.einsum("nchw,nkhw->nck", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([2, 3], [2, 3])),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute-all": lambda x: x.permute(3, 1, 0, 2),
    "transpose": lambda x: x.transpose(0, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "reshape": lambda x: x.reshape(2, -1),
    "view": lambda x: x.view(34, 30),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 3)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze-inner": lambda x: x.unsqueeze(3),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x[:, :1].expand(2, 4, 6, 5),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "tile": lambda x: torch.tile(x, (2, 1)),
    "sort": lambda x: x.sort(1),
    "argsort": lambda x: x.argsort(-1),
    "topk": lambda x: x.topk(3, dim=1),
    "kthvalue": lambda x: x.kthvalue(2, 2),
    "median": lambda x: x.median(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(2),
    "cummax": lambda x: x.cummax(3),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "index-int": lambda x: x[1],
    "index-slice": lambda x: x[:, 3:11:2, ::2],
    "index-none": lambda x: x[:, None],
    "index-ellipsis": lambda x: x[..., 0],
    "index-tensor": lambda x: x[torch.tensor([1, 0]), torch.tensor([2, 16])],
    "index-mask": lambda x: x[x > 0],
    "index-mask-of-dense": lambda x: x[random_dense() > 0],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 3, 0])),
    "gather": lambda x: x.gather(1, torch.zeros(2, 3, 6, 5, dtype=torch.long)),
    "take": lambda x: x.take(torch.tensor([0, 100, 1019])),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "nonzero": lambda x: (x > 1).nonzero(),
    "scatter": lambda x: x.scatter(1, torch.zeros(2, 1, 6, 5, dtype=torch.long), 7.0),
    "scatter_add": lambda x: x.scatter_add(1, torch.ones(2, 17, 6, 5, dtype=torch.long), x),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 5]), torch.ones(2, 2, 6, 5)),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.tensor(3.0)),
    "flip": lambda x: x.flip(1, 3),
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "tril": lambda x: x.tril(),
    "stack": lambda x: torch.stack([x, x + 1], 1),
    "split": lambda x: x.split(6, 1),
    "chunk": lambda x: x.chunk(3, 1),
    "unbind": lambda x: x.unbind(2),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "tensor-unfold": lambda x: x.unfold(1, 4, 3),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x[:, :16], 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x[:, :16], 4),
    "pad-channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, 3),
    "normalize": lambda x: F.normalize(x),
    "layer_norm": lambda x: F.layer_norm(x, (6, 5)),
    "group_norm": lambda x: F.group_norm(x[:, :16], 4),
    "instance_norm": lambda x: F.instance_norm(x),
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "sum": lambda x: x.sum(),
    "sum-channels": lambda x: x.sum(1),
    "mean-all-dims": lambda x: x.mean((0, 1, 2, 3), keepdim=True),
    "prod": lambda x: x.prod(2),
    "max": lambda x: x.max(),
    "max-dim": lambda x: x.max(1),
    "argmax": lambda x: x.argmax(),
    "argmin-dim": lambda x: x.argmin(2, keepdim=True),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "var_mean": lambda x: torch.var_mean(x, (0, 2, 3)),
    "norm": lambda x: x.norm(),
    "norm-dim": lambda x: x.norm(dim=1),
    "cdist": lambda x: torch.cdist(x[0], x[1]),
    "histc": lambda x: x.histc(8, -2, 2),
    "bincount": lambda x: (x > 0).long().flatten().bincount(),
    "unique": lambda x: (x > 0).unique(return_counts=True),
    "all": lambda x: (x > -9).all(),
    "any-dim": lambda x: (x > 2).any(1),
    "isclose": lambda x: x.isclose(x + 1e-9),
    "allclose": lambda x: x.allclose(x),
    "equal": lambda x: x.equal(x.clone()),
    "item": lambda x: x[0, 3, 2, 1].item(),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2), align_corners=False),
    "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
    "embedding-like": lambda x: F.one_hot((x[:, 0] > 0).long(), 2),
    "svd": lambda x: torch.linalg.svdvals(x),
    "inverse": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(6)),
    "glu": lambda x: F.glu(x[:, :16], 1),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(DIMS)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.ones(2, 6, 5, dtype=torch.long)),
    "to-long": lambda x: x.to(torch.long),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
    "half": lambda x: x.half().float(),
    "view-dtype": lambda x: x.view(torch.int32),
    "contiguous": lambda x: x.contiguous(),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "new_zeros": lambda x: x.new_zeros(3, 2),
    "meshgrid": lambda x: torch.meshgrid(x[0, :, 0, 0], x[1, 0, :, 0], indexing="ij"),
    "vmap": lambda x: torch.vmap(lambda image: image * 2)(x),
    "dropout-eval": lambda x: F.dropout(x, 0.5, training=False),
    "bernoulli": lambda x: (torch.manual_seed(3), x.sigmoid().bernoulli())[1],
    "dropout": lambda x: (torch.manual_seed(3), F.dropout(x, 0.5))[1],
    "rand_like": lambda x: (torch.manual_seed(3), torch.rand_like(x))[1],
    "randn_like": lambda x: (torch.manual_seed(3), torch.randn_like(x))[1],
}


@pytest.mark.parametrize("name", OPS)
def test_every_op_takes_blocked(name):
    dense = random_dense()
    x = dense.to_blocked(TAG)
    # Sums in another order differ in the last bits.
    assert_same(OPS[name](x), OPS[name](dense), rtol=1e-5, atol=1e-5)
    assert torch.equal(x.to_dense(), dense), "the input was written"


@pytest.mark.parametrize("correction", (-1, 0, 1, 2))
@pytest.mark.parametrize("dims", (None, (0, 1), (0, 2), (1,)))
@pytest.mark.parametrize("spread", (torch.std_mean, torch.var_mean))
@pytest.mark.parametrize("shape", ((0, 9, 3, 2), (1, 1, 1, 1)))
def test_the_spread_of_none_or_one(shape, spread, dims, correction):
    dense = torch.ones(shape)
    got, wanted = (spread(x, dims, correction=correction) for x in (dense.to_blocked(TAG), dense))
    assert_same(got, wanted, equal_nan=True)


def test_factories_follow_their_tensor():
    x = random_dense().to_blocked(TAG)
    for make in (torch.zeros_like, torch.ones_like, torch.empty_like):
        made = make(x, dtype=torch.float64)
        assert (made.format, made.shape, made.dtype) == (TAG, x.shape, torch.float64)
        assert tail_is_zero(made)
    assert torch.equal(torch.full_like(x, 3.0).to_dense(), torch.full(DIMS, 3.0))
    assert torch.equal(torch.zeros_like(x).to_dense(), torch.zeros(DIMS))


def test_iteration_and_python_values():
    dense = random_dense(2, 3, 2, 2)
    x = dense.to_blocked(TAG)
    assert [value.tolist() for value in x] == dense.tolist()
    assert float(x.sum()) == pytest.approx(float(dense.sum()), rel=1e-6)
    assert bool((x == dense).all())
    assert (x.numpy() == dense.numpy()).all()
    assert (numpy.asarray(x, dtype="float64") == dense.double().numpy()).all()
    assert x.tolist() == dense.tolist()
    with pytest.raises(RuntimeError, match=r"^torch_blocked::numpy: expected .*require grad"):
        x.requires_grad_().numpy()


def test_python_functions_and_sharing():
    """Paths of torch that end in a data pointer without passing the dispatcher."""
    dense = random_dense()
    x = dense.to_blocked(TAG)
    assert torch.equal(x.apply_(lambda v: v + 1).to_dense(), dense + 1)
    assert torch.equal(x.map_(dense, lambda a, b: a * b).to_dense(), (dense + 1) * dense)
    assert tail_is_zero(x)
    assert torch.equal(torch.from_dlpack(x), x.to_dense())
    assert not x.is_shared()
    assert x.share_memory_() is x
    assert x.is_shared()


@pytest.mark.parametrize("requires_grad", (False, True))
def test_copies_and_files(requires_grad):
    x = random_dense().to_blocked(TAG).requires_grad_(requires_grad)
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    for same in (
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        torch.load(file, weights_only=True)["x"],
    ):
        assert isinstance(same, BlockedTensor)
        assert same.format == TAG and same.requires_grad == requires_grad
        assert torch.equal(same.to_dense(), x.to_dense())
        assert same._physical.data_ptr() != x._physical.data_ptr()
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"^torch_blocked::\w+: expected a leaf"):
            refused(x.detach().requires_grad_() * 2)


# --- writes

WRITES = {
    "add_": lambda x: x.add_(1.5),
    "mul_-dense": lambda x: x.mul_(random_dense(seed=5)),
    "mul_-channels": lambda x: x.mul_(torch.arange(17.0)[:, None, None]),
    "exp_": lambda x: x.exp_(),
    "relu_": lambda x: F.relu(x, inplace=True),
    "hardswish_": lambda x: F.hardswish(x, inplace=True),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(2.5),
    "copy_-dense": lambda x: x.copy_(random_dense(seed=5)),
    "copy_-broadcast": lambda x: x.copy_(torch.arange(5.0)),
    "copy_-other-block": lambda x: x.copy_(random_dense(seed=5).to_blocked("nChw16c")),
    "normal_": lambda x: (torch.manual_seed(3), x.normal_())[1],
    "uniform_": lambda x: (torch.manual_seed(3), nn.init.uniform_(x, 1, 2))[1],
    "dropout_": lambda x: (torch.manual_seed(3), F.dropout(x, 0.5, inplace=True))[1],
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 9.0),
    "setitem-mask": lambda x: x.__setitem__(random_dense() > 0, 4.0) or x,
    "setitem-index": lambda x: x.__setitem__((torch.tensor([0]), torch.tensor([16])), 4.0) or x,
    "index_add_": lambda x: x.index_add_(1, torch.tensor([0, 16]), torch.ones(2, 2, 6, 5)),
    "scatter_": lambda x: x.scatter_(1, torch.full((2, 1, 6, 5), 16), 5.0),
    "cumsum_": lambda x: x.cumsum_(1),
    "sub_-out": lambda x: torch.sub(x, 1.0, out=x),
    "exp-out": lambda x: torch.exp(random_dense(seed=5), out=x),
    "sum-keeps-alias": lambda x: x.detach().add_(3).detach(),
    "data": lambda x: x.data.add_(3),
    "unsqueeze": lambda x: x.unsqueeze(2).mul_(3).squeeze(2),
}


@pytest.mark.parametrize("tag", ("nChw8c", "nChw16c"))
@pytest.mark.parametrize("name", WRITES)
def test_in_place(name, tag):
    """The base holds the values, the result is what dense gives, and the version counter moves."""
    dense, x = random_dense(), random_dense().to_blocked(tag)
    version, physical = x._version, x._physical
    expected = WRITES[name](dense)
    result = WRITES[name](x)
    assert_same(result, expected)
    assert_same(x, dense)
    assert x._physical is physical
    assert x.format == tag
    if name != "data":
        assert x._version > version


def test_in_place_on_a_saved_tensor_is_noticed():
    x = random_dense().to_blocked(TAG).requires_grad_()
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_on_a_leaf_is_refused():
    x = random_dense().to_blocked(TAG).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)


def test_dense_takes_writes_from_blocked():
    dense = random_dense()
    dense.add_(random_dense(seed=5).to_blocked(TAG))
    assert torch.equal(dense, random_dense() + random_dense(seed=5))
    dense.copy_(random_dense(seed=6).to_blocked(TAG))
    assert torch.equal(dense, random_dense(seed=6))
    dense[:, :17] = random_dense(seed=7).to_blocked(TAG)
    assert torch.equal(dense, random_dense(seed=7))


VIEWS = {
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "setitem-channel": lambda x: x.__setitem__((slice(None), 3), random_dense(2, 6, 5)),
    "setitem-ellipsis": lambda x: x.__setitem__((..., 0), 1.0),
    "select": lambda x: x.select(1, 3).add_(1),
    "narrow": lambda x: x.narrow(1, 0, 3).zero_(),
    "chunk": lambda x: x.chunk(2, 1)[0].relu_(),
    "permute": lambda x: x.permute(0, 2, 3, 1).add_(1),
    "transpose": lambda x: x.transpose(0, 1).mul_(2),
    "view": lambda x: x.view(2, -1).add_(1),
    "flatten": lambda x: x.flatten(1).add_(1),
    "unsqueeze": lambda x: x.unsqueeze(0).add_(1),
    "diagonal": lambda x: x.diagonal(0, 2, 3).zero_(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_writes_to_views_are_never_lost(name):
    """A view that cannot share the blocked memory refuses the write, or carries it back."""
    dense, x = random_dense(), random_dense().to_blocked(TAG)
    VIEWS[name](dense)
    try:
        VIEWS[name](x)
        values = x.to_dense()
    except (RuntimeError, NotImplementedError) as error:
        assert "torch_blocked" in str(error)  # noqa: PT017
        return
    assert torch.equal(values, dense)


# --- mixing


@pytest.mark.parametrize("other", ("dense", "channels-last", "nChw16c", "nChw4c"))
@pytest.mark.parametrize("function", (torch.add, torch.mul, torch.maximum, torch.atan2))
def test_operands_of_other_formats(function, other):
    """The first blocked operand decides the format."""
    a, b = random_dense(), random_dense(seed=5)
    converted = {
        "dense": b,
        "channels-last": b.contiguous(memory_format=torch.channels_last),
    }.get(other)
    converted = b.to_blocked(other) if converted is None else converted
    with torch_blocked.profile() as p:
        left = function(a.to_blocked(TAG), converted)
        right = function(converted, a.to_blocked(TAG))
    assert p.fallbacks == 0
    assert left.format == TAG
    assert right.format == (other if other.startswith("nC") else TAG)
    torch.testing.assert_close(left.to_dense(), function(a, b))
    torch.testing.assert_close(right.to_dense(), function(b, a))


@pytest.mark.parametrize("dims", ((), (1,), (5,), (6, 1), (17, 1, 1), (2, 1, 1, 1), (1, 17, 6, 5)))
def test_operands_that_broadcast(dims):
    x, other = random_dense(), random_dense(*dims, seed=5) if dims else torch.tensor(2.5)
    for function in (torch.add, torch.sub, torch.div):
        assert_same(function(x.to_blocked(TAG), other), function(x, other))
        assert_same(function(other, x.to_blocked(TAG)), function(other, x))
    grown = random_dense(3, *DIMS, seed=5)
    assert_same(x.to_blocked(TAG) + grown, x + grown)
    narrow = random_dense(1, 1, 6, 1).to_blocked(TAG)
    assert_same(narrow + x, narrow.to_dense() + x)


def test_type_promotion_is_that_of_dense():
    x, y = random_dense(), random_dense(seed=5)
    for other in (y.double(), y.long(), y > 0, 2, 2.5, True, torch.tensor(2, dtype=torch.float64)):
        for value in (x, (x * 9).int()):
            assert_same(value.to_blocked(TAG) * other, value * other)


def test_another_subclass_takes_its_turn():
    class Logged(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.tensor(7)

    x = random_dense()
    for result in (x.to_blocked(TAG) + Logged(x), Logged(x) + x.to_blocked(TAG)):
        assert result.item() == 7


# --- strict mode and warnings


def test_strict_names_op_formats_and_remedy():
    x = random_dense().to_blocked(TAG)
    with torch_blocked.strict():
        (x + 1).relu()
        with pytest.raises(NotImplementedError) as caught:
            x.renorm(2, 1, 1)
    sentence = str(caught.value)
    assert sentence.startswith("torch_blocked::aten.renorm.default: expected a blocked kernel for ")
    assert "nChw8c (2, 17, 6, 5)" in sentence
    assert sentence.endswith("call .to_dense() on the input, or leave torch_blocked.strict()")
    assert "no blocked kernel for this op" in sentence
    assert_same(x.renorm(2, 1, 1), random_dense().renorm(2, 1, 1))


def test_strict_nests_and_is_of_one_thread():
    x = random_dense().to_blocked(TAG)
    results = []
    with torch_blocked.strict():
        with torch_blocked.strict():
            pass
        with pytest.raises(NotImplementedError):
            x.renorm(2, 1, 1)
        thread = threading.Thread(target=lambda: results.append(x.renorm(2, 1, 1)))
        thread.start()
        thread.join()
    assert_same(results[0], random_dense().renorm(2, 1, 1))
    with pytest.raises(ValueError), torch_blocked.strict():
        raise ValueError
    x.renorm(2, 1, 1)


def test_an_op_warns_once(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())
    x = random_dense().to_blocked(TAG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x.renorm(2, 1, 1)
            x.cumprod(1)
            x.relu()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    for text, op in zip(texts, ("renorm", "cumprod"), strict=True):
        assert text.startswith(f"torch_blocked: aten.{op}.default runs on a dense copy of nChw8c")
        assert "torch_blocked.profile() counts these" in text
