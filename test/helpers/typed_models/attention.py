"""Attention, and masks of bools, of floats and of the least number of a type."""

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .table import between_linears, register, typed

TOKENS = (2, 6, 24)
PADDING = torch.tensor([[False] * 5 + [True], [False] * 3 + [True] * 3])
LATER = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
# 0, and -inf for later tokens.
CAUSAL = torch.zeros(6, 6).masked_fill(LATER, -torch.inf)


class Multihead(nn.Module):
    """Self-attention with masks of these names."""

    def __init__(self, *names, weights=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True, **options)
        self.names, self.weights = names, weights

    def forward(self, x, *masks):
        masks = dict(zip(self.names, masks, strict=True))
        results = self.attention(x, x, x, need_weights=self.weights, **masks)
        return results if self.weights else results[0]


BOTH = ("key_padding_mask", "attn_mask")
register("multihead", Multihead, TOKENS)
register("multihead_weights", partial(Multihead, weights=True), TOKENS)
register("multihead_padding", partial(Multihead, BOTH[0], weights=True), TOKENS, PADDING)
register("multihead_padding_fast", partial(Multihead, BOTH[0]), TOKENS, PADDING)
register("multihead_bool_mask", partial(Multihead, BOTH[1]), TOKENS, LATER)
register("multihead_float_mask", partial(Multihead, BOTH[1]), TOKENS, CAUSAL)
register("multihead_both_masks", partial(Multihead, *BOTH), TOKENS, PADDING.float() * -1e4, CAUSAL)
register(
    "multihead_extra_keys",
    partial(Multihead, add_bias_kv=True, add_zero_attn=True, weights=True),
    TOKENS,
)


