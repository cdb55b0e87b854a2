"""Draws docs/pictures/*.svg. Every offset in them is asked of a torch_blocked.Descriptor.

python docs/pictures.py"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from torch_blocked import Descriptor

FOLDER = Path(__file__).parent / "pictures"
PAGE = Path(__file__).parent / "formats.md"  # the table of paths is there
WIDTH = 760

# The example of "Understanding Memory Formats", and its four formats with the letters of its marks.
DIMS = (2, 16, 5, 4)
FORMATS = {"nchw": "a", "nhwc": "b", "chwn": "c", "nChw8c": "d"}

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; }
  .tag { font: bold 15px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
  .small { font-size: 11px; fill: #59636e; }
  .fine { font-size: 11px; }
  .mark { font-weight: bold; font-size: 12px; fill: #b3261e; }
  .middle { text-anchor: middle; } .end { text-anchor: end; }
  .a { fill: #a9d0f5; } .b { fill: #fbd3a4; } .c { fill: #b5e2b0; } .d { fill: #d9c6f0; }
  .a, .b, .c, .d, .none { stroke: #59636e; stroke-width: 0.6; }
  .none { fill: #ffffff; stroke-dasharray: 3 2; }
  .line { stroke: #59636e; fill: none; } .jump { stroke: #b3261e; fill: none; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .page { fill: #131416; }
    .small { fill: #9198a1; }
    .mark { fill: #ff8a80; }
    .a { fill: #1c5d96; } .b { fill: #95560f; } .c { fill: #2b7135; } .d { fill: #6543a3; }
    .a, .b, .c, .d, .none { stroke: #9198a1; }
    .none { fill: #131416; }
    .line { stroke: #9198a1; } .jump { stroke: #ff8a80; }
  }
"""  # noqa: E501


