"""An optimized model at sizes other than the example's: what Python computes from sizes."""

import pytest
import torch
from helpers.optimized import assert_exact, blocked
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked.verify import others_like


@pytest.fixture(autouse=True)
def seed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)


class Padded(nn.Module):
    """Pads to whole windows of 32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3, stride=2)

    def forward(self, x):
        h, w = x.shape[-2:]
        return self.layer(F.pad(x, (0, -w % 32, 0, -h % 32)))


class Same(Padded):
    """TensorFlow's "same" padding."""

    def forward(self, x):
        pads = []
        for size in reversed(x.shape[2:]):
            more = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
            pads += [more // 2, more - more // 2]
        return self.layer(F.pad(x, pads))


class Skip(nn.Module):
    """A U-Net of one step that pads what it scales up to the size of the skip."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        skip = self.down(x).relu()
        y = self.up(self.inner(F.max_pool2d(skip, 2)).relu())
        dy, dx = skip.size(2) - y.size(2), skip.size(3) - y.size(3)
        y = F.pad(y, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.last(torch.cat([skip, y], 1))


class Resized(Skip):
    """The same, resized."""

    def forward(self, x):
        skip = self.down(x).relu()
        y = self.up(self.inner(F.max_pool2d(skip, 2)).relu())
        return self.last(torch.cat([skip, F.interpolate(y, size=skip.shape[2:])], 1))


class Branches(nn.Module):
    """Decides by its input's sizes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 8, kernel) for kernel in (1, 3))

    def forward(self, x):
        y = self.layers[x.shape[-1] < 30](x)
        if x.shape[0] > 2:
            y = y * 2
        return y.flatten(1).view(x.size(0), -1, 4) if y.numel() % 4 == 0 else y


@pytest.mark.parametrize("form", ("optimized", "loaded"))
@pytest.mark.parametrize("kind", (Padded, Same, Skip, Resized, Branches))
def test_twenty_sizes(kind, form, tmp_path):
    model = kind().eval()
    fast = tb.optimize(model, torch.randn(1, 3, 32, 32), tune=False, verify=False)
    sizes = [(1 + i % 4, 3, 20 + 3 * i % 25, 21 + 7 * i % 31) for i in range(20)]
    if form == "loaded":
        sizes = sizes[:6]  # as many as captures are kept
        for size in sizes:
            fast(torch.randn(size))
        fast.save(tmp_path / "model.pt")
        fast = tb.load(tmp_path / "model.pt")
    with torch.no_grad():
        for size in sizes:
            x = torch.randn(size)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_that_asks_for_nothing_is_captured_once():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match="hooks"):
        fast = tb.optimize(model, torch.randn(1, 3, 16, 16), tune=False, verify=False)
    first = len(calls)
    for size in (9, 12, 33):
        x = torch.randn(2, 3, size, size + 1)
        result = fast(x)
        assert len(calls) == first
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)
        calls[first:] = []


def test_efficientnet():
    """Padding of TensorFlow's kind at every stride."""
    from torch_blocked.bench import networks as models

    model = models.build_model("efficientnet_lite0")[0].eval()
    fast = tb.optimize(model, torch.randn(1, 3, 224, 224), tune=False)
    with torch.no_grad():
        for size in (200, 225, 240, 263, 300):
            x = torch.randn(1, 3, size, size)
            torch.testing.assert_close(fast(x).softmax(1), model(x).softmax(1), rtol=0, atol=1e-5)


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.randn(x.shape)


def test_a_capture_draws_no_numbers_of_the_callers():
    fast = tb.optimize(Draws().eval(), torch.zeros(1, 3), tune=False)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(fast(torch.zeros(2, 3)))
    torch.manual_seed(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], Draws()(torch.zeros(2, 3)))


def test_results_whose_sizes_depend_on_values_run_in_parts():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            y = self.layer(x)
            return y[y > 0], y.relu().nonzero()

    model, x = Masked().eval(), torch.randn(1, 3, 8, 8)
    fast = tb.optimize(model, x)
    assert "values" in fast.plan()
    for y in (x, -x, torch.randn(2, 3, 9, 9)):
        with torch.no_grad():
            torch.testing.assert_close(fast(y), model(y), rtol=1e-4, atol=1e-5)


def test_an_op_without_a_meta_kernel_has_the_sizes_of_the_run():
    targets = torch.randint(1, 6, (2, 4))
    lengths = torch.full((2,), 12), torch.full((2,), 4)

    class Loss(nn.Module):
        def forward(self, x):
            return F.ctc_loss(x.log_softmax(-1), targets, *lengths)

    x = torch.randn(12, 2, 6)
    fast = tb.optimize(Loss().eval(), x)
    torch.testing.assert_close(fast(2 * x), Loss()(2 * x))


