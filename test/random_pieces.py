"""The pieces of random models: each writes one or a few lines of a forward.

A piece is a function of the builder (random_models.py) that picks values and returns code, which
assigns `g.out`, or changes a value in place. It may be wrong about what fits: the builder runs the
code at every size and drops what the dense model refuses. So a new piece is a few lines, and most are
rows of the tables here. `Skip` says that no value fits.
"""

from __future__ import annotations

CHANNELS = (1, 2, 3, 4, 5, 7, 8, 8, 9, 12, 15, 16, 16, 17, 20, 24, 32, 33, 40)

PIECES: list = []  # (weight, piece)


class Skip(Exception):
    """No value fits the piece."""


def piece(weight):
    def add(function):
        PIECES.append((weight, function))
        return function

    return add


# Shape stays; {x} may be any float value. Bounded slopes, no jumps.
POINTWISE = """
F.relu({x}) | torch.relu({x}) | F.relu6({x}) | F.silu({x}) | F.gelu({x}) | F.hardswish({x})
F.gelu({x}, approximate="tanh") | F.leaky_relu({x}, 0.2) | F.elu({x}) | F.mish({x}) | F.selu({x})
F.softplus({x}) | F.hardtanh({x}, -1, 2) | F.hardsigmoid({x}) | torch.sigmoid({x}) | torch.tanh({x})
{x} * torch.sigmoid({x}) | {x} * F.relu6({x} + 3) / 6 | {x} * torch.tanh(F.softplus({x}))
{x} * 0.5 * (1 + torch.erf({x} / 2**0.5)) | torch.clamp({x}, 0, 6) | torch.clamp({x}, min=-0.5)
{x}.clamp(min=0.0) | torch.maximum({x}, {x} * 0.1) | torch.where({x} > 0, {x}, 0.1 * {x})
{x}.masked_fill({x} > 0.5, 0.5) | {x} + 1 | 1 - {x} | {x} * 0.5 | -{x} | {x} / 3 | 2 / (1 + {x}.abs())
torch.sqrt({x} * {x} + 1) | torch.exp(-{x}.abs()) | torch.log1p({x}.abs()) | {x}.abs() | {x}.cos()
torch.sin({x}) | {x}.square() * 0.3 | {x}**2 * 0.3 | torch.rsub({x}, 1) | torch.lerp({x}, -{x}, 0.2)
{x}.pow(3).clamp(-2, 2) | torch.addcmul({x}, {x}, {x}, value=0.1) | F.dropout({x}, 0.5, False)
{x} - {x}.mean() | F.logsigmoid({x}) | F.softsign({x}) | F.threshold({x}, 0.0, 0.0) | F.celu({x})
F.glu(torch.cat(({x}, {x}), 1), 1) | {x}.contiguous() | {x}.clone() | torch.relu_({x}.clone())
F.relu({x} * 1, inplace=True) | ({x} + 1).mul_(0.5) | {x}.clone().clamp_(0, 1) | F.tanhshrink({x})
{x} * {x}.shape[-1] / 16 | {x} * ({x}.shape[0] + 1) * 0.3 | {x} + len({x}) * 0.1 | {x} / {x}.size(-1)
{x} * ({x}.numel() % 3) * 0.4 | {x} + float({x}.dim()) * 0.1 | {x} + {x}.shape.numel() ** -0.5
{x} * (0.5 if {x}.shape[-1] % 2 else 2.0) | {x} + ({x}.shape[0] > 1) | {x} if {x}.shape[0] > 2 else -{x}
torch.softmax({x}, {d}) | F.log_softmax({x}, {d}) | {x}.softmax(-1) * 4 | F.normalize({x} + 2, dim={d})
torch.cumsum({x}, {d}) * 0.2 | {x}.flip({d}) | {x}.roll({k}, {d}) | {x} - {x}.mean({d}, keepdim=True)
{x} * {x}.amax({d}, keepdim=True).clamp(0, 2) | {x} / ({x}.norm(dim={d}, keepdim=True) + 1)
F.layer_norm({x}, {x}.shape[-1:]) | F.layer_norm({x}, {x}.shape[1:]) | {x} * torch.ones_like({x})
{x} + torch.zeros({x}.shape) | {x} + torch.full_like({x}, 0.25) | {x}.new_ones({x}.shape) + {x}
{x} + torch.arange({x}.shape[-1], dtype={x}.dtype) * 0.05 | {x} * torch.linspace(0, 1, {x}.shape[-1])
torch.cat({x}.chunk(2, {d})[::-1], {d}) | torch.stack({x}.unbind({d}), {d}) | {x}.view({x}.shape)
torch.cat({x}.split({k}, {d}), {d}) | sum({x}.unbind({d})).unsqueeze({d}) * 0.3 + {x}
{x} + {x}.transpose({d}, {e}) | {x} + {x}.flip({d}) | {x} * torch.tril(torch.ones({x}.shape[-2:]))
torch.where(torch.arange({x}.shape[-1]) % 2 == 0, {x}, -{x}) | {x}.detach() | {x}.to({x}.dtype)
torch.nan_to_num({x}) | torch.atan2({x}, {x}.abs() + 1) | torch.hypot({x}, {x} + 1) | {x}.data * 1
F.alpha_dropout({x}, 0.5, False) | {x}.expand_as({x}) | {x}.reshape(-1).view_as({x}) | {x}.mul(2).sub(1)
torch.broadcast_to({x}.mean({d}, keepdim=True), {x}.shape) | {x}.masked_fill(torch.tensor(False), 0)
{x}.flatten().reshape({x}.shape) | {x}.index_select({d}, torch.arange({x}.shape[{d}]).flip(0))
{x} + torch.randn({x}.shape[-1], generator=torch.Generator().manual_seed(3))
"""

