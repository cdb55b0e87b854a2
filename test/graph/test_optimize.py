"""torch_blocked.optimize: whole models against float64, fused steps, sizes, files, threads."""

import pytest
import torch
from helpers import networks as models
from helpers.optimized import ACTIVATIONS, assert_exact, blocked, randomized
from torch import nn
from torch.nn import functional as F

import torch_blocked as tb
from torch_blocked import _C
from torch_blocked.capture import capture
from torch_blocked.compile import backend

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.parametrize("name", ["mobilenet_v2", "densenet121", "unet"])
def test_models(name):
    model = models.build_model(name)[0].eval()
    x = torch.randn(1, 3, 32, 32)
    assert_exact(model, blocked(model, x), x, tolerance=8)


class Block(nn.Module):
    """A convolution, batch norm, activation and residual sum, in the order that `form` says."""

    def __init__(self, channels, form, activation, rank=2):
        super().__init__()
        Conv, Norm = {2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}[rank]
        self.first = Conv(channels, channels, 3, padding=1)
        self.norm = Norm(channels)
        self.last = Conv(
            channels,
            channels,
            1 if form == "1x1" else 3,
            padding=0 if form == "1x1" else 1,
            bias=False,
        )
        self.form, self.activation = form, activation

    def forward(self, x):
        y = self.norm(self.first(x))
        z = self.last(self.activation(y))
        if self.form == "add last":
            return self.activation(z) + y
        if self.form == "plain":
            return self.activation(z)
        return self.activation(y + z)


@pytest.mark.parametrize("form", ["add first", "add last", "1x1", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_steps(form, activation):
    for channels, tune in ((17, False), (16, True)):
        model = randomized(Block(channels, form, ACTIVATIONS[activation]))
        x = torch.randn(2, channels, 9, 7)
        assert_exact(model, blocked(model, x, tune=tune), x)


@pytest.mark.parametrize("form", ["add first", "add last", "plain"])
@pytest.mark.parametrize("activation", ["leaky_relu", "silu"])
def test_fused_steps_3d(form, activation):
    model = randomized(Block(17, form, ACTIVATIONS[activation], rank=3))
    x = torch.randn(2, 17, 5, 9, 7)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert _C.isa() == "default" or "winograd" in optimized.plan()


def test_fusion_leaves_two_steps():
    x = torch.randn(1, 16, 8, 8)
    plan = blocked(randomized(Block(16, "plain", F.relu)), x).plan()
    assert "aten::conv2d + batch_norm + relu" in plan and "aten::conv2d + relu" in plan
    assert "aten::relu " not in plan
    plan = blocked(randomized(Block(16, "add first", F.relu)), x).plan()
    assert "aten::conv2d + add + relu" in plan  # the other relu's operand has a second reader
    plan = blocked(randomized(Block(16, "plain", F.gelu)), x).plan()
    assert "aten::conv2d + batch_norm + gelu" in plan and "aten::conv2d + gelu" in plan


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(5, 17, 3, padding=1),
        nn.Conv3d(8, 9, 3, padding=1),
        nn.ConvTranspose2d(12, 6, 2, stride=2, groups=2),
        nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1),
        nn.Conv2d(24, 24, 5, padding=2, groups=24),
        nn.Conv2d(16, 32, 3, padding=2, dilation=2, groups=4),
        nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 16, 3, stride=2)),
        nn.Sequential(nn.ZeroPad2d((2, 1, 1, 0)), nn.Conv2d(16, 16, 3)),
    ],
    ids=str,
)
def test_layers(layer):
    convolution = layer if not isinstance(layer, nn.Sequential) else layer[1]
    rank = convolution.weight.dim() - 2
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1](convolution.out_channels)
    model = randomized(nn.Sequential(layer, norm, nn.ReLU()))
    for batch in (1, 3):
        x = torch.randn(batch, convolution.in_channels, *(9, 8, 7)[:rank])
        assert_exact(model, blocked(model, x, tune=True), x)


