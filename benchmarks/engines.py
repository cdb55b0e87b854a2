"""The engines that peers.py compares, and the process that runs one of them.

    python benchmarks/engines.py ENGINE JOB     (a process of peers.py, which talks to it in JSON)

It loads the model, checks its result against float64, answers with one line, and then times calls
when asked. Each engine imports its own packages only."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Largest |y - y64| / largest |y64| of a result that is timed. The Winograd kernels of the peers
# stay below 1e-4; reduced precision (bf16, f16) is above 1e-3.
TOLERANCE = 5e-4
# The same of engines that compute in less: a wrong result is off by all of it.
TOLERANCES = {"float32": TOLERANCE, "bfloat16": 0.2, "int8": 0.5}
# A call shorter than this is repeated once before each sample: it brings the caches back.
COLD_MS = 100.0


@dataclass(frozen=True)
class Job:
    """One row of the comparison; folder holds model.pt and what the batch needs."""

    model: str
    batch: int
    threads: int
    folder: str

    @property
    def files(self) -> Path:
        """Folder of input.npy, expected.npy and model.onnx of this batch."""
        return Path(self.folder) / f"batch{self.batch}"


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """--cache: where exported models are kept (exports.py)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    default = home / "torch_blocked" / "peers"
    parser.add_argument("--cache", type=Path, default=default, help="exported models")


@dataclass(frozen=True)
class Engine:
    """load(job) returns a function that computes the output for the input of the job once.

    package: the distribution whose version is reported. needs: the export it reads, if any.
    tunes: measures while it loads, so it is loaded when nothing else runs. precision: what it
    computes in; engines are compared with those of the same."""

    load: Callable[[Job], Callable[[], Any]]
    package: str
    needs: str | None = None
    tunes: bool = False
    ours: bool = False
    precision: str = "float32"


def torch_model(job: Job, folded: bool = False) -> Any:
    """The job's model as exports.py stored it, for inference."""
    import torch
    from zoo.row import declare_torchvision_ops

    from torch_blocked.bench.fold import fold_batch_norms

    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)
    declare_torchvision_ops()
    model = torch.load(Path(job.folder) / "model.pt", weights_only=False)
    model.requires_grad_(False)
    return fold_batch_norms(model)[0] if folded else model


def torch_input(job: Job) -> Any:
    import numpy
    import torch

    return torch.from_numpy(numpy.load(job.files / "input.npy"))


def load_torch(folded: bool, channels_last: bool, compiles: bool = False) -> Callable:
    """Eager or compiled torch, with or without folded batch norms, in one memory format."""

    def load(job: Job) -> Callable[[], Any]:
        import torch

        from torch_blocked.bench.inference import CHANNELS_LAST

        model, input = torch_model(job, folded), torch_input(job)
        if channels_last:
            if input.dim() not in CHANNELS_LAST:
                raise NotImplementedError("torch has no channels_last format of 1-D signals")
            _, memory_format = CHANNELS_LAST[input.dim()]
            model.to(memory_format=memory_format)
            input = input.contiguous(memory_format=memory_format)
        if compiles:
            torch._inductor.config.freezing = True
            model = torch.compile(model)
        return lambda: model(input)

    return load


def load_mkldnn(job: Job) -> Callable[[], Any]:
    """torch's opaque oneDNN tensors."""
    from torch.utils.mkldnn import to_mkldnn

    model = to_mkldnn(torch_model(job, folded=True))
    input = torch_input(job)
    return lambda: model(input.to_mkldnn()).to_dense()


def load_onnxruntime(file: str = "model.onnx") -> Callable:
    def load(job: Job) -> Callable[[], Any]:
        import numpy
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job.threads
        options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            job.files / file, options, providers=["CPUExecutionProvider"]
        )
        feed = {session.get_inputs()[0].name: numpy.load(job.files / "input.npy")}
        return lambda: session.run(None, feed)[0]

    return load


def load_openvino(
    hint: str | None = "f32",
    file: str = "model.onnx",
    prepared: Callable = lambda model, job: model,
) -> Callable:
    """hint: the precision it is told; None: its own choice. prepared(model, job): what runs."""

    def load(job: Job) -> Callable[[], Any]:
        import numpy
        import openvino

        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads}
        if hint:
            settings["INFERENCE_PRECISION_HINT"] = hint
        core = openvino.Core()
        network = prepared(core.read_model(job.files / file), job)
        model = core.compile_model(network, "CPU", settings)
        request = model.create_infer_request()
        request.set_input_tensor(openvino.Tensor(numpy.load(job.files / "input.npy")))

        def run() -> Any:
            request.infer()
            return request.get_output_tensor().data

        return run

    return load