# Another shape, of any float value with at least two dims. {i}: an index into {d}; {a}, {b}: bounds.
VIEWS = """
{x}.select({d}, {i}) | {x}.narrow({d}, {a}, {n}) | {x}.unbind({d})[{i}] | {x}.chunk(2, {d})[0]
{x}.chunk(2, {d})[1] | {x}.split({k}, {d})[0] | {x}.tensor_split(2, {d})[-1] | {x}.transpose({d}, {e})
{x}.movedim({d}, {e}) | {x}.permute({perm}) | {x}.mT | {x}.swapaxes({d}, {e}) | {x}.flatten({d})
{x}.flatten(1) | {x}.flatten(-2) | {x}.flatten(0, 1) | {x}.reshape({x}.shape[0], -1) | {x}[:, {c}]
{x}[:, {a1}:{b1}] | {x}[:, ::2] | {x}[:, 1::2] | {x}[:, -{k}:] | {x}[..., {k}:] | {x}[..., :-{k}]
{x}[..., ::{k}] | {x}[..., 1:-1] | {x}[::2] | {x}[:1] | {x}[-1:] | {x}[0] | {x}[-1] | {x}[:, None]
{x}[..., None] | {x}[None] | {x}.unsqueeze({d}) | {x}.squeeze() | {x}.squeeze({d}) | {x}[:, 0:1]
{x}[:, [0, -1]] | {x}[:, [-1, 0, 0]] | {x}[torch.arange({x}.shape[0]) % 2 == 0] | {x}[:, :, 1:]
{x}[:, :, ::2] | {x}[..., ::2, ::2] | {x}[..., 1:, :-1] | {x}[..., {x}.shape[-1] // 2 :]
{x}[..., : {x}.shape[-1] // 2] | {x}[:, : {x}.shape[1] // 2] | {x}[..., : min({x}.shape[-2:])]
{x}[..., {x}.shape[-1] % 3 :] | {x}[..., (lambda w: slice(w // 4, w - w // 4))({x}.shape[-1])]
{x}.diagonal(dim1={d}, dim2={e}) | {x}.unfold({d}, 2, 1) | {x}.unfold(-1, 3, 2) | {x}[:, :, {x}.shape[2] // 2]
{x}.unsqueeze({d}).expand({expand}) | {x}.repeat({ones2}) | {x}.repeat_interleave(2, {d})
{x}.expand({k}, {minus}) | {x}[:1].expand(3, {minus1}) | torch.stack(({x}, -{x}), {d})
torch.cat(({x}, {x}), {d}) | torch.cat(({x}, {x} * 2, {x}), 1) | torch.cat(({x}[:, :1], {x}), 1)
{x}.view({x}.shape[0], -1) | {x}.view(-1, {x}.shape[-1]) | {x}.view(*{x}.shape[:-1], 1, {x}.shape[-1])
{x}.reshape({x}.shape[0], 2, {x}.shape[1] // 2, *{x}.shape[2:]) | {x}.unflatten(1, (-1, 2))
{x}.reshape({x}.shape[0], {x}.shape[1] * {x}.shape[2], *{x}.shape[3:]) | {x}.unflatten(-1, (1, -1))
{x}.reshape(-1, *{x}.shape[2:]) | {x}.contiguous().view(-1) | {x}.sum({d}) * 0.3 | {x}.mean({d})
{x}.mean(({d}, {e})) | {x}.mean((-2, -1), keepdim=True) | {x}.amax({d}) | {x}.sum() * 0.01 | {x}.std({d})
{x}.var({d}, unbiased=False) | {x}.logsumexp({d}) | {x}.mean({d}, keepdim=True) | {x}.max({d})[0]
{x}.min({d}, keepdim=True).values | F.pad({x}, (1, 2)) | F.pad({x}, (0, -1)) | F.pad({x}, (-1, 1, 1, 0))
F.pad({x}, (0, -{x}.shape[-1] % 4)) | F.pad({x}, (0, -{x}.shape[-1] % 8, 0, -{x}.shape[-2] % 8))
F.pad({x}, (1, 1), value=0.5) | F.pad({x}, (1, 1), mode="replicate") | F.pad({x}, (1, 2, 0, 1), mode="reflect")
F.pad({x}, (1, 1, 2, 1), mode="circular") | F.pad({x}, (0, {x}.shape[-1] % 2)) | F.pad({x}, (0, 0, 0, 0, 1, 0))
torch.constant_pad_nd({x}, (1, 0, 0, 1)) | F.pad({x}, (0, max(0, 16 - {x}.shape[-1])))
{x}.tril() | torch.einsum("...ij,...kj->...ik", {x}, {x}) * 0.2 | {x} @ {x}.mT * 0.2 | {x}.tile(2)
{x}.gather({d}, torch.zeros({x}.shape, dtype=torch.int64)) | {x}.take_along_dim(torch.tensor([[0]]), -1)
{x}.swapdims(0, 1) | {x}.T if {x}.dim() == 2 else {x}.transpose(-1, -2) | {x}.unsafe_chunk(2, {d})[0]
torch.hstack(({x}, {x})) | torch.vstack(({x}, {x})) | {x}.ravel() | torch.atleast_3d({x}) | {x}.squeeze(0)
{x}.contiguous()[:, ::2].contiguous() | {x}[:0]
torch.outer({x}.flatten()[:5], {x}.flatten()[:3]) | {x}.new_zeros({x}.shape[0], 3) + {x}.flatten(1)[:, :3]
"""

