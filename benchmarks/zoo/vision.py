"""torchvision: a model or two of each family, and ultralytics' networks, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from zoo.row import Inputs, Row, Size, batches, images, make, squares

IMAGES = squares(64, 96, 80, 75)
VIDEOS = ((1, 8, 64, 64), (2, 8, 64, 64), (1, 6, 48, 80), (1, 12, 56, 56))
FIVE = {"weights": None, "num_classes": 5}
# Detectors resize their images, to sizes that are small here, and give lists of dicts of as many
# boxes as pass a threshold: few, of few classes, so that hardly any two have almost one score.
BOXES = {**FIVE, "weights_backbone": None, "min_size": 96, "max_size": 128}
FEW = {
    "box_detections_per_img": 5,
    "rpn_pre_nms_top_n_test": 50,
    "rpn_post_nms_top_n_test": 20,
}
SINGLE = {**FIVE, "weights_backbone": None, "detections_per_img": 5, "topk_candidates": 20}
IMAGES_OF_DETECTORS = ((1, 96, 96), (2, 96, 128), (1, 128, 80), (1, 112, 112))


def _flow(batch: int, *spatial: int) -> Inputs:
    return torch.rand(batch, 3, *spatial), torch.rand(batch, 3, *spatial)


def _torchvision(
    names: str, sizes: tuple[Size, ...], inputs: Callable[..., Inputs] | None = None, **settings
) -> Iterable[Row]:
    for name in names.split():
        build = make("torchvision.models:get_model", name, **settings)
        yield Row(f"torchvision/{name}", build, inputs or images(3), sizes)


def _yolo(names: str, sizes: tuple[Size, ...]) -> Iterable[Row]:
    def network(name: str) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            from ultralytics import YOLO

            return YOLO(f"{name}.yaml", verbose=False).model

        return build

    for name in names.split():
        yield Row(f"ultralytics/{name}", network(name), images(3), sizes)


CLASSIFIERS = """
alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d densenet121 squeezenet1_1 mobilenet_v2
mobilenet_v3_large mnasnet0_5 efficientnet_b0 efficientnet_v2_s regnet_x_400mf regnet_y_400mf
convnext_tiny shufflenet_v2_x1_0
"""

ROWS = (
    *_torchvision(CLASSIFIERS, IMAGES, **FIVE),
    *_torchvision(
        "inception_v3", squares(96, 128, 112, 107), **FIVE, init_weights=False, aux_logits=False
    ),
    *_torchvision("swin_v2_t", squares(64, 96, 80, 72), **FIVE),
    *_torchvision("maxvit_t", batches(224, 224), **FIVE),
    *_torchvision("vit_b_32", batches(224, 224), **FIVE),
    *_torchvision(
        "deeplabv3_mobilenet_v3_large deeplabv3_resnet50", IMAGES, **FIVE, weights_backbone=None
    ),
    *_torchvision(
        """fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn fasterrcnn_resnet50_fpn_v2
        maskrcnn_resnet50_fpn keypointrcnn_resnet50_fpn""",
        IMAGES_OF_DETECTORS,
        **BOXES,
        **FEW,
    ),
    *_torchvision(
        "retinanet_resnet50_fpn retinanet_resnet50_fpn_v2 fcos_resnet50_fpn",
        IMAGES_OF_DETECTORS,
        **SINGLE,
        min_size=96,
        max_size=128,
    ),
    *_torchvision("ssd300_vgg16 ssdlite320_mobilenet_v3_large", IMAGES_OF_DETECTORS, **SINGLE),
    *_torchvision("mc3_18 r2plus1d_18", VIDEOS, **FIVE),
    *_torchvision(
        "s3d", ((1, 16, 224, 224), (2, 16, 224, 224), (1, 16, 256, 224), (1, 24, 224, 224)), **FIVE
    ),
    *_torchvision("mvit_v1_b", batches(16, 224, 224), **FIVE),
    *_torchvision(
        "swin3d_t", ((1, 4, 64, 64), (2, 4, 64, 64), (1, 6, 64, 96), (1, 4, 80, 64)), **FIVE
    ),
    *_torchvision(
        "raft_small raft_large",
        ((1, 128, 128), (2, 128, 128), (1, 128, 160), (1, 160, 136)),
        _flow,
        weights=None,
    ),
    *_yolo(
        "yolov5n yolov8n yolov9t yolov10n yolo11n yolo12n yolo26n yolo11n-seg yolo11n-pose",
        squares(64, 96, 128, 160),
    ),
)
