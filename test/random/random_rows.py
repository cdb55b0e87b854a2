"""Expressions that random models are made of: a row is one, with places for a value and its dims.

Rows of a line are parted by " | ". The dense model decides whether one fits, so a new row is a few
words.
"""

from __future__ import annotations

# Shape stays; {x} may be any float value. Bounded slopes, no jumps.
POINTWISE = """
F.relu({x}) | torch.relu({x}) | F.relu6({x}) | F.silu({x}) | F.gelu({x}) | F.hardswish({x})
F.gelu({x}, approximate="tanh") | F.leaky_relu({x}, 0.2) | F.elu({x}) | F.mish({x}) | F.selu({x})
F.softplus({x}) | F.hardtanh({x}, -1, 2) | F.hardsigmoid({x}) | torch.sigmoid({x}) | torch.tanh({x})
{x} * torch.sigmoid({x}) | {x} * F.relu6({x} + 3) / 6 | {x} * torch.tanh(F.softplus({x}))
{x} * 0.5 * (1 + torch.erf({x} / 2**0.5)) | torch.clamp({x}, 0, 6) | torch.clamp({x}, min=-0.5)
{x}.clamp(min=0.0) | torch.maximum({x}, {x} * 0.1) | torch.where({x} > 0, {x}, 0.1 * {x})
{x}.masked_fill({x} > 0.5, 0.5) | {x} + 1 | 1 - {x} | {x} * 0.5 | -{x} | {x} / 3
2 / (1 + {x}.abs()) | torch.sqrt({x} * {x} + 1) | torch.exp(-{x}.abs()) | torch.log1p({x}.abs())
{x}.abs() | {x}.cos() | torch.sin({x}) | {x}.square() * 0.3 | {x}**2 * 0.3 | torch.rsub({x}, 1)
torch.lerp({x}, -{x}, 0.2) | {x}.pow(3).clamp(-2, 2) | torch.addcmul({x}, {x}, {x}, value=0.1)
F.dropout({x}, 0.5, False) | {x} - {x}.mean() | F.logsigmoid({x}) | F.softsign({x})
F.threshold({x}, 0.0, 0.0) | F.celu({x}) | F.glu(torch.cat(({x}, {x}), 1), 1) | {x}.contiguous()
{x}.clone() | torch.relu_({x}.clone()) | F.relu({x} * 1, inplace=True) | ({x} + 1).mul_(0.5)
{x}.clone().clamp_(0, 1) | F.tanhshrink({x}) | {x} * {x}.shape[-1] / 16
{x} * ({x}.shape[0] + 1) * 0.3 | {x} + len({x}) * 0.1 | {x} / {x}.size(-1)
{x} * ({x}.numel() % 3) * 0.4 | {x} + float({x}.dim()) * 0.1 | {x} + {x}.shape.numel() ** -0.5
{x} * (0.5 if {x}.shape[-1] % 2 else 2.0) | {x} + ({x}.shape[0] > 1)
{x} if {x}.shape[0] > 2 else -{x} | torch.softmax({x}, {d}) | F.log_softmax({x}, {d})
{x}.softmax(-1) * 4 | F.normalize({x} + 2, dim={d}) | torch.cumsum({x}, {d}) * 0.2 | {x}.flip({d})
{x}.roll({k}, {d}) | {x} - {x}.mean({d}, keepdim=True)
{x} * {x}.amax({d}, keepdim=True).clamp(0, 2) | {x} / ({x}.norm(dim={d}, keepdim=True) + 1)
F.layer_norm({x}, {x}.shape[-1:]) | F.layer_norm({x}, {x}.shape[1:]) | {x} * torch.ones_like({x})
{x} + torch.zeros({x}.shape) | {x} + torch.full_like({x}, 0.25) | {x}.new_ones({x}.shape) + {x}
{x} + torch.arange({x}.shape[-1], dtype={x}.dtype) * 0.05
{x} * torch.linspace(0, 1, {x}.shape[-1]) | torch.cat({x}.chunk(2, {d})[::-1], {d})
torch.stack({x}.unbind({d}), {d}) | {x}.view({x}.shape) | torch.cat({x}.split({k}, {d}), {d})
sum({x}.unbind({d})).unsqueeze({d}) * 0.3 + {x} | {x} + {x}.transpose({d}, {e})
{x} + {x}.flip({d}) | {x} * torch.tril(torch.ones({x}.shape[-2:]))
torch.where(torch.arange({x}.shape[-1]) % 2 == 0, {x}, -{x}) | {x}.detach() | {x}.to({x}.dtype)
torch.nan_to_num({x}) | torch.atan2({x}, {x}.abs() + 1) | torch.hypot({x}, {x} + 1) | {x}.data * 1
F.alpha_dropout({x}, 0.5, False) | {x}.expand_as({x}) | {x}.reshape(-1).view_as({x})
{x}.mul(2).sub(1) | torch.broadcast_to({x}.mean({d}, keepdim=True), {x}.shape)
{x}.masked_fill(torch.tensor(False), 0) | {x}.flatten().reshape({x}.shape)
{x}.index_select({d}, torch.arange({x}.shape[{d}]).flip(0))
{x} + torch.eye({x}.shape[-1])[0]
"""

