"""Pieces of random models that are no ops of networks of layers: recurrent modules, whole blocks of
torch, parametrized weights, Fourier transforms, indices from values, masks, and the ways in which
a forward calls functions."""

from __future__ import annotations

from random_layers import CHANNELS
from random_pieces import Skip, piece


def _tokens(g):
    """A value as [N, T, C], and C."""
    x = g.pick(rank=(3, 4))
    text = x
    if g.rank(x) == 4:
        text = f"{x}{g.rng.choice(('.flatten(2)', '.mean(2)', '[:, :, -1]'))}.transpose(1, 2)"
    elif g.rng.random() < 0.3:
        text = f"{x}.transpose(1, 2)"
    _, width = g.measured(text, -1)
    if not 1 <= width <= 48:
        raise Skip
    return text, width


@piece(1)
def recurrent(g):
    """A module over all tokens, or a cell in a loop."""
    tokens, width = _tokens(g)
    hidden = g.rng.choice((3, 8, 16))
    kind = g.rng.choice(("LSTM", "GRU", "RNN"))
    if g.rng.random() < 0.3:
        cell = g.module(f"nn.{kind}Cell({width}, {hidden})")
        first = "h[0]" if kind == "LSTM" else "h"
        return (
            f"t, h, r = {tokens}, None, []\n"
            f"for each in t[:, :9].unbind(1):\n    h = {cell}(each, h)\n    r.append({first})\n"
            f"{g.out} = torch.stack(r, 1)"
        )
    more = g.rng.choice(("", "", ", num_layers=2", ", bidirectional=True", ", bias=False"))
    layer = g.module(f"nn.{kind}({width}, {hidden}, batch_first=True{more})")
    last = "t[1][0]" if kind == "LSTM" else "t[1]"
    end = g.rng.choice(("t[0]", "t[0]", "t[0][:, -1]", f"{last}[-1]", "t[0].transpose(1, 2)"))
    return f"t = {layer}({tokens})\n{g.out} = {end}"


@piece(1)
def block(g):
    """Attention and encoders as torch's own modules."""
    tokens, width = _tokens(g)
    heads = g.rng.choice([h for h in (1, 2, 4) if width % h == 0])
    row = g.rng.choice(
        (
            "nn.MultiheadAttention({c}, {h}, batch_first=True)|(t, t, t)[0]",
            "nn.MultiheadAttention({c}, {h}, batch_first=True)|(t, t, t, need_weights=False)[0]",
            "nn.MultiheadAttention({c}, {h})|(t, t[:2], t[:2])[0]",
            "nn.TransformerEncoderLayer({c}, {h}, 20, batch_first=True)|(t)",
            "nn.TransformerEncoderLayer({c}, {h}, 20, 0.1, 'gelu', norm_first=True)|(t)",
            "nn.TransformerDecoderLayer({c}, {h}, 20, batch_first=True)|(t, t * 0.5)",
            "nn.Bilinear({c}, {c}, 5)|(t, t.flip(1))",
            "nn.CosineSimilarity(-1)|(t, t.flip(1) + 1)[..., None]",
        )
    )
    made, call = row.format(c=width, h=heads).split("|")
    return f"t = {tokens}\n{g.out} = {g.module(made)}{call}"


@piece(0.7)
def parametrized(g):
    """A layer whose weight a parametrization computes."""
    x = g.pick(rank=(3, 5), fixed=(1,))
    c, n, out = g.dims(x)[1], g.rank(x) - 2, g.rng.choice(CHANNELS)
    row = g.rng.choice(
        (
            "nn.utils.parametrizations.weight_norm({l})",
            "nn.utils.parametrizations.spectral_norm({l})",
            "nn.utils.spectral_norm({l})",
            "nn.utils.weight_norm({l})",
        )
    )
    layer = f"nn.Conv{n}d({c}, {out}, {g.rng.choice('13')}, padding={g.rng.choice('01')})"
    return f"{g.out} = {g.module(row.format(l=layer))}({x})"


