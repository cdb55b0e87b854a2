"""The networks that tests run: those that the package ships, and more, each for a structure that
none of the others has (squeeze and excitation, attention, shuffles of channels, dense concats)."""

from torch import nn

from torch_blocked.bench import networks
from torch_blocked.bench.networks import IMAGE, SMALL, ModelSpec

from ..draws import draws
from .convnext import convnext_tiny
from .densenet import densenet121
from .segformer import segformer_b0
from .shufflenet import shufflenet_v2
from .squeeze_excite import efficientnet_b0, mobilenet_v3_large
from .vgg import VGG, vgg16

MODELS: dict[str, ModelSpec] = networks.MODELS | {
    "vgg16": ModelSpec(vgg16, IMAGE, SMALL, "large 3x3 convolutions, no batch norm"),
    "mobilenet_v3_large": ModelSpec(
        mobilenet_v3_large, IMAGE, SMALL, "squeeze and excitation, hard swish"
    ),
    "efficientnet_b0": ModelSpec(efficientnet_b0, IMAGE, SMALL, "squeeze and excitation, SiLU"),
    "densenet121": ModelSpec(densenet121, IMAGE, SMALL, "concats, norm before convolution"),
    "shufflenet_v2": ModelSpec(shufflenet_v2, IMAGE, SMALL, "splits and shuffles of channels"),
    "convnext_tiny": ModelSpec(convnext_tiny, IMAGE, SMALL, "depthwise 7x7, layer norm, linear"),
    "segformer_b0": ModelSpec(segformer_b0, (3, 512, 512), SMALL, "attention and convolutions"),
}

# `make test` leaves out those that are a deeper or wider form of another one.
SOME = [name for name in MODELS if name not in draws(("resnet50", "efficientnet_lite0"), ())]


def build_model(name: str) -> tuple[nn.Module, str]:
    """As the package's function of this name, of all of these."""
    return networks.build(MODELS[name])


def narrow(model: nn.Module) -> nn.Module:
    """The model with fewer neurons, if it is VGG-16: its 123 million weights of linear layers take
    longer than all other models together."""
    if isinstance(model, VGG):
        head = model.classifier
        head[0], head[3], head[6] = nn.Linear(25088, 64), nn.Linear(64, 64), nn.Linear(64, 1000)
    return model
