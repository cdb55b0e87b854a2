"""Networks for medical images, most of them with skips, many in 3-D."""

from __future__ import annotations

from zoo.row import Row, batches, images, make, squares

NETS = "monai.networks.nets:"
CUBES = (
    (1, 32, 32, 32),
    (2, 32, 32, 32),
    (1, 48, 32, 32),
    (1, 32, 48, 64),
    (2, 64, 32, 32),
)
_PLAN = {
    "n_stages": 4,
    "features_per_stage": (8, 16, 24, 32),
    "kernel_sizes": 3,
    "strides": (1, 2, 2, 2),
    "n_conv_per_stage": 2,
    "num_classes": 3,
    "n_conv_per_stage_decoder": 1,
    "conv_bias": True,
}


def _plain_unet():
    from dynamic_network_architectures.architectures.unet import PlainConvUNet
    from torch import nn

    return PlainConvUNet(
        1, conv_op=nn.Conv2d, norm_op=nn.InstanceNorm2d, nonlin=nn.LeakyReLU, **_PLAN
    )


def _residual_unet():
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
    from torch import nn

    plan = {**_PLAN, "n_blocks_per_stage": _PLAN["n_conv_per_stage"]}
    plan.pop("n_conv_per_stage")
    return ResidualEncoderUNet(
        1, conv_op=nn.Conv3d, norm_op=nn.InstanceNorm3d, nonlin=nn.LeakyReLU, **plan
    )


ROWS = (
    Row(
        "monai/highresnet",
        make(NETS + "HighResNet", spatial_dims=3, in_channels=1, out_channels=3),
        images(1),
        ((1, 16, 16, 16), (2, 16, 16, 16), (1, 24, 16, 20), (1, 17, 16, 16), (2, 9, 20, 16)),
    ),
    Row(
        "monai/highresnet2d",
        make(NETS + "HighResNet", spatial_dims=2, in_channels=3, out_channels=3),
        images(3),
        squares(32, 48, 40, 33, 47),
    ),
    Row(
        "monai/unet",
        make(NETS + "UNet", 2, 1, 2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2),
        images(1),
        squares(64, 96, 72, 48, 40),
    ),
    Row(
        "monai/unet3d",
        make(NETS + "UNet", 3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        images(1),
        CUBES,
    ),
    Row(
        "monai/basic_unet",
        make(NETS + "BasicUNet", spatial_dims=2, features=(8, 8, 16, 32, 64, 8)),
        images(1),
        squares(64, 96, 80, 72, 33, 45),
    ),
    Row(
        "monai/basic_unet3d",
        make(NETS + "BasicUNet", spatial_dims=3, features=(8, 8, 16, 24, 32, 8)),
        images(1),
        ((1, 32, 32, 32), (2, 32, 32, 32), (1, 33, 32, 32), (1, 40, 36, 35), (1, 48, 32, 17)),
    ),
    Row(
        "monai/basic_unet_plus_plus",
        make(NETS + "BasicUNetPlusPlus", spatial_dims=2, features=(8, 8, 16, 32, 64, 8)),
        images(1),
        squares(64, 96, 80, 48, 112),
    ),
    Row(
        "monai/attention_unet",
        make(NETS + "AttentionUnet", 2, 1, 2, channels=(8, 16, 32), strides=(2, 2)),
        images(1),
        squares(64, 96, 72, 48, 40),
    ),
    Row(
        "monai/dynunet",
        make(
            NETS + "DynUNet",
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            kernel_size=(3, 3, 3),
            strides=(1, 2, 2),
            upsample_kernel_size=(2, 2),
            filters=(8, 16, 32),
            res_block=True,
        ),
        images(1),
        CUBES,
    ),
    Row(
        "monai/segresnet",
        make(
            NETS + "SegResNet",
            spatial_dims=3,
            init_filters=8,
            blocks_down=(1, 2, 2),
            blocks_up=(1, 1),
        ),
        images(1),
        CUBES,
    ),
    Row(
        "monai/segresnet2d",
        make(NETS + "SegResNet", spatial_dims=2, init_filters=8, in_channels=3),
        images(3),
        squares(64, 96, 72, 48, 40),
    ),
    Row(
        "monai/segresnet_ds",
        make(NETS + "SegResNetDS", spatial_dims=2, init_filters=8, in_channels=1, dsdepth=2),
        images(1),
        squares(64, 96, 128, 32, 160),
    ),
    Row(
        "monai/vnet",
        make(NETS + "VNet", spatial_dims=2, in_channels=1, out_channels=2),
        images(1),
        squares(64, 96, 80, 48, 112),
    ),
    Row(
        "monai/ahnet",
        make(NETS + "AHNet", layers=(2, 2, 2, 2), spatial_dims=2, upsample_mode="bilinear"),
        images(1),
        squares(128, 160, 192, 224),
    ),
    Row(
        "monai/densenet",
        make(
            NETS + "DenseNet",
            spatial_dims=3,
            in_channels=1,
            out_channels=3,
            init_features=16,
            growth_rate=8,
            block_config=(2, 2, 2),
        ),
        images(1),
        CUBES,
    ),
    Row(
        "monai/resnet10",
        make(
            NETS + "resnet10", spatial_dims=3, n_input_channels=1, num_classes=3, pretrained=False
        ),
        images(1),
        CUBES,
    ),
    Row(
        "monai/senet",
        make(NETS + "SEResNet50", spatial_dims=2, in_channels=3, layers=(1, 1, 1, 1)),
        images(3),
        squares(64, 96, 72, 48, 65),
    ),
    Row(
        "monai/efficientnet",
        make(NETS + "EfficientNetBN", "efficientnet-b0", pretrained=False),
        images(3),
        squares(64, 96, 72, 65, 47),
    ),
    Row(
        "monai/swin_unetr",
        make(NETS + "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, spatial_dims=2),
        images(1),
        squares(64, 96, 128, 160),
    ),
    Row(
        "monai/unetr",
        make(
            NETS + "UNETR",
            1,
            2,
            img_size=32,
            feature_size=8,
            hidden_size=48,
            mlp_dim=96,
            num_heads=4,
            spatial_dims=2,
        ),
        images(1),
        batches(32, 32),
    ),
    Row(
        "monai/autoencoder",
        make(
            NETS + "AutoEncoder",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(8, 16, 32),
            strides=(2, 2, 2),
        ),
        images(1),
        squares(64, 96, 72, 48, 40),
    ),
    Row(
        "monai/mednext",
        make(NETS + "MedNeXtSmall", spatial_dims=2, in_channels=1, out_channels=2),
        images(1),
        squares(64, 96, 80, 48),
    ),
    Row(
        "dynamic-network-architectures/plain_unet", _plain_unet, images(1), squares(64, 96, 72, 40)
    ),
    Row("dynamic-network-architectures/residual_unet3d", _residual_unet, images(1), CUBES),
)
