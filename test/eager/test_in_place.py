"""Ops that change the dims or the memory of a blocked tensor in place, and views of views: the same
object, the values of the dense tensor, and every later write seen by all that share the memory."""

import pytest
import torch
import torch.nn.functional as F

import torch_blocked
from torch_blocked import BlockedTensor
from torch_blocked.tensor import tail_is_zero

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]

DIMS = (2, 17, 6, 5)
TAGS = {3: "nCw8c", 4: "nChw8c", 5: "nCdhw8c"}


def random_dense(dims, seed=0):
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def pair(dims=DIMS):
    dense = random_dense(dims)
    return dense, dense.to_blocked(TAGS[len(dims)])


def assert_equal(blocked, dense):
    if isinstance(blocked, BlockedTensor):
        assert tail_is_zero(blocked)
        blocked = blocked.to_dense()
    assert blocked.shape == dense.shape
    assert torch.equal(torch.empty(0).new_tensor(blocked.tolist()).view(dense.shape), dense)


CHANGES = {
    "unsqueeze_ inside": (DIMS, lambda x: x.unsqueeze_(2)),
    "unsqueeze_ first": (DIMS, lambda x: x.unsqueeze_(0)),
    "unsqueeze_ last": (DIMS, lambda x: x.unsqueeze_(-1)),
    "unsqueeze_ to six": ((2, 17, 6, 5, 3), lambda x: x.unsqueeze_(1)),
    "squeeze_ one": ((2, 17, 1, 5), lambda x: x.squeeze_()),
    "squeeze_ two": ((2, 17, 1, 1), lambda x: x.squeeze_()),
    "squeeze_ dim": ((2, 17, 6, 1), lambda x: x.squeeze_(-1)),
    "squeeze_ dims": ((2, 17, 1, 1), lambda x: x.squeeze_((2, 3))),
    "squeeze_ batch": ((1, 17, 6, 5), lambda x: x.squeeze_(0)),
    "transpose_ batch": (DIMS, lambda x: x.transpose_(0, 1)),
    "transpose_ spatial": (DIMS, lambda x: x.transpose_(2, 3)),
    "transpose_ channels": ((2, 17, 6), lambda x: x.transpose_(1, 2)),
    "swapaxes_": (DIMS, lambda x: x.swapaxes_(1, 3)),
    "swapdims_": (DIMS, lambda x: x.swapdims_(2, 3)),
    "as_strided_": (DIMS, lambda x: x.as_strided_((3, 4), (7, 2), 5)),
    "there and back": (DIMS, lambda x: x.unsqueeze_(0).squeeze_(0).transpose_(1, 2)),
}
RESIZES = {
    "resize_ same": (DIMS, lambda x: x.resize_(DIMS)),
    "resize_ less": (DIMS, lambda x: x.resize_(2, 3, 4)),
    "resize_ none": (DIMS, lambda x: x.resize_(0)),
    "resize_ back": (DIMS, lambda x: x.resize_(0).resize_(DIMS)),
    "resize_as_": (DIMS, lambda x: x.resize_as_(torch.zeros(17, 2, 5, 6))),
    "resize_as_ preserved": (
        DIMS,
        lambda x: x.resize_as_(torch.zeros(17, 2, 5, 6), memory_format=torch.preserve_format),
    ),
    "resize_as_ channels last": (
        DIMS,
        lambda x: x.resize_as_(torch.zeros(17, 2, 5, 6), memory_format=torch.channels_last),
    ),
    "resize_as_ blocked": (
        DIMS,
        lambda x: x.resize_as_(
            torch.zeros(17, 2, 5, 6).to_blocked(), memory_format=torch.preserve_format
        ),
    ),
}


@pytest.mark.parametrize("inference", (False, True), ids=("", "inference"))
@pytest.mark.parametrize("name", CHANGES | RESIZES)
def test_dims_change_in_place(name, inference):
    dims, change = (CHANGES | RESIZES)[name]
    with torch.inference_mode(inference):
        dense, blocked = pair(dims)
        views = [(x.narrow(2, 0, 1), x[:, 1:3], x[-1]) for x in (dense, blocked)]
        change(dense)
        assert change(blocked) is blocked
        assert_equal(blocked, dense)
        for x in (dense, blocked):
            x.mul_(2)
        assert_equal(blocked, dense)
        for index in range(3):
            for row in views:
                row[index].add_(index)
            assert_equal(blocked, dense)
            for theirs, ours in zip(*views, strict=True):
                assert_equal(ours, theirs)
        assert_equal(blocked + 1, dense + 1)


@pytest.mark.parametrize("name", CHANGES)
def test_gradients_of_dims_changed_in_place(name):
    dims, change = CHANGES[name]
    gradients = []
    for leaf in pair(dims):
        leaf.requires_grad_()
        change(leaf * 2).square().sin().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0], rtol=1e-5, atol=1e-5)


