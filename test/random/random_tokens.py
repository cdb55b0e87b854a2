"""Pieces of random models that work on rows of tokens: linear layers, their norms, attention, and
products of matrices in every spelling."""

from __future__ import annotations

from random_layers import CHANNELS, activation_for
from random_pieces import Skip, piece


@piece(5)
def linear(g):
    x = g.pick(rank=(1, 5))
    read = g.rng.choice(
        (
            x,
            x,
            x,
            f"{x}.flatten(1)",
            f"{x}.movedim(1, -1)",
            f"{x}[..., ::2]",
            f"{x}.transpose(-1, -2)",
        )
    )
    if g.rank(x) == 4 and g.rng.random() < 0.4:
        read = f"{x}.mean((2, 3))"
    rank, last = g.measured(read, -1)
    if last < 1:
        raise Skip
    out = g.rng.choice(CHANNELS)
    layer = g.module(f"nn.Linear({last}, {out}{g.rng.choice(('', '', ', bias=False'))})")
    text = activation_for(g, "t")
    end = g.rng.choice(("", "", f"\n{g.out} = {g.out}.movedim(-1, 1)")) if rank > 2 else ""
    return f"t = {layer}({read})\n{g.out} = {text}{end}"


@piece(3)
def token_norm(g):
    x = g.pick(rank=(2, 5), fixed=(-1,))
    c = g.dims(x)[-1]
    made = g.rng.choice(
        (f"nn.LayerNorm({c})", f"nn.LayerNorm({c}, bias=False)", f"nn.RMSNorm({c}, eps=1e-3)")
    )
    return f"{g.out} = {g.module(made)}({x})"


@piece(1)
def norm_of_rows(g):
    """A batch norm of all tokens, which the linear layer before it may take in."""
    x = g.pick(rank=(3, 4), fixed=(-1,))
    out = g.rng.choice(CHANNELS)
    layer = g.module(f"nn.Linear({g.dims(x)[-1]}, {out})")
    norm = g.module(f"nn.BatchNorm1d({out})")
    like = g.rng.choice(("t", "t", f"{x}[..., :1].expand(*{x}.shape[:-1], {out})"))
    text = activation_for(g, g.out)
    return (
        f"t = {layer}({x})\n{g.out} = {norm}(t.flatten(0, -2)).reshape_as({like})\n{g.out} = {text}"
    )


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
            "F.softmax(torch.matmul(q, k.mT) / 3 + torch.arange(q.shape[2]) * 0.1, -1) @ v",
            "torch.bmm((q[0] @ k[0].mT).softmax(2), v[0])[None].expand(len(q), -1, -1, -1)",
            "torch.softmax(torch.einsum('bhid,bhjd->bhij', q, k), -1) @ v",
        )
    )
    end = g.rng.choice(("", f".transpose(1, 2).view_as({x})" if g.rank(x) == 4 else ""))
    return (
        f"t = {tokens}\n"
        f"q, k, v = {layer}(t).view(*t.shape[:2], 3, {heads}, -1).permute(2, 0, 3, 1, 4)\n"
        f"{g.out} = ({call}).transpose(1, 2).reshape(t.shape){end}"
    )


@piece(2)
def token_layers(g):
    """Linear layers before and after an image whose pixels are their tokens."""
    x = g.pick(rank=(4, 4), fixed=(1,))
    c = g.dims(x)[1]
    hidden = g.rng.choice((3, 16, 24))
    first = g.module(f"nn.Linear({c}, {hidden})")
    second = g.module(f"nn.Linear({hidden}, {c})")
    middle = g.module(f"nn.Conv2d({hidden}, {hidden}, 3, padding=1, groups={hidden})")
    there, back = g.rng.choice(
        (
            (
                ".flatten(2).transpose(1, 2)",
                ".transpose(1, 2).reshape(len({x}), -1, *{x}.shape[2:])",
            ),
            (
                ".permute(0, 2, 3, 1).flatten(1, 2)",
                ".unflatten(1, {x}.shape[2:]).permute(0, 3, 1, 2)",
            ),
        )
    )
    back = back.format(x=x)
    act = activation_for(g, "t")
    return (
        f"t = {first}({x}{there})\nt = {act}\nt = {middle}(t{back}){there}\n"
        f"{g.out} = {second}(F.gelu(t)){g.rng.choice(('', back))}"
    )


# Of x [..., R, C] and a constant w [C, O]; of x and y [B, R, C].
PRODUCTS_WITH_WEIGHTS = (
    "{x} @ {w}",
    "{x} @ {w} + {b}",
    "torch.matmul({x}, {w}).add({b})",
    "torch.einsum('...c,co->...o', {x}, {w})",
    "torch.addmm({b}, {x}.flatten(0, -2), {w}).unflatten(0, {x}.shape[:-1])",
    "torch.addmm({b}, {x}.flatten(0, -2), {w}, beta=0.5, alpha=2)",
    "torch.mm({x}.flatten(0, -2), {w})",
    "{w}.t() @ {x}.transpose(-1, -2)",
    "F.linear({x}, {w}.t(), {b}).mul(2)",
)
PRODUCTS_OF_VALUES = (
    "{x} @ {y}.transpose(-1, -2)",
    "torch.bmm({x}, {y}.mT)",
    "({x}.mT @ {y}).mT",
    "({x}.transpose(-1, -2) * 0.1) @ {y}",
    "torch.einsum('brc,bsc->brs', {x}, {y})",
    "torch.einsum('brc, bsc', {x}, {y})",
    "torch.einsum('brc,brd->bcd', {x}, {y})",
    "torch.einsum('brc,bsc->sbr', {x}, {y})",
    "torch.einsum('brc,src->bs', {x}, {y})",
    "torch.baddbmm({x} @ {y}.mT, {x}, {y}.mT, beta=0.5, alpha=0.2)",
    "torch.baddbmm({x}.new_empty(1), {x}, {y}.mT, beta=0, alpha=0.2)",
    "F.linear({x}, {y}[0])",
    "{x} @ {y}[:1].mT",
    "({x}[:, None] @ {y}[None].mT).sum(0)",
)


@piece(3)
def product_with_weights(g):
    x = g.pick(rank=(2, 4), fixed=(-1,))
    channels, out = g.dims(x)[-1], g.rng.choice(CHANNELS)
    form = g.rng.choice(PRODUCTS_WITH_WEIGHTS)
    weight, bias = g.constant(channels, out), g.constant(out)
    return f"{g.out} = {form.format(x=x, w=weight, b=bias)} * 0.3"


@piece(3)
def product_of_values(g):
    x = g.pick(rank=3)
    y = g.pick_like(x)
    return f"{g.out} = {g.rng.choice(PRODUCTS_OF_VALUES).format(x=x, y=y)} * 0.1"


@piece(2)
def block_of_tokens(g):
    """The two halves of a transformer's layer, each added to what it reads."""
    x = g.pick(rank=(2, 4), fixed=(-1,))
    width, hidden = g.dims(x)[-1], g.rng.choice(CHANNELS)
    first = g.module(f"nn.Linear({width}, {hidden})")
    second = g.module(f"nn.Linear({hidden}, {width}{g.rng.choice(('', ', bias=False'))})")
    scale = g.rng.choice(("", "", f" * {g.constant(width)}"))
    hidden_values = activation_for(g, f"{first}({x})")
    total = g.rng.choice(("{x} + t", "t + {x}", "F.relu({x} + t)", "(t + {x}) + {x}"))
    return f"t = {second}({hidden_values}){scale}\n{g.out} = {total.format(x=x)}"