POOLINGS = [
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d(2, ceil_mode=True),
    nn.MaxPool2d(3, 1, 1, dilation=2, ceil_mode=True),
    nn.AvgPool2d(2),
    nn.AvgPool2d(3, 2, 1),
    nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    nn.AvgPool2d(2, divisor_override=3),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d((4, 5)),
]


@pytest.mark.parametrize("pool", POOLINGS, ids=str)
@pytest.mark.parametrize("channels", [16, 3])
def test_pooling(pool, channels):
    model = nn.Sequential(nn.Conv2d(3, channels, 3), pool, nn.Conv2d(channels, 8, 1)).eval()
    x = torch.randn(2, 3, 14, 11)
    assert_exact(model, blocked(model, x), x)


class Head(nn.Module):
    """What follows the last convolution of a classifier; the pooled image is an output, too."""

    def __init__(self, channels, pool):
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 3)
        self.linear = nn.Linear(channels, 5)
        self.pool = pool

    def forward(self, x):
        pooled = self.pool(self.convolution(x))
        return torch.cat((self.linear(pooled.flatten(1)), pooled.flatten(1)), 1)


HEADS = {
    "pool": nn.AdaptiveAvgPool2d(1),
    "mean": lambda x: x.mean((2, 3)),
    "kept": lambda x: x.mean((-1, 2), keepdim=True),
    "one dim": lambda x: x.mean(3, keepdim=True).mean(2),
}


@pytest.mark.parametrize("pool", HEADS)
@pytest.mark.parametrize("channels", [16, 9])
def test_heads(pool, channels):
    model = Head(channels, HEADS[pool]).eval()
    optimized = blocked(model, torch.randn(1, 3, 8, 7))
    for batch in (1, 3):
        assert_exact(model, optimized, torch.randn(batch, 3, 8, 7))
    assert ("aten::mean" in optimized.plan()) == (pool == "one dim")
    assert optimized(torch.randn(0, 3, 8, 7)).shape == (0, channels + 5)


class Hybrid(nn.Module):
    """As ConvNeXt and SegFormer have it: pixels as rows of linear layers, and back to images."""

    def __init__(self, activation):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3)
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 40)
        self.depthwise = nn.Conv2d(40, 40, 3, padding=1, groups=40)
        self.down = nn.Linear(40, 24, bias=False)
        self.scale = nn.Parameter(torch.randn(24, 1, 1))
        self.activation = activation

    def forward(self, x):
        x = self.stem(x)
        rows = self.activation(self.up(self.norm(x.flatten(2).transpose(1, 2))))
        image = rows.transpose(1, 2).reshape(rows.shape[0], -1, *x.shape[2:])
        y = self.down(self.depthwise(image).permute(0, 2, 3, 1))
        return self.scale * y.permute(0, 3, 1, 2) + x


@pytest.mark.parametrize("activation", [F.relu, F.silu, F.gelu, nn.GELU("tanh"), torch.tanh])
def test_rows_and_images(activation):
    model = Hybrid(activation).eval()
    x = torch.randn(2, 3, 9, 8)
    for tune in (False, True):
        optimized = blocked(model, x, tune=tune)
        assert_exact(model, optimized, x)
        assert_exact(model, optimized, torch.randn(1, 3, 7, 6))


@pytest.mark.parametrize(
    "layers, steps",
    [
        ([nn.BatchNorm2d(5), nn.Conv2d(5, 17, 3), nn.BatchNorm2d(17)], 1),
        ([nn.BatchNorm2d(5), nn.Conv2d(5, 16, 1, bias=False), nn.ReLU()], 1),
        ([nn.BatchNorm2d(5), nn.Conv2d(5, 16, 3, padding=1)], 2),
        ([nn.ConvTranspose2d(5, 6, 2, 2), nn.BatchNorm2d(6)], 1),
    ],
    ids=["both sides", "before", "padding keeps it", "transposed"],
)
def test_batch_norms_fold(layers, steps):
    model = randomized(nn.Sequential(*layers))
    x = torch.randn(2, 5, 7, 6)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    plan = optimized.plan()
    assert plan.count("aten::conv") == 1 and ("aten::batch_norm" in plan) == (steps == 2)


