"""What an optimized or loaded model takes and refuses, and the state that its model keeps."""

import collections
import copy
import dataclasses
import io
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_blocked as tb
from torch_blocked.verify import TOLERANCE


@pytest.fixture(autouse=True)
def seed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)


def network():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 17, 1)]
    return nn.Sequential(*layers).eval()


class Branches(nn.Module):
    """Python decides on values between its two parts."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        y = self.layers(x)
        return y.neg() if y.sum() == 0 and y.numel() else y


@pytest.fixture(params=("optimized", "loaded", "in parts"))
def pair(request, tmp_path):
    model, x = network(), torch.randn(2, 3, 8, 8)
    if request.param == "in parts":
        model = Branches().eval()
    fast = tb.optimize(model, x, tune=False)
    if request.param == "loaded":
        fast.save(tmp_path / "model.pt")
        fast = tb.load(tmp_path / "model.pt")
    return model, fast, x


@pytest.mark.parametrize("tag", ("nChw4c", "nChw8c", "nChw16c", "nChw32c", "nhwc"))
def test_formats_are_taken(pair, tag):
    model, fast, x = pair
    fast(tb.to_format(x, tag))  # parts are captured when they first run
    with torch.no_grad(), tb.profile() as profile:
        result = fast(tb.to_format(x, tag))
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)
    assert "to_dense" not in profile.table()  # no reorder to a format that no step wants


class Subclass(torch.Tensor):
    pass


def _resized(x):
    x = x.clone()
    x.untyped_storage().resize_(4)
    return x


def _fake(x):
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


ODD = {
    "meta": lambda x: x.to("meta"),
    "fake": _fake,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "functionalized": torch._to_functional_tensor,
    "sparse": torch.Tensor.to_sparse,
    "mkldnn": torch.Tensor.to_mkldnn,
    "of a subclass": lambda x: x.as_subclass(Subclass),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_other_tensors_are_refused(pair, kind):
    with pytest.raises(TypeError, match="expected dense or blocked CPU tensors as inputs, got"):
        pair[1](ODD[kind](pair[2]))


def test_memory_smaller_than_the_sizes_is_refused(pair):
    with pytest.raises(ValueError, match="expected a tensor with memory of"):
        pair[1](_resized(pair[2]))


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "export": lambda f, x: torch.export.export(f, (x,), strict=False),
    "jit.trace": lambda f, x: torch.jit.trace(f, (x,)),
    "make_fx": lambda f, x: make_fx(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(pair, name):
    with pytest.raises((TypeError, NotImplementedError), match="torch_blocked::optimize"):
        TRANSFORMS[name](pair[1], pair[2])


@pytest.mark.parametrize(
    "dtype",
    [torch.half, torch.bfloat16, torch.bool, torch.uint8, torch.double, torch.long, torch.cfloat],
    ids=str,
)
def test_types_that_the_model_refuses(pair, dtype):
    model, fast, x = pair
    with pytest.raises(RuntimeError):
        model(x.to(dtype))
    with pytest.raises((RuntimeError, ValueError)):
        fast(x.to(dtype))


def test_numbers_and_ranks_of_inputs(pair):
    _, fast, x = pair
    for args in ((), (x, x), (None,), (1.0,), (x.numpy(),), (x[None],), (x[:, :2],)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            fast(*args)


@pytest.mark.parametrize("dims", [(0, 3, 8, 8), (2, 3, 0, 8), (2, 0, 8, 8), (0, 3, 0, 0)])
def test_empty_inputs(pair, dims):
    model, fast, _ = pair
    x = torch.randn(dims)
    try:
        expected = model(x)
    except RuntimeError:
        with pytest.raises((RuntimeError, ValueError)):
            fast(x)
    else:
        assert fast(x).shape == expected.shape


EMPTY = {
    "batch norm": nn.BatchNorm2d(4),
    "pool": nn.MaxPool2d(2),
    "mean": nn.AdaptiveAvgPool2d(1),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "group norm": nn.GroupNorm(2, 4),
    "head": nn.Sequential(
        nn.Conv2d(4, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    ),
    "act": nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Hardswish(), nn.PixelShuffle(2)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch(name):
    model = EMPTY[name].eval()
    fast = tb.optimize(model, torch.randn(2, 4, 8, 8), tune=False)
    x = torch.randn(0, 4, 8, 8)
    assert torch.equal(fast(x), model(x))
    assert torch.equal(tb.optimize(model, x, tune=False)(x), model(x))


def test_names_and_other_arguments():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x, scale=1.0, *, flip=False, more=None):
            y = self.layer(x) * scale
            y = y if more is None else y + more["bias"]
            return y.flip(3) if flip else y

    model, x = Scaled().eval(), torch.randn(1, 3, 6, 6)
    fast = tb.optimize(model, x, example_kwargs={"scale": 2.0}, tune=False)
    more = {"bias": torch.randn(8, 1, 1)}
    calls = [{"scale": 2.0}, {"scale": 3}, {}, {"flip": True}, {"more": more}, {"scale": 2.0}]
    with torch.no_grad():
        for kwargs in calls:
            torch.testing.assert_close(fast(x, **kwargs), model(x, **kwargs), rtol=1e-4, atol=1e-5)
    only = tb.optimize(model, example_kwargs={"x": x}, tune=False)
    torch.testing.assert_close(only(x=2 * x), model(2 * x), rtol=1e-4, atol=1e-5)


@dataclasses.dataclass
class Result:
    image: torch.Tensor
    parts: list


Pair = collections.namedtuple("Pair", "first second")


def test_results_of_other_structures(tmp_path):
    class Returns(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.layer = kind, nn.Conv2d(3, 8, 3)

        def forward(self, x):
            return self.kind(self.layer(x), [x, 3])

    x = torch.randn(1, 3, 6, 6)
    for kind in (Result, Pair):
        model = Returns(kind).eval()
        fast = tb.optimize(model, x, tune=False)
        result, expected = fast(2 * x), model(2 * x)
        assert type(result) is kind
        torch.testing.assert_close(
            result[0] if kind is Pair else result.image,
            expected[0] if kind is Pair else expected.image,
            rtol=1e-4,
            atol=1e-5,
        )
        with pytest.raises(NotImplementedError, match="torch_blocked::save"):
            fast.save(tmp_path / "model.pt")
    model = Returns(lambda y, parts: torch.distributions.Normal(y, 1.0)).eval()
    torch.testing.assert_close(tb.optimize(model, x)(2 * x).mean, model(2 * x).mean)


def test_blocked_results():
    class Blocked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 17, 3)

        def forward(self, x):
            y = self.layer(x.to_blocked("nChw8c"))
            return y.relu(), {"x": x.to_blocked("nChw16c")}

    model, x = Blocked().eval(), torch.randn(2, 3, 6, 6)
    fast = tb.optimize(model, x, tune=False)
    for y in (x, 2 * x, torch.randn(1, 3, 9, 7)):
        result, expected = fast(y), model(y)
        assert result[0].format == "nChw8c" and result[1]["x"].format == "nChw16c"
        assert type(result[0]._physical) is torch.Tensor
        torch.testing.assert_close(
            result[0].to_dense(), expected[0].to_dense(), rtol=1e-4, atol=1e-5
        )


class Stateful(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.calls, self.last, self.history = form, 0, None, []
        self.layer, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.form == "train":
            return self.norm(self.layer(x))
        if self.form == "buffer":
            self.seen += 1
            return self.layer(x) * self.seen
        self.calls += 1
        self.last = x
        self.history.append(x.shape)
        return self.layer(x) * (self.calls if self.form == "counts" else 1)


@pytest.mark.parametrize("form", ("sets", "counts", "buffer", "train"))
def test_what_a_forward_changes_is_put_back_and_counts(form):
    model, x = Stateful(form).eval(), torch.randn(2, 3, 6, 6)
    model.norm.train(form == "train")
    before = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = tb.optimize(model, x, tune=False)
    said = [str(each.message) for each in caught if "torch_blocked" in str(each.message)]
    assert bool(said) == (form == "sets") and all("Stateful.calls" in each for each in said)
    assert (model.calls, model.last, model.history) == (0, None, [])
    assert model.norm.training == (form == "train")
    for now, then in zip(model.buffers(), before.buffers(), strict=True):
        assert torch.equal(now, then)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), before(x), rtol=1e-4, atol=1e-5)


class Keeping(nn.Module):
    """Computes something at the first call and keeps it."""

    def __init__(self, form):
        super().__init__()
        self.form, self.kept = form, {}
        self.layer, self.weight = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.randn(8, 5))

    def made(self, y):
        if self.form == "from parameters":
            return self.weight[:, torch.tensor([0, 3, 3, 1])].mean(1).view(8, 1, 1)
        if self.form == "from sizes":
            return torch.arange(y.shape[2]).view(-1, 1) / torch.arange(1, 1 + y.shape[3])
        return y.mean((0, 2, 3)).view(8, 1, 1)  # "from values"

    def forward(self, x):
        y = self.layer(x)
        key = tuple(y.shape[2:]) if self.form == "from sizes" else "only"
        if key not in self.kept:
            self.kept[key] = self.made(y)
        return y + self.kept[key]


@pytest.mark.parametrize("form", ("from parameters", "from sizes", "from values"))
def test_what_a_first_call_keeps(form):
    """What follows from parameters and sizes is a constant of the second call; values are not, and
    such a model runs as it is."""
    model = Keeping(form).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tb.optimize(model, torch.randn(1, 3, 6, 6), tune=False)
    assert model.kept == {}
    assert isinstance(fast, tb.optimized_module.OptimizedModule) == (form != "from values")
    own = copy.deepcopy(model)
    with torch.no_grad():
        for size in ((1, 3, 6, 6), (2, 3, 9, 5), (1, 3, 6, 6)):
            x = torch.randn(size)
            torch.testing.assert_close(fast(x), own(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", ("blocked", "dense"))
def test_weights_are_those_of_the_optimized_model(choice, tmp_path):
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.LayerNorm(64),
    ]
    model = nn.Sequential(*layers).eval()
    x = torch.randn(1, 3, 6, 6)
    fast = tb.optimize(model, x, tune=False)
    fast._choose(choice, "")
    expected = fast(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(2)
    assert torch.equal(fast(x), expected)
    with pytest.raises(ValueError, match="expected the weights that the model had"):
        fast(torch.randn(2, 3, 6, 6))
    with pytest.raises(ValueError, match="expected the weights that the model had"):
        fast.save(tmp_path / "model.pt")


def test_results_are_verified(monkeypatch):
    from torch_blocked import _C

    model, x = network(), torch.randn(1, 3, 8, 8)
    original = _C.Compiled.__call__
    wrong = lambda self, inputs: [2 * each for each in original(self, inputs)]  # noqa: E731
    monkeypatch.setattr(_C.Compiled, "__call__", wrong)
    with pytest.warns(UserWarning, match="differed from the model .* Please report"):
        fast = tb.optimize(model, x, tune=False)
    assert fast.choice == "model"
    assert torch.equal(fast(x), model(x))
    assert tb.optimize(model, x, tune=False, verify=False).choice == "blocked"


class Chaos(nn.Module):
    """x = 3.99 x (1 - x), which about doubles a difference at each of `steps` steps."""

    def __init__(self, steps):
        super().__init__()
        self.layer, self.steps = nn.Conv2d(3, 16, 3), steps

    def forward(self, x):
        x = self.layer(x).sigmoid()
        for _ in range(self.steps):
            x = 3.99 * x * (1 - x)
        return x


def test_what_nothing_can_be_compared_with_is_no_defect_either():
    """After 40 steps a nudge has moved each result anywhere."""
    torch.manual_seed(0)
    model, x = Chaos(40).eval(), torch.randn(2, 3, 9, 9)
    with pytest.warns(UserWarning, match="cannot be compared .* move the model's own by .*%"):
        fast = tb.optimize(model, x, tune=False)
    assert fast.choice == "model"
    assert fast.reason.startswith("rounding decides its results")
    assert torch.equal(fast(x), model(x))
    assert tb.optimize(model, x, tune=False, verify=False).choice == "blocked"


@pytest.mark.parametrize("wrong", (False, True))
def test_a_model_that_rounding_decides_is_no_defect(wrong, monkeypatch):
    """After 16 steps two right forms differ by percents, as two runs of nudged inputs do."""
    torch.manual_seed(0)
    model, x = Chaos(2 if wrong else 16).eval(), torch.randn(2, 3, 9, 9)
    if wrong:
        original = tb._C.Compiled.__call__
        half = lambda self, inputs: [each / 2 for each in original(self, inputs)]  # noqa: E731
        monkeypatch.setattr(tb._C.Compiled, "__call__", half)
        with pytest.warns(UserWarning, match="differed from the model"):
            assert tb.optimize(model, x, tune=False).choice == "model"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tb.optimize(model, x, tune=False)
    assert fast.choice == "blocked"
    exact = copy.deepcopy(model).double()(x.double())
    assert (fast(x) - model(x)).abs().max() > TOLERANCE
    assert (model(x) - exact).abs().max() > TOLERANCE  # so that nobody can tell which is right


@pytest.mark.parametrize("rank", (2, 3, 4))
def test_batch_norms_beside_writes_to_memory(rank):
    """torch.export traces these, with the batch norm of three results."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            norms = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
            self.norm, self.layer = norms[rank](4), nn.Linear(6, 6)

        def forward(self, x):
            y = x.new_zeros(x.shape[0], 4, *x.shape[2:])
            y[:, 1:] = x
            return self.norm(y), self.norm(self.layer(y)) if rank > 2 else y

    model, x = Writes().eval(), torch.randn(2, 3, *(5, 6)[4 - rank :])
    fast = tb.optimize(model, x, tune=False, verify=False)
    torch.testing.assert_close(fast(2 * x), model(2 * x), rtol=1e-4, atol=1e-5)


