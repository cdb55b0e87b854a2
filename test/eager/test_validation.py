"""What dense tensors refuse through ATen's API, blocked ones refuse with ATen's own exception, and
never with a signal. Many rows are inputs that crash other libraries."""

import pytest
import torch
import torch.nn.functional as F
from helpers.direct_calls import OPS, TRANSPOSED, WEIGHT, X, random

import torch_blocked
from torch_blocked.tensor import format_name, tail_is_zero

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore:torch_blocked")]

ATEN = {
    "conv-stride-0": lambda x: F.conv2d(x, WEIGHT, stride=0),
    "conv-stride-negative": lambda x: F.conv2d(x, WEIGHT, stride=-1),
    "conv-padding-negative": lambda x: F.conv2d(x, WEIGHT, padding=-1),
    "conv-padding-word": lambda x: F.conv2d(x, WEIGHT, padding="sane"),
    "conv-same-strided": lambda x: F.conv2d(x, WEIGHT, padding="same", stride=2),
    "conv-same": lambda x: F.conv2d(x, random(8, 16, 4, 4), padding="same"),
    "conv-dilation-0": lambda x: F.conv2d(x, WEIGHT, dilation=0),
    "conv-dilation-large": lambda x: F.conv2d(x, WEIGHT, dilation=9),
    "conv-groups-0": lambda x: F.conv2d(x, WEIGHT, groups=0),
    "conv-groups-negative": lambda x: F.conv2d(x, WEIGHT, groups=-2),
    "conv-groups-3": lambda x: F.conv2d(x, WEIGHT, groups=3),
    "conv-channels": lambda x: F.conv2d(x, WEIGHT[:, :15]),
    "conv-no-channels": lambda x: F.conv2d(x, WEIGHT[:, :0]),
    "conv-no-output": lambda x: F.conv2d(x, WEIGHT[:0]),
    "conv-no-kernel": lambda x: F.conv2d(x, WEIGHT[..., :0]),
    "conv-kernel-large": lambda x: F.conv2d(x, random(8, 16, 3, 10)),
    "conv-weight-rank": lambda x: F.conv2d(x, WEIGHT[0]),
    "conv-weight-double": lambda x: F.conv2d(x, WEIGHT.double()),
    "conv-weight-int": lambda x: F.conv2d(x, WEIGHT.int()),
    "conv-bias-size": lambda x: F.conv2d(x, WEIGHT, torch.ones(7)),
    "conv-bias-double": lambda x: F.conv2d(x, WEIGHT, torch.ones(8).double()),
    "conv-of-ints": lambda x: F.conv2d(x.int(), WEIGHT.int()),
    "conv-of-empty-images": lambda x: F.conv2d(x[:, :, :0], WEIGHT),
    "conv-of-no-channels": lambda x: F.conv2d(x[:, :0], WEIGHT[:, :0]),
    "conv1d-of-4-dims": lambda x: F.conv1d(x, WEIGHT[..., 0]),
    "conv3d-of-4-dims": lambda x: F.conv3d(x, WEIGHT[None]),
    "transposed-output-padding": lambda x: F.conv_transpose2d(x, TRANSPOSED, output_padding=1),
    "transposed-stride-0": lambda x: F.conv_transpose2d(x, TRANSPOSED, stride=0),
    "transposed-padding": lambda x: F.conv_transpose2d(x, TRANSPOSED, padding=9),
    "transposed-groups": lambda x: F.conv_transpose2d(x, TRANSPOSED, groups=3),
    "transposed-channels": lambda x: F.conv_transpose2d(x, TRANSPOSED[:15]),
    "max-stride-0": lambda x: F.max_pool2d(x, 2, 0),
    "max-stride-negative": lambda x: F.max_pool2d(x, 2, -1),
    "max-kernel-0": lambda x: F.max_pool2d(x, 0),
    "max-kernel-negative": lambda x: F.max_pool2d(x, -2),
    "max-kernel-large": lambda x: F.max_pool2d(x, 10),
    "max-kernel-of-3": lambda x: F.max_pool2d(x, (2, 2, 2)),
    "max-padding-large": lambda x: F.max_pool2d(x, 2, 2, 2),
    "max-padding-negative": lambda x: F.max_pool2d(x, 2, 2, -1),
    "max-dilation-0": lambda x: F.max_pool2d(x, 2, 2, 0, 0),
    "max-of-empty-images": lambda x: F.max_pool2d(x[:, :, :0], 2),
    "max-of-bool": lambda x: F.max_pool2d(x > 0, 2),
    "max-1d": lambda x: F.max_pool1d(x, 2),
    "avg-stride-0": lambda x: F.avg_pool2d(x, 2, 0),
    "avg-kernel-0": lambda x: F.avg_pool2d(x, 0),
    "avg-kernel-large": lambda x: F.avg_pool2d(x, 99),
    "avg-padding-negative": lambda x: F.avg_pool2d(x, 2, 2, -1),
    "avg-divisor-0": lambda x: F.avg_pool2d(x, 2, divisor_override=0),
    "avg-of-ints": lambda x: F.avg_pool2d(x.int(), 2),
    "adaptive-negative": lambda x: F.adaptive_avg_pool2d(x, (-1, 2)),
    "adaptive-of-3": lambda x: F.adaptive_avg_pool2d(x, (2, 2, 2)),
    "adaptive-0": lambda x: F.adaptive_avg_pool2d(x, 0),
    "adaptive-max-of-empty": lambda x: F.adaptive_max_pool2d(x[..., :0], 2),
    "unpool-sizes": lambda x: F.max_unpool2d(x, torch.zeros(1, dtype=torch.long), 2),
    "interpolate-0": lambda x: F.interpolate(x, (0, 4)),
    "interpolate-negative": lambda x: F.interpolate(x, scale_factor=-1),
    "interpolate-of-3": lambda x: F.interpolate(x, (2, 2, 2)),
    "interpolate-1d": lambda x: F.interpolate(x, 4, mode="linear"),
    "interpolate-ints": lambda x: F.interpolate(x.long(), scale_factor=2, mode="bilinear"),
    "pad-crop-all": lambda x: F.pad(x, (-5, -5)),
    "pad-odd": lambda x: F.pad(x, (1, 2, 3)),
    "pad-too-many": lambda x: F.pad(x, (1,) * 10),
    "pad-reflect-large": lambda x: F.pad(x, (9, 0, 0, 0), mode="reflect"),
    "pad-reflect-rank": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "pad-circular-large": lambda x: F.pad(x, (10, 0, 0, 0), mode="circular"),
    "batch-norm-mean": lambda x: F.batch_norm(x, torch.ones(15), torch.ones(16)),
    "batch-norm-weight": lambda x: F.batch_norm(
        x, torch.ones(16), torch.ones(16), torch.ones(15), torch.ones(15)
    ),
    "batch-norm-no-statistics": lambda x: F.batch_norm(x, None, None),
    "batch-norm-one-value": lambda x: F.batch_norm(
        x[:1, :, :1, :1], torch.ones(16), torch.ones(16), training=True
    ),
    "prelu-size": lambda x: F.prelu(x, torch.ones(3)),
    "add-sizes": lambda x: x + torch.ones(16),
    "add-in-place-grows": lambda x: x.add_(torch.ones(3, 1, 1, 1, 1)),
    "add-channels": lambda x: x + x[:, :3],
    "in-place-float-to-int": lambda x: x.int().add_(0.5),
    "in-place-broadcast": lambda x: x[:1].clone().add_(x),
    "clamp-nothing": lambda x: x.clamp(),
    "bitwise-of-floats": lambda x: x & x,
    "where-of-float": lambda x: torch.where(x, x, x),
    "cat-sizes": lambda x: torch.cat([x, x[:, :, :3]], 1),
    "cat-ranks": lambda x: torch.cat([x, x[0]], 1),
    "cat-dim": lambda x: torch.cat([x, x], 4),
    "cat-batch": lambda x: torch.cat([x, x[:, :3]], 0),
    "mean-dim": lambda x: x.mean(4),
    "mean-twice": lambda x: x.mean((2, 2)),
    "mean-of-ints": lambda x: x.int().mean((2, 3)),
    "amax-of-empty": lambda x: x[:, :, :0].amax(2),
    "squeeze-dim": lambda x: x.squeeze(7),
    "unsqueeze-dim": lambda x: x.unsqueeze(6),
    "view-size": lambda x: x.view(5, 5),
    "view-two-unknown": lambda x: x.view(-1, -1),
    "permute-twice": lambda x: x.permute(0, 0, 1, 2),
    "transpose-dim": lambda x: x.transpose(1, 1250999896764),
    "select-beyond": lambda x: x[:, 16],
    "narrow-beyond": lambda x: x.narrow(1, 10, 10),
    "index-beyond": lambda x: x[torch.tensor([5])],
    "matmul-sizes": lambda x: x @ torch.ones(3, 3),
    "copy-sizes": lambda x: x.clone().copy_(torch.ones(3)),
    "zeros-like-sparse": lambda x: torch.zeros_like(x, layout=torch.sparse_coo).to_dense(),
    "gelu-word": lambda x: F.gelu(x, approximate="tan"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATEN)
def test_blocked_refuses_what_dense_refuses(name):
    """The same type of exception, or the same values where ATen has an answer."""
    x = X.to_blocked("nChw8c")
    try:
        expected = ATEN[name](X.clone())
    except Exception as error:
        with pytest.raises(type(error)) as caught:
            ATEN[name](x)
        assert type(caught.value) is type(error)
        assert "torch_blocked::" not in str(caught.value), "ATen's API speaks in ATen's words"
    else:
        result = ATEN[name](x)
        if torch_blocked.is_blocked(result):
            assert tail_is_zero(result)
            result = result.to_dense()
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(x.to_dense(), X), "the input was written"


UNBATCHED = {
    "max2d": lambda x: F.max_pool2d(x, 2),
    "max3d": lambda x: F.max_pool3d(x, 2),
    "avg2d": lambda x: F.avg_pool2d(x, 2),
    "avg3d": lambda x: F.avg_pool3d(x, 2),
    "adaptive-avg2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive-avg3d": lambda x: F.adaptive_avg_pool3d(x, 2),
    "adaptive-max2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "reflect2d": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate3d": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
    "conv2d": lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3)),
    "conv3d": lambda x: F.conv3d(x, torch.ones(3, 2, 3, 3, 3)),
}


