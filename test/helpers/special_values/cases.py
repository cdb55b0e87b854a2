"""The models by which each family of kernels meets special values, eager and optimized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_blocked as tb
from helpers.implementations import forced
from helpers.int8_layers import Conv, fake
from helpers.nets import Op
from helpers.optimized import blocked
from helpers.problems import dims_of, make_tensors, problems
from helpers.special_values.values import INPUTS, Dims
from helpers.tensors import as_dense
from torch_blocked import _C
from torch_blocked.tensor import format_name

Result = tuple[str, str, Tensor, Tensor]  # column, how it ran, our result, ATen's

ENGINES = ("eager", "optimized")


@dataclass(frozen=True)
class Case:
    """make() gives a model of one input. kernel: a family of implementations and one of its
    names, by which everything runs; "" for what the library chooses."""

    name: str
    make: Callable[[], nn.Module]
    dims: Dims
    kernel: tuple[str, str] = ("convolution", "")
    engines: tuple[str, ...] = ENGINES

    def results(self) -> Iterator[Result]:
        """Of every input of every column; nothing where the kernel refuses the model."""
        torch.manual_seed(0)
        model = self.make().eval()
        for engine in self.engines:
            with self._kernel(), torch.no_grad():
                run = _RUNS[engine](model, self)
                for column, x in self._inputs() if run else ():
                    yield column, f"{self.name} {self.kernel[1]} {engine}", run(x), model(x.clone())

    def _inputs(self) -> Iterator[tuple[str, Tensor]]:
        return ((column, x) for column, make in INPUTS.items() for x in make(self.dims))

    @contextmanager
    def _kernel(self) -> Iterator[None]:
        family, name = self.kernel
        with ExitStack() as stack:
            if name:
                stack.enter_context(forced(name, family))
            yield


def _eager(model: nn.Module, case: Case) -> Callable[[Tensor], Tensor] | None:
    tag = format_name(len(case.dims), tb.native_blocks()[0])

    def run(x: Tensor) -> Tensor:
        return as_dense(model(x.to_blocked(tag)))

    try:
        with tb.strict():
            run(torch.randn(case.dims))
    except NotImplementedError:
        return None
    family, name = case.kernel
    assert name in ("", _C.last_implementation(family))
    return run


def _optimized(model: nn.Module, case: Case) -> Callable[[Tensor], Tensor] | None:
    try:
        fast = blocked(model, torch.randn(case.dims), verify=False)
    except NotImplementedError:
        return None
    if case.kernel[1] and all(step.implementation != case.kernel[1] for step in fast.steps()):
        return None
    return lambda x: as_dense(fast(x.clone()))


def _optimized_blocked(model: nn.Module, case: Case) -> Callable[[Tensor], Tensor] | None:
    fast = _optimized(model, case)
    tag = format_name(len(case.dims), tb.native_blocks()[0])
    return fast and (lambda x: fast(x.to_blocked(tag)))


_RUNS = {
    "eager": _eager,
    "optimized": _optimized,
    "optimized, blocked input": _optimized_blocked,
}


# ---- models -------------------------------------------------------------------------------------


class _OfProblem(nn.Module):
    """A row of the table of problems. Shifts are zero, so that denormals stay what they are."""

    def __init__(self, problem, operands):
        super().__init__()
        self.problem = problem
        self.operands = nn.ParameterList(operands).requires_grad_(False)

    def forward(self, x):
        return self.problem.run(x, *self.operands)


SHIFTS = {"batch_norm": (1, 2), "group_norm": (1,)}


# Activations by exponentials and fractions, which programs compute in their own way.
FUNCTIONS = (
    *("sigmoid", "silu", "gelu", "mish", "logsigmoid", "softshrink", "elu", "celu", "selu"),
    *("softplus", "tanh", "exp", "squeeze-excite", "channels", "width", "bce-logits"),
    *("soft_margin", "cross_entropy"),
)


def of_problems(*families: str, names=(), without=()) -> list[Case]:
    """The rows of these families, those of these names, or all but those."""
    found = []
    for problem in (problem for family in families for problem in problems(family)):
        if problem.name in without or (names and problem.name not in names):
            continue
        dims = dims_of(problem, 2, 17)
        _, *operands = make_tensors(problem, dims)
        for place, operand in enumerate(operands):
            operand *= place not in SHIFTS.get(problem.family, ())

        def make(problem=problem, operands=operands):
            return _OfProblem(problem, operands)

        found.append(Case(problem.id, make, dims, engines=("eager", "optimized, blocked input")))
    return found


def _conv(*arguments, rank=2, transposed="", **options):
    kind = getattr(nn, f"Conv{transposed}{rank}d")
    return lambda: kind(*arguments, bias=False, **options)


_LAYERS = {
    "3x3": (_conv(17, 24, 3, padding=1), (2, 17, 13, 14)),
    "5x5": (_conv(32, 32, 5, padding=2), (1, 32, 17, 17)),
    "stride": (_conv(32, 32, 3, padding=1, stride=2), (1, 32, 20, 20)),
    "three channels": (_conv(3, 32, 7, padding=3, stride=2), (1, 3, 26, 26)),
    "1d": (_conv(17, 9, 9, padding=4, rank=1), (1, 17, 60)),
    "3d": (_conv(17, 9, 3, padding=1, rank=3), (1, 17, 6, 7, 9)),
    "transposed": (_conv(17, 24, 4, 2, 1, transposed="Transpose"), (2, 17, 9, 9)),
    "biased": (lambda: nn.Conv2d(17, 24, 3, padding=1), (2, 17, 13, 14)),
}
_GROUPS = {
    "depthwise": (_conv(17, 17, 3, padding=1, groups=17), (2, 17, 9, 9)),
    "depthwise 5x5": (_conv(32, 32, 5, padding=2, stride=2, groups=32), (2, 32, 9, 9)),
    "groups": (_conv(64, 64, 3, padding=1, groups=2), (1, 64, 9, 9)),
}
_ONE_BY_ONE = {
    "1x1": (_conv(17, 33, 1), (2, 17, 9, 9)),
    "one pixel": (_conv(96, 96, 1), (2, 96, 1, 1)),
}
_MANY_CHANNELS = {"1x1": (_conv(96, 96, 1), (2, 96, 9, 9))}
_LINEAR = {
    "rows": (lambda: nn.Linear(96, 96, bias=False), (3, 96)),
    "one row": (lambda: nn.Linear(512, 64, bias=False), (1, 512)),
    "odd": (lambda: nn.Linear(33, 17, bias=False), (29, 33)),
}
_MANY_ROWS = {"many rows": (lambda: nn.Linear(128, 256, bias=False), (112, 128))}


def by_each(family: str, names: tuple[str, ...], layers: dict, engines=ENGINES) -> list[Case]:
    return [
        Case(layer, make, dims, (family, name), engines)
        for layer, (make, dims) in layers.items()
        for name in names
    ]


_OF_ONEDNN = ("onednn_blocked", "onednn_channels_last", "aten")


class _WeightGradient(nn.Module):
    """The gradient of a convolution's weight, as a function of its input."""

    def __init__(self, inputs, outputs, kernel, groups=1):
        super().__init__()
        self.layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups)

    def forward(self, x):
        with torch.enable_grad():
            y = self.layer(x)
            diff = 0.1 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
            diff = diff.to_blocked(y.format) if tb.is_blocked(y) else diff
            return torch.autograd.grad(y, self.layer.weight, diff)[0]


