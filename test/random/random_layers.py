"""Layers of random models: constructors of convolutions and norms, and the views that they read."""

from __future__ import annotations

CHANNELS = (1, 2, 3, 4, 5, 7, 8, 8, 9, 12, 15, 16, 16, 17, 20, 24, 32, 33, 40)


def convolution_for(g, n, channels, transposed=False):
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
    # torch 2.13 dies of dilated 1x1 kernels with strides on small padded channels-last images.
    if g.rng.random() < 0.15 and (stride == 1 or set(text) & set("2357")):
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
    "{x} * F.relu6({x} + 3) / 6",
    "0.5 * {x} * (1 + torch.erf({x} / 2**0.5))",
    "torch.where({x} > 0, {x}, 0.1 * {x})",
    "torch.maximum({x}, 0.2 * {x})",
    "({x} + {x}.abs()) * 0.5",
    "{x} * torch.tanh(F.softplus({x}))",
    "{x} * torch.sigmoid(1.702 * {x})",
    "F.elu({x}).mul(0.5).add(1)",
    "F.elu({x})",
    "F.softplus({x})",
    "torch.cos({x})",
    "F.softshrink({x}) * 2",
)

# {p} and {q} are any numbers, {n} is not 0, {w} above 0. No jumps.
PARAMETRIC = (
    "F.elu({x}, {p})",
    "F.celu({x}, {n})",
    "torch.celu({x}.clone(), {n})",
    "F.leaky_relu({x}, {p})",
    "F.leaky_relu({x}, {p}, inplace=True)",
    "F.softplus({x}, {n}, 40)",
    "F.softshrink({x}, {w})",
    "F.hardtanh({x}, {p} - {w}, {p})",
    "F.prelu({x}, torch.tensor([{p}]))",
    "{x}.clamp({p}, {q})",
    "{x}.clamp_(min={p})",
    "torch.clamp({x}, max={p})",
    "torch.where({x} < {p}, {p}, {x}) * {q}",
    "torch.minimum({x} * {p}, {x} * {q})",
    "({x}.abs() + {w}) ** {p}",
    "({x} + {p}) / {n}",
    "{n} / ({x}.abs() + {w})",
    "{x} * ({x} * {p} + {q}).sigmoid()",
    "{x} * F.relu6({x} + {p}) * {q}",
    "{x} * F.hardtanh({x} * {p}, {q} - {w}, {q})",
    "torch.lerp({x}, {x}.tanh(), {p})",
    "torch.add({x}, {x}.abs(), alpha={p})",
    "torch.rsub({x}, {p}, alpha={q})",
    "torch.addcmul({x}, {x}, {x}.sigmoid(), value={p})",
    "torch.addcdiv({x}, {x}, {x}.abs() + {w}, value={p})",
    "torch.xlogy({x}, {w})",
    "{x}.logit({w} * 0.1)",
)
_NUMBERS = (-3.0, -1.3, -1, -0.7, -0.5, 0, 0.0, 0.3, 0.5, 1, 1.0, 1.5, 2, 2.5)


def activation_for(g, x):
    """An activation of x: more of them as people write them, the others with any parameters."""
    text = g.rng.choice(ACTIVATIONS if g.rng.random() < 0.6 else PARAMETRIC)
    numbers = [n for n in _NUMBERS if n]
    return text.format(
        x=x,
        p=g.rng.choice(_NUMBERS),
        q=g.rng.choice(_NUMBERS),
        n=g.rng.choice(numbers),
        w=g.rng.choice([n for n in numbers if n > 0]),
    )


def norm_for(g, n, channels):
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


def read_for(g, x):
    rank = g.rank(x)
    return g.rng.choice(READS).format(
        x=x,
        h=max(1, g.least(x, 1) // 2),
        minus1=", ".join(["-1"] * (rank - 1)),
        minus2=", ".join(["-1"] * (rank - 2)),
    )