@typed(TOKENS, (2, 4, 17))
class MultiheadAcross(nn.Module):
    """Keys and values of another width, weights of each head."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, kdim=17, vdim=17, batch_first=True)

    def forward(self, x, y):
        return self.attention(x, y, y, average_attn_weights=False)


class Encoder(nn.Module):
    def __init__(self, *names, layers=0, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, **options)
        self.encoder = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers else layer
        )
        self.names = names

    def forward(self, x, *masks):
        return self.encoder(x, **dict(zip(self.names, masks, strict=True)))


register("encoder_layer", Encoder, TOKENS)
register("encoder_layer_padding", partial(Encoder, "src_key_padding_mask"), TOKENS, PADDING)
register("encoder_layer_causal", partial(Encoder, "src_mask", norm_first=True), TOKENS, CAUSAL)
register(
    "encoder_of_two_layers",
    partial(Encoder, "mask", "src_key_padding_mask", layers=2, activation="gelu"),
    *(TOKENS, CAUSAL, torch.zeros(2, 6).masked_fill(PADDING, -torch.inf)),
)


@typed(TOKENS, (2, 4, 24))
class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(24, 3, 40, batch_first=True)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)


class Attention(nn.Module):
    """Between linear layers; mix(q, k, v, *more) takes (batch, head, token, channel)."""

    def __init__(self, mix):
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(24, 72), nn.Linear(24, 17), mix

    def forward(self, x, *more):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(q, k, v, *more).transpose(1, 2).flatten(2))


def _written(change):
    """Attention in which `change` is applied to the scores."""

    def mix(q, k, v, *more):
        scores = change(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), *more)
        return scores.softmax(-1) @ v

    return mix


def _least(scores):
    return torch.finfo(scores.dtype).min


def _where_causal(scores):
    """As in GPT-2."""
    keep = torch.tril(torch.ones(6, 6, dtype=torch.uint8)).view(1, 1, 6, 6).to(torch.bool)
    return torch.where(keep, scores, torch.full([], _least(scores), dtype=scores.dtype))


def _extended(scores, mask):
    """As in BERT: 1 is kept, 0 becomes the least number."""
    return scores + (1.0 - mask[:, None, None, :].to(dtype=scores.dtype)) * _least(scores)


def _prepared(scores, mask):
    """As in Llama: a causal mask of the least number, made by arange and combined with padding."""
    size = scores.shape[-1]
    causal = torch.full((size, size), _least(scores), dtype=scores.dtype).triu(diagonal=1)
    causal = causal[None, None].expand(len(scores), 1, -1, -1).clone()
    is_padding = (causal[..., :size] + mask[:, None, None, :].to(causal.dtype)) == 0
    causal[..., :size] = causal.masked_fill(is_padding & (mask == 0)[:, None, None], _least(scores))
    return scores + causal


def _softmax_in_float(q, k, v):
    scores = (q @ k.mT).float() / math.sqrt(q.shape[-1]) + CAUSAL
    return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def _softmax_by_hand(q, k, v):
    scores = (q @ k.mT / 3).masked_fill(LATER, -1e9)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * (~LATER).to(scores.dtype)
    return weights / (weights.sum(-1, keepdim=True) + 1e-8) @ v


def _rows_without_keys(q, k, v):
    """A row of nothing but -inf becomes NaN, and then 0."""
    mask = torch.zeros(6, 6).masked_fill(LATER.T, -torch.inf)
    mask[2] = -torch.inf
    return torch.nan_to_num((q @ k.mT + mask).softmax(-1), 0.0) @ v


def _by_baddbmm(q, k, v):
    """As in diffusion models: the first summand is not initialized, and beta is 0."""
    q, k, w = (each.flatten(0, 1) for each in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(scores.float().softmax(-1).to(w.dtype), w).view_as(v)


def _with_slopes(q, k, v):
    """As in Bloom: the bias is the summand of baddbmm, and float32."""
    slopes = torch.tensor([0.5, 0.25, 0.125]).repeat(len(q))[:, None, None]
    bias = slopes * torch.arange(6.0)[None, None]
    scores = bias.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=8**-0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(v)


def _linear(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    total = torch.einsum("bhtc,bhtd->bhcd", k, v)
    norm = 1 / (torch.einsum("bhtc,bhc->bht", q, k.sum(2)) + 1e-6)
    return torch.einsum("bhtc,bhcd,bht->bhtd", q, total, norm)


def _linear_causal(q, k, v):
    q, k = F.relu(q) + 0.1, F.relu(k) + 0.1
    total = (k[..., None] * v[..., None, :]).cumsum(2)
    count = k.cumsum(2, dtype=torch.float32)
    return (q[..., None] * total).sum(-2) / (q * count).sum(-1, keepdim=True)


def _grouped(q, k, v):
    k, v = (each[:, :1].expand(-1, 3, -1, -1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


MIXES = {
    "sdpa": F.scaled_dot_product_attention,
    "sdpa_causal": partial(F.scaled_dot_product_attention, is_causal=True),
    "sdpa_scale": partial(F.scaled_dot_product_attention, scale=0.2),
    "sdpa_grouped": _grouped,
    "sdpa_fixed_float_mask": partial(F.scaled_dot_product_attention, attn_mask=CAUSAL),
    "sdpa_mask_of_factory": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.zeros(6, 6).masked_fill(LATER, -torch.inf)
    ),
    "sdpa_mask_of_type": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.full((6, 6), -torch.inf, dtype=q.dtype).triu(1)
    ),
    "sdpa_in_float": lambda q, k, v: F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=CAUSAL
    ).to(q.dtype),
    "masked_by_infinity": _written(lambda s: s.masked_fill(LATER, -torch.inf)),
    "masked_by_infinity_of_text": _written(lambda s: s.masked_fill(LATER, float("-inf"))),
    "masked_by_least": _written(lambda s: s.masked_fill(LATER, torch.finfo(s.dtype).min)),
    "masked_by_least_of_float": _written(
        lambda s: s.masked_fill(LATER, torch.finfo(torch.float32).min)
    ),
    "masked_by_tensor": _written(lambda s: s.masked_fill(LATER, torch.tensor(-1e30))),
    "masked_by_sum": _written(lambda s: s + torch.full((6, 6), -torch.inf).triu(1)),
    "masked_by_least_sum": _written(lambda s: s + LATER.to(s.dtype) * torch.finfo(s.dtype).min),
    "masked_where": _written(_where_causal),
    "softmax_in_float_masked": _softmax_in_float,
    "softmax_by_hand": _softmax_by_hand,
    "rows_without_keys": _rows_without_keys,
    "attention_by_baddbmm": _by_baddbmm,
    "attention_with_slopes": _with_slopes,
    "linear_attention": _linear,
    "linear_causal_attention": _linear_causal,
}
for _name, _mix in MIXES.items():
    register(_name, partial(Attention, _mix), TOKENS)

_sdpa_masked = partial(Attention, F.scaled_dot_product_attention)
register("sdpa_bool_mask", _sdpa_masked, TOKENS, ~PADDING[:, None, None])
register("sdpa_float_mask", _sdpa_masked, TOKENS, PADDING[:, None, None].float() * -30)
register("extended_mask", partial(Attention, _written(_extended)), TOKENS, (~PADDING).long())
register("prepared_mask", partial(Attention, _written(_prepared)), TOKENS, (~PADDING).long())


@typed(TOKENS, ~PADDING)
class MaskedMean(nn.Module):
    """Over the tokens of a sentence, as in sentence embeddings."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)

    def forward(self, x, mask):
        x = self.linear(x)
        mask = mask.unsqueeze(-1).expand(x.size()).float()
        mean = torch.sum(x * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
        return F.normalize(mean, p=2, dim=1)


@typed(TOKENS, torch.tensor([5, 3]))
class MaskedByLengths(nn.Module):
    """Statistics of as many tokens as there are; the others are 0."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 17), nn.Linear(17, 8)

    def forward(self, x, lengths):
        mask = (torch.arange(x.shape[1])[None] < lengths[:, None]).to(x.dtype)[..., None]
        x = self.first(x) * mask
        mean = x.sum(1, keepdim=True) / lengths[:, None, None]
        var = ((x - mean) * mask).square().sum(1, keepdim=True) / lengths.view(-1, 1, 1).float()
        return self.last((x - mean) * torch.rsqrt(var + 1e-5) * mask)


@typed(TOKENS, ~PADDING)
class LastToken(nn.Module):
    """The last that is no padding, and the largest numbers of those that are none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 17)

    def forward(self, x, mask):
        x = self.linear(x)
        last = x[torch.arange(len(x)), mask.long().sum(1) - 1]
        return last, x.masked_fill(~mask[..., None], torch.finfo(x.dtype).min).amax(1)