# Another shape, of any float value with at least two dims; {i} is an index into {d}.
VIEWS = """
{x}.select({d}, {i}) | {x}.narrow({d}, {a}, {n}) | {x}.unbind({d})[{i}] | {x}.chunk(2, {d})[0]
{x}.chunk(2, {d})[1] | {x}.split({k}, {d})[0] | {x}.tensor_split(2, {d})[-1]
{x}.transpose({d}, {e}) | {x}.movedim({d}, {e}) | {x}.permute({perm}) | {x}.mT
{x}.swapaxes({d}, {e}) | {x}.flatten({d}) | {x}.flatten(1) | {x}.flatten(-2) | {x}.flatten(0, 1)
{x}.reshape({x}.shape[0], -1) | {x}[:, {c}] | {x}[:, {a1}:{b1}] | {x}[:, ::2] | {x}[:, 1::2]
{x}[:, -{k}:] | {x}[..., {k}:] | {x}[..., :-{k}] | {x}[..., ::{k}] | {x}[..., 1:-1] | {x}[::2]
{x}[:1] | {x}[-1:] | {x}[0] | {x}[-1] | {x}[:, None] | {x}[..., None] | {x}[None]
{x}.unsqueeze({d}) | {x}.squeeze() | {x}.squeeze({d}) | {x}[:, 0:1] | {x}[:, [0, -1]]
{x}[:, [-1, 0, 0]] | {x}[torch.arange({x}.shape[0]) % 2 == 0] | {x}[:, :, 1:] | {x}[:, :, ::2]
{x}[..., ::2, ::2] | {x}[..., 1:, :-1] | {x}[..., {x}.shape[-1] // 2 :]
{x}[..., : {x}.shape[-1] // 2] | {x}[:, : {x}.shape[1] // 2] | {x}[..., : min({x}.shape[-2:])]
{x}[..., {x}.shape[-1] % 3 :] | {x}[..., (lambda w: slice(w // 4, w - w // 4))({x}.shape[-1])]
{x}.diagonal(dim1={d}, dim2={e}) | {x}.unfold({d}, 2, 1) | {x}.unfold(-1, 3, 2)
{x}[:, :, {x}.shape[2] // 2] | {x}.unsqueeze({d}).expand({expand}) | {x}.repeat({ones2})
{x}.repeat_interleave(2, {d}) | {x}.expand({k}, {minus}) | {x}[:1].expand(3, {minus1})
torch.stack(({x}, -{x}), {d}) | torch.cat(({x}, {x}), {d}) | torch.cat(({x}, {x} * 2, {x}), 1)
torch.cat(({x}[:, :1], {x}), 1) | {x}.view({x}.shape[0], -1) | {x}.view(-1, {x}.shape[-1])
{x}.view(*{x}.shape[:-1], 1, {x}.shape[-1])
{x}.reshape({x}.shape[0], 2, {x}.shape[1] // 2, *{x}.shape[2:]) | {x}.unflatten(1, (-1, 2))
{x}.reshape({x}.shape[0], {x}.shape[1] * {x}.shape[2], *{x}.shape[3:]) | {x}.unflatten(-1, (1, -1))
{x}.reshape(-1, *{x}.shape[2:]) | {x}.contiguous().view(-1) | {x}.sum({d}) * 0.3 | {x}.mean({d})
{x}.mean(({d}, {e})) | {x}.mean((-2, -1), keepdim=True) | {x}.amax({d}) | {x}.sum() * 0.01
{x}.std({d}) | {x}.var({d}, unbiased=False) | {x}.logsumexp({d}) | {x}.mean({d}, keepdim=True)
{x}.max({d})[0] | {x}.min({d}, keepdim=True).values | F.pad({x}, (1, 2)) | F.pad({x}, (0, -1))
F.pad({x}, (-1, 1, 1, 0)) | F.pad({x}, (0, -{x}.shape[-1] % 4))
F.pad({x}, (0, -{x}.shape[-1] % 8, 0, -{x}.shape[-2] % 8)) | F.pad({x}, (1, 1), value=0.5)
F.pad({x}, (1, 1), mode="replicate") | F.pad({x}, (1, 2, 0, 1), mode="reflect")
F.pad({x}, (1, 1, 2, 1), mode="circular") | F.pad({x}, (0, {x}.shape[-1] % 2))
F.pad({x}, (0, 0, 0, 0, 1, 0)) | torch.constant_pad_nd({x}, (1, 0, 0, 1))
F.pad({x}, (0, max(0, 16 - {x}.shape[-1]))) | {x}.tril()
torch.einsum("...ij,...kj->...ik", {x}, {x}) * 0.2 | {x} @ {x}.mT * 0.2 | {x}.tile(2)
{x}.gather({d}, torch.zeros({x}.shape, dtype=torch.int64))
{x}.take_along_dim(torch.tensor([[0]]), -1) | {x}.swapdims(0, 1)
{x}.T if {x}.dim() == 2 else {x}.transpose(-1, -2) | {x}.unsafe_chunk(2, {d})[0]
torch.hstack(({x}, {x})) | torch.vstack(({x}, {x})) | {x}.ravel() | torch.atleast_3d({x})
{x}.squeeze(0) | {x}.contiguous()[:, ::2].contiguous() | {x}[:0]
torch.outer({x}.flatten()[:5], {x}.flatten()[:3])
{x}.new_zeros({x}.shape[0], 3) + {x}.flatten(1)[:, :3]
"""

