"""Writes into memory that several tensors show: what a run tells of them, at other sizes too."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.draws import crossed
from torch import nn
from torch.utils import _pytree as pytree

import torch_blocked as tb
from torch_blocked import capture as captures
from torch_blocked.captured import CaptureError

pytestmark = pytest.mark.any_isa


def rows(x):
    x[:, 0] = 1
    return x


def chunks(x):
    a, b = x.chunk(2, 1)
    a.mul_(2)
    return x + 1, b, a


def permuted(x):
    y = x.permute(0, 2, 3, 1)
    y[..., 2:4].add_(1)
    return x, y


def strided(x):
    y = x[:, :, 1::2].transpose(2, 3)
    y.relu_()
    return x * 2, y


def groups(x):
    v = x.view(x.shape[0], 2, 4, *x.shape[2:])
    v[:, 1] = v[:, 0]
    return x


def mask(x):
    x[x > 0] = 0
    y = x[:, 1]
    y.clamp_(-1, -0.5)
    x.mul_(3)
    return y, x


def powers(x):
    """Whose functional overloads have other names."""
    y = (x.abs() + 1).pow_(0.75).pow_(x.sigmoid())
    return y, y.clone().ldexp_(torch.ones(1)), x.double().float_power_(2).cos_()


def other_types(x):
    """Whose functional forms have other types than what is written."""
    y = x.relu().logical_not_().add_(torch.arange(x.shape[-1], dtype=torch.double))
    z = y.clone()
    z[:, 1].gt_(2)
    return y, z, x.eq_(x.flip(1)) * 0.5, x.masked_fill_(torch.ones(x.shape[-1]) > 0, 2)


def filled(x):
    out = torch.empty(x.shape)
    for i in range(8):
        out[:, i] = x[:, 7 - i]
    return out


def like(x):
    y = torch.empty_like(x)
    y.copy_(x)
    y[0] = 0
    return y, x


def parts(x):
    x.diagonal(0, 2, 3).fill_(3.0)
    x.unbind(1)[3].neg_()
    x.split([3, 5], 1)[1].tanh_()
    x.split(3, 1)[2].add_(1)
    return x


def shown_before(x):
    y = x.unsqueeze(0).squeeze(0)
    y.narrow(2, 1, 2).zero_()
    z = y.expand(2, *y.shape)
    x.add_(1)
    return z


def moved(x):
    y = x.movedim(1, -1)
    y.select(-1, 0).copy_(torch.ones(1, dtype=torch.double))
    return x.relu_(), y, x.mT.mul_(2), x


def sometimes_copied(x):
    y = x[..., :8].flatten(1)
    y.clamp_(-0.1, 0.1)
    return x, y


def constants(x):
    return x[:, [-1, 0, 2]] * torch.tensor([0.5, 2.0]).sum() + torch.tensor(x.shape[-1])


FORWARDS = (
    rows, chunks, permuted, strided, groups, mask, filled, like, parts, shown_before, moved,
    sometimes_copied, constants, powers, other_types,
)  # fmt: skip


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.function = function

    def forward(self, x):
        return self.function(self.conv(x))


def close(results, wanted):
    torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", FORWARDS)
@torch.no_grad()
def test_writes_reach_what_shows_the_memory(function):
    model = Model(function).eval()
    run = captures._recorded(model, (torch.randn(2, 3, 8, 8),), {})
    assert run is not None
    fast = tb.optimize(model, torch.randn(2, 3, 8, 8), verify=False, tune=False)
    for size in (8, 9, 12):
        x = torch.randn(2, 3, size, size)
        close(fast(x), model(x))


@torch.no_grad()
def test_what_is_a_copy_at_some_sizes_holds_for_these():
    captured = [
        captures._recorded(Model(function).eval(), (torch.randn(2, 3, 8, 8),), {})
        for function in (sometimes_copied, chunks, rows, permuted)
    ]
    assert [each.fixed_sizes for each in captured] == [True, True, False, False]


def tokens(x):
    """Channels-last by permuting, of any stride in the dim of the images where there is one."""
    t = x.flatten(2).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return t.transpose(1, 2).view(x.shape)


def copied_beyond_one_image(x):
    y = F.max_pool2d(tokens(x), 2) * 1
    y.flatten(1).clamp_(-0.1, 0.1)
    return y


def compared(x):
    return (x + 1).gt_(1)


def whole_chunk(x):
    y = x[:1] + 1
    y.unsafe_chunk(2, 0)[0][:, 0] = 0.25
    return y, -y


BY_BATCH = (copied_beyond_one_image, compared, whole_chunk)


@pytest.mark.parametrize(
    ("function", "batch"), [*crossed(2, FORWARDS, (1, 2)), *itertools.product(BY_BATCH, (1, 2))]
)
@torch.no_grad()
def test_writes_that_export_tells(function, batch, monkeypatch):
    monkeypatch.setattr(captures, "_recorded", lambda *_: None)
    model, x = Model(function).eval(), torch.randn(batch, 3, 8, 8)
    fast = tb.optimize(model, x, verify=False, tune=False)
    for images in (batch, 3 - batch):
        x = torch.randn(images, 3, 8, 8)
        close(fast(x), model(x))


# Writes whose way back to the base torch.export works out; at these sizes it may lose elements.
LOST = {
    "a row in no window": lambda y: y.unfold(2, 2, 2).mul_(3),
    "gaps between windows": lambda y: y.unfold(3, 2, 3).add_(1),
    "a part of each window": lambda y: y.unfold(2, 2, 3)[..., 0].add_(1),
    "chunks of windows": lambda y: y.unfold(2, 3, 4).chunk(2, -1)[0].zero_(),
    "windows of one": lambda y: y.unfold(2, 1, 1).add_(1),
    "a part of a pair": lambda y: y.unsafe_split(3, 1)[1].add_(1),
    "every third element": lambda y: y.view(-1)[::3].neg_(),
    "a diagonal": lambda y: y.diagonal(1, 2, 3).mul_(2),
    "a filled diagonal": lambda y: y.view(y.shape[0], -1).fill_diagonal_(1),
    "elements by their strides": lambda y: y.as_strided((2, 3), (5, 2)).add_(1),
    "bits": lambda y: y.view(torch.int32).bitwise_and_(-2),
    "complex": lambda y: torch.view_as_complex(y.unfold(3, 2, 2)).mul_(1j),
    "several at once": lambda y: torch._foreach_add_([y[:, 0], y[:, 1]], 1.0),
}


@pytest.mark.filterwarnings("ignore:torch_blocked..optimize. the model (runs|is)")
@pytest.mark.parametrize("write", LOST)
@torch.no_grad()
def test_no_write_is_lost_at_any_size(write):
    def function(y):
        LOST[write](y)
        return y * 2, y

    model = Model(function).eval()
    fast = tb.optimize(model, torch.randn(2, 3, 6, 6), verify=False, tune=False)
    for size in (6, 6), (9, 7), (5, 11):
        try:
            wanted = model(x := torch.randn(1, 3, *size))
        except RuntimeError:  # ATen has no such view at this size
            continue
        close(fast(x), wanted)


def unsafely_chunked(self, x):
    part = x[..., None].unsafe_chunk(2, -3)[0]
    part[:, 0] = 0.25
    return part


@torch.no_grad()
def test_a_write_into_an_input_by_what_is_called_no_view():
    class Writes(nn.Module):
        forward = unsafely_chunked

    model, x = Writes().eval(), torch.randn(1, 40)
    with pytest.raises(CaptureError, match="its buffers or inputs"):
        captures.capture(model, (x,))
    fast = tb.optimize(model, x.clone(), verify=False, tune=False)
    given, wanted = x.clone(), x.clone()
    close(fast(given), model(wanted))
    assert torch.equal(given, wanted)


def overlapping(x):
    x.unfold(2, 3, 1).add_(1)
    return x


def made_and_written(x):
    y = torch.tensor([0.0, 0, 0])
    y[1] = 2
    return x * y.sum()


def shown_by_no_rule(x):
    x.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return x


@pytest.mark.parametrize("function", [overlapping, made_and_written, shown_by_no_rule])
@torch.no_grad()
def test_what_no_rule_tells_is_left_to_export(function):
    model, x = Model(function).eval(), torch.randn(2, 3, 8, 8)
    assert captures._recorded(model, (x,), {}) is None
    if function is not overlapping:  # of which torch says that its result is not defined
        close(tb.optimize(model, x, verify=False, tune=False)(x), model(x))


class BlockedWithin(nn.Module):
    """Makes a blocked tensor and a view of it, and writes into one of the two."""

    def __init__(self, write, returns):
        super().__init__()
        self.write, self.returns = write, returns

    def forward(self, x):
        y = x.to_blocked()
        view = y[:, :3]
        self.write(y, view)
        return self.returns(y, view)


def item(y, view):
    y[:, 0] = 0.25


def items(y, view):
    y[y > 0] = 0.5


def augmented(y, view):
    y[0] += 1


def parts_of_blocked(y, view):
    for i, part in enumerate(y.chunk(2, 1)):
        part.mul_(i)


WRITES_OF_BLOCKED = {
    "base": lambda y, view: y.clamp_(-1, 1),
    "view": lambda y, view: view.clamp_(-1, 1),
    "view-of-view": lambda y, view: view[1:].mul_(2),
    "image": lambda y, view: y[0].mul_(2),
    "flat": lambda y, view: y.flatten(1).mul_(2),
    "permuted": lambda y, view: y.permute(0, 2, 3, 1).add_(1),
    "channels": lambda y, view: y[:, 1:].copy_(y[:, :-1].clone()),
    "item": item,
    "items": items,
    "augmented": augmented,
    "parts": parts_of_blocked,
    "new": lambda y, view: y.new_zeros(y.shape)[:, 1:].copy_(view[:, :1]),
}


@pytest.mark.parametrize("form", ("optimize", "compile"))
@pytest.mark.parametrize("write", WRITES_OF_BLOCKED)
def test_a_write_reaches_views_of_a_blocked_tensor_made_within(write, form):
    x = torch.randn(2, 17, 5, 6, generator=torch.Generator().manual_seed(0)) * 2
    for returns in (lambda y, view: view, lambda y, view: (y.to_dense(), view.to_dense())):
        y = x.clone()
        WRITES_OF_BLOCKED[write](y, y[:, :3])
        expected = returns(y, y[:, :3])
        model = BlockedWithin(WRITES_OF_BLOCKED[write], returns).eval()
        torch._dynamo.reset()
        with torch.no_grad():
            if form == "optimize":
                result = tb.optimize(model, x, tune=False, verify=False)(x)
            else:
                result = torch.compile(model, backend="torch_blocked")(x)
        for ours, exact in zip(
            pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True
        ):
            assert torch.equal(tb.to_dense(ours), exact)


def test_writes_before_a_view_is_taken_leave_the_model_whole():
    """What torchvision's networks do: in-place activations, and a flattening at the end."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 17, 3)

        def forward(self, x):
            return F.relu(self.layer(x.to_blocked()), inplace=True).flatten(1)

    x = torch.randn(2, 3, 6, 6)
    optimized = tb.optimize(Network().eval(), x, tune=False, verify=False)
    assert "parts" not in optimized.plan()
