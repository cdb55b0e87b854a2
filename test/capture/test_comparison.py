"""How `optimize` compares its results with the model's: in every type, output by output."""

import copy
import warnings

import pytest
import torch
from torch import nn

import torch_blocked as tb
from torch_blocked.capture import capture
from torch_blocked.exact import in_float64
from torch_blocked.verify import judged, least_of

pytestmark = [pytest.mark.usefixtures("cache_folder"), pytest.mark.any_isa]

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def network(depth, dtype):
    torch.manual_seed(depth)
    channels = [3] + depth * [16]
    layers = []
    for of, to in zip(channels, channels[1:], strict=False):
        layers += [nn.Conv2d(of, to, 3, padding=1), nn.BatchNorm2d(to), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1)).to(dtype).eval()


def by_another_row(result, model):
    return result.roll(1, 2)


def without_bias(result, model):
    return result - model[-1].bias[:, None, None]


def with_one_channel_a_hundredth_larger(result, model):
    result = result.clone()
    result[:, result.float().square().mean((0, 2, 3)).argmax()] *= 1.01
    return result


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("depth", (1, 4, 16))
def test_what_is_right_is_taken(depth, dtype):
    model, x = network(depth, dtype), torch.randn(2, 3, 20, 20).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tb.optimize(model, x, tune=False).choice == "blocked"


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("depth", (1, 4, 16))
@pytest.mark.parametrize(
    "fault", (by_another_row, without_bias, with_one_channel_a_hundredth_larger)
)
def test_what_is_wrong_is_not(depth, dtype, fault, monkeypatch):
    model, x = network(depth, dtype), torch.randn(2, 3, 20, 20).to(dtype)
    run = tb._C.Compiled.__call__
    monkeypatch.setattr(
        tb._C.Compiled, "__call__", lambda self, given: [fault(run(self, given)[0], model)]
    )
    with pytest.warns(UserWarning, match="differed from the model"):
        assert tb.optimize(model, x, tune=False).choice == "model"


class WithNoise(nn.Module):
    """An image, and its mean of next to nothing, of which rounding makes all there is."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)

    def forward(self, x):
        y = nn.functional.instance_norm(self.conv(x))
        return self.last(y), y.mean((2, 3))


@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("wrong", (None, 0, 1))
def test_an_output_of_noise_is_judged_by_itself(wrong, dtype, monkeypatch, tmp_path):
    """The other as strictly as ever, and what is beyond the noise is none."""
    torch.manual_seed(0)
    model, x = WithNoise().to(dtype).eval(), torch.randn(2, 3, 24, 24).to(dtype)
    if wrong is not None:
        run = tb._C.Compiled.__call__

        def off(self, given):
            results = run(self, given)
            results[wrong] = results[wrong] + 0.1
            return results

        monkeypatch.setattr(tb._C.Compiled, "__call__", off)
        with pytest.warns(UserWarning, match="optimized model"):
            assert tb.optimize(model, x, tune=False).choice == "model"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tb.optimize(model, x, tune=False)
    assert fast.choice == "blocked"
    fast.save(tmp_path / "model")
    again = tb.load(tmp_path / "model")(x)
    torch.testing.assert_close(again[0], fast(x)[0])


@torch.no_grad()
def test_ops_in_float64_are_those_of_the_model():
    """Types that the model names, and constants that it makes, are of float64, too."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            y = x.float()
            y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            halves = self.linear(y).add_(torch.ones(16, dtype=x.dtype) / 3).chunk(2, -1)
            return halves, y.softmax(-1, dtype=torch.float32), x.argmax(-1)

    model, x = Model().bfloat16().eval(), torch.randn(4, 16).bfloat16()
    results = in_float64(capture(model, (x,)), [x])
    wide = copy.deepcopy(model).double()

    def in_double(x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return *(wide.linear(y) + 1 / 3).chunk(2, -1), y.softmax(-1), x.argmax(-1)

    torch.testing.assert_close(results, list(in_double(x.double())), rtol=0, atol=1e-12)


@pytest.mark.parametrize("moved,is_right", ((0.01, True), (0.2, False)))
def test_integers_are_compared_with_what_rounding_makes_of_them(moved, is_right):
    exact = torch.arange(1000)
    own, result = exact.clone(), exact.clone()
    own[:10] += 1
    result[-int(1000 * moved * 2) :] += 1
    judgement = judged([exact], [[own]], [result], lambda dtype: least_of(dtype, False))
    assert (judgement.what == "") == is_right


@torch.no_grad()
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_a_convolution_of_no_channels(rank):
    """ATen makes no channels of none, whatever the weight; so does the plan, whose steps tell."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing to initialize
        model = convolution(0, 4, 3, padding=1).eval()
    x = torch.randn(2, 0, *[5] * rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tb.optimize(model, x)
    assert fast.choice != "model" and fast(x).shape == model(x).shape
    assert fast.steps()


def lazy():
    torch.manual_seed(0)
    layers = nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    return nn.Sequential(*layers).eval()


def quantized(model, x):
    return tb.optimize(tb.quantize(model, [x]), x)(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "use",
    (
        lambda model, x: tb.optimize(model, x)(x),
        lambda model, x: tb.optimize(model, x.to_blocked())(x),
        lambda model, x: tb.optimize(model, example_kwargs={"input": x})(x),
        lambda model, x: tb.explain(model, x, tune=False) and model(x),
        lambda model, x: tb.prepack(model, x.to_blocked())(x),
        quantized,
    ),
)
def test_lazy_modules_get_their_weights(use):
    """The same as by the model's own first call, and none of the random numbers more."""
    x = torch.ones(2, 3, 8, 8)
    model = lazy()
    expected = model(x)
    torch.testing.assert_close(use(lazy(), x), expected, rtol=0, atol=0.02)