# Images [N, C, H, W]; {c1}: a channel count, for what follows.
IMAGES = """
F.max_pool2d({x}, 2) | F.max_pool2d({x}, 3, 2, 1) | F.max_pool2d({x}, 3, 1, 1) | F.avg_pool2d({x}, 2)
F.max_pool2d({x}, 2, ceil_mode=True) | F.avg_pool2d({x}, 3, 2, 1) | F.avg_pool2d({x}, 3, 2, 1, False, False)
F.max_pool2d({x}, 3, 2, 1, dilation=2) | F.adaptive_avg_pool2d({x}, 1) | F.adaptive_avg_pool2d({x}, (3, 2))
F.avg_pool2d({x}, 3, 2, ceil_mode=True, count_include_pad=False) | F.adaptive_max_pool2d({x}, 2)
F.adaptive_avg_pool2d({x}, (None, 1)) | F.max_pool2d({x}, 2, return_indices=True)[0] | F.lp_pool2d({x} + 3, 2, 2) * 0.2
F.avg_pool2d({x}, {x}.shape[2:]) | F.avg_pool2d({x}, ({x}.shape[2], 1)) | F.max_pool2d({x}, ({k}, 1))
F.interpolate({x}, scale_factor=2) | F.interpolate({x}, scale_factor=2, mode="bilinear", align_corners=True)
F.interpolate({x}, scale_factor=1.5, mode="bilinear") | F.interpolate({x}, scale_factor=0.5)
F.interpolate({x}, size=(9, 7), mode="bilinear", align_corners=False) | F.interpolate({x}, size=(5, 12))
F.interpolate({x}, scale_factor=(1.0, 0.7), mode="bicubic") | F.interpolate({x}, (8, 8), mode="area")
F.interpolate({x}, [s * 2 - 1 for s in {x}.shape[-2:]], mode="bilinear", align_corners=True)
F.interpolate({x}, size=({x}.shape[2] // 2, {x}.shape[3]), mode="bilinear", antialias=True)
F.interpolate(F.max_pool2d({x}, 2), size={x}.shape[2:]) + {x} | F.pixel_unshuffle({x}, 2)
F.pixel_shuffle({x}, 2) | F.channel_shuffle({x}, 2) | F.unfold({x}, 3, padding=1) | F.unfold({x}, 2, stride=2)
F.fold(F.unfold({x}, 3, padding=1), {x}.shape[-2:], 3, padding=1) / 9
F.grid_sample({x}, F.affine_grid(torch.eye(2, 3)[None].expand({x}.shape[0], -1, -1) * 0.9, {x}.shape, align_corners=False), align_corners=False)
F.affine_grid({x}.mean((2, 3))[:, :1, None].expand(-1, 2, 3), {x}.shape, align_corners=True).permute(0, 3, 1, 2)
{x}.contiguous(memory_format=torch.channels_last) | {x}.to(memory_format=torch.channels_last)
F.avg_pool2d({x}, 3, stride=1, padding=1) - {x} | {x} * {x}.mean((2, 3), keepdim=True).sigmoid()
{x} * F.adaptive_avg_pool2d({x}, 1) | F.local_response_norm({x}, 3) | F.dropout2d({x}, 0.3, False)
{x}.reshape({x}.shape[0], 2, -1, *{x}.shape[2:]).transpose(1, 2).reshape({x}.shape)
{x}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) | {x}.view({x}.shape[0], 2, -1, *{x}.shape[2:])[:, 1]
{x}.view({x}.shape[0], {x}.shape[1], {x}.shape[2] // 2, 2, {x}.shape[3]).mean(3)
{x}.permute(0, 2, 3, 1) | {x}.permute(0, 2, 3, 1).contiguous() | {x}.flatten(2).transpose(1, 2)
F.layer_norm({x}.permute(0, 2, 3, 1), {x}.shape[1:2]).permute(0, 3, 1, 2) | {x}.transpose(2, 3)
F.batch_norm({x}, torch.zeros({x}.shape[1], dtype={x}.dtype), torch.ones({x}.shape[1], dtype={x}.dtype))
F.conv2d({x}.flatten(0, 1)[:, None], torch.ones(1, 1, 3, 3, dtype={x}.dtype) / 9, padding=1).view_as({x})
F.instance_norm({x}) | F.group_norm({x}, 1) | {x}[:, :, ::2, ::2] | {x}[:, :, 1::2, ::2] | {x}[:, :, :, :1].expand_as({x})
torch.cat(({x}, *torch.meshgrid(*(torch.linspace(-1, 1, s, dtype={x}.dtype)[None, None, :].squeeze() for s in {x}.shape[2:]), indexing="ij"))[:1], 1)
torch.cat(({x}, torch.linspace(0, 1, {x}.shape[3]).expand({x}.shape[0], 1, *{x}.shape[2:])), 1)
torch.cat(({x}[..., ::2, ::2], {x}[..., 1::2, 1::2]), 1) | torch.roll({x}, (1, -1), (2, 3))
torch.rot90({x}, 1, (2, 3)) | {x}[..., torch.arange({x}.shape[-1]).flip(0)] | {x} + {x}[:, :1] | {x} * {x}[:, :, :1]
{x} + {x}.mean(1, keepdim=True) | {x} - {x}.amax(1, keepdim=True) * 0.5 | torch.cat(({x}.mean(1, keepdim=True), {x}.amax(1, keepdim=True)), 1)
F.pad({x}, (0, -{x}.shape[3] % 32, 0, -{x}.shape[2] % 32)) | F.pad({x}, (1, 1, 1, 1), mode="reflect") | F.pad({x}, (1, 0, 2, 1))
"""


def _rows(table):
    return [row.strip() for line in table.strip().splitlines() for row in line.split(" | ")]


def _fill(g, row, x):
    """The row with its places filled for the value x."""
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


@piece(9)
def pointwise(g):
    x = g.pick(rank=(1, 6), any_float=True)
    return f"{g.out} = {_fill(g, g.rng.choice(_rows(POINTWISE)), x)}"


@piece(9)
def view(g):
    x = g.pick(rank=(2, 5), any_float=True)
    return f"{g.out} = {_fill(g, g.rng.choice(_rows(VIEWS)), x)}"


