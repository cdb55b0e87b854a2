"""What the engines of peers.py read: model, input, float64 result, and files in their formats.

    python benchmarks/exports.py MODEL BATCH FOLDER [FORMAT...]     (a process of peers.py)

Files are kept and used again, in a folder named after the sources and versions they come from."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy
import torch
from engines import version
from zoo import timed, yolo

from torch_blocked.bench import fold, models, networks
from torch_blocked.bench.fold import Untraceable, fold_batch_norms

ONNX_OPSET = 18
TIMED = timed.TIMED | yolo.TIMED
ZOO = ("builders.py", "row.py", "timed.py", "timed.txt", "yolo.py")  # what models are made of


def folder_of(cache: Path, model: str) -> Path:
    """Where the files of a model are kept; another folder for other sources or versions."""
    sources = [
        Path(__file__),
        Path(fold.__file__),
        *(Path(timed.__file__).with_name(name) for name in ZOO),
        *Path(networks.__file__).parent.glob("*.py"),
    ]
    digest = hashlib.sha256()
    for source in sorted(sources, key=lambda path: path.name):
        digest.update(source.read_bytes())
    of_another = [TIMED[model].package] if model in TIMED else []
    for package in ("torch", "onnx", "pnnx", "MNN", "litert-torch", *of_another):
        digest.update(version(package).encode())
    return cache / f"{model}-{digest.hexdigest()[:12]}"


def export(model_name: str, batch: int, folder: Path, formats: list[str]) -> dict[str, str]:
    """Makes the files that are not there yet; returns why a format could not be made, by format."""
    batch_folder = folder / f"batch{batch}"
    wanted = {
        "onnx": batch_folder / "model.onnx",
        "ncnn": folder / "ncnn" / "model.ncnn.bin",
        "mnn": batch_folder / "mnn" / "model.mnn",
        "litert": batch_folder / "litert" / "model.tflite",
        "qdq": batch_folder / "qdq" / "model.onnx",
        "pt2e": batch_folder / "pt2e" / "model.pt2",
    }
    refusals = {name: path.with_suffix(".failed") for name, path in wanted.items()}
    missing = [n for n in formats if not (wanted[n].exists() or refusals[n].exists())]
    expected = batch_folder / "expected.npy"  # the last of the files that every engine reads
    if missing or not expected.exists():
        make(model_name, batch, folder, {name: wanted[name] for name in missing}, refusals)
    return {name: refusals[name].read_text() for name in formats if refusals[name].exists()}


def load(name: str) -> models.Model:
    """A model of torch_blocked/bench/networks or of another package."""
    if name not in TIMED:
        return models.load(name)
    row = TIMED[name]
    return models.Model(name, row.model(), "its own", row.input_dims)


def make(
    model_name: str, batch: int, folder: Path, missing: dict[str, Path], refusals: dict[str, Path]
) -> None:
    """Model, input, float64 result, and an export in each format, or the reason why not."""
    batch_folder = folder / f"batch{batch}"
    batch_folder.mkdir(parents=True, exist_ok=True)
    loaded = load(model_name)
    model, input = loaded.module, loaded.random_input(batch)
    with torch.no_grad():
        if not (batch_folder / "expected.npy").exists():
            torch.save(model, folder / "model.pt")
            numpy.save(batch_folder / "input.npy", input.numpy())
            exact = copy.deepcopy(model).double()
            outputs = [exact(image.double()) for image in input.split(1)]
            numpy.save(batch_folder / "expected.npy", torch.cat(outputs).numpy())
        try:
            folded, _ = fold_batch_norms(model)
        except Untraceable:
            folded = model  # the engines fold what they can
        for name, path in missing.items():
            path.parent.mkdir(exist_ok=True)
            try:
                EXPORTS[name](folded, input, path)
            except Exception as error:
                refusals[name].write_text(str(error).strip().splitlines()[0][:160])


def export_onnx(model: torch.nn.Module, input: torch.Tensor, path: Path) -> None:
    """With the batch fixed, so that the engines know every dim."""
    partial = path.with_suffix(".partial")
    torch.onnx.export(model, (input,), partial, dynamo=False, opset_version=ONNX_OPSET)
    partial.rename(path)


def export_ncnn(model: torch.nn.Module, input: torch.Tensor, path: Path) -> None:
    """One image, by pnnx, in float32; the .bin is its last file."""
    image = input[:1]
    traced = path.parent / "model.pt"
    torch.jit.trace(model, image, check_trace=False).save(traced)
    dims = ",".join(map(str, image.shape))
    pnnx = Path(sysconfig.get_path("scripts")) / "pnnx"
    command = [pnnx, traced, f"inputshape=[{dims}]", "fp16=0"]
    subprocess.run(command, check=True, cwd=path.parent, stdout=sys.stderr)
    for leftover in path.parent.iterdir():
        if not leftover.name.startswith("model.ncnn."):
            leftover.unlink()


def export_mnn(model: torch.nn.Module, input: torch.Tensor, path: Path) -> None:
    """By way of ONNX; beside it the names of inputs and outputs, which its loader wants."""
    onnx_path = path.with_suffix(".onnx")
    names = (["input"], ["output"])
    torch.onnx.export(
        model,
        (input,),
        onnx_path,
        dynamo=False,
        opset_version=ONNX_OPSET,
        input_names=names[0],
        output_names=names[1],
    )
    path.with_name("names.json").write_text(json.dumps(names))
    converter = Path(sysconfig.get_path("scripts")) / "mnnconvert"
    command = [converter, "-f", "ONNX", "--bizCode", "-", "--modelFile", onnx_path]
    subprocess.run([*command, "--MNNModel", path], check=True, stdout=sys.stderr)
    onnx_path.unlink()


def export_litert(model: torch.nn.Module, input: torch.Tensor, path: Path) -> None:
    import litert_torch

    litert_torch.convert(model, (input,)).export(str(path))


def calibration(input: torch.Tensor) -> list[torch.Tensor]:
    """The input and three like it, for engines that measure the ranges of values."""
    generator = torch.Generator().manual_seed(0)
    others = [torch.randn(input.shape, generator=generator) for _ in range(3)]
    return [input, *(other * input.std() + input.mean() for other in others)]


def export_qdq(model: torch.nn.Module, input: torch.Tensor, path: Path) -> None:
    """Quantized by ONNX Runtime's tool: unsigned activations, signed weights by channel."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.values = iter([{"input": each.numpy()} for each in calibration(input)])

        def get_next(self) -> dict | None:
            return next(self.values, None)

    plain = path.with_suffix(".float")
    torch.onnx.export(
        model, (input,), plain, dynamo=False, opset_version=ONNX_OPSET, input_names=["input"]
    )
    partial = path.with_suffix(".partial")
    quantization.quantize_static(
        plain,
        partial,
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
    )
    plain.unlink()
    partial.rename(path)


def export_pt2e(model: torch.nn.Module, input: torch.Tensor, path: Path) -> None:
    """By torchao's flow with its quantizer for Inductor on x86."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model, (input,), strict=True)
    prepared = prepare_pt2e(exported.module(), quantizer)
    for each in calibration(input):
        prepared(each)
    converted = convert_pt2e(prepared)
    partial = path.with_suffix(".partial")
    torch.export.save(torch.export.export(converted, (input,)), partial)
    partial.rename(path)


EXPORTS = {
    "onnx": export_onnx,
    "ncnn": export_ncnn,
    "mnn": export_mnn,
    "litert": export_litert,
    "qdq": export_qdq,
    "pt2e": export_pt2e,
}

if __name__ == "__main__":
    name, batch, folder, *formats = sys.argv[1:]
    print(json.dumps(export(name, int(batch), Path(folder), formats)))