@piece(1)
def fourier(g):
    """Real to complex and back: filters in frequencies, spectra, rotations."""
    x = g.pick(rank=(3, 5))
    c = g.dims(x)[1]
    gains = g.constant(c, *[1] * (g.rank(x) - 2)) if c > 0 else "0.5"
    row = g.rng.choice(
        (
            "torch.fft.irfft2(torch.fft.rfft2({x}, norm='ortho') * {w}, {x}.shape[-2:], "
            "norm='ortho')",
            "torch.fft.rfft({x}, norm='ortho').abs()",
            "torch.fft.fft2({x}, norm='ortho').real",
            "torch.fft.irfft(torch.fft.rfft({x})[..., :3] * {w}, {x}.shape[-1])",
            "torch.view_as_real(torch.complex({x}, {x} * {w}) * (0.6 + 0.8j)).flatten(-2)",
            "torch.polar({x}.abs(), {x} * {w}).imag",
            # The angle of 0 is that of its signs, so it counts as much as the number.
            "(lambda z: z.angle().cos() * z.abs())"
            "(torch.fft.fftshift(torch.fft.fft({x}, norm='ortho'), -1) * {w})",
        )
    )
    return f"{g.out} = {row.format(x=x, w=gains)}"


@piece(1)
def indexed(g):
    """Indices and counts that come from values, of inputs: no rounding moves them."""
    y = g.pick_exact(g.pick(rank=(1, 5)))
    if g.rank(y) < 2:
        raise Skip
    x = g.pick(rank=(1, 5), where=lambda name: g.sizes(name, -1) == g.sizes(y, -1))
    row = g.rng.choice(
        (
            "{y}.gather(-1, {y}.argsort(-1)) + {x}.mean()",
            "{x} * F.one_hot({y}.argmax(-1), {y}.shape[-1]).to({x}.dtype).mean()",
            "{y}.gather(-1, {y}.topk(1, -1).indices) * 0.5 + {x}.amax()",
            "torch.zeros_like({y}).scatter({y}.dim() - 1, {y}.argmin(-1, keepdim=True), 1.0)",
            "{x}.index_select(-1, {y}.flatten(0, -2)[0].argsort())",
            "{x}[..., {y}.flatten(0, -2)[0].argsort(descending=True)]",
            "{x} * (torch.bucketize({y}, torch.tensor([-1.0, 0.0, 1.0])) * 0.3).mean()",
            "{x} * ({y} > 0).sum() / {y}.numel()",
            "{x} + {y}[{y} > 0].sum() * 0.01",
            "{x} + len(({y} > 1).nonzero()) * 0.01",
            "{x}.index_add(-1, {y}.flatten(0, -2)[0].argsort(), {x})",
            "{x} + torch.cummax({y}, -1).values.mean()",
            "{x} if float({y}.sum()) > 0 else -{x}",
            "{x} * (int({y}.abs().sum()) % 3 + 1) * 0.3",
        )
    )
    return f"{g.out} = {row.format(x=x, y=y)}"


@piece(4)
def masked_by_input(g):
    """A boolean image of one channel, which is an input."""
    mask = g.pick_input("mask")
    x = g.pick(rank=g.rank(mask), any_float=True)
    row = g.rng.choice(
        (
            "{x} * {m}",
            "torch.where({m}, {x}, 0.5)",
            "{x}.masked_fill(~{m}, -1.0)",
            "{x} * {m}.float()" if not g.double else "{x} * {m}",
            "{x} * ({m} | ({m}.flip(-1) & {m}))",
            "{x} * {m}.all(-1, keepdim=True) + {m}.any(1, keepdim=True)",
            "({x} * {m}).sum(1, keepdim=True) / ({m}.sum() + 1)",
            "{x} + F.max_pool2d({m}.to({x}.dtype), 3, 1, 1)",
        )
    )
    return f"{g.out} = {row.format(x=x, m=mask)}"


@piece(1)
def called(g):
    """An op by way of what wraps functions."""
    x = g.pick(rank=(2, 5))
    row = g.rng.choice(
        (
            "torch.vmap(lambda r: torch.tanh(r) * 2)({x})",
            "torch.vmap(lambda r: r * r.mean(), in_dims=1, out_dims=1)({x})",
            "torch.utils.checkpoint.checkpoint(lambda t: t.sin(), {x}, use_reentrant=False)",
            "Halved.apply({x})",
            "scripted({x})",
            "torch.func.functional_call(nn.Softplus(), {{}}, ({x},))",
            "torch.func.jvp(torch.sin, ({x},), ({x},))[1]",
        )
    )
    start = g.rng.choice(
        ("", "", "with torch.autocast('cpu', enabled=False):\n    ", "with torch.no_grad():\n    ")
    )
    return f"{start}{g.out} = {row.format(x=x)}"
