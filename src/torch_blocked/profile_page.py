"""A profile as one HTML page that needs no other file and no network."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from torch_blocked import profile_report
from torch_blocked.profile_rows import BETWEEN, OUTSIDE, Recorded, Row

# The colour of a row's bar, by its kind; the same in light and dark.
_COLOURS = {
    "op": "#4c78a8",
    "reorder": "#e45756",
    "torch reorder": "#f58518",
    "pack": "#b279a2",
    "between": "#9d9d9d",
    "recording": "#54a24b",
}
_NAMES = {
    "op": "ops",
    "reorder": "reorders",
    "torch reorder": "reorders of torch's oneDNN",
    "pack": "weight packs",
    "between": "Python and dispatch",
    "recording": "the profile itself",
}

_BODY = "<!--BODY-->"  # where the tables go in profile_page.html
_WIDTHS = (12, 16, 14, 14, 12, 5, 6, 5, 5, 7, 4)
_FALLBACK_WIDTHS = (17, 12, 16, 24, 26, 5)


def page(profile: Recorded) -> str:
    sums: dict[str, float] = defaultdict(float)
    for row in profile.rows:
        if row.in_thread:
            sums[row.kind] += row.ms
    wall = profile.wall_ms or 1.0
    kinds = [kind for kind in _COLOURS if sums[kind] > 0]
    stack = "".join(
        f'<div style="width:{100 * sums[kind] / wall:.3f}%;background:{_COLOURS[kind]}" '
        f'title="{_NAMES[kind]}: {sums[kind]:.3f} ms"></div>'
        for kind in kinds
    )
    keys = "".join(
        f'<span class="key"><i style="background:{_COLOURS[kind]}"></i>{_NAMES[kind]} '
        f"{sums[kind]:.3f} ms, {100 * sums[kind] / wall:.1f} %</span>"
        for kind in kinds
    )
    roofs = profile_report.roofs()
    body = (
        f"<h1>Profile: {profile.wall_ms:.3f} ms</h1>\n"
        f"<p>{escape(profile_report.summary(profile))}. "
        f"Roofs: {roofs.gflops:.0f} GFLOP/s by FMAs, {roofs.gbs:.1f} GB/s by copies.</p>\n"
        f'<div class="stack">{stack}</div><p>{keys}</p>\n'
        f"{_fallbacks(profile)}"
        f"<h2>By module</h2>\n<p>A module's time includes everything in it.</p>\n"
        f"{_modules(profile.rows, wall)}\n"
        f"<h2>By kind of op</h2>\n{_kinds(profile.rows, wall)}\n"
        f"<h2>By op, in the order of the run</h2>\n{_rows(profile.rows, wall)}\n"
    )
    template = resources.files("torch_blocked").joinpath("profile_page.html").read_text()
    return template.replace(_BODY, body)


def _cell(text: str, numeric: bool = False) -> str:
    if numeric:
        return f'<td class="n">{escape(text)}</td>'
    return f"<td>{_BREAKS.sub(_breakable, escape(text))}</td>"


# Where a long name may break into the next line.
_BREAKS = re.compile(r"::|[._]")


def _breakable(found: re.Match[str]) -> str:
    return f"{found[0]}<wbr>"


def _table(name: str, header: Iterable[tuple[str, float, bool]], body: Iterable[str]) -> str:
    """header: for each column a title, the width in percent and whether it holds numbers."""
    head = "".join(
        f'<th style="width:{width}%"{" class=n" if numeric else ""}>{escape(title)}</th>'
        for title, width, numeric in header
    )
    table = f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody>'
    return f'<div class="scroll">{table}</table></div>'


def _bar(kinds: dict[str, float], longest: float) -> str:
    return "".join(
        f'<i style="width:{max(0.0, 99 * kinds[kind] / longest):.2f}%;'
        f'background:{_COLOURS[kind]}" title="{_NAMES[kind]}: {kinds[kind]:.3f} ms"></i>'
        for kind in _COLOURS
        if kinds.get(kind, 0) > 0
    )


_MODEL = "the model itself"
_BACKWARD = "backward of "


def _path(module: str) -> tuple[str, ...]:
    """A module as its place in the tree: the model, what is in it, and so on."""
    top = _MODEL
    if module.startswith(_BACKWARD):
        top, module = "backward", module.removeprefix(_BACKWARD)
        module = "" if module == "the model" else module
    if module == OUTSIDE:
        return (module,)
    return (top, *module.split(".")) if module else (top,)


@dataclass
class _Module:
    """A row of the tree: milliseconds by kind, for the module with its parts and for itself."""

    all: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    own: float = 0.0
    children: dict[str, _Module] = field(default_factory=dict)


def _tree(rows: list[Row]) -> _Module:
    top = _Module()
    for row in rows:
        if not row.in_thread:
            continue
        at = top
        for name in _path(row.module):
            at = at.children.setdefault(name, _Module())
            at.all[row.kind] += row.ms
        at.own += row.ms
    return top


def _modules(rows: list[Row], wall: float) -> str:
    """The tree of modules, with the first two levels open."""
    top = _tree(rows)
    longest = max((sum(each.all.values()) for each in top.children.values()), default=1.0) or 1.0
    header = (("module", 34, False), ("ms", 9, True), ("own ms", 9, True), ("share", 8, True))
    body = _branch(top, (), wall, longest)
    return _table("modules", (*header, ("", 40, False)), body)


def _branch(of: _Module, within: tuple[str, ...], wall: float, longest: float) -> Iterator[str]:
    for name, each in of.children.items():
        path, total = (*within, name), sum(each.all.values())
        state = "leaf" if not each.children else "open" if not within else ""
        cells = (
            f'<td style="padding-left:{14 * len(within)}px"><button aria-label="open"></button> '
            f"{_BREAKS.sub(_breakable, escape(name))}</td>"
            f"{_cell(f'{total:.3f}', True)}{_cell(f'{each.own:.3f}', True)}"
            f"{_cell(f'{100 * total / wall:.1f} %', True)}<td>{_bar(each.all, longest)}</td>"
        )
        places = f'data-path="{escape("/".join(path))}" data-in="{escape("/".join(within))}"'
        yield f'<tr class="{state}" {places}{" hidden" if len(within) > 1 else ""}>{cells}</tr>'
        yield from _branch(each, path, wall, longest)


def _kinds(rows: list[Row], wall: float) -> str:
    """Sums over all modules and sizes."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.in_thread:
            of_kind = sums.setdefault((row.kind, row.op, row.implementation), [0, 0])
            of_kind[0] += row.calls
            of_kind[1] += row.ms
    longest = max((ms for _, ms in sums.values()), default=1.0) or 1.0
    body = [
        f"<tr>{_cell(op)}{_cell(by)}{_cell(str(int(calls)), True)}{_cell(f'{ms:.3f}', True)}"
        f"{_cell(f'{100 * ms / wall:.1f} %', True)}<td>{_bar({kind: ms}, longest)}</td></tr>"
        for (kind, op, by), (calls, ms) in sorted(sums.items(), key=lambda each: -each[1][1])
    ]
    words, numbers = (("op", 26, False), ("implementation", 18, False)), ("calls", "ms", "share")
    header = (*words, *((each, 8, True) for each in numbers), ("", 32, False))
    return _table("kinds", header, body)