def test_batch_norms_fold_into_linear():
    norms = [nn.BatchNorm1d(12), nn.BatchNorm1d(7)]
    model = randomized(nn.Sequential(norms[0], nn.Linear(12, 7, bias=False), norms[1], nn.ReLU()))
    x = torch.randn(4, 12)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert "aten::linear + batch_norm + relu" in optimized.plan()
    assert "aten::batch_norm" not in optimized.plan()


class SqueezeExcite(nn.Module):
    def __init__(self, channels, gate):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, 4, 1)
        self.expand = nn.Conv2d(4, channels, 1)
        self.gate = gate

    def forward(self, x):
        x = self.convolution(x)
        return x * self.gate(self.expand(F.silu(self.reduce(self.pool(x)))))


@pytest.mark.parametrize("gate", [torch.sigmoid, F.hardsigmoid])
@pytest.mark.parametrize("channels", [16, 9])
def test_squeeze_excite_stays_blocked(channels, gate):
    model = SqueezeExcite(channels, gate).eval()
    x = torch.randn(2, channels, 8, 7)
    optimized = blocked(model, x)
    assert_exact(model, optimized, x)
    assert optimized.plan().count("reorder") <= 2  # in and out


class Dense(nn.Module):
    """Growing concats of whole and of partial blocks, as DenseNet has them."""

    def __init__(self, growth):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * (i + 1)),
                nn.ReLU(),
                nn.Conv2d(growth * (i + 1), growth, 3, padding=1),
            )
            for i in range(3)
        )

    def forward(self, x):
        features = [x * 2]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


@pytest.mark.parametrize("growth", [16, 12])
@pytest.mark.parametrize("batch", [1, 2])
def test_concat(growth, batch):
    model = randomized(Dense(growth))
    x = torch.randn(batch, growth, 6, 5)
    assert_exact(model, blocked(model, x, tune=True), x)


class Nested(nn.Module):
    """A concat of concats, as Inception has them: all four convolutions may write into the last."""

    def __init__(self, channels):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(5))

    def forward(self, x):
        a, b, c, d, e = (layer(x) for layer in self.layers)
        return torch.cat((a, torch.cat((b, torch.cat((c, d), 1)), 1), e), 1) * 2


@pytest.mark.parametrize("channels", [16, 12])
@pytest.mark.parametrize("batch", [1, 2])
def test_concat_of_concats(channels, batch):
    model = randomized(Nested(channels))
    x = torch.randn(batch, channels, 6, 5)
    assert_exact(model, blocked(model, x, tune=True), x)


class ReadTwice(nn.Module):
    """The first operand of a concat is read before it, after it, and as a result; the others are
    infinite, which must not reach those that read the first."""

    def __init__(self, channels):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, count, 1) for count in channels)
        self.before, self.after = (nn.Conv2d(channels[0], 5, 3, padding=1) for _ in range(2))

    def forward(self, x, read_after, give):
        first, *others = (layer(x) for layer in self.layers)
        first = first.relu()
        y = self.before(first)
        joined = torch.cat((first, *(other + float("inf") for other in others)), 1)
        results = [y, joined.clamp(-3, 3)]
        if read_after:
            results.append(self.after(first))
        if give:
            results.append(first)
        return results


