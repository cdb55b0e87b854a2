"""Small random models of bytes against the graph that their quantizer wrote, op by op.

    python test/random/random_int8.py --models 300 --seed 1
    python test/random/random_int8.py --seed-only 4711

A model is quantized by TorchBlockedQuantizer, by X86InductorQuantizer, or by hand: q/dq pairs of
other forms (hand_quantized.py) at random places of the float graph. The optimized model returns
all that it makes bytes of. The reference graph runs op by op on these bytes, so that no difference
grows from layer to layer: each quantized op gives bytes of one unit apart at most.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from helpers.hand_quantized import by_hand  # noqa: E402
from torch import Tensor, fx, nn  # noqa: E402
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: E402
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: E402

import torch_blocked as tb  # noqa: E402

CHANNELS = (1, 3, 7, 8, 9, 15, 16, 17, 33)
QUANTIZERS = ("torch_blocked", "x86", "by hand")


# ---- models -------------------------------------------------------------------------------------


class Padded(nn.Module):
    """What is read with zeros around it, more at some sides."""

    def __init__(self, pads, body):
        super().__init__()
        self.pads, self.body = pads, body

    def forward(self, x):
        return self.body(F.pad(x, self.pads))


class Residual(nn.Module):
    """x and what the body makes of it, or two bodies, in either order."""

    def __init__(self, body, other, swapped, then):
        super().__init__()
        self.body, self.other, self.swapped, self.then = body, other, swapped, then

    def forward(self, x):
        a, b = self.body(x), self.other(x)
        return self.then(b + a if self.swapped else a + b)


class Concat(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        return torch.cat([body(x) for body in self.bodies], 1)


class Halves(nn.Module):
    """The body on half of the channels, and the channels in turn after it."""

    def __init__(self, body, shuffle):
        super().__init__()
        self.body, self.shuffle = body, shuffle

    def forward(self, x):
        a, b = x.chunk(2, 1)
        x = torch.cat([a, self.body(b)], 1)
        if self.shuffle:
            x = x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return x


class Gated(nn.Module):
    """A squeeze-excite gate."""

    def __init__(self, channels, conv, gate):
        super().__init__()
        self.down, self.up = conv(channels, 8, 1), conv(8, channels, 1)
        self.gate = gate

    def forward(self, x):
        mean = x.mean(tuple(range(2, x.dim())), keepdim=True)
        return x * self.gate(self.up(F.relu(self.down(mean))))


class Twice(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(self.body(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(tuple(range(2, x.dim())))


class Last(nn.Module):
    """Linear layers on the channels of each pixel."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x.movedim(1, -1)).movedim(-1, 1)