def _rows(rows: list[Row], wall: float) -> str:
    header = [
        (name, width, i >= 5)
        for i, (name, width) in enumerate(zip(profile_report.HEADER, _WIDTHS, strict=True))
    ]
    body = []
    for row in rows:
        if row.op == BETWEEN:
            continue  # these rows are in the table above
        texts = profile_report.cells(row, wall)
        colour = f'style="box-shadow: inset 3px 0 {_COLOURS[row.kind]}"'
        line = "".join(_cell(text, i >= 5) for i, text in enumerate(texts))
        body.append(f'<tr {colour} title="{escape(row.line)}">{line}</tr>')
    return _table("rows", header, body)


def _fallbacks(profile: Recorded) -> str:
    found = profile_report.fallbacks(profile)
    if not found:
        return ""
    last = len(_FALLBACK_WIDTHS) - 1
    header = [
        (name, width, i == last)
        for i, (name, width) in enumerate(
            zip(profile_report.FALLBACK_HEADER, _FALLBACK_WIDTHS, strict=True)
        )
    ]
    body = [
        f"<tr>{''.join(_cell(text, i == last) for i, text in enumerate(each))}</tr>"
        for each in found
    ]
    return f"<h2>Fallbacks</h2>\n{_table('fallbacks', header, body)}\n"