@pytest.mark.parametrize("block", (8, 16))
@pytest.mark.parametrize("name", UNBATCHED)
def test_one_image_instead_of_a_batch(name, block):
    """[C, *spatial] to ATen, though to us its first dims are [N, C]."""
    dense = random(2, 16, 8) if "2d" in name else random(2, 16, 8, 6)
    expected = UNBATCHED[name](dense)
    result = UNBATCHED[name](dense.to_blocked(format_name(dense.dim(), block)))
    torch.testing.assert_close(torch_blocked.to_dense(result), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", (1, 2, 16))
def test_empty_batches(groups):
    x = X[:0].to_blocked("nChw8c").requires_grad_()
    weight = random(32, 16 // groups, 3, 3).requires_grad_()
    result = F.conv2d(x, weight, groups=groups)
    assert result.shape == (0, 32, 7, 7)
    result.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert x.grad.shape == x.shape


def test_new_is_not_silently_blocked():
    made = X.to_blocked("nChw8c").new_zeros((2, 3))
    assert not torch_blocked.is_blocked(made)
    assert torch.equal(made, torch.zeros(2, 3))


MASKED = {
    "batch_norm_backward": lambda x, row: (x, x, 8, None, row, row, False),
    "group_norm_backward": lambda x, row: (x, x, 8, row, row, row, 1),
}


@pytest.mark.parametrize("op", MASKED)
def test_a_mask_of_four_for_meta_tensors(op):
    """torch checks the length of a mask for kernels in C++ only, and reads as many results."""
    x, row = torch.empty(2, 1, 3, 3, 16, device="meta"), torch.empty(8, device="meta")
    with pytest.raises(RuntimeError, match="output_mask of 3, got 4"):
        getattr(OPS, op)(*MASKED[op](x, row), [True] * 4)
