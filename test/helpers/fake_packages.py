"""Small packages in place of timm, torchvision and pytorchcv, with their ways to make models."""

from pathlib import Path

TIMM = """
from torch import nn

SIZES = {"resnet50": (3, 32, 32), "resnet18": (3, 32, 32), "mobilenetv2_100": (3, 24, 24)}


def list_models():
    return sorted(SIZES)


def create_model(name, pretrained):
    assert not pretrained
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    model.pretrained_cfg = {"input_size": SIZES[name.partition(".")[0]]}
    return model
"""

TORCHVISION = """
from functools import partial
from types import SimpleNamespace

from torch import nn


def resnet50(*, weights, progress=True):
    assert weights is None
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())


def mobilenet_v2(*, weights):
    return resnet50(weights=weights)


def fcn_resnet50(*, weights, weights_backbone="DEFAULT"):
    assert weights is None and weights_backbone is None
    return nn.Conv2d(3, 16, 3)


def r3d_18(*, weights):
    return nn.Conv3d(3, 16, 3)


BUILDERS = {each.__name__: each for each in (resnet50, mobilenet_v2, fcn_resnet50, r3d_18)}
TRANSFORMS = {
    "resnet50": partial(print, crop_size=40),
    "mobilenet_v2": partial(print, crop_size=40),
    "fcn_resnet50": partial(print, resize_size=520),
    "r3d_18": partial(print, crop_size=(28, 28)),
}


def list_models():
    return list(BUILDERS)


def get_model_builder(name):
    return BUILDERS[name]


def get_model(name, **settings):
    return BUILDERS[name](**settings)


def get_model_weights(name):
    return SimpleNamespace(DEFAULT=SimpleNamespace(transforms=TRANSFORMS[name]))
"""

PYTORCHCV = """
from torch import nn


def unet_cityscapes():
    model = nn.Conv2d(4, 16, 3)
    model.in_channels, model.in_size = 4, (16, 32)
    return model


def resnet10():
    return nn.Conv2d(3, 16, 3)


def get_model(name, pretrained):
    assert not pretrained
    return globals()[name]()
"""

FILES = {
    "timm/__init__.py": TIMM,
    "torchvision/__init__.py": "",
    "torchvision/models/__init__.py": TORCHVISION,
    "pytorchcv/__init__.py": "",
    "pytorchcv/model_provider.py": PYTORCHCV,
}


def write(folder: Path) -> Path:
    """Writes them into the folder, for sys.path; returns it."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
