"""Models that make tensors, of the type of x, of float32 and of whatever the default is."""

import torch
from torch import nn
from torch.nn import functional as F

from .table import between_convolutions, between_linears, typed


def _empty_filled(x):
    result = torch.empty(x.shape[0], 30)
    result[:, :24], result[:, 24:] = x, 1
    return result


def _empty_of_type(x):
    result = torch.empty((x.shape[0], 27), dtype=x.dtype)
    result[:, :3] = 0.5
    result[:, 3:].copy_(x)
    return result


def _every_other(x):
    result = torch.zeros(x.shape[0], 48)
    result[:, ::2] = x
    result[:, 1::2] = x.flip(1)
    return result


def _by_mask(x):
    result = torch.zeros_like(x, dtype=torch.float32)
    mask = torch.arange(24) % 3 > 0
    result[:, mask] = x[:, mask]
    return result


def _accumulated(x):
    total = torch.zeros(x.shape)
    for shift in range(3):
        total += x.roll(shift, 1) / (shift + 1)
    return total


def _at_indices(x):
    result = torch.zeros(x.shape[0], 30)
    result[:, torch.arange(24) + 3] = x
    return result


def _into_buffer(x):
    return torch.add(x, 1, out=torch.empty(x.shape))


def _shift_tokens(x):
    """Each row beside the one before, as in RWKV."""
    before = torch.cat((torch.zeros(1, x.shape[1]), x[:-1]))
    return torch.cat((x, before), 1)


def _averages(x):
    """Of the rows up to this one."""
    ones = torch.tril(torch.ones(len(x), len(x)))
    return ones / ones.sum(1, keepdim=True) @ x


INDEX = (torch.arange(24) * 5 % 24).expand(3, 24)

between_linears(
    {
        "cat_zeros": lambda x: torch.cat((x, torch.zeros(x.shape[0], 3)), 1),
        "cat_zeros_of_type": lambda x: torch.cat((x, torch.zeros(len(x), 3, dtype=x.dtype)), 1),
        "cat_ones_of_float": lambda x: torch.cat(
            (torch.ones(len(x), 1, dtype=torch.float32), x), 1
        ),
        "cat_arange": lambda x: torch.cat((x, torch.arange(24.0)[None].expand_as(x) / 24), 1),
        "cat_double": lambda x: torch.cat(
            (x, torch.ones(len(x), 2, dtype=torch.float64)), 1
        ).float(),
        "stack_ones": lambda x: torch.stack((x, torch.ones(x.shape)), -1).flatten(1),
        "stack_zeros_like": lambda x: torch.stack((x, torch.zeros_like(x)), 1).flatten(1),
        "full_of_type": lambda x: x + torch.full((24,), 0.5, dtype=x.dtype),
        "full_where": lambda x: torch.where(x > 0, x, torch.full((1,), -0.1)),
        "full_number_where": lambda x: torch.where(x > 0, x, torch.full((), 0.1, dtype=x.dtype)),
        "full_like_where": lambda x: torch.where(x > 0, x, torch.full_like(x, 0.1)),
        "full_like_of_float": lambda x: x * torch.full_like(x, 0.7, dtype=torch.float32),
        "arange_of_type": lambda x: x * torch.arange(24, dtype=x.dtype) / 24,
        "arange_of_float": lambda x: x * torch.arange(0, 2.4, 0.1, dtype=torch.float32),
        "linspace": lambda x: x * torch.linspace(-1, 1, 24),
        "linspace_of_type": lambda x: x * torch.linspace(-1, 1, 24, dtype=x.dtype),
        "logspace": lambda x: x * torch.logspace(-1, 0.5, 24),
        "hann_window": lambda x: x * torch.hann_window(24),
        "product_with_eye": lambda x: x @ torch.eye(24, 17, dtype=torch.float32),
        "product_with_ones": lambda x: x @ torch.ones(24, 24).tril() / 8,
        "product_of_type": lambda x: x @ torch.ones(24, 24, dtype=x.dtype).triu() / 8,
        "linear_of_factory": lambda x: F.linear(x, torch.linspace(-1, 1, 240).view(10, 24)),
        "averages_of_rows": _averages,
        "empty_filled": _empty_filled,
        "empty_of_type_filled": _empty_of_type,
        "every_other": _every_other,
        "by_mask": _by_mask,
        "accumulated": _accumulated,
        "at_indices": _at_indices,
        "out_of_float": _into_buffer,
        "shifted_tokens": _shift_tokens,
        "new_zeros": lambda x: torch.cat((x.new_zeros(len(x), 2), x), 1),
        "new_full": lambda x: torch.maximum(x, x.new_full((24,), -0.25)),
        "new_tensor": lambda x: x[:, :4] * x.new_tensor([1.0, 0.5, 0.25, 2.0]),
        "new_ones_of_float": lambda x: torch.cat(
            (x, x.new_ones(len(x), 1, dtype=torch.float32)), 1
        ),
        "maximum_of_float": lambda x: torch.maximum(x, torch.full((24,), -0.25)),
        "lerp_to_zeros": lambda x: torch.lerp(x, torch.zeros(x.shape), 0.25),
        "addcmul_of_float": lambda x: torch.addcmul(torch.ones(24), x, torch.linspace(0, 1, 24)),
        "scatter_to_zeros": lambda x: torch.zeros(len(x), 24).scatter(1, INDEX, x),
        "scatter_add": lambda x: torch.zeros(len(x), 24).scatter_add(1, INDEX // 2, x),
        "index_add": lambda x: torch.zeros(len(x), 12).index_add(1, torch.arange(24) // 2, x),
        "index_copy": lambda x: torch.ones(len(x), 30).index_copy(1, torch.arange(24), x),
        "diagonal": lambda x: torch.diag_embed(x[:, :5]).flatten(1),
        "outer_with_float": lambda x: torch.einsum("bi,j->bij", x, torch.arange(3.0)).flatten(1),
    },
    *(3, 24),
)


def _normalized_by_ones(x):
    """A sum of neighbours over the count of these that are in the image."""
    window = torch.ones(x.shape[1], 1, 3, 3)
    count = F.conv2d(torch.ones(1, 1, *x.shape[2:]), torch.ones(1, 1, 3, 3), padding=1)
    return F.conv2d(x, window, padding=1, groups=x.shape[1]) / count


def _blurred(x):
    row = torch.tensor([1.0, 2.0, 1.0])
    window = (row[:, None] * row / 16).expand(x.shape[1], 1, 3, 3)
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), window, groups=x.shape[1])


