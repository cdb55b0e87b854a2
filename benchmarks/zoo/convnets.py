"""Convolutional networks of pytorchcv, timm, torchvision and segmentation-models-pytorch."""

from __future__ import annotations

from torch import nn

from zoo.row import Row, batches, images, make, squares

IMAGES = squares(64, 96, 80, 65, 75, 47)
SEGMENTATION = "segmentation_models_pytorch:"


def _cv(name: str, sizes=None) -> Row:
    """The features of a model in pytorchcv's table of names, without the last pooling, which takes
    maps of 7x7 only."""

    def build() -> nn.Module:
        from pytorchcv.model_provider import get_model

        features = get_model(name, pretrained=False).features
        if hasattr(features, "final_pool"):
            features.final_pool = nn.Identity()
        return features

    return Row(f"pytorchcv/{name}", build, images(3), sizes or IMAGES)


def _timm(name: str, sizes=None, **settings) -> Row:
    build = make("timm:create_model", name, pretrained=False, num_classes=10, **settings)
    return Row(f"timm/{name}", build, images(3), sizes or IMAGES)


def _vision(name: str, path: str, sizes=None, **settings) -> Row:
    build = make(f"torchvision.models{path}:{name}", weights=None, **settings)
    return Row(f"torchvision/{name}", build, images(3), sizes or IMAGES)


def _segmentation(name: str, encoder: str, sizes, **settings) -> Row:
    build = make(
        SEGMENTATION + name, encoder_name=encoder, encoder_weights=None, classes=3, **settings
    )
    row = f"segmentation-models-pytorch/{name.lower()}_{encoder}"
    return Row(row, build, images(3), sizes)


MULTIPLES_OF_32 = squares(64, 96, 128, 160)

ROWS = (
    # Reversible blocks: their forward frees and refills the memory of tensors.
    _cv("revnet38", squares(64, 96, 80, 128)),
    _cv("preresnet10"),
    _cv("mobilenetv3_small_w7d20"),
    _cv("shufflenet_g3_wd4"),
    _cv("shufflenetv2_wd2"),
    _cv("menet108_8x1_g3"),
    _cv("ghostnet"),
    _cv("efficientnet_b0b"),
    _cv("mixnet_s"),
    _cv("vovnet27s"),
    _cv("dla34", squares(64, 96, 128, 160)),
    _cv("hrnet_w18_small_v1", squares(64, 96, 128, 160)),
    _cv("peleenet", squares(64, 96, 80, 128)),
    _cv("octresnet10_ad2", squares(64, 96, 128)),
    _cv("bagnet9"),
    _cv("condensenet74_c4_g4", squares(64, 96, 80, 128)),
    _cv("resnet20_cifar10", squares(32, 48, 40, 33)),
    _cv("densenet40_k12_cifar10", squares(32, 48, 40, 33)),
    _timm("resnet10t"),
    _timm("tf_efficientnet_lite0"),
    _timm("tf_mobilenetv3_small_minimal_100"),
    _timm("efficientvit_b0", squares(64, 96, 128, 160)),
    _timm("convnext_atto", squares(64, 96, 80, 75)),
    _timm("repvgg_a0"),
    _timm("ghostnetv2_100"),
    _timm("fastvit_t8", squares(64, 96, 128)),
    _timm("edgenext_xx_small", squares(64, 96, 128)),
    _timm("vit_tiny_patch16_224", batches(64, 64), img_size=64, depth=2),
    _timm("maxvit_rmlp_pico_rw_256", batches(64, 64), img_size=64),
    _timm("xcit_nano_12_p16_224", squares(64, 96, 128)),
    _vision("shufflenet_v2_x0_5", ""),
    _vision("mobilenet_v3_small", ""),
    _vision("googlenet", "", init_weights=False, aux_logits=False),
    _vision("swin_t", "", squares(64, 96, 80, 72)),
    _vision("lraspp_mobilenet_v3_large", ".segmentation", weights_backbone=None),
    _vision("fcn_resnet50", ".segmentation", squares(64, 75, 96), weights_backbone=None),
    _vision("r3d_18", ".video", ((1, 4, 32, 32), (2, 4, 32, 32), (1, 6, 48, 40), (1, 8, 33, 32))),
    _segmentation("Unet", "resnet18", MULTIPLES_OF_32),
    _segmentation("UnetPlusPlus", "mobilenet_v2", MULTIPLES_OF_32),
    _segmentation("FPN", "resnet18", MULTIPLES_OF_32),
    _segmentation("PSPNet", "resnet18", MULTIPLES_OF_32),
    _segmentation("DeepLabV3Plus", "mobilenet_v2", MULTIPLES_OF_32),
    _segmentation("Linknet", "resnet18", MULTIPLES_OF_32),
    _segmentation("PAN", "resnet18", squares(128, 160, 192)),
    _segmentation("MAnet", "resnet18", MULTIPLES_OF_32),
    _segmentation("Segformer", "mit_b0", MULTIPLES_OF_32),
)