_GRADIENTS = {
    "3x3": (lambda: _WeightGradient(24, 40, 3), (2, 24, 14, 13)),
    "depthwise": (lambda: _WeightGradient(16, 16, 5, 16), (2, 16, 14, 13)),
}


class _Sampled(nn.Module):
    """A grid that reaches beyond every border of the picture."""

    def __init__(self, mode, padding, corners, rank):
        super().__init__()
        self.options = {"mode": mode, "padding_mode": padding, "align_corners": corners}
        self.register_buffer("grid", 1.2 * torch.randn(2, *[6] * rank, rank))

    def forward(self, x):
        return F.grid_sample(x, self.grid, **self.options)


def samplers() -> list[Case]:
    dims = {2: (2, 9, 4, 5), 3: (2, 9, 3, 4, 4)}
    rows = [
        (mode, padding, corners, rank)
        for rank, modes in ((2, ("bilinear", "bicubic", "nearest")), (3, ("bilinear",)))
        for mode in modes
        for padding in ("zeros", "border", "reflection")
        for corners in (False, True)
    ]
    return [
        Case(str(row), lambda row=row: _Sampled(*row), dims[row[-1]], engines=("eager",))
        for row in rows
    ]


def _heads(x):
    return F.scaled_dot_product_attention(*x.chunk(3, -1))


def _heads_written_out(x):
    q, k, v = x.chunk(3, -1)
    return ((q @ k.mT) * 0.3).softmax(-1) @ v


class _Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = getattr(nn, kind)(17, 24, batch_first=True)
        with torch.no_grad():
            for each in self.layer.parameters():
                each.mul_(3)  # so that some gates are all but closed

    def forward(self, x):
        return self.layer(x)[0]


