"""The pieces of random models: each writes one or a few lines of a forward.

A piece is a function of the builder (random_models.py) that picks values and returns code, which
assigns `g.out`, or changes a value in place. It may be wrong about what fits: the builder runs the
code at every size and drops what the dense model refuses. So a new piece is a few lines, and most
are rows of random_rows.py. `Skip` says that no value fits.
"""

from __future__ import annotations

from random_layers import CHANNELS, activation_for, convolution_for, norm_for, read_for
from random_rows import IMAGES, POINTWISE, VIEWS, row_for

PIECES: list = []  # (weight, piece)


class Skip(Exception):
    """No value fits the piece."""


def piece(weight):
    def add(function):
        PIECES.append((weight, function))
        return function

    return add


@piece(9)
def pointwise(g):
    x = g.pick(rank=(1, 6), any_float=True)
    return f"{g.out} = {row_for(g, POINTWISE, x)}"


# What formulas are made of: bounded slopes, no jumps, {a} and {b} are formulas themselves.
_TERMS = (
    "({a} + {b})",
    "({a} - {b})",
    "({a} * {b})",
    "({a} / ({b}.abs() + 1))",
    "({p} - {a})",
    "({a} * {p})",
    "torch.maximum({a}, {b})",
    "torch.where({a} > {b}, {a}, {b})",
    "torch.sigmoid({a})",
    "torch.tanh({a})",
    "F.relu({a})",
    "{a}.clamp({p}, {q})",
    "torch.exp(-{a}.abs())",
    "torch.rsqrt({a} * {a} + 0.5)",
    "F.elu({a}, {p})",
    "F.softplus({a})",
)


def _formula(g, values, depth):
    if depth == 0 or g.rng.random() < 0.1:
        return g.rng.choice(values)
    a, b = (_formula(g, values, depth - 1) for _ in "ab")
    p, q = (g.rng.choice((-1.5, -1, 0, 0.5, 2, 3)) for _ in "pq")
    return g.rng.choice(_TERMS).format(a=a, b=b, p=p, q=q)


@piece(3)
def formula(g):
    """Ops on numbers alone, in a row or reading each other, right behind a layer now and then."""
    x = g.pick(rank=(2, 5))
    text = x
    if g.rank(x) == 4 and g.dims(x)[1] > 0 and g.rng.random() < 0.6:
        made, _ = convolution_for(g, 2, g.dims(x)[1])
        text = f"{g.module(made)}({x})"
    values = ["t", "t", "t", "u"]
    if text == x:
        values.append(g.pick_like(x))
    return f"t = {text}\nu = {_formula(g, ['t'], 2)}\n{g.out} = {_formula(g, values, 3)}"


@piece(9)
def view(g):
    x = g.pick(rank=(2, 5), any_float=True)
    return f"{g.out} = {row_for(g, VIEWS, x)}"


@piece(6)
def image(g):
    x = g.pick(rank=4)
    return f"{g.out} = {row_for(g, IMAGES, x)}"


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


@piece(14)
def convolution(g):
    """A convolution of a view, often with a norm and an activation behind it."""
    x = g.pick(rank=(2, 5))
    read = read_for(g, x)
    rank, channels = g.measured(read)  # what the view gives
    n = rank - 2
    if rank in (3, 4) and g.rng.random() < 0.06:  # unbatched: [C, ...]
        n, channels = rank - 1, g.measured(read, 0)[1]
    if n not in (1, 2, 3) or channels < 1:
        raise Skip
    made, out = convolution_for(g, n, channels, g.rng.random() < 0.15)
    text = f"{g.module(made)}({read})"
    if n == rank - 2 and g.rng.random() < 0.35:
        text = f"{g.module(norm_for(g, n, out))}({text})"
    lines = [f"{g.out} = {text}"]
    activation = activation_for(g, g.out)
    if activation != g.out:
        lines.append(f"{g.out} = {activation}")
    if g.rng.random() < 0.2:
        lines.append(f"{g.out} = {x} + {g.out}")
    return "\n".join(lines)


@piece(2)
def normalize(g):
    x = g.pick(rank=(2, 5))
    read = read_for(g, x)
    rank, channels = g.measured(read)
    if channels < 1 or rank < 2:
        raise Skip
    return f"{g.out} = {g.module(norm_for(g, max(1, rank - 2), channels))}({read})"


@piece(2)
def same_padding(g):
    """TensorFlow's padding, worked out from sizes."""
    x = g.pick(rank=4, fixed=(1,))
    kernel, stride = g.rng.choice(((3, 2), (5, 2), (3, 1), (2, 2), (3, 3)))
    made, _ = convolution_for(g, 2, g.dims(x)[1])
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


