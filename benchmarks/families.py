"""One model of each family that nobody has tuned for, optimized, beside torch and OpenVINO.

    python benchmarks/families.py --of timm [NAME...] --threads 2
    python benchmarks/families.py --of pytorchcv --threads 2
    python benchmarks/families.py --of kinds --threads 2

The smallest model of each family of a package, with random weights (zoo/families.py); or small
nets, each around one kind of layer (zoo/kinds.py). Each has a process of its own, in which all
three run in interleaved rounds once their results are those of the model.
OpenVINO converts the module itself."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import harness
import torch
from torch import nn
from torch.utils import _pytree as pytree
from zoo.families import PACKAGES

from torch_blocked.bench.measure import on_threads, time_interleaved

# Of the largest value: what rounding does to most deep networks is below. What a nudge of the input
# moves by a quarter of it, rounding may have.
TOLERANCE, NUDGE, TIMES = 1e-4, 1e-6, 4


def by_openvino(model: nn.Module, x: torch.Tensor, threads: int) -> Any:
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    network = openvino.convert_model(model, example_input=x)
    request = openvino.Core().compile_model(network, "CPU", settings).create_infer_request()
    input = x.numpy()
    return lambda: [torch.from_numpy(each) for each in request.infer([input]).to_tuple()]


def _apart(result: Any, expected: Any) -> float:
    """The largest difference of any tensor, of the largest value there."""
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def case(package: str, name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Best milliseconds of each, and what is wrong; an engine that is wrong is not timed."""
    import torch_blocked

    model, x = PACKAGES[package][0](name)
    with torch.no_grad(), on_threads(threads), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected = model(x)
        optimized = torch_blocked.optimize(model, x)
        faults = [str(each.message) for each in said if "torch_blocked" in str(each.message)]
        rivals = {"torch": lambda: model(x), "ours": lambda: optimized(x)}
        try:
            rivals["openvino"] = by_openvino(model, x, threads)
        except Exception as error:  # whatever its converter raises
            faults.append(f"openvino: {type(error).__name__}")
        nudged = _apart(model(x * (1 + NUDGE)), expected)
        for engine in rivals.keys() - {"torch"}:
            apart = _apart(rivals[engine](), expected)
            if not apart <= max(TOLERANCE, TIMES * nudged):
                faults.append(f"{engine} is wrong by {apart:.1e} of the largest value")
                del rivals[engine]
        times = time_interleaved(rivals, rounds)
    return {"ms": {each: times[each].min_ms for each in times}, "faults": faults}


HEADER = ["model", "torch, ms", "openvino, ms", "ours, ms", "beside torch", "beside openvino"]


def row_of(name: str, ms: dict[str, float]) -> list[str]:
    cells = [f"{ms[each]:.2f}" if each in ms else "-" for each in ("torch", "openvino", "ours")]
    ratios = [harness.speed(ms.get(each), ms.get("ours")) for each in ("torch", "openvino")]
    return [name, *cells, *ratios]


def measured(package: str, name: str, threads: int, rounds: int) -> dict[str, Any]:
    try:
        return dict(
            harness.in_process(
                __file__, package, name, threads, rounds, env=harness.on_cores(threads)
            )
        )
    except harness.Failed as error:
        return {"ms": {}, "faults": [str(error)]}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if anything was wrong, or failed."""
    parser = harness.parser(__doc__, threads=2, rounds=15)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--of", choices=PACKAGES, default="timm", help="default: timm")
    args = parser.parse_args(argv)
    rows, ratios, faults = [], [], []
    for name in args.names or PACKAGES[args.of][1]:
        result = measured(args.of, name, args.threads, args.rounds)
        ms = result["ms"]
        rows.append(row_of(name, ms))
        harness.progress(*rows[-1], *result["faults"])
        faults += [f"{name}: {each}" for each in result["faults"]]
        if {"openvino", "ours"} <= ms.keys():
            ratios.append(ms["openvino"] / ms["ours"])
    notes = [*harness.mean_speed("beside openvino", ratios), *faults]
    harness.finish(args, [harness.Table("", HEADER, rows)], notes, rounds=args.rounds)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(harness.run(main, case))