@piece(6)
def image(g):
    x = g.pick(rank=4)
    return f"{g.out} = {_fill(g, g.rng.choice(_rows(IMAGES)), x)}"


@piece(3)
def ends(g):
    """1-D and 3-D forms of the pools and resamplings."""
    x = g.pick(rank=(3, 5))
    n = g.rank(x) - 2
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]
    row = g.rng.choice(
        (
            "F.max_pool{n}d({x}, 2)",
            "F.max_pool{n}d({x}, 3, 2, 1, ceil_mode=True)",
            "F.avg_pool{n}d({x}, 2)",
            "F.avg_pool{n}d({x}, 3, 1, 1, count_include_pad=False)",
            "F.adaptive_avg_pool{n}d({x}, 1)",
            "F.adaptive_avg_pool{n}d({x}, 3)",
            "F.adaptive_max_pool{n}d({x}, 2)",
            "F.interpolate({x}, scale_factor=2)",
            "F.interpolate({x}, scale_factor=1.5, mode='{mode}')",
            "F.interpolate({x}, size=[(s + 1) // 2 for s in {x}.shape[2:]], mode='{mode}')",
            "F.interpolate({x}, size=5, mode='nearest-exact')",
            "F.max_pool{n}d({x}, 2, return_indices=True)[0]",
            "F.instance_norm({x})",
            "F.group_norm({x}, 1)",
        )
    )
    return f"{g.out} = {row.format(n=n, x=x, mode=mode)}"