def _padded(x):
    zeros = torch.zeros(x.shape[0], x.shape[1], x.shape[2], 2)
    return torch.cat((zeros, x, zeros), 3)


def _shortcut(x):
    """A shortcut that adds channels of zeros, as in the first residual networks."""
    return torch.cat((x[:, :, ::2, ::2], torch.zeros_like(x[:, :7, ::2, ::2])), 1)


def _checkerboard(x):
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in x.shape[2:]), indexing="ij")
    return x * ((rows + columns) % 2).float()


between_convolutions(
    {
        "mean_of_neighbours": _normalized_by_ones,
        "blur": _blurred,
        "cat_zeros_beside": _padded,
        "zeros_channels": _shortcut,
        "checkerboard": _checkerboard,
        "coordinates_times": lambda x: x * torch.linspace(0, 1, x.shape[-1])[None, None, None],
        "ones_channel": lambda x: torch.cat((x, torch.ones_like(x[:, :1], dtype=torch.float32)), 1),
    },
    *(2, 5, 8, 6),
)


@typed(torch.tensor([[1, 5, 2, 0], [7, 3, 3, 6]]))
class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 17)

    def forward(self, tokens):
        return self.linear(F.one_hot(tokens, 8).float()).relu()


@typed((2, 4, 24), torch.tensor([[1, 5, 2, 0], [7, 3, 3, 6]]))
class OneHotOfType(nn.Module):
    """Rows of a table as a product."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 17)
        self.table = nn.Parameter(torch.randn(8, 17))

    def forward(self, x, tokens):
        return self.first(x) * (F.one_hot(tokens, 8).to(x.dtype) @ self.table)


@typed((2, 24), torch.tensor([[0.5, 3.5, 7.5], [1.5, 1.5, 6.5]]))
class Buckets(nn.Module):
    """Times between whole numbers choose rows of a table."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(24, 17), nn.Embedding(9, 17)

    def forward(self, x, times):
        rows = torch.bucketize(times, torch.linspace(0, 8, 9)[1:-1])
        return self.linear(x)[:, None] + self.table(rows)


@typed((2, 5, 24))
class ClassToken(nn.Module):
    """A token of its own, and zeros up to a multiple of 4 tokens."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 24))
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x):
        x = torch.cat((self.token.expand(len(x), -1, -1), self.first(x)), 1)
        x = torch.cat((x, torch.zeros(len(x), -x.shape[1] % 4, 24)), 1)
        return self.last(x.relu())
