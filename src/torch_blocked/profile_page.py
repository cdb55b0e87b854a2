"""A profile as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from torch_blocked import profile_report
from torch_blocked.profile_rows import BETWEEN, Recorded, Row

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

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8882; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1160px; margin: 24px auto; padding: 0 16px;
  background: light-dark(#fff, #16181c); color: light-dark(#1c1e21, #e3e5e8); }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 4px 0 12px; }
table { border-collapse: collapse; width: 100%; font-size: 12px; table-layout: fixed; }
th, td { padding: 3px 6px; text-align: left; vertical-align: top; overflow-wrap: anywhere;
  border-bottom: 1px solid var(--faint); }
th { border-bottom: 1px solid var(--line); font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.stack { display: flex; height: 22px; margin: 8px 0; }
.stack div { min-width: 1px; }
.key { display: inline-block; margin-right: 18px; }
.key i, td i { display: inline-block; height: 10px; min-width: 1px; }
.key i { width: 10px; margin-right: 6px; }
"""
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
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>torch_blocked profile</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Profile: {profile.wall_ms:.3f} ms</h1>\n"
        f"<p>Roofs: {roofs.gflops:.0f} GFLOP/s by FMAs, {roofs.gbs:.1f} GB/s by copies.</p>\n"
        f'<div class="stack">{stack}</div><p>{keys}</p>\n'
        f"<h2>By module</h2>\n{_modules(profile.rows, wall)}\n"
        f"<h2>By op, in the order of the run</h2>\n{_rows(profile.rows, wall)}\n"
        f"{_fallbacks(profile)}</body></html>\n"
    )


def _cell(text: str, numeric: bool = False) -> str:
    return f'<td class="n">{escape(text)}</td>' if numeric else f"<td>{escape(text)}</td>"


def _modules(rows: list[Row], wall: float) -> str:
    """Each module's share as a bar: its ops, reorders and the rest."""
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.in_thread:
            of_module = sums.setdefault(row.module, defaultdict(float))
            of_module[row.kind] += row.ms
    longest = max((sum(each.values()) for each in sums.values()), default=1.0) or 1.0
    body = []
    for module, kinds in sums.items():
        total = sum(kinds.values())
        bar = "".join(
            f'<i style="width:{max(0.0, 99 * kinds[kind] / longest):.2f}%;'
            f'background:{_COLOURS[kind]}" title="{_NAMES[kind]}: {kinds[kind]:.3f} ms"></i>'
            for kind in _COLOURS
            if kinds.get(kind, 0) > 0
        )
        name = _cell(module or "the model itself")
        share = _cell(f"{100 * total / wall:.1f} %", True)
        body.append(f"<tr>{name}{_cell(f'{total:.3f}', True)}{share}<td>{bar}</td></tr>")
    head = '<tr><th style="width:32%">module</th><th class="n" style="width:8%">ms</th>'
    head += '<th class="n" style="width:7%">share</th><th></th></tr>'
    return f"<table>{head}{''.join(body)}</table>"


def _rows(rows: list[Row], wall: float) -> str:
    head = "".join(
        f'<th style="width:{width}%"{" class=n" if i >= 5 else ""}>{escape(name)}</th>'
        for i, (name, width) in enumerate(zip(profile_report.HEADER, _WIDTHS, strict=True))
    )
    body = []
    for row in rows:
        if row.op == BETWEEN:
            continue  # they are in the table above
        texts = profile_report.cells(row, wall)
        colour = f'style="box-shadow: inset 3px 0 {_COLOURS[row.kind]}"'
        line = "".join(_cell(text, i >= 5) for i, text in enumerate(texts))
        body.append(f'<tr {colour} title="{escape(row.line)}">{line}</tr>')
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _fallbacks(profile: Recorded) -> str:
    found = profile_report.fallbacks(profile)
    if not found:
        return ""
    head = "".join(
        f'<th style="width:{width}%">{escape(name)}</th>'
        for name, width in zip(profile_report.FALLBACK_HEADER, _FALLBACK_WIDTHS, strict=True)
    )
    body = "".join(f"<tr>{''.join(_cell(text) for text in each)}</tr>" for each in found)
    return f"<h2>Fallbacks</h2>\n<table><tr>{head}</tr>{body}</table>\n"