def test_one_weight_in_two_packed_forms():
    """The number of rows decides the form in which a linear layer packs its weights."""
    model = nn.Linear(32, 64).eval()
    fast = tb.optimize(model, torch.randn(32, 32), tune=False)
    for rows in (96, 1, 7, 300):
        x = torch.randn(rows, 32)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    model = nn.ConvTranspose2d(17, 9, 1, stride=3).eval()
    fast = tb.optimize(model, torch.randn(2, 17, 20, 12), tune=False)
    for width in (8, 12, 5):
        x = torch.randn(2, 17, 20, width)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pads", [(1, 0), (2, 0, 1, 0), (0, 2)])
@torch.no_grad()
def test_padding_of_one_pixel(pads):
    """More on the near side than there is of the image."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 12, 3, stride=2, padding=1)

        def forward(self, x):
            return self.conv(F.pad(x, pads))

    model = Padded().eval()
    fast = tb.optimize(model, torch.randn(2, 8, 9, 8), tune=False)
    for size in ((9, 8), (9, 1), (1, 1), (1, 5), (2, 2)):
        x = torch.randn(2, 8, *size)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Sliced(nn.Module):
    """Indexing leaves out a slice that is as long as its dim."""

    def forward(self, x):
        return x.swapaxes(0, 1)[:, :1].expand(-1, 4, -1, -1) * 2


class Written(nn.Module):
    def forward(self, x):
        x = x * 1
        x[:, :, :8] = 0
        return x


@pytest.mark.parametrize("model", [Sliced(), Written()], ids=["read", "written"])
@torch.no_grad()
def test_slices_as_long_as_their_dim(model):
    fast = tb.optimize(model.eval(), torch.randn(1, 9, 8, 10), tune=False)
    for shape in ((1, 9, 8, 10), (4, 9, 16, 18), (1, 9, 8, 12), (1, 9, 10, 10), (2, 9, 12, 10)):
        x = torch.randn(shape)
        assert torch.equal(fast(x), model(x))


class SometimesInParts(nn.Module):
    def forward(self, x):
        return x.data * 1 if x.numel() > 1000 else x + 0


@torch.no_grad()
def test_a_module_that_ran_in_parts_is_not_saved(tmp_path):
    """It would refuse, when loaded, sizes that ran."""
    model = SometimesInParts().eval()
    fast = tb.optimize(model, torch.randn(1, 2, 8, 14), tune=False)
    fast.save(tmp_path / "before")
    x = torch.randn(3, 2, 20, 10)
    assert torch.equal(fast(x), model(x))
    with pytest.raises(NotImplementedError, match="captured whole"):
        fast.save(tmp_path / "after")


# Size of an image, kernel, stride, padding, dilation, and the taps that see a pixel for an output.
UNSEEN = [
    ((16, 16), 3, 1, 24, 24, (1, 1)),
    ((16, 9), 3, 1, (16, 9), (16, 9), (1, 1)),
    ((16, 16), 3, 1, 12, 12, (3, 3)),
    ((7, 40), 5, 1, 16, 8, (1, 5)),
    ((9, 9), (3, 5), 2, (18, 6), (18, 3), (1, 5)),
    ((1, 5), 3, 1, 1, 1, (1, 3)),
    ((2, 2), 7, 1, 3, 1, (3, 3)),
    ((3, 3), 3, 4, 1, 1, (2, 2)),
    ((7, 7), 3, 9, 2, 5, (2, 2)),
]


@pytest.mark.parametrize("size, kernel, stride, padding, dilation, seen", UNSEEN)
@pytest.mark.parametrize("groups", (1, 16))
def test_taps_that_see_padding_only_are_left_out(
    size, kernel, stride, padding, dilation, seen, groups
):
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv = nn.Conv2d(16, 32 // (2 if groups > 1 else 1), kernel, **arguments).eval()
    x = torch.randn(2, 16, *size)
    optimized = blocked(conv, x)
    assert_exact(conv, optimized, x)
    flops = max(step.flops for step in optimized.steps())
    products = conv.weight[0, :, 0, 0].numel() * seen[0] * seen[1]
    assert flops == 2 * products * conv(x).numel()
    for n, extra in ((1, 0), (3, 17)):  # other sizes see other taps
        y = torch.randn(n, 16, size[0] + extra, size[1] + extra)
        assert_exact(conv, optimized, y)


@pytest.mark.any_isa
def test_small_images_are_compared_at_twice_their_size():
    """And at 32 pixels more if the model refuses that; large ones are made smaller."""
    sizes = [tuple(x.shape) for x in others_like(torch.zeros(1, 3, 4, 6))]
    assert sizes[:2] == [(2, 3, 8, 12), (2, 3, 36, 38)]
    assert next(others_like(torch.zeros(1, 3, 16, 224))).shape == (2, 3, 8, 56)