class _Gated(nn.Module):
    """A squeeze and excite block."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x):
        return x * self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


def of_modules(dims: Dims, engines=ENGINES, **modules: Callable[[], nn.Module]) -> list[Case]:
    return [Case(name, make, dims, engines=engines) for name, make in modules.items()]


def of_functions(dims: Dims, engines=ENGINES, **functions) -> list[Case]:
    return [
        Case(name, lambda function=function: Op(function), dims, engines=engines)
        for name, function in functions.items()
    ]  # fmt: skip


_TOKENS = (5, 7, 48)
_OPTIMIZED = ("optimized",)
_PICTURE = (2, 17, 9, 11)

# Behind a layer that runs in a blocked format, so that they do.
_POOLINGS = {
    "average": (lambda: nn.Sequential(nn.Conv2d(17, 16, 1), nn.AvgPool2d(3, 2, 1)), _PICTURE),
    "maximum": (lambda: nn.Sequential(nn.Conv2d(17, 16, 1), nn.MaxPool2d(3, 2, 1)), _PICTURE),
}
_BYTES = {
    "numbers": (lambda: Conv(16, 16, padding=1, to=None), (1, 16, 9, 9)),
    "bytes": (lambda: Conv(16, 16, padding=1), (1, 16, 9, 9)),
}

# The cases of each family of kernels, in the order of the table.
CASES: dict[str, list[Case]] = {
    "convolutions: direct": by_each("convolution", ("direct", *_OF_ONEDNN), _LAYERS),
    "convolutions: depthwise, grouped": by_each(
        "convolution", ("depthwise", "grouped", "direct", *_OF_ONEDNN), _GROUPS
    ),
    "convolutions: 1x1": by_each("convolution", ("few_rows", "direct", *_OF_ONEDNN), _ONE_BY_ONE),
    "convolutions: Winograd": by_each(
        "convolution",
        ("winograd4", "winograd2", "winograd3", "winograd_phases"),
        _LAYERS | {"groups": _GROUPS["groups"]},
    ),
    "Strassen's product": [
        *by_each("convolution", ("strassen",), _MANY_CHANNELS),
        *by_each("linear", ("strassen",), _MANY_ROWS, _OPTIMIZED),
    ],
    "tiles of AMX": [
        *by_each("convolution", ("amx",), _LAYERS | _MANY_CHANNELS),
        *by_each("linear", ("amx",), _LINEAR | _MANY_ROWS, _OPTIMIZED),
    ],
    "linear": by_each(
        "linear", ("few_rows", "direct", "onednn"), _LINEAR | _MANY_ROWS, _OPTIMIZED
    ),
    "weight gradients: Winograd": by_each(
        "weight_gradient", ("winograd",), _GRADIENTS, ("eager",)
    ),
    "weight gradients: others": by_each(
        "weight_gradient",
        ("direct", "depthwise", "onednn_blocked", "onednn_channels_last", "aten"),
        _GRADIENTS,
        ("eager",),
    ),
    "batch norm, scale and shift": [
        *of_problems("batch_norm"),
        *of_functions(_PICTURE, affine=lambda x: x * -2 + 0, shifted=lambda x: x * 2 - 3),
    ],
    "group and layer norm": [
        *of_problems("group_norm", "layer_norm"),
        *of_modules(
            _TOKENS, _OPTIMIZED, tokens=lambda: nn.LayerNorm(48), rms=lambda: nn.RMSNorm(48)
        ),
    ],
    "local response norm": of_problems("local_response_norm"),
    "softmax": [
        *of_problems("softmax"),
        *of_functions(_TOKENS, _OPTIMIZED, rows=lambda x: x.softmax(-1)),
    ],
    "attention": of_functions((2, 3, 33, 48), _OPTIMIZED, op=_heads, written=_heads_written_out),
    "recurrent": of_modules(
        (3, 7, 17),
        _OPTIMIZED,
        lstm=lambda: _Recurrent("LSTM"),
        gru=lambda: _Recurrent("GRU"),
        rnn=lambda: _Recurrent("RNN"),
    ),
    "pooling": [
        *of_problems("pooling"),
        *by_each(
            "pooling",
            ("maximum", "onednn", "average"),
            _POOLINGS,
            _OPTIMIZED,
        ),
    ],
    "squeeze and excite": of_modules((2, 16, 9, 9), gated=_Gated),
    "resampling": of_problems("resampling"),
    "grid sampler": samplers(),
    "pointwise: sums, products, bounds": of_problems(
        "pointwise", "loss", without=FUNCTIONS
    ),
    "pointwise: exponentials": of_problems("pointwise", "glu", "loss", names=FUNCTIONS),
    "reductions and scans": of_problems("reduction", "scan"),
    "bytes": [
        *by_each("quantized_convolution", ("dots", "winograd_words"), _BYTES, _OPTIMIZED),
        *of_functions(_PICTURE, _OPTIMIZED, rounded=lambda x: fake(x, 0.03, 101)),
    ],
    "padding, concatenation, slices": of_problems(
        "padding", "concat", "view", "shuffle", "gather", "copy"
    ),
    "reorders": by_each(
        "reorder", ("transpose", "onednn", "aten"), {"there and back": (nn.Identity, _PICTURE)},
        ("eager",),
    ),
}  # fmt: skip
