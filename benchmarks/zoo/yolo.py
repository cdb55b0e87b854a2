"""ultralytics' networks as predict() runs them, for yolo.py: random weights, fused, one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.timed import SEED, Timed

# One of each generation, and the other tasks of two of them.
NETWORKS = """
yolov5n yolov8n yolov9t yolov10n yolo11n yolo12n yolo26n yolov8n-seg yolov8n-pose yolov8n-obb
yolov8n-cls yolo11n-seg yolo11n-pose yolo11n-obb yolo11n-cls
""".split()
SIZES = ((640, 640), (480, 640), (320, 416))


class Predicted(nn.Module):
    """What a network predicts (boxes, scores, masks), without what only its losses read, as one
    tensor [N, numbers]. Each channel is scaled to values up to 1: else an error of a score would be
    nothing beside boxes of hundreds of pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.scales: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = pytree.tree_leaves(self.network(x)[0])
        if self.scales:
            found = [each * scale for each, scale in zip(found, self.scales, strict=True)]
        return torch.cat([each.flatten(1) for each in found], 1)

    def scale(self, x: torch.Tensor) -> None:
        """By the largest values of each channel for x."""
        for each in pytree.tree_leaves(self.network(x)[0]):
            others = [dim for dim in range(each.dim()) if dim != 1]
            self.scales.append(1 / each.abs().amax(others, keepdim=True).clamp(min=1e-6))


@dataclass(frozen=True)
class Yolo(Timed):
    """Layers and batch norms are fused as the predictor does it, once these have statistics."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            model.network.fuse(verbose=False)
            random = torch.Generator().manual_seed(SEED)  # the same model in each process
            model.scale(torch.randn(2, *self.input_dims, generator=random))
        return model


def spread_scores(head: nn.Module) -> None:
    """Over 0 to 1, as a trained network's: the biases that it begins with make all of them 1e-5,
    and an error of such a score, relative to it, is that of its logarithm."""
    for name in ("cv3", "one2one_cv3"):
        for branch in getattr(head, name, None) or ():
            branch[-1].bias.data.fill_(-1.5)


def _row(name: str, size: tuple[int, int]) -> Yolo:
    def build() -> nn.Module:
        from ultralytics import YOLO

        network = YOLO(f"{name}.yaml", verbose=False).model
        spread_scores(network.model[-1])
        return Predicted(network)

    return Yolo(build, (3, *size), "ultralytics", "x".join(map(str, size)))


TIMED = {f"{name}@{h}x{w}": _row(name, (h, w)) for name in NETWORKS for h, w in SIZES}