def test_copies_and_pickles():
    model, x = network(), torch.randn(1, 3, 8, 8)
    fast = tb.optimize(model, x, tune=False)
    expected = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), expected)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)
    with pytest.raises(NotImplementedError, match="use the model's state_dict"):
        fast.state_dict()
    with pytest.raises(NotImplementedError, match="expected float32 on the CPU"):
        fast.half()
    assert fast.float().eval() is fast


def test_other_kinds_of_models():
    x = torch.randn(1, 3, 8, 8)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    double = copy.deepcopy(plain).double()
    assert torch.equal(tb.optimize(double, x.double(), tune=False)(x.double()), double(x.double()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripts = [torch.jit.script(plain), torch.jit.trace(plain, x)]
        scripts.append(torch.jit.freeze(torch.jit.script(plain)))
    for script in (*scripts, torch.export.export(plain, (x,)).module()):
        fast = tb.optimize(script, x, tune=False)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fast(2 * x), plain(2 * x), rtol=1e-4, atol=1e-5)


def test_an_optimized_model_inside_another(tmp_path):
    model, x = network(), torch.randn(1, 3, 8, 8)
    inner = tb.optimize(model, x, tune=False)
    inner.save(tmp_path / "model.pt")
    for each in (inner, tb.load(tmp_path / "model.pt")):
        outer = nn.Sequential(nn.Conv2d(3, 3, 1), each, nn.ReLU()).eval()
        fast = tb.optimize(outer, x, tune=False)
        with torch.no_grad():
            torch.testing.assert_close(fast(2 * x), outer(2 * x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1)],
        [
            nn.Conv2d(3, 17, 3),
            nn.BatchNorm2d(17),
            nn.Hardswish(),
            nn.MaxPool2d(2),
            nn.Conv2d(17, 5, 1),
        ],
        [nn.Conv2d(3, 24, 3, groups=3), nn.Sigmoid(), nn.ConvTranspose2d(24, 8, 2, stride=2)],
    ],
    ids=("1x1", "mixed", "grouped"),
)
def test_bfloat16(layers):
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 12, 12)
    for tune in (False, True):
        fast = tb.optimize(model, x, tune=tune, dtype=torch.bfloat16)
        assert fast.choice != "model"
        fast.choice = "blocked"
        expected = model(x)
        assert (fast(x) - expected).abs().max() <= 0.05 * expected.abs().max()
