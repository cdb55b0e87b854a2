"""The smallest model of each family of a package, with ordinary images, for families.py."""

from __future__ import annotations

import torch
from torch import nn

from zoo import kinds
from zoo.row import declare_torchvision_ops, make
from zoo.timed import Timed

LARGEST = 256  # of the sides of an image; timm's models for larger ones get 224
CITYSCAPES = (256, 512)  # an eighth of the pixels of its images

TIMM = """
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

PYTORCHCV = """
airnet50_1x64d_r16 airnext50_32x4d_r2 alexnet bagnet9 bam_resnet18 bisenet_resnet18_celebamaskhq
bninception cbam_resnet18 centernet_resnet18_voc cgnet_cityscapes channelnet condensenet74_c4_g4
ctxnet_cityscapes dabnet_cityscapes danet_resnetd50b_cityscapes darknet53 darknet_tiny darts
densenet40_k12_cifar10 diaresnet10 dicenet_wd5 dla46c dpn68 drnc26
edanet_cityscapes efficientnet_edge_small_b enet_cityscapes erfnet_cityscapes
esnet_cityscapes espcnet_cityscapes espnetv2_wd2 fastscnn_cityscapes fbnet_cb
fdmobilenet_w1 fishnet99 fpenet_cityscapes hardnet39ds ibn_densenet121
ibn_resnet50 icnet_resnetd50b_cityscapes igcv3_w1 inceptionresnetv1
lednet_cityscapes lffd20x5s320v2_widerface linknet_cityscapes
lwopenpose2d_mobilenet_cmupan_coco menet108_8x1_g3 mnasnet_a1 mobilenet_w1 nasnet_4a1056
octresnet10_ad2 peleenet preresnet10 proxylessnas_mobile pspnet_resnetd50b_voc
resattnet56 resnesta18 resnet10 resneta10 resnetd50b resnext14_32x4d scnet50 segnet_cityscapes
senet16 seresnet10 sharesnet18 shufflenet_g3_w1 shufflenetv2b_w1 simplepose_resnet18_coco
simplepose_mobile_mobilenet_w1_coco sinet_cityscapes sknet50 sparsenet121 spnasnet sqnet_cityscapes
sqnxt23_w1 squeezenet_v1_1 superpointnet unet_cityscapes vgg11 vovnet27s wrn20_10_1bit_cifar10
xdensenet121_2 zfnet
""".split()


def of_timm(name: str) -> tuple[nn.Module, torch.Tensor]:
    declare_torchvision_ops()  # both packages import torchvision
    import timm

    with torch.device("meta"):
        dims = timm.create_model(name, pretrained=False).default_cfg["input_size"]
    if max(dims) > LARGEST:
        dims = (3, 224, 224)
    row = Timed(make("timm:create_model", name, pretrained=False), tuple(dims), "timm", "")
    return row.model(), torch.randn(1, *dims, generator=torch.Generator().manual_seed(0))


def of_pytorchcv(name: str) -> tuple[nn.Module, torch.Tensor]:
    declare_torchvision_ops()
    from pytorchcv.model_provider import get_model

    with torch.device("meta"):
        model = get_model(name)
    settings = {"in_size": CITYSCAPES} if name.endswith("_cityscapes") else {}
    size = settings.get("in_size", getattr(model, "in_size", (224, 224)))
    dims = (getattr(model, "in_channels", 3), *size)
    build = make("pytorchcv.model_provider:get_model", name, **settings)
    row = Timed(build, dims, "pytorchcv", "")
    return row.model(), torch.randn(1, *dims, generator=torch.Generator().manual_seed(0))


# What makes a model of a name, and the names; of `kinds` each is around one kind of layer.
PACKAGES = {
    "timm": (of_timm, TIMM),
    "pytorchcv": (of_pytorchcv, PYTORCHCV),
    "kinds": (kinds.build, list(kinds.KINDS)),
}