@piece(1)
def parts(g):
    """Layers of parts of the channels, joined before their batch norm and activation."""
    x = g.pick(rank=(4, 4), fixed=(1,))
    c = g.dims(x)[1]
    first = max(c // 2, 1)
    names = [
        g.module(f"nn.Conv2d({first}, {first}, 3, padding=1, groups={first})"),
        g.module(f"nn.Conv2d({c - first}, 5, 1)") if c > first else None,
    ]
    calls = [f"{names[0]}({x}[:, :{first}])"]
    if names[1]:
        calls.append(f"{names[1]}({x}[:, {first}:])")
    if g.rng.random() < 0.3:
        calls.append(f"{x}[:, :1]")
    channels = first + 5 * bool(names[1]) + (len(calls) - 1 - bool(names[1]))
    norm = g.module(f"nn.BatchNorm2d({channels})")
    text = activation_for(g, g.out)
    return f"{g.out} = {norm}(torch.cat(({', '.join(calls)},), 1))\n{g.out} = {text}"


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
            "torch.tanh({x}) * torch.sigmoid({y}) + {x}",
            "({x} * 0.5 + {y}).clamp(-1, 2) - {y}.abs()",
            "torch.where({x} > {y}, {x}, {y}).mul(2).sub(1)",
            "({x} - {y}).square().add(1).rsqrt() * {x}",
            "torch.minimum({x}, {y}).masked_fill({x} < 0, 0.0) + 1 / (2 + {y}.exp())",
            "{x} * {y}.mean(-1, keepdim=True) + {y}",
            "torch.sigmoid({y}).mean({d}, keepdim=True) * {x} + {x}",
            "({x} + 1) * torch.tanh({y}.sum(tuple(range(2, {y}.dim())), keepdim=True)) - {x}",
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
            "F.interpolate({y}, size=tuple({x}.shape[2:]), mode='bilinear', align_corners=True)",
            "F.adaptive_avg_pool2d({y}, {x}.shape[2:])",
            "F.pad({y}, (0, {x}.shape[3] - {y}.shape[3], 0, {x}.shape[2] - {y}.shape[2]))",
            "F.pad({y}, [n for a, b in (({x}.shape[i], {y}.shape[i]) for i in (3, 2)) "
            "for n in ((a - b) // 2, -((b - a) // 2))])",
            "{y}[:, :, : {x}.shape[2], : {x}.shape[3]]",
            "{y}[:, :, ({y}.size(2) - {x}.size(2)) // 2 :][..., : {x}.size(2), : {x}.size(3)]",
            "{y}.mean((2, 3), keepdim=True).expand(-1, -1, *{x}.shape[2:])",
        )
    ).format(x=x, y=y)
    if g.dims(x)[1] == g.dims(y)[1] and g.rng.random() < 0.6:
        return f"{g.out} = {x} {g.rng.choice('+-*')} {fit}"
    return f"{g.out} = torch.cat(({x}, {fit}), 1)"


@piece(3)
def neck(g):
    """Images brought to the size of one of them, joined, and 1x1 convolutions of them all."""
    images = [g.pick(rank=(4, 4), fixed=(1,)) for _ in range(g.rng.choice((1, 2, 3)))]
    size = f"{g.rng.choice(images)}.shape[2:]" if g.rng.random() < 0.8 else "(9, 8)"
    mode = g.rng.choice(("nearest", "bilinear", "nearest-exact", "bicubic"))
    parts = [
        g.rng.choice((f"F.interpolate({x}, {size}, mode='{mode}')",) * 2 + (x,)) for x in images
    ]
    if any(part in images for part in parts):
        parts = [
            f"F.adaptive_avg_pool2d({each}, {size})" if each in images else each for each in parts
        ]
    channels = sum(g.dims(x)[1] for x in images)
    outputs = g.rng.choice((1, 5, 16, 24))
    first = g.module(f"nn.Conv2d({channels}, {outputs}, 1, bias={g.rng.random() < 0.5})")
    text = f"{g.out} = {first}(torch.cat(({', '.join(parts)},), 1))"
    if g.rng.random() < 0.5:
        norm = g.module(f"nn.BatchNorm2d({outputs})")
        text += f"\n{g.out} = {norm}({g.out})"
    if g.rng.random() < 0.4:
        second = g.module(f"nn.Conv2d({outputs}, {g.rng.choice((3, 17))}, 1)")
        text += f"\n{g.out} = {second}({g.out})"
    return f"{text}\n{g.out} = {activation_for(g, g.out)}"


