"""Examples of every op of the library: {op: [(args, kwargs), ...]}.

The rows of an op's family in the table of problems give its examples. Ops without a family there
have their examples in this file."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from helpers.problems import PROBLEMS, dims_of, make_tensors
from torch_blocked.tensor import BlockedTensor, format_name

OPS = torch.ops.torch_blocked


def blocked(channels, block, *spatial, batch=2, dtype=torch.float32):
    """A physical tensor [N, ceil(C/b), *spatial, b] with a zero tail."""
    dense = torch.arange(batch * channels * torch.Size(spatial).numel()).to(dtype) % 7
    return OPS.to_blocked(dense.reshape(batch, channels, *spatial), block)


def convolution(x, channels, weight, bias=True, transposed=False, groups=1, **arguments):
    spatial = len(weight) - 2
    out = weight[1] * groups if transposed else weight[0]
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0} | arguments
    stride, padding, dilation, output_padding = (
        [value] * spatial if isinstance(value, int) else value for value in defaults.values()
    )
    bias = torch.randn(out) if bias else None
    return (x, channels, torch.randn(weight), bias, stride, padding, dilation, transposed,
            output_padding, groups)  # fmt: skip


def backward(input, channels, weight, bias, *arguments, mask=(True, True, True)):
    """Arguments of convolution_backward from those of convolution."""
    output = OPS.convolution(input, channels, weight, bias, *arguments)
    return (torch.ones_like(output), input, channels, weight, *arguments, list(mask))


def normed(input, channels=9):
    """grad_output, input and channels."""
    return torch.ones_like(input), input, channels


def index_of_pixels(channels, *spatial):
    """A channel for every pixel of two images, -1 among them."""
    count = 2 * torch.Size(spatial).numel()
    return (torch.arange(count) % (channels + 1) - 1).reshape(2, *spatial)


def example(*args, **kwargs):
    return args, kwargs


def examples():
    """{op: [(args, kwargs), ...]}"""
    dense = torch.randn(2, 9, 5, 7)
    vectors = [torch.rand(9) + 0.5 for _ in range(4)]
    return {
        "to_blocked": [
            example(dense, 8),
            example(dense.to(memory_format=torch.channels_last), 16),
            example(dense[:, :, ::2, 1:], 4, dtype=torch.float64),
            example(dense[:1].expand(3, 9, 5, 7), 32, dtype=torch.bfloat16),
            example(torch.randn(3, 17, 11), 16),
            example(torch.randn(1, 3, 2, 4, 5), 8),
            example(torch.randn(0, 9, 5, 7), 8),
            example(torch.ones(2, 9, 5, dtype=torch.int64), 8),
        ],
        "to_dense": [
            example(blocked(9, 8, 5, 7), 9),
            example(blocked(9, 8, 5, 7), 9, channels_last=True),
            example(blocked(17, 16, 11), 17, channels_last=True, dtype=torch.float64),
            example(blocked(3, 4, 2, 4, 5), 3),
            example(blocked(3, 4, 2, 4, 5), 3, channels_last=True),
            example(blocked(9, 8, 5, 7, batch=0), 9),
        ],
        "reblock": [
            example(blocked(9, 8, 5, 7), 9, 16),
            example(blocked(33, 32, 11), 33, 4, dtype=torch.float16),
            example(blocked(17, 16, 2, 4, 5), 17, 8, dtype=torch.int32),
            example(blocked(9, 8, 5, 7, batch=0), 9, 32),
        ],
        "clear_tail_": [
            example(torch.ones(2, 2, 5, 7, 8), 9),
            example(torch.ones(2, 2, 5, 7, 8), 16),
            example(torch.ones(2, 1, 5, 16, dtype=torch.int64), 3),
        ],
        "tail_is_zero": [
            example(blocked(9, 8, 5, 7), 9),
            example(torch.ones(2, 2, 5, 7, 8), 9),
            example(torch.ones(2, 1, 5, 16), 3),
        ],
        "convolution": [
            example(*convolution(blocked(9, 8, 5, 7), 9, (17, 9, 3, 3), padding=1)),
            example(*convolution(blocked(16, 16, 5, 7), 16, (8, 16, 1, 1), bias=False)),
            example(*convolution(blocked(9, 8, 5, 7), 9, (9, 1, 3, 3), groups=9, stride=2)),
            example(
                *convolution(
                    blocked(16, 8, 9, 9), 16, (4, 16, 3, 3), dilation=[2, 1], padding=[0, 2]
                )
            ),
            example(*convolution(blocked(17, 16, 11), 17, (8, 17, 3), stride=2)),
            example(*convolution(blocked(3, 8, 4, 5, 6), 3, (9, 3, 3, 3, 3), padding=1)),
            example(
                *convolution(
                    blocked(9, 8, 5, 7), 9, (9, 4, 4, 4), transposed=True, stride=2, padding=1,
                    output_padding=1,
                )
            ),
            example(*convolution(blocked(9, 8, 5, 7, batch=0), 9, (17, 9, 3, 3), padding=1)),
        ],
        "batch_norm_inference": [
            example(blocked(9, 8, 5, 7), 9, *vectors, 1e-5),
            example(blocked(9, 16, 11), 9, None, None, *vectors[2:], 1e-3),
            example(blocked(9, 4, 2, 4, 5), 9, vectors[0], None, *vectors[2:], 1e-5),
            example(blocked(9, 8, 5, 7, batch=0), 9, *vectors, 1e-5),
        ],
        "convolution_backward": [
            example(*backward(*convolution(blocked(9, 8, 5, 7), 9, (17, 9, 3, 3), padding=1))),
            example(
                *backward(
                    *convolution(blocked(9, 8, 5, 7), 9, (9, 1, 3, 3), groups=9, stride=2),
                    mask=(True, False, True),
                )
            ),
            example(
                *backward(
                    *convolution(blocked(17, 16, 11), 17, (17, 4, 4), transposed=True, stride=2),
                    mask=(True, True, False),
                )
            ),
            example(
                *backward(
                    *convolution(blocked(3, 8, 4, 5, 6), 3, (9, 3, 3, 3, 3)),
                    mask=(False, True, True),
                )
            ),
        ],
        "batch_norm_training": [
            example(blocked(9, 8, 5, 7), 9, *vectors, 0.1, 1e-5),
            example(blocked(9, 16, 11), 9, None, None, None, None, 0.1, 1e-3),
            example(blocked(9, 4, 2, 4, 5), 9, vectors[0], None, *vectors[2:], 1.0, 1e-5),
        ],
        "batch_norm_backward": [
            example(*normed(blocked(9, 8, 5, 7)), vectors[0], *vectors[2:], True, [True] * 3),
            example(*normed(blocked(9, 16, 11)), None, *vectors[2:], False, [True, False, False]),
            example(
                *normed(blocked(9, 4, 2, 4, 5)), vectors[0], *vectors[2:], True, [False, True, True]
            ),
        ],
        "empty_like": [
            example(blocked(9, 8, 5, 7)),
            example(blocked(9, 16, 11, dtype=torch.bfloat16)),
            example(blocked(64, 16, 64, 64)),
        ],
        "slice_channels": [
            example(blocked(17, 8, 5, 7), 17, 3, 9),
            example(blocked(17, 16, 11), 17, 16, 1),
            example(blocked(9, 4, 2, 4, 5), 9, 0, 9),
            example(blocked(9, 8, 5, 7), 9, 5, 0),
        ],
        "gather_channels": [
            example(blocked(9, 8, 5, 7), 9, [8, -1, 0, 0]),
            example(blocked(17, 16, 11), 17, list(range(17))[::-1]),
            example(blocked(16, 8, 2, 4, 5), 16, list(range(8, 16))),
            example(blocked(9, 4, 5, 7, batch=0), 9, [1]),
        ],
        "pixel_shuffle": [
            example(blocked(16, 8, 5, 7), 16, 2),
            example(blocked(36, 16, 2, 3), 36, 3),
            example(blocked(4, 4, 1, 1), 4, 1),
        ],
        "pixel_unshuffle": [
            example(blocked(9, 8, 4, 6), 9, 2),
            example(blocked(17, 16, 3, 9), 17, 3),
            example(blocked(4, 4, 1, 1), 4, 1),
        ],
        "resample": [
            example(blocked(9, 8, 5, 7), 9, [11, 4], 2, False, [0.0, 0.0]),
            example(blocked(17, 16, 11), 17, [22], 0, False, [2.0]),
            example(blocked(3, 4, 2, 4, 5), 3, [3, 3, 9], 2, True, [0.0, 0.0, 0.0]),
        ],
        "pick_channels": [
            example(blocked(9, 8, 5, 7), 9, index_of_pixels(9, 5, 7)),
            example(blocked(17, 16, 11), 17, index_of_pixels(17, 11)),
            example(blocked(3, 4, 2, 4, 5), 3, index_of_pixels(3, 2, 4, 5)),
        ],
        "place_channels": [
            example(torch.randn(2, 5, 7), index_of_pixels(9, 5, 7), 9, 8),
            example(torch.randn(2, 11), index_of_pixels(17, 11), 17, 16),
            example(torch.randn(2, 2, 4, 5), index_of_pixels(3, 2, 4, 5), 3, 4),
        ],
        "sum_channels": [
            example(blocked(9, 8, 5, 7), 9),
            example(blocked(17, 16, 11), 17),
            example(blocked(9, 4, 2, 4, 5), 9),
        ],
        "argmax_channels": [
            example(blocked(9, 8, 5, 7), 9, False),
            example(blocked(17, 16, 11), 17, True),
            example(blocked(9, 4, 2, 4, 5), 9, False),
        ],
        "concat_channels": [
            example([blocked(9, 8, 5, 7), blocked(3, 8, 5, 7)], [9, 3]),
            example([blocked(16, 16, 11), blocked(17, 16, 11), blocked(1, 16, 11)], [16, 17, 1]),
            example([blocked(9, 8, 5, 7)], [9]),
        ],
    }  # fmt: skip


class Calls(TorchDispatchMode):
    """Notes what is called of our ops: {op: [(args, kwargs), ...]}, each op with the same numbers
    and ranks once."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, BlockedTensor) for each in types):
            return NotImplemented  # its handler calls our ops
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "torch_blocked":
            key = tree_map_only(torch.Tensor, torch.Tensor.dim, (args, kwargs))
            call = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            self.seen.setdefault(name, {}).setdefault(str(key), call)
        return func(*args, **kwargs)


def calls_of(op):
    """What the rows of the op's family call of it, forward and backward; up to four examples."""
    rows = [each for each in PROBLEMS if op in (each.family, f"{each.family}_backward")]
    calls = Calls()
    for index, problem in enumerate(rows):
        channels, block = ((9, 8), (17, 16), (3, 4))[index % 3]
        dims = dims_of(problem, 2, channels)
        input, *operands = (each.requires_grad_() for each in make_tensors(problem, dims))
        with calls:
            result = problem.run(input.to_blocked(format_name(len(dims), block)), *operands)
            torch.autograd.grad(result.sum(), input)
    return list(calls.seen.get(op, {}).values())[:4]


def all_examples():
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.partition("::")[2] for n in names if n.startswith("torch_blocked::")}
    written = examples()
    return {op: written.pop(op, None) or calls_of(op) for op in sorted(registered)} | written


EXAMPLES = all_examples()