@torch.no_grad()
@pytest.mark.parametrize(
    "channels", [(16, 16), (16, 5), (12, 12), (16, 12, 8), (5, 3, 40), (16, 16, 7, 33), (7, 17, 1)]
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("read_after", [False, True])
@pytest.mark.parametrize("give", [False, True])
def test_operands_of_a_concat_that_others_read(channels, batch, read_after, give):
    model = randomized(ReadTwice(channels))
    x = torch.randn(batch, 3, 26, 41)
    optimized = tb.optimize(model, (x, read_after, give), tune=False, verify=False)
    expected, result = model(x, read_after, give), optimized(x, read_after, give)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(result, optimized(x, read_after, give), strict=True):
        assert torch.equal(a, b)


class Odd(nn.Module):
    """What no kernel of ours does, views, several and nested outputs, a constant, in-place ops."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(6, 10, 3)
        self.scale = nn.Parameter(torch.randn(10, 1, 1))

    def forward(self, x, y):
        z = self.convolution(x).relu_()
        w = z.permute(0, 2, 3, 1).cumsum(1) * y
        a, b = z.mul(self.scale).chunk(2, dim=1)
        z = z.add_(1)
        return {"w": w, "parts": [a.softmax(1), b]}, z.mean((2, 3)), 5


def test_other_ops_and_structures():
    model = Odd().eval()
    x, y = torch.randn(2, 6, 7, 8), torch.randn(1)
    with torch.no_grad():
        expected = model(x.clone(), y)
        result = blocked(model, x, y)(x, y)
    torch.testing.assert_close(result, expected)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.convolution(x).relu()
        return y + 1 if x.sum() > 0 else y - 1


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel, dilation", [(3, 1), (4, 1), ((1, 4), (1, 3)), (2, 2)])
def test_padding_in_words(padding, kernel, dilation):
    model = nn.Sequential(nn.Conv2d(17, 19, kernel, padding=padding, dilation=dilation), nn.ReLU())
    x = torch.randn(2, 17, 11, 13)
    optimized = blocked(model.eval(), x)
    assert_exact(model, optimized, x)
    assert [s.op for s in optimized.steps() if "conv" in s.op] == ["aten::conv2d + relu"]
    assert "aten " not in optimized.plan()


def test_a_model_that_branches_runs_in_parts(tmp_path):
    model = Branches().eval()
    x = torch.randn(1, 3, 8, 8).abs()
    optimized = tb.optimize(model, x)
    assert_exact(model, optimized, x)
    assert_exact(model, optimized, -x)
    plan = optimized.plan()
    assert "parts, because" in plan and "conv2d" in plan
    with pytest.raises(NotImplementedError, match="captured whole"):
        optimized.save(tmp_path / "model.pt")
    with pytest.raises(NotImplementedError, match="train the model"):
        optimized.train()


@pytest.mark.usefixtures("in_bfloat16")
def test_bfloat16():
    model = randomized(Block(16, "add first", F.relu))
    x = torch.randn(1, 16, 12, 12)
    optimized = blocked(model, x, dtype=torch.bfloat16)
    with torch.no_grad():
        result, expected = optimized(x), model(x)
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() <= 0.03 * expected.abs().max()


def test_compile_backend():
    model = models.build_model("resnet18")[0].eval()
    x = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model.fc.weight.mul_(2)  # a constant of the graph no more
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None


def test_capture_numbers_every_value():
    captured = capture(Odd().eval(), (torch.randn(2, 6, 7, 8), torch.randn(1)))
    made = [value for node in captured.nodes for value in node.outputs]
    known = [*captured.inputs, *captured.constants, *made]
    assert len(set(known)) == len(known)
    assert captured.input_metas == [([2, 6, 7, 8], torch.float32), ([1], torch.float32)]


@pytest.mark.parametrize("dropout", (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))
def test_dropout_that_is_on_stays_on(dropout):
    """As Monte Carlo dropout keeps it, in a model that is else in evaluation mode."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), dropout(0.5), nn.Conv2d(16, 16, 1)).eval()
    x = torch.randn(2, 3, 9, 9)
    off = tb.optimize(model, x, tune=False)
    assert torch.equal(off(x), off(x))

    class WithDropout(nn.Module):
        def forward(self, x):
            model[1].train()
            result = model(x)
            model[1].eval()
            return result

    on = tb.optimize(WithDropout().eval(), x, tune=False)
    assert not torch.equal(on(x), on(x))


@pytest.mark.parametrize("width", [1, 2, 5, 6])
@pytest.mark.parametrize("kernel, stride", [(1, 1), (1, 2), (1, 3), (2, 2), (3, 2)])
def test_far_padding_beyond_all_pixels(kernel, stride, width):
    padding = nn.ConstantPad1d((0, 2 + -width % 4), 0.0)
    model = randomized(nn.Sequential(padding, nn.Conv1d(16, 17, kernel, stride=stride)))
    x = torch.randn(3, 16, width)
    for tune in (False, True):
        assert_exact(model, blocked(model, x, tune=tune), x)