def by_nncf(network: Any, job: Job) -> Any:
    """Quantized by OpenVINO's own tool, as it does by default, for the inputs that others see."""
    import nncf
    from exports import calibration

    inputs = [each.numpy() for each in calibration(torch_input(job))]
    return nncf.quantize(network, nncf.Dataset(inputs), subset_size=len(inputs))


def load_ncnn(job: Job) -> Callable[[], Any]:
    """ncnn has no batches: the images run one after the other."""
    import ncnn
    import numpy

    ncnn.set_omp_num_threads(job.threads)
    net = ncnn.Net()
    net.opt.num_threads = job.threads
    net.opt.lightmode = True
    for precision in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage"):
        setattr(net.opt, f"use_{precision}", False)
    files = Path(job.folder) / "ncnn"
    failed = net.load_param(str(files / "model.ncnn.param"))
    failed = failed or net.load_model(str(files / "model.ncnn.bin"))
    if failed:
        raise NotImplementedError("ncnn does not load what pnnx made of the model")
    images = [ncnn.Mat(image).clone() for image in numpy.load(job.files / "input.npy")]

    def run() -> Any:
        outputs = []
        for image in images:
            extractor = net.create_extractor()
            extractor.input("in0", image)
            failed, output = extractor.extract("out0")
            if failed:
                raise RuntimeError(f"ncnn's extract gave {failed}")
            outputs.append(numpy.array(output))
        return numpy.stack(outputs)

    return run


def load_mnn(job: Job) -> Callable[[], Any]:
    import MNN
    import numpy

    settings = {"backend": "CPU", "numThread": job.threads, "precision": "high"}
    runtime = MNN.nn.create_runtime_manager((settings,))
    names = json.loads((job.files / "mnn" / "names.json").read_text())
    path = str(job.files / "mnn" / "model.mnn")
    net = MNN.nn.load_module_from_file(path, *names, runtime_manager=runtime)
    values = numpy.load(job.files / "input.npy")
    input = MNN.expr.placeholder(list(values.shape), MNN.expr.NCHW, MNN.numpy.float32)
    input.write(values)
    return lambda: MNN.expr.convert(net.forward([input])[0], MNN.expr.NCHW).read()


def load_litert(job: Job) -> Callable[[], Any]:
    """LiteRT, once TensorFlow Lite, with XNNPACK."""
    import numpy
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(job.files / "litert" / "model.tflite"), num_threads=job.threads)
    interpreter.allocate_tensors()
    (input,), (output,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(input["index"], numpy.load(job.files / "input.npy"))

    def run() -> Any:
        interpreter.invoke()
        return interpreter.get_tensor(output["index"])

    return run


def load_blocked_eager(job: Job) -> Callable[[], Any]:
    """The folded model, called on a blocked tensor."""
    import torch_blocked

    model, input = torch_model(job, folded=True), torch_input(job)

    def run() -> Any:
        output = model(torch_blocked.to_blocked(input))
        return output.to_dense() if torch_blocked.is_blocked(output) else output

    return run


def load_blocked(job: Job) -> Callable[[], Any]:
    """With a fact on it: whether the model was captured as one graph."""
    import torch_blocked
    from torch_blocked.optimized_module import OptimizedModule

    input = torch_input(job)
    model = torch_blocked.optimize(torch_model(job), input)

    def run() -> Any:
        return model(input)

    run.facts = {"whole": isinstance(model, OptimizedModule)}
    return run


def load_blocked_bfloat16(job: Job) -> Callable[[], Any]:
    import torch

    import torch_blocked

    input = torch_input(job)
    model = torch_blocked.optimize(torch_model(job), input, dtype=torch.bfloat16)
    return lambda: model(input)


def quantized_model(job: Job) -> Any:
    """What torchao's flow has made of the model for Inductor on x86 (exports.py)."""
    import torch
    from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers the ops

    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)
    return torch.export.load(job.files / "pt2e" / "model.pt2").module(check_guards=False)


def load_blocked_int8(job: Job) -> Callable[[], Any]:
    import torch_blocked

    input = torch_input(job)
    model = torch_blocked.optimize(quantized_model(job), input)
    return lambda: model(input)