REFUSED = {
    "transpose_": lambda x: x.transpose_(7, 2),
    "unsqueeze_": lambda x: x.unsqueeze_(9),
    "t_": lambda x: x.t_(),
    "leaf": lambda x: x.requires_grad_().unsqueeze_(2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_dense_refuses(name):
    dense, blocked = pair()
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        REFUSED[name](dense)
    with pytest.raises(type(theirs.value)):
        REFUSED[name](blocked)
    assert blocked.shape == DIMS


def test_ops_that_change_dims_on_the_way():
    dense, blocked = pair((2, 16, 3, 4, 5))
    for x in (dense, blocked):
        x.requires_grad_()
    quantiles = [torch.nanquantile(x, 0.3, dim=1) for x in (dense, blocked)]
    torch.testing.assert_close(quantiles[1], quantiles[0])
    outputs = []
    for x in (dense, blocked):
        torch.manual_seed(0)
        outputs.append(F.dropout3d(x * 1, 0.5, training=True, inplace=True))
    assert outputs[0].shape == outputs[1].shape


def test_gradient_of_singular_values():
    gradients = []
    for x in pair((2, 3, 5, 4)):
        x.requires_grad_()
        torch.linalg.svd(x, full_matrices=False)[1].sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_compiled():
    """What stays blocked; what does not is refused, for a traced tensor cannot become another."""
    dense, blocked = pair()
    compiled = torch.compile(lambda y: (y * 2).unsqueeze_(2) * 3, backend="aot_eager")
    assert_equal(compiled(blocked), (dense * 2).unsqueeze_(2) * 3)
    refused = torch.compile(lambda y: (y * 2).transpose_(0, 1), backend="aot_eager")
    with pytest.raises(Exception, match="torch_blocked::in place: expected a tensor"):
        refused(blocked)


# --- views of views that are copies


VIEWS = {
    "unsqueeze": lambda y: y[:, 3:6].unsqueeze(2),
    "select": lambda y: y[:, 3:6][:, :, 0],
    "slice": lambda y: y[:, 3:6][:, :, 1:3],
    "batch": lambda y: y[:, 3:6][:1],
    "permute": lambda y: y[:, 3:6].permute(0, 2, 3, 1),
    "channels": lambda y: y[:, 3:8][:, 1:3],
    "instances": lambda y: y.view(1, 34, 6, 5)[:, 3:5],
    "instances, row": lambda y: y.view(1, 34, 6, 5)[:, :, 2],
    "dense": lambda y: y[0, 3].unsqueeze(0),
    "transpose": lambda y: y[:, 3:6].transpose(2, 3),
    "unbind": lambda y: y[:, 3:6].unbind(2)[1],
    "detach": lambda y: y[:, 3:6].detach(),
    "flat": lambda y: y[:, :, :1, :1].flatten(1),
    "flat channels": lambda y: y[:, 3:6, :1, :1].flatten(1),
    "split": lambda y: y[:, 3:9].split(2, 1)[1],
    "chunk": lambda y: y.chunk(3, 1)[1][:, :, 2],
}


@pytest.mark.parametrize("inference", (False, True), ids=("", "inference"))
@pytest.mark.parametrize("name", VIEWS)
def test_writes_reach_the_base_through_views_of_views(name, inference):
    with torch.inference_mode(inference):
        dense, blocked = pair()
        views = [VIEWS[name](x) for x in (dense, blocked)]
        for view in views:
            view.mul_(3)
        assert_equal(blocked, dense)
        for x in (dense, blocked):
            x.add_(1)
        assert_equal(views[1], views[0])


# What is written to one of the elements that expand() repeats reaches all of them.
REPEATS = {
    "row": lambda y: y[:, :, :1].expand(2, 17, 6, 5),
    "column": lambda y: y[..., 1:2].expand(2, 17, 6, 5),
    "pixel": lambda y: y[:, :, 1:2, :1].expand(2, 17, 6, 5),
    "image": lambda y: y[:1].expand(2, 17, 6, 5),
    "amax": lambda y: torch.broadcast_to(y.amax(-1, keepdim=True), y.shape),
    "amax of pixels": lambda y: y.amax((2, 3), keepdim=True).expand(y.shape)[:, 2:5],
}


@pytest.mark.parametrize("name", REPEATS)
def test_writes_reach_all_repeats(name):
    for view in (
        lambda y: y[0, :, 0, 0],
        lambda y: y.select(3, 1).select(2, 0)[:1],
        lambda y: y.permute(2, 3, 0, 1)[0, 1, 0],
        lambda y: y[:, 1:, :1, :1][:1],
    ):
        results = []
        for x in pair():
            repeated = REPEATS[name](x)
            part = repeated[:, :2]
            view(repeated).mul_(3)
            repeated.detach()[:1, :, :1, :1].add_(1)
            results.append((repeated, part, x, x * 1, repeated[0]))
        for ours, dense in zip(*reversed(results), strict=True):
            assert_equal(ours, dense)


def pixels(y):
    return y.permute(0, 2, 3, 1)


# Whether a result is a view follows from the strides of what it is of.
VIEWS_OR_COPIES = {
    "contiguous": lambda y: pixels(y).contiguous(),
    "contiguous, there and back": lambda y: pixels(y).permute(0, 3, 1, 2).contiguous(),
    "contiguous transposed": lambda y: y.transpose(2, 3).contiguous(),
    "reshape": lambda y: pixels(y).reshape(2, -1, 17),
    "reshape of all": lambda y: pixels(y).reshape(-1, 17),
    "flatten": lambda y: pixels(y).flatten(),
    "clone": lambda y: pixels(y).clone(),
    "double": lambda y: (pixels(y) * 2).contiguous(),
    "channels last": lambda y: pixels(y).permute(0, 3, 1, 2).contiguous(
        memory_format=torch.channels_last
    ),
    "1-d": lambda y: y.flatten(2).permute(0, 2, 1).contiguous(),
    "rows": lambda y: y[:, :, 1:3].contiguous(),
    "rows of one block": lambda y: y[:1, :8, 1:3].contiguous(),
    "every other column": lambda y: y[..., ::2].contiguous(),
    "whole blocks": lambda y: y[:, :16].contiguous(),
    "whole blocks of one image": lambda y: y[:1, :16].contiguous(),
    "channels": lambda y: y[:, 3:6].contiguous(),
    "channels of one image": lambda y: y[:1, 3:6].contiguous(),
    "one image": lambda y: y[:1].contiguous(),
    "expanded": lambda y: y[:1].expand(3, 17, 6, 5).contiguous(),
    "no copy": lambda y: y.contiguous(),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS_OR_COPIES)
def test_what_is_written_to_a_copy_stays_there(name):
    dense, blocked = pair()
    results = [VIEWS_OR_COPIES[name](x) for x in (dense, blocked)]
    assert_equal(results[1], results[0])
    if isinstance(results[1], BlockedTensor):
        assert results[1].contiguous() is results[1]
    for result in results:
        result.mul_(3)
    assert_equal(results[1], results[0])
    assert_equal(blocked, dense)


# --- other memory


def test_set_gives_and_takes_memory():
    dense, blocked = pair()
    other = blocked + 1
    with torch.no_grad():
        assert blocked.set_() is blocked
        assert blocked.shape == (0,)
        blocked.set_(other)
    assert isinstance(blocked, BlockedTensor)
    assert_equal(blocked, dense + 1)
    blocked.mul_(2)
    assert_equal(other, (dense + 1) * 2)  # they share the memory now
    plain = torch.ones(3, 4)
    blocked.set_(plain)
    blocked[1] = 7
    assert plain[1].eq(7).all()


def test_set_to_a_storage_is_refused():
    _, blocked = pair()
    with pytest.raises(RuntimeError, match=r"^torch_blocked::set_: expected a tensor .*x\.set_\(y"):
        blocked.set_(torch.ones(1020).untyped_storage())
    with pytest.raises(RuntimeError):
        blocked.set_(torch.ones(3, dtype=torch.float64))


class Reversible(torch.autograd.Function):
    """Frees its input in forward and computes it anew in backward, as invertible networks do."""

    @staticmethod
    def forward(ctx, x, free):
        y = x.detach() * 2 + 1
        ctx.input, ctx.free = x.detach(), free
        ctx.save_for_backward(y)
        if free:
            ctx.input.untyped_storage().resize_(0)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        if ctx.free:
            ctx.input.set_((y - 1) / 2)
        return grad * 2 * ctx.input, None


def test_freed_memory_can_be_brought_back():
    dense, blocked = pair()
    gradients = []
    for x, free in ((dense, False), (blocked, True)):
        leaf = x.requires_grad_()
        hidden = leaf * 3
        Reversible.apply(hidden, free).sum().backward()
        assert (hidden.untyped_storage().nbytes() == 0) == free
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0])