# Images [N, C, H, W]; {c1}: a channel count, for what follows.
IMAGES = """
F.max_pool2d({x}, 2) | F.max_pool2d({x}, 3, 2, 1) | F.max_pool2d({x}, 3, 1, 1)
F.avg_pool2d({x}, 2) | F.max_pool2d({x}, 2, ceil_mode=True) | F.avg_pool2d({x}, 3, 2, 1)
F.avg_pool2d({x}, 3, 2, 1, False, False) | F.max_pool2d({x}, 3, 2, 1, dilation=2)
F.adaptive_avg_pool2d({x}, 1) | F.adaptive_avg_pool2d({x}, (3, 2))
F.avg_pool2d({x}, 3, 2, ceil_mode=True, count_include_pad=False) | F.adaptive_max_pool2d({x}, 2)
F.adaptive_avg_pool2d({x}, (None, 1)) | F.max_pool2d({x}, 2, return_indices=True)[0]
F.lp_pool2d({x} + 3, 2, 2) * 0.2 | F.avg_pool2d({x}, {x}.shape[2:])
F.avg_pool2d({x}, ({x}.shape[2], 1)) | F.max_pool2d({x}, ({k}, 1))
F.interpolate({x}, scale_factor=2)
F.interpolate({x}, scale_factor=2, mode="bilinear", align_corners=True)
F.interpolate({x}, scale_factor=1.5, mode="bilinear") | F.interpolate({x}, scale_factor=0.5)
F.interpolate({x}, size=(9, 7), mode="bilinear", align_corners=False)
F.interpolate({x}, size=(5, 12)) | F.interpolate({x}, scale_factor=(1.0, 0.7), mode="bicubic")
F.interpolate({x}, (8, 8), mode="area")
F.interpolate({x}, [s * 2 - 1 for s in {x}.shape[-2:]], mode="bilinear", align_corners=True)
F.interpolate({x}, size=({x}.shape[2] // 2, {x}.shape[3]), mode="bilinear", antialias=True)
F.interpolate(F.max_pool2d({x}, 2), size={x}.shape[2:]) + {x} | F.pixel_unshuffle({x}, 2)
F.pixel_shuffle({x}, 2) | F.channel_shuffle({x}, 2) | F.unfold({x}, 3, padding=1)
F.unfold({x}, 2, stride=2) | F.fold(F.unfold({x}, 3, padding=1), {x}.shape[-2:], 3, padding=1) / 9
F.grid_sample({x}, F.affine_grid(torch.eye(2, 3)[None].expand({x}.shape[0], -1, -1) * 0.9, \
{x}.shape, align_corners=False), align_corners=False)
F.affine_grid({x}.mean((2, 3))[:, :1, None].expand(-1, 2, 3), {x}.shape, align_corners=True)\
.permute(0, 3, 1, 2)
{x}.contiguous(memory_format=torch.channels_last) | {x}.to(memory_format=torch.channels_last)
F.avg_pool2d({x}, 3, stride=1, padding=1) - {x} | {x} * {x}.mean((2, 3), keepdim=True).sigmoid()
{x} * F.adaptive_avg_pool2d({x}, 1) | F.local_response_norm({x}, 3) | F.dropout2d({x}, 0.3, False)
F.local_response_norm({x}, 4, 2.0, 0.5) | F.local_response_norm({x}, {k}, k=2.0)
{x} / (1 + F.avg_pool3d(({x} * {x})[:, None], (3, 1, 1), 1, (1, 0, 0))[:, 0]) ** 0.75
{x}.reshape({x}.shape[0], 2, -1, *{x}.shape[2:]).transpose(1, 2).reshape({x}.shape)
{x}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
{x}.view({x}.shape[0], 2, -1, *{x}.shape[2:])[:, 1]
{x}.view({x}.shape[0], {x}.shape[1], {x}.shape[2] // 2, 2, {x}.shape[3]).mean(3)
{x}.permute(0, 2, 3, 1) | {x}.permute(0, 2, 3, 1).contiguous() | {x}.flatten(2).transpose(1, 2)
F.layer_norm({x}.permute(0, 2, 3, 1), {x}.shape[1:2]).permute(0, 3, 1, 2) | {x}.transpose(2, 3)
F.batch_norm({x}, torch.zeros({x}.shape[1], dtype={x}.dtype), {x}.new_ones({x}.shape[1]))
F.conv2d({x}.flatten(0, 1)[:, None], {x}.new_ones(1, 1, 3, 3) / 9, padding=1).view_as({x})
F.instance_norm({x}) | F.group_norm({x}, 1) | {x}[:, :, ::2, ::2] | {x}[:, :, 1::2, ::2]
{x}[:, :, :, :1].expand_as({x})
torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, s, dtype={x}.dtype) for s in {x}.shape[2:]), \
indexing="ij"))[None].mul({x}[:, :1])
torch.cat(({x}, torch.linspace(0, 1, {x}.shape[3]).expand({x}.shape[0], 1, *{x}.shape[2:])), 1)
torch.cat(({x}[..., ::2, ::2], {x}[..., 1::2, 1::2]), 1) | torch.roll({x}, (1, -1), (2, 3))
torch.rot90({x}, 1, (2, 3)) | {x}[..., torch.arange({x}.shape[-1]).flip(0)] | {x} + {x}[:, :1]
{x} * {x}[:, :, :1] | {x} + {x}.mean(1, keepdim=True) | {x} - {x}.amax(1, keepdim=True) * 0.5
torch.cat(({x}.mean(1, keepdim=True), {x}.amax(1, keepdim=True)), 1)
F.pad({x}, (0, -{x}.shape[3] % 32, 0, -{x}.shape[2] % 32))
F.pad({x}, (1, 1, 1, 1), mode="reflect") | F.pad({x}, (1, 0, 2, 1))
"""


