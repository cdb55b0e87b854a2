"""A bar chart of relative speeds as SVG, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from xml.sax.saxutils import escape

LABEL, BARS, NUMBER = 110, 420, 60  # widths of a bar's name, of speed 1, and of its number
BAR, GAP, TITLE = 14, 4, 26

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; }
  .row { font-weight: bold; }
  .name { text-anchor: end; }
  .peer { fill: #a9c4de; } .ours { fill: #d9622b; }
  .best { stroke: #59636e; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .page { fill: #0d1117; }
    .peer { fill: #3d5a75; } .ours { fill: #e2733f; }
    .best { stroke: #9198a1; }
  }
"""  # noqa: E501


def bars(
    rows: Mapping[str, Mapping[str, float]], order: Iterable[str], ours: Collection[str]
) -> str:
    """One group of bars for each row, one bar for each engine: speed, best peer = 1."""
    order = list(order)
    longest = max((speed for row in rows.values() for speed in row.values()), default=1.0)
    column = LABEL + BARS * max(1.0, longest)  # of the numbers
    width = column + NUMBER
    parts: list[str] = []
    y = GAP
    for label, speeds in rows.items():
        y += TITLE
        parts.append(f'<text class="row" x="{LABEL}" y="{y - 8}">{escape(label)}</text>')
        top = y
        for engine in order:
            if engine in speeds:
                parts += bar(engine, speeds[engine], y, column, engine in ours)
                y += BAR + GAP
        x = LABEL + BARS
        parts.append(f'<line class="best" x1="{x}" x2="{x}" y1="{top}" y2="{y - GAP}"/>')
    height = y + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
            f'width="{width:.0f}" height="{height}" role="img">',
            "<title>Speed of each engine, the best peer of each row = 1</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{width:.0f}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def bar(engine: str, speed: float, y: int, column: float, is_ours: bool) -> list[str]:
    base = y + BAR - 3
    kind = "ours" if is_ours else "peer"
    return [
        f'<text class="name" x="{LABEL - 8}" y="{base}">{escape(engine)}</text>',
        f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{BARS * speed:.1f}" height="{BAR}"/>',
        f'<text x="{column + 8:.1f}" y="{base}">{speed:.2f}</text>',
    ]