def test_freed_memory_is_not_read():
    _, blocked = pair()
    blocked.untyped_storage().resize_(0)
    for use in (torch.nn.Conv2d(17, 8, 3), lambda x: x.to_dense()):
        with pytest.raises((RuntimeError, ValueError), match="bytes"), torch.no_grad():
            use(blocked)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("typed", (False, True))
def test_memory_comes_back_with_room_for_whole_blocks(typed):
    """Who brings it back counts the elements of the dense tensor."""
    dense, blocked = pair()
    room = blocked.untyped_storage().nbytes()
    assert room > dense.nbytes
    storage = blocked.storage() if typed else blocked.untyped_storage()
    storage.resize_(0)
    assert blocked.untyped_storage().nbytes() == 0
    storage.resize_(dense.numel() if typed else dense.nbytes)
    assert blocked.untyped_storage().nbytes() == room
    blocked.copy_(dense)
    assert_equal(blocked, dense)


# --- out


OUTS = {
    "matmul of the same dims": lambda x, out: torch.matmul(x, torch.ones(5, 5), out=out),
    "matmul": lambda x, out: torch.matmul(x, torch.ones(5, 7), out=out),
    "add": lambda x, out: torch.add(x, 1, out=out),
    "sum": lambda x, out: torch.sum(x, (1, 2, 3), out=out),
    "bmm": lambda x, out: torch.bmm(x[0], x[0].mT, out=out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OUTS)
def test_out_takes_the_dims_of_the_result(name):
    dense, _ = pair()
    theirs, ours = pair(DIMS if "same" in name else (1, 3, 2, 2))
    expected = OUTS[name](dense, theirs)
    assert OUTS[name](dense, ours) is ours
    torch.testing.assert_close(
        ours.to_dense() if torch_blocked.is_blocked(ours) else ours, expected
    )


SLICES = {
    "spatial": lambda x: x[:, :, 1::2, ::2],
    "batch": lambda x: x[::2],
    "rows": lambda x: x[:, :, 2:],
    "channels": lambda x: x[:, 8:16],
    "some channels of some rows": lambda x: x[:, :, 1::2][:, 3:9],
    "turned": lambda x: x.transpose(2, 3),
    "whole": lambda x: x[:],
}
RESHAPES = {
    "flatten": lambda x: x.flatten(1),
    "flatten spatial": lambda x: x.flatten(2),
    "flatten all": lambda x: x.flatten(),
    "permuted": lambda x: x.permute(1, 0, 2, 3).flatten(2),
    "split channels": lambda x: x.reshape(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:]),
    "one of the batch": lambda x: x[0].flatten(1),
}


