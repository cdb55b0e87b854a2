"""Times as SVG, readable on light and dark pages and at the width of a text column: bars of
milliseconds, of several parts or with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 830  # of a picture
LEGEND = 30  # width of a mark in the legend and of the space around a name
LETTER = 6.6  # width of a letter, on average

# Marks of radius about 5 around the origin: rivals take these in turn, ours the last one each.
SHAPES = (
    "M-4.5,-4.5H4.5V4.5H-4.5Z",  # square
    "M0,-5.5L5.5,4.5H-5.5Z",  # triangle
    "M0,5.5L5.5,-4.5H-5.5Z",  # triangle on its tip
    "M-5,0A5,5 0 1 0 5,0A5,5 0 1 0 -5,0Z",  # circle
    "M-6,0L0,-6L6,0L0,6Z",  # diamond
    "M-5,-2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",  # cross
    "M-5,-5L0,-2L5,-5L2,0L5,5L0,2L-5,5L-2,0Z",  # star of four
)
COLOURS = ("#7b8794", "#4c9f70", "#8e6bbf", "#3b82c4", "#c9a227", "#b5607e", "#5a6b2f")
OURS_COLOURS = ("#d9622b", "#f0a070", "#a03c10")

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; }
  .title { font-weight: bold; }
  .name { text-anchor: end; } .tick { text-anchor: middle; }
  .line { stroke: #d1d9e0; } .one { stroke: #59636e; stroke-dasharray: 3 3; }
  .spread { stroke: #1f2328; stroke-width: 1.5; fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .page { fill: #0d1117; }
    .line { stroke: #3d444d; } .one { stroke: #9198a1; } .spread { stroke: #f0f6fc; }
  }
"""  # noqa: E501


@dataclass(frozen=True)
class Bar:
    """parts: lengths by kind, side by side. spread: the ends of a line over the bar's end. note: in
    words behind it."""

    name: str
    parts: Mapping[str, float]
    spread: tuple[float, float] | None
    note: str

    @property
    def length(self) -> float:
        return max(sum(self.parts.values()), self.spread[1] if self.spread else 0)


@dataclass(frozen=True)
class Section:
    """Bars below a heading. A bar of length `full` takes the whole width."""

    heading: str
    bars: Sequence[Bar]
    full: float


TIME = {"time": COLOURS[3]}  # colours of bars with one part
BAR, HEADING = 18, 30  # heights of a bar's row and of a heading
NAME, NOTE = 300, 190  # widths at most of a bar's name, and of its note


def bars(title: str, sections: Sequence[Section], colours: Mapping[str, str]) -> str:
    """colours: of each kind of part; those of more than one kind have a legend."""
    names = [bar.name for section in sections for bar in section.bars]
    label = min(NAME, 24 + LETTER * max((len(name) for name in names), default=0))
    width = WIDTH - label - NOTE
    looks = {kind: (SHAPES[0], colour) for kind, colour in colours.items()}
    parts = [f'<text class="title" x="8" y="17">{escape(title)}</text>']
    parts += legend(looks) if len(looks) > 1 else []
    y = 17.0 + 18 * (len(looks) > 1)
    for section in sections:
        y += HEADING
        parts.append(f'<text class="title" x="8" y="{y - 4:g}">{escape(section.heading)}</text>')
        for bar in section.bars:
            parts += _bar(bar, label, y, width / (section.full or 1), colours)
            y += BAR
    return picture(title, parts, round(y) + 12)


def time_bar(name: str, quartiles_ms: Sequence[float]) -> Bar:
    """A median with its quartiles."""
    low, median, high = quartiles_ms
    note = f"{median:.2f} ms ({low:.2f} to {high:.2f})"
    return Bar(name, {"time": median}, (low, high), note)


def _bar(bar: Bar, left: float, y: float, scale: float, colours: Mapping[str, str]) -> list[str]:
    middle, x = y + BAR / 2, left
    most = round((NAME - 24) / LETTER)
    name = bar.name if len(bar.name) <= most else f"{bar.name[:12]}…{bar.name[13 - most :]}"
    drawn = [f'<text class="name" x="{left - 8:.1f}" y="{middle + 4}">{escape(name)}</text>']
    for kind, length in bar.parts.items():
        drawn.append(
            f'<rect x="{x:.1f}" y="{y + 3:g}" width="{length * scale:.1f}" height="{BAR - 6}" '
            f'fill="{colours[kind]}"><title>{escape(f"{bar.name}, {kind}: {length:.3f} ms")}'
            "</title></rect>"
        )
        x += length * scale
    if bar.spread:
        low, high = (left + end * scale for end in bar.spread)
        ends = "".join(f"M{end:.1f},{middle - 4}v8" for end in (low, high))
        drawn.append(f'<path class="spread" d="M{low:.1f},{middle}H{high:.1f}{ends}"/>')
    x = left + bar.length * scale + 8
    drawn.append(f'<text x="{x:.1f}" y="{middle + 4}">{escape(bar.note)}</text>')
    return drawn


def picture(title: str, parts: Sequence[str], height: int) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def legend(looks: Mapping[str, tuple[str, str]]) -> list[str]:
    parts, x = [], 14.0
    for rival, look in looks.items():
        parts.append(mark(look, x, 31, rival))
        parts.append(f'<text x="{x + 10:.1f}" y="35">{escape(rival)}</text>')
        x += LEGEND + LETTER * len(rival)
    return parts


def mark(look: tuple[str, str], x: float, y: float, text: str) -> str:
    shape, colour = look
    return (
        f'<path d="{shape}" fill="{colour}" transform="translate({x:.1f},{y:g})">'
        f"<title>{escape(text)}</title></path>"
    )
