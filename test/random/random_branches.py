"""Pieces of random models that part and meet again, as those of random_pieces.py."""

from __future__ import annotations

from random_layers import CHANNELS
from random_pieces import Skip, piece

BLOCKS = (16, 32)  # whole blocks of either width lie where a concat wants them


@piece(2)
def several(g):
    """Multi-way: inception, split-transform-merge, dense blocks."""
    x = g.pick(rank=(3, 5), fixed=(1,))
    n, c = g.rank(x) - 2, g.dims(x)[1]
    ways, outs = [], g.rng.choice((CHANNELS, BLOCKS))
    for _ in range(g.rng.randint(2, 4)):
        k = g.rng.choice((1, 3, 5))
        made = f"nn.Conv{n}d({c}, {g.rng.choice(outs)}, {k}, padding={k // 2})"
        source = g.rng.choice((x, x, f"F.relu({x})", f"F.max_pool{n}d({x}, 3, 1, 1)"))
        ways.append(f"{g.module(made)}({source})")
    if g.rng.random() < 0.4:
        ways.append(x)
    if g.rng.random() < 0.3:  # some of them are a concat, too
        ways = [ways[0], f"torch.cat(({', '.join(ways[1:])},), 1)", ways[0]]
    end = g.rng.choice(("{}", "{}", "F.relu({})", "{}[:, ::2]", "{}.flip(1)", "{}[:, 3:]"))
    return f"{g.out} = {end.format('torch.cat((' + ', '.join(ways) + '), 1)')}"


@piece(2)
def moved_channels(g):
    """Channel shuffles and other orders of channels, as people write them."""
    x = g.pick(rank=(3, 5), fixed=(1,))
    c = g.dims(x)[1]
    if c < 2:
        raise Skip
    groups = g.rng.choice([i for i in range(1, c + 1) if c % i == 0])
    apart = f"{x}.unflatten(1, ({groups}, {c // groups}))"
    form = g.rng.choice(
        (
            "{apart}.transpose(1, 2).contiguous().flatten(1, 2)",
            "{apart}.swapaxes(1, 2).reshape({x}.shape)",
            "{apart}.movedim(2, 1).clone().view({x}.shape)",
            "{x}.flatten(2).unflatten(1, ({g}, {c} // {g})).transpose(1, 2).reshape({x}.shape)",
            "torch.stack({x}.chunk(2, 1)[:1] * 2, 2).flatten(1, 2)",
            "torch.stack({x}.unbind(1)[::-1], 1)",
            "torch.cat({x}.tensor_split(3, 1)[::-1], 1)",
            "torch.cat([{x}.select(1, i).unsqueeze(1) for i in (1, 0, -1)], 1)",
            "torch.cat({x}.hsplit([1])[::-1], 1)",
            "{x}[:, {order}]",
            "{x}.index_select(1, torch.tensor({order}))",
            "{x}.flip(1)",
            "{x}.roll({g}, 1)",
            "{x}.repeat_interleave(2, 1)",
        )
    )
    order = g.rng.sample(range(c), c)
    return f"{g.out} = " + form.format(x=x, apart=apart, g=groups, c=c, order=order)


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
            "a, b = {x}.split([{a}, {b}], 1)\n"
            "{o} = F.channel_shuffle(torch.cat((a, F.relu({m}(b))), 1), {g})",
            "a, b = {x}.split([{a}, {b}], 1)\n{o} = {m}(b) * a.mean(1, keepdim=True) + b",
        )
    )
    return form.format(x=x, a=a, b=c - a, o=g.out, m=first, g=2 if c % 2 == 0 else 1)
