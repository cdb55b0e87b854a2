"""What the package uses of torch that torch does not promise, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def uses(package: Path) -> set[str]:
    """Names such as "torch._ops.OpOverload", and ".name" of a private attribute of an object that
    the source does not name: of a tensor, say. Its own private attributes are left out."""
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    own = set().union(*map(_own_names, trees))
    found = set().union(*(_uses_of(tree) for tree in trees))
    return {name for name in found if not (name.startswith(".") and name[1:] in own)}


def _own_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # object.__setattr__(self, "_model", ...)
    return names


def _uses_of(tree: ast.AST) -> Iterator[str]:
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                full = f"{node.module}.{each.name}"
                aliases[each.asname or each.name] = full
                if any(map(is_private, full.split("."))):
                    yield full
    aliases |= _assigned(tree, aliases)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        root, parts = _chain(node)
        if root in aliases:
            parts = [*aliases[root].split("."), *parts]
            if any(map(is_private, parts)):
                end = next((i for i, part in enumerate(parts) if part.startswith("__")), None)
                yield ".".join(parts[:end])
        else:
            yield from ("." + part for part in parts if is_private(part))


def _assigned(tree: ast.AST, aliases: dict[str, str]) -> dict[str, str]:
    """Names for parts of torch, as in `aten = torch.ops.aten`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            root, parts = _chain(node.value)
            if root in aliases:
                found[node.targets[0].id] = ".".join([aliases[root], *parts])
    return found


def _chain(node: ast.AST) -> tuple[str, list[str]]:
    """`a.b.c` as "a", ["b", "c"]; the root is "" if it has no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), parts