def _convolution(g, n, channels, transposed=False):
    """The constructor of a random convolution of `channels`, and its output channels."""
    groups = g.rng.choice((1, 1, 1, 1, 2, 4, channels, channels))
    if channels % groups:
        groups = 1
    out = g.rng.choice(CHANNELS)
    if groups == channels:
        out = channels * g.rng.choice((1, 1, 2))
    elif out % groups:
        out = groups * max(1, out // groups)
    kernel = g.rng.choice((1, 1, 2, 3, 3, 3, 3, 5, 7 if n < 3 else 3))
    text = str(kernel)
    if n > 1 and g.rng.random() < 0.15:
        text = "(" + ", ".join(str(g.rng.choice((1, 3, kernel))) for _ in range(n)) + ")"
    extra = []
    stride = g.rng.choice((1, 1, 1, 2, 2, 3))
    if transposed:
        if stride > 1:
            extra.append(f"stride={stride}")
            if g.rng.random() < 0.3:
                extra.append("output_padding=1")
        if g.rng.random() < 0.5:
            extra.append(f"padding={g.rng.randint(0, kernel // 2)}")
    elif g.rng.random() < 0.2:
        extra.append("padding='same'")
    else:
        extra.append(f"padding={g.rng.choice((0, kernel // 2, kernel // 2, kernel // 2, 1))}")
        if stride > 1:
            extra.append(f"stride={stride}")
        if g.rng.random() < 0.12:
            extra.append(f"padding_mode={g.rng.choice(('reflect', 'circular', 'replicate'))!r}")
    if g.rng.random() < 0.15:
        extra.append("dilation=2")
    if groups > 1:
        extra.append(f"groups={groups}")
    if g.rng.random() < 0.3:
        extra.append("bias=False")
    kind = f"nn.ConvTranspose{n}d" if transposed else f"nn.Conv{n}d"
    return f"{kind}({', '.join([str(channels), str(out), text, *extra])})", out


NORMS = (
    "nn.BatchNorm{n}d({c})",
    "nn.BatchNorm{n}d({c})",
    "nn.BatchNorm{n}d({c}, affine=False)",
    "nn.BatchNorm{n}d({c}, track_running_stats=False)",
    "nn.GroupNorm(1, {c})",
    "nn.GroupNorm({g}, {c})",
    "nn.GroupNorm({c}, {c}, affine=False)",
    "nn.InstanceNorm{n}d({c})",
    "nn.InstanceNorm{n}d({c}, affine=True)",
    "nn.InstanceNorm{n}d({c}, affine=True, track_running_stats=True)",
    "nn.PReLU({c})",
)

ACTIVATIONS = (
    "{x}",
    "F.relu({x})",
    "F.relu({x}, inplace=True)",
    "{x}.relu_()",
    "F.relu6({x})",
    "F.silu({x})",
    "F.hardswish({x})",
    "F.gelu({x})",
    "F.leaky_relu({x}, 0.1)",
    "{x} * torch.sigmoid({x})",
    "torch.sigmoid({x})",
)


def _norm(g, n, channels):
    divisors = [k for k in range(1, channels + 1) if channels % k == 0]
    return g.rng.choice(NORMS).format(n=n, c=channels, g=g.rng.choice(divisors))


# What a layer reads: often the value itself, else a view of it of the same rank or one less.
READS = (
    *["{x}"] * 6,
    "{x}[:, :{h}]",
    "{x}[:, {h}:]",
    "{x}[:, ::2]",
    "{x}.flip(1)",
    "{x}[::2]",
    "{x}[:1]",
    "{x}[..., 1:]",
    "{x}[..., 1:-1]",
    "{x}[..., ::2]",
    "{x}.transpose(-1, -2)",
    "{x}.chunk(2, 1)[1]",
    "{x}[:, -3:]",
    "{x}.transpose(0, 1)",
    "{x}.unbind(-1)[1]",
    "{x}.select(2, 0)",
    "{x}[:, 0]",
    "{x}.movedim(-1, 1)",
    "{x}[:1].expand(2, {minus1})",
    "{x}[:, :1].expand(-1, 4, {minus2})",
    "F.pad({x}, (0, -{x}.shape[-1] % 4))",
    "F.pad({x}, (1, 0))",
)


def _read(g, x):
    rank = g.rank(x)
    return g.rng.choice(READS).format(
        x=x,
        h=max(1, g.least(x, 1) // 2),
        minus1=", ".join(["-1"] * (rank - 1)),
        minus2=", ".join(["-1"] * (rank - 2)),
    )


@piece(14)
def convolution(g):
    """A convolution of a view, often with a norm and an activation behind it."""
    x = g.pick(rank=(2, 5))
    read = _read(g, x)
    rank, channels = g.measured(read)  # what the view gives
    n = rank - 2
    if rank in (3, 4) and g.rng.random() < 0.06:  # unbatched: [C, ...]
        n, channels = rank - 1, g.measured(read, 0)[1]
    if n not in (1, 2, 3) or channels < 1:
        raise Skip
    made, out = _convolution(g, n, channels, g.rng.random() < 0.15)
    text = f"{g.module(made)}({read})"
    if n == rank - 2 and g.rng.random() < 0.35:
        text = f"{g.module(_norm(g, n, out))}({text})"
    activation = g.rng.choice(ACTIVATIONS)
    lines = [f"{g.out} = {text}"]
    if activation != "{x}":
        lines.append(f"{g.out} = {activation.format(x=g.out)}")
    if g.rng.random() < 0.2:
        lines.append(f"{g.out} = {x} + {g.out}")
    return "\n".join(lines)


@piece(2)
def normalize(g):
    x = g.pick(rank=(2, 5))
    read = _read(g, x)
    rank, channels = g.measured(read)
    if channels < 1 or rank < 2:
        raise Skip
    return f"{g.out} = {g.module(_norm(g, max(1, rank - 2), channels))}({read})"


@piece(2)
def same_padding(g):
    """TensorFlow's padding, worked out from sizes."""
    x = g.pick(rank=4, fixed=(1,))
    kernel, stride = g.rng.choice(((3, 2), (5, 2), (3, 1), (2, 2), (3, 3)))
    made, _ = _convolution(g, 2, g.dims(x)[1])
    made = made.split(",")
    layer = g.module(f"{','.join(made[:2])}, {kernel}, stride={stride})")
    return (
        f"h, w = {x}.shape[2:]\n"
        f"ph = max((-(-h // {stride}) - 1) * {stride} + {kernel} - h, 0)\n"
        f"pw = max((-(-w // {stride}) - 1) * {stride} + {kernel} - w, 0)\n"
        f"{g.out} = {layer}(F.pad({x}, (pw // 2, pw - pw // 2, ph // 2, ph - ph // 2)))"
    )


@piece(2)
def computed_weights(g):
    x = g.pick(rank=(3, 5), fixed=(1,))
    n, channels, out = g.rank(x) - 2, g.dims(x)[1], g.rng.choice(CHANNELS)
    kernel = g.rng.choice((1, 3))
    weight = g.constant(out, channels, *[kernel] * n)
    scale = g.constant(out, *[1] * (n + 1))
    form = g.rng.choice(
        (
            "{w} * {s}",
            "{w} - {w}.mean(1, keepdim=True)",
            "{w} * 2",
            "F.normalize({w}.flatten(1), dim=1).view_as({w})",
            "{w}.transpose(-1, -2)" if n > 1 else "{w}.flip(-1)",
        )
    )
    weight = form.format(w=weight, s=scale)
    return f"{g.out} = F.conv{n}d({x}, {weight}, padding={kernel // 2}) * 0.5"


@piece(2)
def weights_from_values(g):
    x = g.pick(rank=4, fixed=(1,))
    channels = g.dims(x)[1]
    layer = g.module(f"nn.Linear({channels}, {channels * 9})")
    return (
        f"k = {layer}({x}.mean((2, 3))).view(-1, 1, 3, 3)\n"
        f"t = F.conv2d({x}.reshape(1, -1, *{x}.shape[2:]), k, padding=1, groups=k.shape[0])\n"
        f"{g.out} = t.view({x}.shape)"
    )


@piece(5)
def linear(g):
    x = g.pick(rank=(1, 5))
    read = g.rng.choice(
        (x, x, x, f"{x}.flatten(1)", f"{x}.movedim(1, -1)", f"{x}[..., ::2]", f"{x}.transpose(-1, -2)")
    )
    if g.rank(x) == 4 and g.rng.random() < 0.4:
        read = f"{x}.mean((2, 3))"
    rank, last = g.measured(read, -1)
    if last < 1:
        raise Skip
    out = g.rng.choice(CHANNELS)
    layer = g.module(f"nn.Linear({last}, {out}{g.rng.choice(('', '', ', bias=False'))})")
    text = g.rng.choice(ACTIVATIONS).format(x="t")
    end = g.rng.choice(("", "", f"\n{g.out} = {g.out}.movedim(-1, 1)")) if rank > 2 else ""
    return f"t = {layer}({read})\n{g.out} = {text}{end}"


@piece(3)
def token_norm(g):
    x = g.pick(rank=(2, 5), fixed=(-1,))
    c = g.dims(x)[-1]
    made = g.rng.choice((f"nn.LayerNorm({c})", f"nn.LayerNorm({c}, bias=False)", f"nn.RMSNorm({c})"))
    return f"{g.out} = {g.module(made)}({x})"


@piece(2)
def attention(g):
    x = g.pick(rank=(3, 4))
    tokens = f"{x}.flatten(2).transpose(1, 2)" if g.rank(x) == 4 else x
    rank, width = g.measured(tokens, -1)
    if width < 1 or width > 48:
        raise Skip
    heads = g.rng.choice([h for h in (1, 2, 4) if width % h == 0])
    layer = g.module(f"nn.Linear({width}, {3 * width})")
    call = g.rng.choice(
        (
            "F.scaled_dot_product_attention(q, k, v)",
            "((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5).softmax(-1) @ v",
            "torch.softmax(torch.einsum('bhid,bhjd->bhij', q, k), -1) @ v",
        )
    )
    end = g.rng.choice(("", f".transpose(1, 2).view_as({x})" if g.rank(x) == 4 else ""))
    return (
        f"t = {tokens}\n"
        f"q, k, v = {layer}(t).view(*t.shape[:2], 3, {heads}, {width // heads}).permute(2, 0, 3, 1, 4)\n"
        f"{g.out} = ({call}).transpose(1, 2).reshape(t.shape){end}"
    )


@piece(8)
def binary(g):
    """Two values of the same dims, or of dims that broadcast or are made to."""
    x = g.pick(rank=(1, 5), any_float=True)
    y = g.pick_like(x)
    form = g.rng.choice(
        (
            "{x} + {y}",
            "{x} + {y}",
            "{x} - {y}",
            "{x} * {y}",
            "F.relu({x} + {y})",
            "torch.add({x}, {y}, alpha=0.5)",
            "{x} * torch.sigmoid({y})",
            "torch.cat(({x}, {y}), 1)",
            "torch.cat(({x}, {y}), {d})",
            "torch.cat(({y}, {x}, {y}), 1)",
            "torch.cat(({x}[:, :1], {y}), 1)",
            "torch.stack(({x}, {y}), {d})",
            "torch.maximum({x}, {y})",
            "torch.lerp({x}, {y}, 0.3)",
            "{x} / ({y}.abs() + 1)",
            "torch.where(torch.arange({x}.shape[-1]) > 2, {x}, {y})",
            "{x} + {y}.flip({d})",
            "{x}[..., 1:] + {y}[..., :-1]",
            "{x} @ {y}.transpose(-1, -2) * 0.2",
            "F.relu({x}) + F.relu({y})",
            "torch.addcmul({x}, {x}, {y}, value=0.5)",
            "sum(({x}, {y}, {x}))",
            "{x}.mul({y}).add_({x})",
            "({x} + {y})[:, :1]",
        )
    )
    return f"{g.out} = {form.format(x=x, y=y, d=g.rng.randrange(g.rank(x)))}"


@piece(5)
def skip(g):
    """A skip connection, brought to the size of the other."""
    x = g.pick(rank=4)
    y = g.pick(rank=4)
    fit = g.rng.choice(
        (
            "F.interpolate({y}, size={x}.shape[-2:])",
            "F.interpolate({y}, {x}.shape[2:], mode='bilinear', align_corners=False)",
            "F.interpolate({y}, size=({x}.size(2), {x}.size(3)), mode='bilinear', align_corners=True)",
            "F.adaptive_avg_pool2d({y}, {x}.shape[2:])",
            "F.pad({y}, (0, {x}.shape[3] - {y}.shape[3], 0, {x}.shape[2] - {y}.shape[2]))",
            "F.pad({y}, [({x}.shape[3] - {y}.shape[3]) // 2, -(({y}.shape[3] - {x}.shape[3]) // 2), "
            "({x}.shape[2] - {y}.shape[2]) // 2, -(({y}.shape[2] - {x}.shape[2]) // 2)])",
            "{y}[:, :, : {x}.shape[2], : {x}.shape[3]]",
            "{y}[..., ({y}.shape[2] - {x}.shape[2]) // 2 :, :][..., : {x}.shape[2], : {x}.shape[3]]",
            "{y}.mean((2, 3), keepdim=True).expand(-1, -1, *{x}.shape[2:])",
        )
    ).format(x=x, y=y)
    if g.dims(x)[1] == g.dims(y)[1] and g.rng.random() < 0.6:
        return f"{g.out} = {x} {g.rng.choice('+-*')} {fit}"
    return f"{g.out} = torch.cat(({x}, {fit}), 1)"


@piece(3)
def squeeze_excite(g):
    x = g.pick(rank=(3, 5), fixed=(1,))
    n, channels = g.rank(x) - 2, g.dims(x)[1]
    inner = max(1, channels // g.rng.choice((1, 2, 4)))
    spatial = ", ".join(str(2 + i) for i in range(n))
    gate = g.rng.choice(("torch.sigmoid", "F.hardsigmoid", "torch.tanh"))
    act = g.rng.choice(("F.relu", "F.silu"))
    if g.rng.random() < 0.6:
        a = g.module(f"nn.Conv{n}d({channels}, {inner}, 1)")
        b = g.module(f"nn.Conv{n}d({inner}, {channels}, 1)")
        mean = g.rng.choice((f"{x}.mean(({spatial},), keepdim=True)", f"F.adaptive_avg_pool{n}d({x}, 1)"))
        text = f"{gate}({b}({act}({a}({mean}))))"
    else:
        a = g.module(f"nn.Linear({channels}, {inner})")
        b = g.module(f"nn.Linear({inner}, {channels})")
        text = f"{gate}({b}({act}({a}({x}.mean(({spatial},))))))[(..., *[None] * {n})]"
    product = g.rng.choice(("{x} * {t}", "{t} * {x}", "F.relu({x} * {t})", "{x} * {t} + {x}"))
    return f"{g.out} = {product.format(x=x, t=text)}"


@piece(4)
def branch(g):
    """A branch on sizes."""
    x = g.pick(rank=(2, 5), any_float=True)
    d = g.rng.randrange(g.rank(x))
    sizes = sorted(g.sizes(x, d))
    middle = sizes[len(sizes) // 2]
    condition = g.rng.choice(
        (
            f"{x}.shape[{d}] < {middle}",
            f"{x}.shape[{d}] > {middle}",
            f"{x}.size({d}) % 2",
            f"{x}.shape[{d}] % 4 == 0",
            f"{x}.shape[0] > 1",
            f"{x}.shape[-1] == {x}.shape[-2]",
            f"{x}.numel() > {g.middle_numel(x)}",
            f"{x}.shape[{d}] == {middle}",
            f"len({x}) == 1",
        )
    )
    first = _fill(g, g.rng.choice(_rows(POINTWISE)), x)
    if g.rng.random() < 0.4:
        second = x
    elif g.rng.random() < 0.5 and g.rank(x) in (3, 4, 5) and g.dims(x)[1] > 0:
        c, n = g.dims(x)[1], g.rank(x) - 2
        second = f"{g.module(f'nn.Conv{n}d({c}, {c}, 3, padding=1)')}({x})"
    elif g.rng.random() < 0.3:  # the branches give other sizes
        first = f"{x}[..., ::2]"
        second = g.rng.choice((x, f"{x}[..., 1:]", f"F.pad({x}, (0, 1))"))
    else:
        second = _fill(g, g.rng.choice(_rows(POINTWISE)), x)
    return f"if {condition}:\n    {g.out} = {first}\nelse:\n    {g.out} = {second}"


@piece(4)
def loop(g):
    x = g.pick(rank=(2, 5))
    d = g.rng.randrange(g.rank(x))
    act = g.rng.choice(("t", "F.relu(t)", "torch.tanh(t)", "t * 0.5 + 0.1"))
    parts = g.rng.choice((f"{x}.unbind({d})", f"{x}.chunk(3, {d})", f"{x}.split(2, {d})", f"{x}.tensor_split(2, {d})"))
    kind = g.rng.randrange(5)
    if kind == 0:
        joint = f"torch.stack(ts, {d})" if "unbind" in parts else f"torch.cat(ts, {d})"
        return f"ts = []\nfor t in {parts}:\n    ts.append({act})\n{g.out} = {joint}"
    if kind == 1:
        return (
            f"{g.out} = 0\nfor i in range({x}.shape[{d}]):\n    t = {x}.select({d}, i)\n"
            f"    {g.out} = {g.out} * 0.7 + {act}"
        )
    if kind == 2:
        return f"t = {x}\nwhile t.shape[{d}] > 4:\n    t = t.narrow({d}, 0, t.shape[{d}] // 2) * 1.1\n{g.out} = t"
    rank, channels = g.measured(f"{parts}[0]")
    if rank not in (3, 4, 5) or channels < 1:
        raise Skip
    layer = g.module(f"nn.Conv{rank - 2}d({channels}, {g.rng.choice(CHANNELS)}, 3, padding=1)")
    if kind == 3:
        return f"{g.out} = sum({layer}(t) for t in {x}.unbind({d})) * 0.4" if "unbind" in parts else (
            f"{g.out} = torch.cat([{layer}(t) for t in {parts}], {d if d != 1 else 1})"
        )
    return f"t = [{layer}(t) for t in {parts}]\n{g.out} = t[0] * t[-1] + t[len(t) // 2]"


@piece(4)
def in_place(g):
    """A write to memory that others may see."""
    x = g.pick(rank=(2, 5))
    d = g.rng.randrange(g.rank(x))
    row = g.rng.choice(
        (
            "{x}.relu_()",
            "{x} += 0.1",
            "{x} *= 0.5",
            "{x}.add_({y}, alpha=0.3)",
            "{x}[:, 0] = 0.25",
            "{x}[:, :1] += 0.5",
            "{x}[..., 0] *= -1",
            "{x}[:, -1] = {x}[:, 0]",
            "{x}[:, 1:].relu_()",
            "{x}.select({d}, 0).mul_(2)",
            "{x}.transpose(0, 1).add_(0.2)",
            "{x}.flatten(1).clamp_(-1, 1)",
            "{x}[:, ::2].sigmoid_()",
            "{x}.chunk(2, 1)[0].neg_()",
            "{x}.clamp_(min=-1)",
            "{x}.fill_diagonal_(0.5)",
            "{x}[..., 1:] = {x}[..., :-1].clone()",
            "{x}.masked_fill_(torch.arange({x}.shape[-1]) == 1, 0.1)",
            "{x}[{x}.shape[0] - 1].zero_()",
            "{x}.copy_({y})",
            "F.silu({x}, inplace=True)",
            "torch.sigmoid_({x})",
            "{x}[:, [0]] = 1.5",
            "{x}.index_fill_({d}, torch.tensor([0]), 0.3)",
            "{x}.data.mul_(0.9)",
        )
    )
    y = g.pick_like(x)
    text = row.format(x=x, y=y, d=d)
    if g.rng.random() < 0.6:  # a value of its own
        return f"{g.out} = {x} * 1\n{text.replace(x, g.out)}"
    if g.rng.random() < 0.4:  # a view, then the base
        return f"{g.out} = {x}[:, :1]\n{text}"
    return text


@piece(2)
def filled(g):
    """A result that is written part by part."""
    x = g.pick(rank=(3, 5))
    k = g.rng.randint(1, 3)
    return g.rng.choice(
        (
            f"{g.out} = torch.zeros({x}.shape, dtype={x}.dtype)\n{g.out}[:, ::2] = {x}[:, ::2]",
            f"{g.out} = {x}.new_zeros({x}.shape[0], {x}.shape[1] + {k}, *{x}.shape[2:])\n"
            f"{g.out}[:, {k}:] = {x}",
            f"{g.out} = torch.empty_like({x})\n{g.out}.copy_({x})\n{g.out}[0] = 0",
            f"{g.out} = torch.zeros_like({x})\nfor i in range({x}.shape[1]):\n"
            f"    {g.out}[:, i] = {x}[:, -1 - i]",
            f"{g.out} = {x}.clone()\n{g.out}[..., {k}:] = {x}[..., :-{k}]\n{g.out}[..., :{k}] = 0",
            f"{g.out} = torch.cat(({x}.new_zeros({x}[:, :1].shape), {x}[:, 1:]), 1)",
        )
    )


@piece(2)
def masked(g):
    """Masks: compared values are inputs, which no rounding moves."""
    x = g.pick(rank=(1, 5), any_float=True)
    y = g.pick_exact(x)
    row = g.rng.choice(
        (
            "torch.where({y} > 0, {x}, 0.5)",
            "{x} * ({y} > 0)",
            "{x}.masked_fill({y} <= 0.2, -1.0)",
            "{x} * ({y} > 0).to({x}.dtype)",
            "torch.where(({y} > 0) & ({y} < 1), {x}, {x} * 0.1)",
            "{x} + ({y} > 0).float().mean()" if not g.double else "{x}",
            "{x} * ({y}.argmax(-1, keepdim=True) % 2)",
            "{x} + {y}.topk(1, -1)[0]",
            "{x} + {y}.sort(-1)[0]",
            "{x} * torch.sign({y})",
            "{x} + {y}.round() * 0.1",
        )
    )
    return f"{g.out} = {row.format(x=x, y=y)}"


@piece(1)
def embedded(g):
    ids = g.pick_integers()
    layer = g.module(f"nn.Embedding(10, {g.rng.choice(CHANNELS)})")
    end = g.rng.choice(("", ".transpose(1, 2)", ".mean(1)", "[:, :, None]"))
    return f"{g.out} = {layer}({ids}){end}"


@piece(2)
def conditioned(g):
    """An image and a vector: scale and shift, or tiles of the vector beside the channels."""
    x, y = g.pick(rank=(3, 5), fixed=(1,)), g.pick(rank=2, fixed=(1,))
    c, n = g.dims(x)[1], g.rank(x) - 2
    ones = f"[(..., *[None] * {n})]"
    if g.rng.random() < 0.5:
        layer = g.module(f"nn.Linear({g.dims(y)[1]}, {2 * c})")
        return f"a, b = {layer}({y}){ones}.chunk(2, 1)\n{g.out} = {x} * (1 + a) + b"
    return f"{g.out} = torch.cat(({x}, {y}{ones}.expand(-1, -1, *{x}.shape[2:])), 1)"


@piece(2)
def constants(g):
    x = g.pick(rank=(1, 5))
    dims = g.dims(x)
    if dims[-1] > 0 and g.rng.random() < 0.5:
        return f"{g.out} = {x} {g.rng.choice('+*-')} {g.constant(dims[-1])}"
    if len(dims) > 2 and dims[1] > 0:
        return f"{g.out} = {x} {g.rng.choice('+*')} {g.constant(1, dims[1], *[1] * (len(dims) - 2))}"
    return f"{g.out} = {x} * {g.constant()} + {g.constant(1)}"


@piece(1)
def island(g):
    """A part in another dtype."""
    x = g.pick(rank=(1, 5))
    g.another_dtype(coarse=False)
    return g.rng.choice(
        (
            f"{g.out} = ({x}.double() * 2).float()",
            f"{g.out} = {x}.double()",
            f"{g.out} = torch.tanh({x}.to(torch.float64)).to({x}.dtype)",
            f"{g.out} = ({x}.double().mean(-1, keepdim=True) + {x}).float()",
        )
    )


@piece(0.5)
def half_island(g):
    x = g.pick(rank=(1, 5))
    g.another_dtype(coarse=True)
    kind = g.rng.choice(("half()", "bfloat16()"))
    return f"{g.out} = ({x}.{kind} * 2).float()"


@piece(0.4)
def to_blocked(g):
    """The model makes a blocked tensor itself."""
    x = g.pick(rank=(3, 5))
    return f"{g.out} = {x}.to_blocked(){g.rng.choice(('', '.to_dense()', ' * 2', '.relu()'))}"


@piece(2)
def several(g):
    """Multi-way: inception, split-transform-merge, dense blocks."""
    x = g.pick(rank=(3, 5), fixed=(1,))
    n, c = g.rank(x) - 2, g.dims(x)[1]
    ways = []
    for _ in range(g.rng.randint(2, 3)):
        k = g.rng.choice((1, 3, 5))
        made = f"nn.Conv{n}d({c}, {g.rng.choice(CHANNELS)}, {k}, padding={k // 2})"
        source = g.rng.choice((x, x, f"F.relu({x})", f"F.max_pool{n}d({x}, 3, 1, 1)"))
        ways.append(f"{g.module(made)}({source})")
    if g.rng.random() < 0.4:
        ways.append(x)
    end = g.rng.choice(("{}", "{}", "F.relu({})", "{}[:, ::2]", "{}.flip(1)", "{}[:, 3:]"))
    return f"{g.out} = {end.format('torch.cat((' + ', '.join(ways) + '), 1)')}"


@piece(2)
def split_channels(g):
    """ShuffleNet, Res2Net, ghost modules: channels apart, some of them changed, and together."""
    x = g.pick(rank=(3, 5), fixed=(1,))
    n, c = g.rank(x) - 2, g.dims(x)[1]
    if c < 2:
        raise Skip
    a = g.rng.randint(1, c - 1)
    first = g.module(f"nn.Conv{n}d({c - a}, {c - a}, 3, padding=1)")
    form = g.rng.choice(
        (
            "a, b = {x}.split([{a}, {b}], 1)\n{o} = torch.cat((a, {m}(b)), 1)",
            "a, b = {x}[:, :{a}], {x}[:, {a}:]\n{o} = torch.cat(({m}(b), a), 1)",
            "a, b = {x}[:, :{a}], {m}({x}[:, {a}:])\n{o} = torch.cat((b, a, {x}), 1)",
            "a, b = {x}.split([{a}, {b}], 1)\n{o} = F.channel_shuffle(torch.cat((a, F.relu({m}(b))), 1), {g})",
            "a, b = {x}.split([{a}, {b}], 1)\n{o} = {m}(b) * a.mean(1, keepdim=True) + b",
        )
    )
    return form.format(x=x, a=a, b=c - a, o=g.out, m=first, g=2 if c % 2 == 0 else 1)
