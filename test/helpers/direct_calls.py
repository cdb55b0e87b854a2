"""Direct calls of the library's ops: right ones, one argument of which a test makes wrong."""

import torch

import torch_blocked  # noqa: F401  registers the ops

OPS = torch.ops.torch_blocked

HUGE = 2**62


def random(*dims, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dims, generator=generator, dtype=dtype)


X = random(2, 16, 9, 9)

PHYSICAL = X.to_blocked("nChw8c")._physical

WEIGHT = random(8, 16, 3, 3)

TRANSPOSED = random(16, 8, 3, 3)


def convolution(
    input=PHYSICAL, channels=16, weight=WEIGHT, bias=None, stride=(1, 1), padding=(0, 0),
    dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=1,
):  # fmt: skip
    return OPS.convolution(
        input, channels, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def batch_norm(input=PHYSICAL, channels=16, weight=None, bias=None, mean=None, var=None):
    mean = torch.zeros(16) if mean is None else mean
    var = torch.ones(16) if var is None else var
    return OPS.batch_norm_inference(input, channels, weight, bias, mean, var, 1e-5)


GRAD = convolution()


def batch_norm_training(input=PHYSICAL, channels=16, weight=None, bias=None, mean=None, var=None):
    return OPS.batch_norm_training(input, channels, weight, bias, mean, var, 0.1, 1e-5)


def batch_norm_backward(input=PHYSICAL, grad=PHYSICAL, channels=16, weight=None, mean=None):
    mean = torch.zeros(16) if mean is None else mean
    return OPS.batch_norm_backward(
        grad, input, channels, weight, mean, torch.ones(16), True, [True] * 3
    )


def convolution_backward(
    grad=GRAD, input=PHYSICAL, channels=16, weight=WEIGHT, stride=(1, 1), padding=(0, 0),
    dilation=(1, 1), groups=1,
):  # fmt: skip
    return OPS.convolution_backward(
        grad, input, channels, weight, stride, padding, dilation, False, (0, 0), groups, [True] * 3
    )


INDEX = torch.zeros(2, 9, 9, dtype=torch.int64)

GRID = torch.zeros(2, 3, 4, 2)

STATISTICS = torch.ones(2, 4)

OTHER_BLOCK = X.to_blocked("nChw16c")._physical


def group_norm(input=PHYSICAL, channels=16, weight=None, groups=4):
    return OPS.group_norm(input, channels, weight, None, groups, 1e-5)


def group_norm_backward(
    grad=PHYSICAL, input=PHYSICAL, channels=16, mean=STATISTICS, rstd=STATISTICS, groups=4
):
    return OPS.group_norm_backward(grad, input, channels, mean, rstd, None, groups, [True] * 3)


def grid_sampler(input=PHYSICAL, channels=16, grid=GRID, mode=0, padding=0):
    return OPS.grid_sampler(input, channels, grid, mode, padding, False)


SAMPLED = grid_sampler()


def resample(input=PHYSICAL, channels=16, size=(5, 6), interpolation=2, scales=(0.0, 0.0)):
    return OPS.resample(input, channels, size, interpolation, False, scales)


def grid_sampler_backward(grad=SAMPLED, input=PHYSICAL, channels=16, grid=GRID, mode=0):
    return OPS.grid_sampler_backward(grad, input, channels, grid, mode, 0, False, [True] * 2)