class Picture:
    """Shapes in the order in which they are drawn, and the room that they need downwards."""

    def __init__(self, title: str) -> None:
        self.title, self.parts, self.bottom = title, [], 0.0

    def rect(self, kind: str, x: float, y: float, width: float, height: float = 22) -> None:
        self._add(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>',
            y + height,
        )

    def text(self, x: float, y: float, words: object, kind: str = "") -> None:
        named = f' class="{kind}"' if kind else ""
        self._add(f'<text{named} x="{x:g}" y="{y:g}">{escape(str(words))}</text>', y + 4)

    def path(self, kind: str, points: str, bottom: float) -> None:
        self._add(f'<path class="{kind}" d="{points}"/>', bottom)

    def cell(
        self, kind: str, x: float, y: float, width: float, words: object, font: str = "middle"
    ) -> None:
        self.rect(kind, x, y, width)
        if words != "":
            self.text(x + width / 2, y + 15.5, words, font)

    def _add(self, part: str, bottom: float) -> None:
        self.parts.append(part)
        self.bottom = max(self.bottom, bottom)

    def svg(self) -> str:
        height = round(self.bottom + 10)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH}" height="{height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<rect class="page" width="{WIDTH}" height="{height}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


Index = tuple[int, ...]


def indices(dims: Iterable[int]) -> Iterable[Index]:
    return itertools.product(*(range(size) for size in dims))


def values(dims: Index) -> dict[Index, int]:
    """What is at each logical index of the example: 0, 1, 2, ... in the order of the dims."""
    return {index: value for value, index in enumerate(indices(dims))}


def memory(desc: Descriptor) -> dict[int, Index]:
    """The logical index at each offset that has one."""
    return {desc.offset(index): index for index in indices(desc.dims())}


def colour(channel: int) -> str:
    return "abcd"[channel // 4 % 4]


def cube() -> Picture:
    """Two images of 16 planes of 5 x 4 values; the first planes show theirs."""
    picture, value = Picture("The tensor of 2 x 16 x 5 x 4 values, as it is meant"), values(DIMS)
    images, channels, height, width = DIMS
    shift, cell, left = (7, 9), (38, 22), (60, 430)
    for n in range(images):
        front_y = 40 + shift[1] * (channels - 1)
        for c in reversed(range(channels)):
            x, y = left[n] + shift[0] * c, front_y - shift[1] * c
            if c:
                picture.rect(colour(c), x, y, cell[0] * width, cell[1] * height)
                continue
            for h, w in indices((height, width)):
                at = (x + cell[0] * w, y + cell[1] * h, cell[0])
                picture.cell(colour(c), *at, value[n, c, h, w])
        x, y = left[n], front_y + cell[1] * height
        picture.text(x, y + 58, f"n = {n}: value({n}, 0, 0, 0) = {value[n, 0, 0, 0]}")
        picture.text(x - 4, front_y - 4, "c = 0", "small end")
        last = (shift[0] * (channels - 1), shift[1] * (channels - 1))
        picture.text(x + cell[0] * width + last[0] + 6, front_y - last[1] + 12, "c = 15", "small")
        picture.text(x - 18, front_y + cell[1] * height / 2, "h", "tag")
        picture.text(x + cell[0] * width / 2, y + 20, "w", "tag middle")
    return picture


def jumps() -> Picture:
    """Where a walk through memory goes on: along the inner-most dim, then to the next line, ..."""
    picture = Picture("The first values in memory in four formats, and where the walk jumps")
    for row, (tag, letter) in enumerate(FORMATS.items()):
        desc = Descriptor(DIMS, "f32", tag)
        strip(picture, desc, letter, top=18 + 96 * row)
    return picture


def extents(desc: Descriptor) -> list[tuple[str, int]]:
    """(dim, offsets of one whole run of it) from the inner-most dim outwards."""
    letters, sizes = "nchw", desc.padded_dims()
    blocks = {dim: block for dim, block in zip(desc.inner_idxs(), desc.inner_blks(), strict=True)}
    runs = [(f"c % {block}", block) for block in blocks.values()]
    for dim in sorted(range(len(sizes)), key=lambda dim: desc.strides()[dim]):
        block = blocks.get(dim, 1)
        name = f"c / {block}" if dim in blocks else letters[dim]
        runs.append((name, desc.strides()[dim] * (sizes[dim] // block)))
    return runs


def strip(picture: Picture, desc: Descriptor, letter: str, top: float) -> None:
    """The values around each end of a run, with a mark there, and their offsets."""
    at, value, runs = memory(desc), values(DIMS), extents(desc)
    ends = [run for _, run in runs[:-1]]
    shown = sorted({0, 1, *(end + side for end in ends for side in (-1, 0, 1))} & at.keys())
    cell, x, before, places = 38.0, 12.0, -1, {}
    picture.text(x, top + 3, desc_name(desc), "tag")
    for offset in shown:
        if offset != before + 1:
            picture.text(x + 9, top + 50, "…", "middle")
            x += 18
        places[offset] = x
        picture.cell(colour(at[offset][1]), x, top + 36, cell, value[at[offset]])
        picture.text(x + cell / 2, top + 71, offset, "middle small")
        x, before = x + cell, offset
    picture.text(x + 6, top + 50, "…")
    picture.text(x + 22, top + 51, "value")
    picture.text(x + 22, top + 71, "offset", "small")
    free = 0.0  # where the mark before ends
    for k, end in enumerate([1, *ends]):
        edge, mark = places[end], f"[{letter}:{k}] {runs[k][0]}"
        half = 3.4 * len(mark)
        middle = max(edge, free + half)
        picture.path("jump", f"M{edge - 12:g},{top + 34:g}q12,-16 24,0", top)
        picture.text(middle, top + 22, mark, "middle mark")
        free = middle + half + 6


def desc_name(desc: Descriptor) -> str:
    return next(tag for tag in FORMATS if desc.matches_tag(tag))


def rows_with_gap(
    picture: Picture, desc: Descriptor, across: int, start: int, words: tuple[str, str]
) -> None:
    """Rows that are part of wider rows: X is in the described region, and below is the memory."""
    at, cell, top, left = memory(desc), 30.0, 46.0, 40.0
    rows, columns = desc.dims()
    for row, column in indices((rows, across)):
        offset = row * across + column - start
        kind = "a" if offset in at else "none"
        picture.cell(kind, left + cell * column, top + 24 * row, cell, "X" if kind == "a" else "")
    bottom = top + 24 * rows
    inside = left + cell * start
    picture.text(inside + cell * columns / 2, top - 8, words[0], "middle")
    picture.text(inside + cell * (columns + across) / 2, top - 8, words[1], "middle")
    right = left + cell * across + 30
    picture.text(right, top + 14, f"dims {desc.dims()}", "tag")
    picture.text(right, top + 38, f"strides {desc.strides()}", "tag")
    picture.text(right, top + 62, f"offset(r, k) = {desc.strides()[0]} r + k")
    picture.text(left, bottom + 28, "in memory, row after row:")
    narrow = 20.0
    for offset in range(rows * across):
        x = left + narrow * offset
        kind = "a" if offset - start in at else "none"
        picture.cell(kind, x, bottom + 38, narrow, "X" if kind == "a" else "")
        if (offset - start) % across == 0:
            picture.text(x + narrow / 2, bottom + 76, offset - start, "middle small")
    picture.text(left, bottom + 94, "offsets of the first X of each row", "small")


def strides() -> Picture:
    """A matrix whose rows have room at their end: a leading dimension larger than the row."""
    picture = Picture("A matrix of 4 x 6 with a row stride of 8")
    desc = Descriptor((4, 6), "f32", strides=(8, 1))
    rows_with_gap(picture, desc, 8, 0, ("6 columns", "unused"))
    return picture


def slice_of_rows() -> Picture:
    """The picture of "Channels Last": rows of n1 values within rows of n1 + n2."""
    n1, n2 = 5, 3
    picture = Picture("A slice: n1 of each n1 + n2 values")
    desc = Descriptor((4, n1), "f32", strides=(n1 + n2, 1))
    rows_with_gap(picture, desc, n1 + n2, 0, ("n1 = 5", "n2 = 3"))
    return picture


def padded() -> Picture:
    """17 channels in blocks of 8: what a pixel takes, and a sum over it."""
    channels, block = 17, 8
    desc = Descriptor((1, channels, 5, 4), "f32", "nChw8c")
    picture, cell = Picture("17 channels in blocks of 8: the room of 24, with a zero tail"), 26.5
    rooms = [(0, channel, 0, 0) for channel in range(desc.padded_dims()[1])]
    left = 12.0
    for row, word in enumerate(("src", "weights", "products")):
        picture.text(left, 62 + 34 * row, word, "tag" if row < 2 else "")
    for channel, index in enumerate(rooms):
        x = 90 + cell * channel + 6 * (channel // block)
        kind = colour(channel // block * 4) if channel < channels else "none"
        offset = desc.offset(index, padded=True)
        of_src, of_weights = (channel, f"w{channel}") if channel < channels else (0, 0)
        picture.cell(kind, x, 46, cell, of_src)
        picture.cell(kind, x, 80, cell, of_weights, "middle fine")
        picture.text(x + cell / 2, 130, "·" if channel < channels else "0", "middle")
        if channel % block == 0:
            picture.text(x, 20, f"block {channel // block}", "mark")
            picture.text(x, 38, f"offset {offset}", "small")
    picture.text(90, 154, "d0 = the sum of all 24 products = the sum of the first 17")
    size, logical = desc.get_size(), 4 * channels * 5 * 4
    picture.text(
        90, 178, f"[1, 17, 5, 4] takes {size} bytes; the product of its dims says {logical}"
    )
    return picture


PATHS = {
    "nchw": ("x [nchw]", "reorder", "conv", "reorder", "y [nchw]"),
    "nhwc": ("x [nhwc]", "conv", "y [nhwc]"),
    "to_mkldnn": ("x [opaque]", "reorder once", "conv", "y [opaque, blocked]"),
    "to_blocked": ("x [nChw16c]", "conv", "y [nChw16c]"),
}


def measured(page: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Milliseconds by layers and path, of the page's table: all, activations, weights."""
    lines = page[page.index("| layers ") :].split("\n\n")[0].splitlines()
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for line in lines[2:]:
        layers, path, *figures = (cell.strip() for cell in line.strip("| ").split("|"))
        total, activations, weights = map(float, figures[:3])
        found.setdefault(layers, {})[path] = (total, activations, weights)
    return found


def paths() -> Picture:
    """Each path's flow, and the time that it takes, of which reorders are shown apart."""
    picture = Picture("The ways through a convolution, and what they cost")
    tables = measured(PAGE.read_text())
    top = flows(picture) + 24
    for word, kind, x in (
        ("layers and dispatch", "c", 120),
        ("reorders of activations", "b", 290),
        ("of weights", "d", 490),
    ):
        picture.rect(kind, x, top, 14, 14)
        picture.text(x + 20, top + 12, word)
    top += 30
    for layers, times in tables.items():
        picture.text(12, top + 12, layers, "tag")
        longest = max(total for total, _, _ in times.values())
        for path, (total, activations, weights) in times.items():
            top += 24
            picture.text(112, top + 13, path, "end")
            x, scale = 120.0, 520 / longest
            rest = max(0.0, total - activations - weights)
            for kind, ms in (("c", rest), ("b", activations), ("d", weights)):
                if ms:
                    picture.rect(kind, x, top, round(ms * scale, 1), 17)
                x += ms * scale
            picture.text(x + 8, top + 13, f"{total:.3f} ms")
        top += 38
    return picture


def flows(picture: Picture) -> float:
    top = 14.0
    for path, steps in PATHS.items():
        picture.text(112, top + 17, path, "tag end")
        x = 122.0
        for index, step in enumerate(steps):
            width = 8.0 * len(step) + 14
            kind = "b" if "reorder" in step else "c" if step == "conv" else "none"
            picture.rect(kind, x, top, width, 24)
            picture.text(x + width / 2, top + 16.5, step, "middle")
            if step == "conv":
                reads = "weights packed once" if path == "to_blocked" else "weights reordered"
                picture.text(x + width / 2, top + 38, reads, "middle small")
            x += width
            if index < len(steps) - 1:
                picture.path("line", f"M{x:g},{top + 12:g}h18m-5,-4l5,4l-5,4", top)
                x += 20
        top += 50
    return top


PICTURES: dict[str, Callable[[], Picture]] = {
    "cube": cube,
    "jumps": jumps,
    "strides": strides,
    "slice": slice_of_rows,
    "padded": padded,
    "paths": paths,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        text = draw().svg()
        (FOLDER / f"{name}.svg").write_text(text)
        print(f"{name}.svg: {len(text)} bytes")


if __name__ == "__main__":
    main()