class Builder:
    """Strings pieces together, each of which runs on what the others made."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rank = self.rng.choices((2, 1, 3), (8, 2, 2))[0]
        low, high = {1: (5, 30), 2: (4, 17), 3: (3, 8)}[self.rank]
        size = [self.rng.randint(low, high) for _ in range(self.rank)]
        self.x = torch.randn(self.rng.choice((1, 1, 3)), self.rng.choice(CHANNELS), *size)

    def model(self) -> nn.Module:
        x, pieces = self.x, []
        wanted = self.rng.randint(1, 5)
        for _ in range(4 * wanted):
            if len(pieces) >= wanted:
                break
            grown = self.grown(self.piece, x)
            if grown:
                pieces.append(grown[0])
                x = grown[1]
        head = self.grown(self.head, x) if self.rng.random() < 0.6 else None
        return nn.Sequential(*pieces, *([head[0]] if head else [])).eval()

    def grown(self, make, x: Tensor) -> tuple[nn.Module, Tensor] | None:
        """A module on x, and its result; nothing if it refuses x."""
        try:
            module = randomized(make(x)).eval()
            result = module(x)
        except (RuntimeError, ValueError, IndexError):  # what the dense model refuses is no model
            return None
        fits = 0 < result.numel() < 20_000 and result.isfinite().all() and result.abs().max() < 1e3
        return (module, result) if fits else None

    def of_rank(self, name: str):
        return getattr(nn, f"{name}{self.rank}d")

    # Pieces. Each takes an example of what it will read.

    def piece(self, x: Tensor) -> nn.Module:
        makers = {
            self.layer: 10,
            self.depthwise: 3,
            self.residual: 3,
            self.concat: 2,
            self.pooling: 3,
            self.activation: 2,
            self.halves: 1,
            self.gated: 1,
            self.twice: 1,
            self.transposed: 2,
            self.chained: 2,
            self.last: 1,
        }
        return self.rng.choices(list(makers), list(makers.values()))[0](x)

    def numbers(self, *choices) -> Any:
        """One number for all dims, or one for each."""
        if self.rng.random() < 0.75:
            return self.rng.choice(choices)
        return tuple(self.rng.choice(choices) for _ in range(self.rank))

    def layer(self, x: Tensor, to: int | None = None, same: bool = False) -> nn.Module:
        """A convolution, and what may follow it. same: it keeps the sizes."""
        channels, to = x.shape[1], to or self.rng.choice(CHANNELS)
        groups = self.rng.choice([n for n in (1, 1, 1, 2, 3, channels) if channels % n == 0])
        if to % groups:
            groups = 1
        kernel = self.numbers(1, 1, 2, 3, 3, 5, 7)
        geometry: dict[str, Any] = {"groups": groups, "bias": self.rng.random() < 0.8}
        if self.rng.random() < 0.15:
            geometry["dilation"] = 2
        pads = None
        if same or self.rng.random() < 0.1:
            geometry["padding"] = "same"
        elif self.rng.random() < 0.1:
            geometry["padding"] = "valid"
        else:
            geometry["padding"] = self.numbers(0, 1, 1, 2)
            geometry["stride"] = self.numbers(1, 1, 1, 2, 3)
            if self.rng.random() < 0.2:
                pads = tuple(self.rng.randint(0, 2) for _ in range(2 * self.rank))
        conv = self.of_rank("Conv")(channels, to, kernel, **geometry)
        return self.followed(Padded(pads, conv) if pads else conv, to)

    def followed(self, layer: nn.Module, channels: int) -> nn.Module:
        more = [layer]
        if self.rng.random() < 0.4:
            more.append(self.of_rank("BatchNorm")(channels))
        if self.rng.random() < 0.7:
            more.append(nn.ReLU(True) if self.rng.random() < 0.2 else self.an_activation())
        return nn.Sequential(*more) if len(more) > 1 else layer

    def an_activation(self) -> nn.Module:
        return self.rng.choice(
            (
                nn.ReLU(),
                nn.ReLU(),
                nn.ReLU6(),
                nn.Hardtanh(-0.7, 0.4),
                nn.Hardswish(),
                nn.SiLU(),
                nn.Sigmoid(),
                nn.GELU(),
                nn.GELU("tanh"),
                nn.LeakyReLU(0.1),
                nn.Hardsigmoid(),
                nn.Tanh(),
                nn.ELU(),
            )
        )

    def activation(self, x: Tensor) -> nn.Module:
        return self.an_activation()

    def depthwise(self, x: Tensor) -> nn.Module:
        channels, kernel = x.shape[1], self.numbers(2, 3, 3, 5, 7)
        conv = self.of_rank("Conv")(
            channels,
            channels * self.rng.choice((1, 1, 1, 2)),
            kernel,
            stride=self.numbers(1, 1, 2),
            padding=self.numbers(0, 1, 2),
            groups=channels,
        )
        return self.followed(conv, conv.out_channels)

    def chained(self, x: Tensor) -> nn.Module:
        """1x1, depthwise at any stride, 1x1: what goes through its rows in turn."""
        conv, wide = self.of_rank("Conv"), self.rng.choice((8, 16, 24, 33))
        stride, padding = self.numbers(1, 2, 2, 3), self.numbers(0, 1, 1, 2)
        middle = conv(wide, wide, self.numbers(2, 3, 3, 5), stride, padding, groups=wide)
        first, last = conv(x.shape[1], wide, 1), conv(wide, self.rng.choice(CHANNELS), 1)
        return nn.Sequential(first, nn.ReLU6(), middle, nn.ReLU6(), last)

    def transposed(self, x: Tensor) -> nn.Module:
        channels, to = x.shape[1], self.rng.choice(CHANNELS)
        groups = self.rng.choice([n for n in (1, 1, 2, channels) if channels % n == 0])
        if to % groups:
            groups = 1
        conv = self.of_rank("ConvTranspose")(
            channels,
            to,
            self.numbers(1, 2, 2, 3, 4, 5),
            self.numbers(1, 2, 2, 3),
            padding=self.numbers(0, 1, 1, 2),
            output_padding=self.rng.choice((0, 0, 1)),
            groups=groups,
            bias=self.rng.random() < 0.8,
            dilation=self.rng.choice((1, 1, 1, 2)),
        )
        return self.followed(conv, to)

    def body(self, x: Tensor) -> nn.Module:
        """Of the sizes of x."""
        return nn.Identity() if self.rng.random() < 0.4 else self.layer(x, x.shape[1], same=True)

    def residual(self, x: Tensor) -> nn.Module:
        then = self.an_activation() if self.rng.random() < 0.6 else nn.Identity()
        first = self.layer(x, x.shape[1], same=True)
        return Residual(first, self.body(x), self.rng.random() < 0.5, then)

    def concat(self, x: Tensor) -> nn.Module:
        bodies = [self.layer(x, same=True) for _ in range(self.rng.randint(1, 2))]
        if self.rng.random() < 0.5:
            bodies.append(nn.Identity())
        return Concat(*bodies)

    def pooling(self, x: Tensor) -> nn.Module:
        size = self.numbers(2, 3)
        stride = self.rng.choice((1, 2, None))
        ceil = self.rng.random() < 0.2
        dilation = self.rng.choice((1, 2)) if min(x.shape[2:]) >= 8 else 1
        return self.rng.choice(
            (
                lambda: self.of_rank("MaxPool")(size, stride, self.rng.choice((0, 1)), dilation),
                lambda: self.of_rank("MaxPool")(size, stride, ceil_mode=ceil),
                lambda: self.of_rank("AvgPool")(size, stride, self.rng.choice((0, 1))),
                lambda: self.of_rank("AvgPool")(size, stride, 1, ceil, False),
                lambda: self.of_rank("AdaptiveAvgPool")(self.numbers(1, 2, 3)),
                lambda: nn.Upsample(scale_factor=2),
            )
        )()

    def halves(self, x: Tensor) -> nn.Module:
        half = x.chunk(2, 1)[1]
        return Halves(self.layer(half, half.shape[1], same=True), self.rng.random() < 0.7)

    def gated(self, x: Tensor) -> nn.Module:
        gate = self.rng.choice((nn.Sigmoid(), nn.Hardsigmoid()))
        return Gated(x.shape[1], self.of_rank("Conv"), gate)

    def twice(self, x: Tensor) -> nn.Module:
        return Twice(self.layer(x, x.shape[1], same=True))

    def last(self, x: Tensor) -> nn.Module:
        to = self.rng.choice(CHANNELS)
        return Last(nn.Sequential(nn.Linear(x.shape[1], to), self.an_activation()))

    def head(self, x: Tensor) -> nn.Module:
        first = self.rng.choice(
            (
                lambda: nn.Sequential(self.of_rank("AdaptiveAvgPool")(1), nn.Flatten()),
                nn.Flatten,
                Mean,
            )
        )()
        inputs = first(x).shape[1]
        layers = [nn.Linear(inputs, self.rng.choice((1, 5, 16, 33)), self.rng.random() < 0.8)]
        if self.rng.random() < 0.5:
            layers += [self.an_activation(), nn.Linear(layers[0].out_features, 10)]
        return nn.Sequential(first, *layers)


def randomized(module: nn.Module) -> nn.Module:
    """With statistics of batch norms that matter."""
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.running_mean.normal_(0, 0.3)
            each.running_var.uniform_(0.5, 2)
            each.weight.data.uniform_(0.5, 1.5)
    return module


@dataclass
class RandomModel:
    """A converted graph, and inputs of batches that it takes; all of it depends on the seed."""

    seed: int
    quantizer: str = field(init=False)
    model: nn.Module = field(init=False)
    converted: fx.GraphModule = field(init=False)
    inputs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(self.seed)
            builder = Builder(self.seed)
            self.quantizer = builder.rng.choice(QUANTIZERS)
            self.model = builder.model()
            x = builder.x
            calibration = [x, torch.randn_like(x)]
            self.converted = self._converted(calibration, builder.rng)
            others = [torch.randn(n, *x.shape[1:]) for n in (0, 1, 3) if n != len(x)]
            others.append(torch.randn(2, x.shape[1], *(size + 3 for size in x.shape[2:])))
            self.inputs = [torch.randn_like(x), *filter(self._takes, others)]

    def _converted(self, calibration: list[Tensor], rng: random.Random) -> fx.GraphModule:
        if self.quantizer == "torch_blocked":
            return tb.quantize(self.model, calibration)
        if self.quantizer == "x86":
            try:
                return by_x86(self.model, calibration)
            except ValueError:  # it takes no padding in words, say
                self.quantizer = "by hand"
        return by_hand(self.model, calibration, rng)

    def _takes(self, x: Tensor) -> bool:
        """Views in the graph may say the sizes."""
        try:
            self.converted(x)
        except Exception:
            return False
        return True


def by_x86(model: nn.Module, calibration: list[Tensor]) -> fx.GraphModule:
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    for strict in (False, True):  # which it needs where a module is called twice
        exported = torch.export.export(model, (calibration[0],), strict=strict)
        try:
            prepared = prepare_pt2e(exported.module(check_guards=False), quantizer)
            break
        except ValueError:
            if strict:
                raise
    prepared._forward_pre_hooks.clear()
    for each in calibration:
        prepared(each)
    converted = convert_pt2e(prepared)
    converted._forward_pre_hooks.clear()
    return converted


# ---- the comparison -----------------------------------------------------------------------------


def is_op(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and str(node.target).startswith(
        f"quantized_decomposed.{name}"
    )


def edges_of(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """What makes bytes, with one of its readers."""
    pairs = []
    for node in graph.nodes:
        if is_op(node, "quantize_per_tensor"):
            reader = next((user for user in node.users if is_op(user, "dequantize")), None)
            if reader is not None:
                pairs.append((node, reader))
    return pairs


def watched(converted: fx.GraphModule) -> fx.GraphModule:
    """The same, which returns the numbers of all bytes that it makes, too."""
    graph = copy.deepcopy(converted.graph)
    graph.set_codegen(fx.graph.CodeGen())
    output = graph.output_node()
    shown = []
    with graph.inserting_before(output):
        for node, reader in edges_of(graph):
            arguments = (node, *reader.args[1:])
            shown.append(graph.call_function(reader.target, arguments, reader.kwargs))
    (result,) = output.args[0]
    output.args = ((result, shown),)
    return fx.GraphModule(converted, graph).eval()


class Reference(fx.Interpreter):
    """The reference graph on the bytes of another run of it."""

    def __init__(self, converted: fx.GraphModule, numbers: list[Tensor], counts: Counter) -> None:
        super().__init__(converted)
        edges = edges_of(converted.graph)
        self.numbers = {node: (reader, n) for (node, reader), n in zip(edges, numbers, strict=True)}
        self.counts = counts

    def run_node(self, n: fx.Node) -> Any:
        expected = super().run_node(n)
        if n not in self.numbers:
            return expected
        _, numbers = self.numbers[n]
        _, arguments = self.fetch_args_kwargs_from_env(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        bytes_ = n.target(numbers, *args[1:], **arguments)
        assert bytes_.shape == expected.shape, f"{n}: {bytes_.shape}, not {expected.shape}"
        apart = (bytes_.long() - expected.long()).abs()
        self.counts["all"] += apart.numel()
        self.counts["one"] += int((apart == 1).sum())
        if apart.numel() and apart.max() > 1:
            raise AssertionError(
                f"{n}: {int((apart > 1).sum())} of {apart.numel()} bytes are more than one apart, "
                f"{int(apart.max())} at most"
            )
        return bytes_


@torch.no_grad()
def check(case: RandomModel) -> Counter:
    """How many bytes were compared, "all", and how many of them were one apart, "one". Raises what
    differs."""
    counts: Counter = Counter()
    x = case.inputs[0]
    shown = tb.optimize(watched(case.converted), x, tune=False, verify=False)
    plain = tb.optimize(case.converted, x, tune=False, verify=False)
    shown.choice = plain.choice = "blocked"
    for each in case.inputs:
        result, numbers = shown(each)
        expected = Reference(case.converted, numbers, counts).run(each)
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5 + 1e-5 * scale)
        alone = plain(each)
        torch.testing.assert_close(alone, result, rtol=1e-4, atol=1e-5 + 1e-5 * scale)
    counts["steps of bytes"] += sum("dots" in step.implementation for step in plain.steps())
    return counts


def run_seeds(seeds, say=print) -> tuple[Counter, list[int]]:
    """The sums of the counts of these models, and the seeds of those that fail."""
    total: Counter = Counter()
    failed = []
    for seed in seeds:
        case = None
        try:
            case = RandomModel(seed)
            total += check(case)
        except Exception as error:
            failed.append(seed)
            kind = case.quantizer if case else "its quantizer"
            say(f"seed {seed}, {kind}: {type(error).__name__}: {error}"[:1500])
            if case is None:
                say("".join(traceback.format_exception(error)[-3:]))
        total["models"] += 1
    return total, failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seed-only", type=int, help="this model alone, printed")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.models)
    if options.seed_only is not None:
        seeds = [options.seed_only]
        case = RandomModel(options.seed_only)
        print(case.model, [tuple(x.shape) for x in case.inputs], case.converted.code, sep="\n")
        print(tb.optimize(case.converted, case.inputs[0], tune=False, verify=False).plan())
    start = time.monotonic()
    total, failed = run_seeds(seeds, lambda text: print(text, flush=True))
    print(
        f"{total['models']} models, {total['steps of bytes']} layers on bytes, {total['all']} "
        f"bytes compared: {total['one']} one apart; {len(failed)} models fail; "
        f"{time.monotonic() - start:.0f} s"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
