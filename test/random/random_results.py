"""What random models return: values, inputs, constants and views of these, numbers, in structures.

A leaf is the text of an expression; what it needs of the model comes as a statement."""

from __future__ import annotations

import torch

# At the level of a module, where forwards find them; no op of a model need read them.
TABLE = torch.linspace(-1, 1, 6).reshape(2, 3)
GRID = torch.arange(4)

_VIEWS = (
    "{0}[..., :1]",
    "{0}.transpose(0, -1)",
    "{0}.unsqueeze(0)",
    "{0}.flatten()",
    "{0}.detach()",
    "{0}.reshape(-1)[1:]",
    "{0}[None].expand(2, *[-1] * {0}.dim())",
    "{0}.view_as({0})",
    "{0}[:0]",
)
_MADE = (
    "torch.ones(2, 3)",
    "torch.tensor([1, 2])",
    "torch.tensor(0.5)",
    "torch.arange({0}.shape[0])",
    "torch.zeros({0}.shape[-1:])",
    "torch.full((2,), 3.0, dtype=torch.float64)",
    "torch.eye(3, dtype=torch.bool)",
)
_NUMBERS = (
    "None",
    "3",
    "0.5",
    "True",
    "'name'",
    "b'bytes'",
    "1.5 + 2j",
    "torch.float32",
    "()",
    "[]",
    "{{}}",
    "{0}.shape[-1]",
    "{0}.shape",
    "{0}.dim()",
    "{0}.dtype",
    "{0}.shape[0] > 2",
    "{0}.size(0) * 0.5",
    "str({0}.dim())",
)
_OF_VALUES = (
    "{0} > 1e6",
    "{0}.double()",
    "torch.complex({0}.float(), {0}.float())",
    "{0}.shape[0] * {0}",
    "{0}.sum() * 0",
)
_STRUCTURES = (
    "({joint},)",
    "({joint},)",
    "[{joint}]",
    "{{{keyed}}}",
    "Pair({first}, [{joint}])",
    "({first}, {{'rest': ({joint},)}})",
    "(({first},), [[{joint}], None])",
    "{{'a': {{'b': ({joint},)}}, 'c': []}}",
)


def _constant(g) -> str:
    """One that the model holds, or the module; most are read by no op."""
    kind = g.rng.choice(("held", "held", "plain", "read", "module"))
    if kind == "module":
        return g.rng.choice(("TABLE", "GRID"))
    if kind == "read" and (weights := _weights(g)):
        return g.rng.choice(weights)
    if kind == "plain":
        return g.holding("torch.linspace(0, 1, 5)")
    return g.holding(
        g.rng.choice(
            (
                "nn.Parameter(torch.randn(2, 3))",
                "nn.Buffer(torch.randn(3))",
                "nn.Buffer(torch.randint(0, 9, (4,)))",
                "nn.Buffer(torch.empty(0))",
                "nn.Parameter(torch.tensor(0.25))",
            )
        )
    )


def _weights(g) -> list[str]:
    """Parameters that the forward reads."""
    names = [f"self.{name}" for each in g.statements for name, _ in each.made]
    modules = [f"{each}.weight" for each in names]
    scope = g.scopes[0]
    return [each for each in (*names, *modules) if _is_tensor(each, scope)]


def _is_tensor(text: str, scope: dict) -> bool:
    try:
        return isinstance(eval(text, scope), torch.Tensor)
    except AttributeError:
        return False


def _view(g, text: str) -> str:
    return g.rng.choice(_VIEWS).format(text)


def leaf(g, values: list[str]) -> str:
    """One more leaf beside `values`, which the model must return."""
    first = values[0]
    inputs = [name for name, _ in g.inputs]
    return g.rng.choice(
        (
            lambda: g.rng.choice(inputs),
            lambda: _view(g, g.rng.choice(inputs)),
            lambda: _constant(g),
            lambda: _constant(g),
            lambda: _view(g, _constant(g)),
            lambda: g.rng.choice(values),
            lambda: _view(g, g.rng.choice(values)),
            lambda: g.rng.choice(_MADE).format(first),
            lambda: g.rng.choice(_NUMBERS).format(first),
            lambda: g.rng.choice(_NUMBERS).format(first),
            lambda: g.rng.choice(_OF_VALUES).format(first),
        )
    )()


def result(g, values: list[str]) -> str:
    """An expression that returns all of `values`, and mostly more; now and then none of them."""
    leaves = list(values) if g.rng.random() < 0.95 else []
    for _ in range(g.rng.choice((0, 1, 1, 2, 3, 4)) + (not leaves)):
        each = leaf(g, values)
        if g.runs(each):
            leaves.insert(g.rng.randrange(len(leaves) + 1), each)
    leaves = leaves or values[:1]
    if len(leaves) == 1 and g.rng.random() < 0.85:
        return leaves[0]
    return g.rng.choice(_STRUCTURES).format(
        joint=", ".join(leaves),
        first=leaves[0],
        keyed=", ".join(f"'k{i}': {each}" for i, each in enumerate(leaves)),
    )
