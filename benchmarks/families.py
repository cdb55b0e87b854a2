"""One model of each family of timm that nobody has tuned for, optimized, beside torch and OpenVINO.

    python benchmarks/families.py [NAME...] --threads 2
    python benchmarks/families.py --kinds --threads 2

The smallest model of each family with ordinary images, with random weights; or small nets, each
around one kind of layer (zoo/kinds.py). Each has a process of its own, in which all three run in
interleaved rounds once their results are those of the model.
OpenVINO converts the module itself. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from typing import Any

import torch
from torch import nn
from zoo import kinds
from zoo.row import declare_torchvision_ops, make
from zoo.timed import Timed

from torch_blocked.bench.arguments import positive
from torch_blocked.bench.measure import on_threads, time_interleaved
from torch_blocked.text_table import markdown

# Of the largest value: what rounding does to most deep networks is below. What a nudge of the input
# moves by a quarter of it, rounding may have.
TOLERANCE, NUDGE, TIMES = 1e-4, 1e-6, 4
LARGEST = 256  # of the sides of an image; models for larger ones get 224

NAMES = """
cait_xxs24_224 coat_tiny coatnet_nano_rw_224 convit_tiny convmixer_768_32 cpubone_nano
crossvit_tiny_240 cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deit_tiny_patch16_224
densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0
efficientvim_m1 efficientvit_b0 efficientvit_m0 ens_adv_inception_resnet_v2 ese_vovnet19b_slim_dw
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_050 gmlp_ti16_224
halonet_h1 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto
inception_v4 jx_nest_tiny lcnetv2_small legacy_seresnet18 legacy_xception levit_128s lowformer_b0
mambaout_femto mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nextvit_small nfnet_l0 pit_ti_224
poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50
resmlp_12_224 resnest14d resnetv2_18 rexnet_100 sam2_hiera_tiny selecsls42 sequencer2d_s shvit_s1
skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
swinv2_tiny_window16_256 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small
visformer_tiny vit_relpos_small_patch16_224 vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224
vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p8_224
""".split()


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name in kinds.KINDS:
        return kinds.build(name)
    declare_torchvision_ops()  # timm imports torchvision
    import timm

    with torch.device("meta"):
        dims = timm.create_model(name, pretrained=False).default_cfg["input_size"]
    if max(dims) > LARGEST:
        dims = (3, 224, 224)
    row = Timed(make("timm:create_model", name, pretrained=False), tuple(dims), "timm", "")
    return row.model(), torch.randn(1, *dims, generator=torch.Generator().manual_seed(0))


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
    return lambda: torch.from_numpy(next(iter(request.infer([input]).values())))


def _apart(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


def once(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Best milliseconds of each, and what is wrong; an engine that is wrong is not timed."""
    import torch_blocked

    model, x = build(name)
    with torch.no_grad(), on_threads(threads), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected = model(x)
        optimized = torch_blocked.optimize(model, x)
        rivals = {
            "torch": lambda: model(x),
            "openvino": by_openvino(model, x, threads),
            "ours": lambda: optimized(x),
        }
        faults = [str(each.message) for each in said if "torch_blocked" in str(each.message)]
        nudged = _apart(model(x * (1 + NUDGE)), expected)
        for engine in ("openvino", "ours"):
            apart = _apart(rivals[engine](), expected)
            if not apart <= max(TOLERANCE, TIMES * nudged):
                faults.append(f"{engine} is wrong by {apart:.1e} of the largest value")
                del rivals[engine]
        times = time_interleaved(rivals, rounds)
    return {"ms": {each: times[each].min_ms for each in times}, "faults": faults}


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--once", name, str(threads), str(rounds)]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"ms": {}, "faults": [last]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


HEADER = ["model", "torch, ms", "openvino, ms", "ours, ms", "beside torch", "beside openvino"]


def row_of(name: str, ms: dict[str, float]) -> list[str]:
    cells = [f"{ms[each]:.2f}" if each in ms else "-" for each in ("torch", "openvino", "ours")]
    ratios = [
        f"{ms[each] / ms['ours']:.2f}x" if {each, "ours"} <= ms.keys() else "-"
        for each in ("torch", "openvino")
    ]
    return [name, *cells, *ratios]


def main() -> int:
    if sys.argv[1:2] == ["--once"]:
        print(json.dumps(once(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of timm, or a kind")
    parser.add_argument("--kinds", action="store_true", help="all kinds of layers")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=15)
    args = parser.parse_args()
    rows, ratios, faults = [], [], []
    for name in args.names or (kinds.KINDS if args.kinds else NAMES):
        result = measure(name, args.threads, args.rounds)
        rows.append(row_of(name, result["ms"]))
        print(*rows[-1], *result["faults"], file=sys.stderr, flush=True)
        faults += [f"{name}: {each}" for each in result["faults"]]
        if {"openvino", "ours"} <= result["ms"].keys():
            ratios.append(result["ms"]["openvino"] / result["ms"]["ours"])
    print(markdown(HEADER, rows))
    if ratios:
        mean, least = statistics.geometric_mean(ratios), min(ratios)
        print(f"\nbeside openvino: geometric mean {mean:.2f}x, least {least:.2f}x")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