@pytest.mark.parametrize("reshape", RESHAPES)
@pytest.mark.parametrize("slice_", SLICES)
@pytest.mark.parametrize("dims", [(4, 24, 6, 6), (1, 24, 6, 6), (3, 12, 6, 6), (1, 12, 6, 6)])
@pytest.mark.parametrize("block", [8, 16])
def test_a_reshape_copies_where_dense_copies(slice_, reshape, block, dims):
    """And is a view where that of a dense tensor is one: a write tells."""
    dense = torch.randn(dims)
    blocked = dense.to_blocked(f"nChw{block}c") * torch.ones(dims[0], 1, 1, 1)
    for x in (dense, blocked):
        part = SLICES[slice_](x)
        shown = RESHAPES[reshape](part)
        shown.clamp_(-0.1, 0.1)
    torch.testing.assert_close(blocked.to_dense(), dense)
    torch.testing.assert_close(
        torch.as_tensor(shown.tolist()), RESHAPES[reshape](SLICES[slice_](dense)).clamp(-0.1, 0.1)
    )


@pytest.mark.parametrize("block", (8, 16))
@pytest.mark.parametrize("images, channels", ((1, 8), (1, 16), (1, 33), (3, 3), (16, 16)))
def test_strides_of_one_block_say_nothing(images, channels, block):
    """A sum takes them from whichever operand is the larger, here a transposed one."""
    x = random_dense((images, channels, 5))
    y = x.to_blocked(f"nCw{block}c")
    dense, blocked = (each + each.transpose(0, 1) for each in (x, y))
    dense.flatten(1).clamp_(-1, 1)
    blocked.flatten(1).clamp_(-1, 1)
    assert_equal(blocked, dense)


SEVERAL = {
    "channels": lambda t: [t[:, 0], t[:, 1]],
    "images": lambda t: [t[0], t[1]],
    "parts of channels": lambda t: [t[:, :3], t[:, 3:6]],
    "a part and a channel": lambda t: [t[:, :3], t[:, 5]],
    "an image and a row": lambda t: [t[0], t[1, 3]],
    "all channels": lambda t: list(t.unbind(1)),
    "chunks": lambda t: list(t.chunk(2, 1)),
    "rows": lambda t: list(t.split(3, 2)),
}


@pytest.mark.any_isa
@pytest.mark.parametrize("views", SEVERAL)
def test_several_views_written_at_once(views):
    y = torch.randn(2, 9, 9, 7)
    b, d = y.to_blocked(), y.clone()
    torch._foreach_mul_(SEVERAL[views](b), 2.0)
    torch._foreach_mul_(SEVERAL[views](d), 2.0)
    assert torch.equal(b.to_dense(), d)