def _rows(table):
    return [row.strip() for line in table.strip().splitlines() for row in line.split(" | ")]


def row_for(g, table, x):
    """A row of the table with its places filled for the value x."""
    row = g.rng.choice(_rows(table))
    rank = g.rank(x)
    d, e = g.rng.randrange(rank), g.rng.randrange(rank)
    least = min(g.least(x, d), 6)
    a = g.rng.randrange(least + 1)
    c = g.least(x, 1) if rank > 1 else 1
    a1 = g.rng.randrange(c + 1)
    values = {
        "x": x,
        "d": g.rng.choice((d, d - rank)),
        "e": e,
        "i": g.rng.randrange(least) if least else 0,
        "a": a,
        "n": max(1, least - a),
        "c": g.rng.randrange(c) if c else 0,
        "a1": a1,
        "b1": g.rng.randint(a1, c),
        "k": g.rng.randint(1, 3),
        "perm": ", ".join(map(str, g.rng.sample(range(rank), rank))),
        "expand": ", ".join("2" if i == d else "-1" for i in range(rank + 1)),
        "ones2": ", ".join("2" if i == d else "1" for i in range(rank)),
        "minus": ", ".join(["-1"] * rank),
        "minus1": ", ".join(["-1"] * (rank - 1)),
    }
    for name, value in values.items():
        row = row.replace("{" + name + "}", str(value))
    return row