def load_inductor_int8(job: Job) -> Callable[[], Any]:
    import torch
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401  its passes

    torch._inductor.config.freezing = True
    input, model = torch_input(job), torch.compile(quantized_model(job))
    return lambda: model(input)


ENGINES = {
    "torch": Engine(load_torch(False, False), "torch"),
    "torch-cl": Engine(load_torch(False, True), "torch"),
    "torch-fold": Engine(load_torch(True, False), "torch"),
    "torch-cl-fold": Engine(load_torch(True, True), "torch"),
    "torch-compile": Engine(load_torch(False, False, compiles=True), "torch"),
    "torch-mkldnn": Engine(load_mkldnn, "torch"),
    "onnxruntime": Engine(load_onnxruntime(), "onnxruntime", "onnx"),
    "openvino": Engine(load_openvino(), "openvino", "onnx"),
    "ncnn": Engine(load_ncnn, "ncnn", "ncnn"),
    "mnn": Engine(load_mnn, "MNN", "mnn"),
    "litert": Engine(load_litert, "ai-edge-litert", "litert"),
    "blocked-eager": Engine(load_blocked_eager, "torch_blocked", ours=True),
    "torch_blocked": Engine(load_blocked, "torch_blocked", tunes=True, ours=True),
    "openvino-bf16": Engine(load_openvino("bf16"), "openvino", "onnx", precision="bfloat16"),
    "torch_blocked-bf16": Engine(
        load_blocked_bfloat16, "torch_blocked", tunes=True, ours=True, precision="bfloat16"
    ),
    "onnxruntime-int8": Engine(
        load_onnxruntime("qdq/model.onnx"), "onnxruntime", "qdq", precision="int8"
    ),
    "openvino-int8": Engine(
        load_openvino(None, "qdq/model.onnx"), "openvino", "qdq", precision="int8"
    ),
    "openvino-nncf": Engine(
        load_openvino(None, prepared=by_nncf), "nncf", "onnx", precision="int8"
    ),
    "inductor-int8": Engine(load_inductor_int8, "torch", "pt2e", precision="int8"),
    "torch_blocked-int8": Engine(
        load_blocked_int8, "torch_blocked", "pt2e", tunes=True, ours=True, precision="int8"
    ),
}


def relative_error(output: Any, expected: Any) -> float:
    """The largest error relative to the largest expected value; NaN stays NaN.

    Engines without batches drop dims of extent 1; the number of elements must be right."""
    import numpy

    output = numpy.asarray(output)
    if output.size != expected.size:
        raise ValueError(f"the output has dims {output.shape}, expected {expected.shape}")
    error = numpy.abs(output.reshape(expected.shape) - expected).max()
    return float(error / numpy.abs(expected).max())


def ready(engine: Engine, job: Job) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Loads the model and checks its result: what runs it, and what the parent is told.

    Raises whatever the engine raises, and ValueError for a wrong result."""
    import numpy

    start = time.perf_counter()
    run = engine.load(job)
    run()
    setup_s = time.perf_counter() - start
    error = relative_error(run(), numpy.load(job.files / "expected.npy"))
    if not error < TOLERANCES[engine.precision]:  # NaN, too
        raise ValueError(f"wrong by {error:.1e} of the largest float64 value")
    facts = {"setup_s": round(setup_s, 2), "relative_error": error, "rss_mib": resident_mib()}
    return run, facts | getattr(run, "facts", {})


def resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 20


def sample(run: Callable[[], Any], calls: int) -> list[float]:
    """Milliseconds of each of `calls` calls."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(name: str, job: Job) -> None:
    """Writes one JSON line when the model is loaded, then one for each line of input, a number of
    calls: their milliseconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes to the log
    try:
        run, facts = ready(ENGINES[name], job)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        print(json.dumps({"failed": reason}), file=answers)
        raise
    print(json.dumps(facts), file=answers)
    gc.collect()
    gc.disable()
    last_ms = 0.0
    for line in sys.stdin:
        if last_ms < COLD_MS:
            run()
        times = sample(run, int(line))
        last_ms = min(times)
        print(json.dumps(times), file=answers)


def arguments(name: str, job: Job) -> list[str]:
    """The command line of the process of one engine."""
    return [sys.executable, __file__, name, json.dumps(asdict(job))]


if __name__ == "__main__":
    main(sys.argv[1], Job(**json.loads(sys.argv[2])))