@piece(2)
def branches(g):
    """Sums and differences of layers of one image, as RepVGG and FastViT train them."""
    x = g.pick(rank=(4, 4), fixed=(1,))
    c = g.dims(x)[1]
    groups = g.rng.choice((1, c))
    layers = [
        f"nn.Conv2d({c}, {c}, 3, padding=1, groups={groups})",
        f"nn.Conv2d({c}, {c}, 1, groups={groups}, bias=False)",
        f"nn.Conv2d({c}, {c}, (1, 5), padding=(0, 2), groups={groups})",
        f"nn.BatchNorm2d({c})",
        f"nn.Sequential(nn.Conv2d({c}, {c}, 5, padding=2, groups={groups}), nn.BatchNorm2d({c}))",
    ]
    calls = [
        f"{g.module(layer)}({x})" for layer in g.rng.choices(layers, k=g.rng.choice((2, 3, 4)))
    ]
    if g.rng.random() < 0.3:
        calls.append(x)
    text = calls[0]
    for call in calls[1:]:
        text = f"({text} {g.rng.choice('++-')} {call})"
    scale = g.rng.choice(("", " * 0.5", f" * {x}.new_ones(()).add(1)"))
    return f"{g.out} = {text}{scale}\n{g.out} = {activation_for(g, g.out)}"


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
        mean = g.rng.choice(
            (f"{x}.mean(({spatial},), keepdim=True)", f"F.adaptive_avg_pool{n}d({x}, 1)")
        )
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
    first = row_for(g, POINTWISE, x)
    if g.rng.random() < 0.4:
        second = x
    elif g.rng.random() < 0.5 and g.rank(x) in (3, 4, 5) and g.dims(x)[1] > 0:
        c, n = g.dims(x)[1], g.rank(x) - 2
        second = f"{g.module(f'nn.Conv{n}d({c}, {c}, 3, padding=1)')}({x})"
    elif g.rng.random() < 0.3:  # the branches give other sizes
        first = f"{x}[..., ::2]"
        second = g.rng.choice((x, f"{x}[..., 1:]", f"F.pad({x}, (0, 1))"))
    else:
        second = row_for(g, POINTWISE, x)
    return f"if {condition}:\n    {g.out} = {first}\nelse:\n    {g.out} = {second}"


@piece(4)
def loop(g):
    x = g.pick(rank=(2, 5))
    d = g.rng.randrange(g.rank(x))
    act = g.rng.choice(("t", "F.relu(t)", "torch.tanh(t)", "t * 0.5 + 0.1"))
    parts = g.rng.choice(
        (
            f"{x}.unbind({d})",
            f"{x}.chunk(3, {d})",
            f"{x}.split(2, {d})",
            f"{x}.tensor_split(2, {d})",
        )
    )
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
        return (
            f"t = {x}\nwhile t.shape[{d}] > 4:\n"
            f"    t = t.narrow({d}, 0, t.shape[{d}] // 2) * 1.1\n{g.out} = t"
        )
    rank, channels = g.measured(f"{parts}[0]")
    if rank not in (3, 4, 5) or channels < 1:
        raise Skip
    layer = g.module(f"nn.Conv{rank - 2}d({channels}, {g.rng.choice(CHANNELS)}, 3, padding=1)")
    if kind == 3:
        return (
            f"{g.out} = sum({layer}(t) for t in {x}.unbind({d})) * 0.4"
            if "unbind" in parts
            else (f"{g.out} = torch.cat([{layer}(t) for t in {parts}], {d if d != 1 else 1})")
        )
    return f"t = [{layer}(t) for t in {parts}]\n{g.out} = t[0] * t[-1] + t[len(t) // 2]"


@piece(3)
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
            "{x}.gt_(0.2)",
            "{x}.ne_({y}).mul_(0.5)",
            "{x}[:, :1].logical_not_()",
            "{x}.unfold({d}, 2, 2).mul_(0.7)",
            "{x}.unfold(-1, 1, 3).relu_()",
            "{x}.diagonal().add_(0.3)",
            "{x}.diagonal(dim1=-2, dim2=-1).neg_()",
            "{x}.view(-1)[::3].neg_()",
            "{x}.add_(torch.arange({x}.shape[-1], dtype=torch.float64), alpha=0.1)",
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
            f"t = {x} * (0.5 + 1j)\nt.real.add_(0.5)\n{g.out} = t.imag.clone()",
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
    ids = g.pick_input("ids")
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
        return (
            f"{g.out} = {x} {g.rng.choice('+*')} {g.constant(1, dims[1], *[1] * (len(dims) - 2))}"
        )
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
    """The model makes a blocked tensor itself.

    Of a blocked input that is the input, as contiguous() may be, and of a dense one a copy: what
    writes into it later needs one of its own."""
    x = g.pick(rank=(3, 5))
    end = g.rng.choice(("", ".to_dense()", " * 2", ".relu()"))
    return f"{g.out} = {x}{'' if end else '.clone()'}.to_blocked(){end}"