@typed((2, 1, 24), (2, 3, 4, 8), (2, 3, 4, 8))
class Cached(nn.Module):
    """One token more: past keys and values come in and go out."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 17)

    def forward(self, x, keys, values):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        mixed = F.scaled_dot_product_attention(q, keys, values)
        return self.out(mixed.transpose(1, 2).flatten(2)), keys, values


@typed(TOKENS, torch.tensor([2]))
class StaticCache(nn.Module):
    """Keys and values are written into float32 buffers of 10 tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 17)

    def forward(self, x, start):
        q, k, v = self.qkv(x).chunk(3, -1)
        at = start + torch.arange(x.shape[1])
        keys, values = torch.zeros(len(x), 10, 24), torch.zeros(len(x), 10, 24)
        keys[:, at], values[:, at] = k, v
        mask = torch.arange(10)[None] <= at[:, None]
        return self.out(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None]))


@typed(TOKENS)
class CosineAttention(nn.Module):
    """As in Swin V2: a learned scale, whose logarithm has a limit."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.log(10 * torch.ones(3, 1, 1)))
        self.attention = Attention(self.mix)

    def mix(self, q, k, v):
        scale = torch.clamp(self.scale, max=torch.log(torch.tensor(1.0 / 0.01))).exp()
        return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale).softmax(-1) @ v

    def forward(self, x):
        return self.attention(x)


@typed((2, 16, 4, 6))
class SpatialAttention(nn.Module):
    """Of pixels, as in diffusion decoders: norm, 1x1 convolutions, batched products."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, 16), nn.Conv2d(16, 48, 1)
        self.out = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)
        weights = torch.bmm(q.permute(0, 2, 1), k) * 16**-0.5
        weights = F.softmax(weights.float(), dim=2).type(weights.dtype)
        return x + self.out(torch.bmm(v, weights.permute(0, 2, 1)).view_as(x))


@typed((1, 4, 4, 24))
class ShiftedWindows(nn.Module):
    """As in Swin: rolled, in windows of 2 x 2, and -100 between regions that were apart."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(_written(lambda s, mask: s + mask[:, None]))

    def forward(self, x):
        regions = torch.zeros((1, 4, 4, 1))
        for i, rows in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
            for j, columns in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
                regions[:, rows, columns] = 3 * i + j
        regions = self.windows(regions).squeeze(-1)
        apart = regions[:, None] - regions[:, :, None]
        mask = apart.masked_fill(apart != 0, float(-100)).masked_fill(apart == 0, float(0))
        return self.attention(self.windows(x.roll((-1, -1), (1, 2))), mask)

    def windows(self, x):
        x = x.view(x.shape[0], 2, 2, 2, 2, x.shape[-1])
        return x.transpose(2, 3).reshape(-1, 4, x.shape[-1])


between_linears(
    {
        "softmax_of_masked": lambda x: x.masked_fill(torch.arange(24) % 5 == 0, -torch.inf).softmax(
            -1
        ),
        "gated_by_softmax": lambda x: x * F.softmax(x / 0.5, -1, dtype=torch.float32).type_as(x),
        "local_weights": lambda x: (
            x.unfold(1, 3, 1).softmax(-1).sum(1) + x[:, 1:-1].amax(1)[:, None]
        ),
    },
    *(3, 24),
)
