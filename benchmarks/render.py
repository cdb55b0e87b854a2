"""Renders what the JSON files in results/ say: a page for each machine, pictures, and an index.

    python benchmarks/render.py            # writes results/*.md, results/*/*.svg and docs/peers.svg
    python benchmarks/render.py --check    # exits with 1 if these are not what the JSON files say

Any script's --json writes such a file; to keep a result, write it to
results/<machine>/<date>-<name>.json. `how` may say in words how it was measured."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart

from torch_blocked.bench import by_layer, time_bars

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README = FOLDER.parent / "README.md"
PEERS = FOLDER.parent / "docs" / "peers.svg"
PEERS_HEADER = "| model | best peer | its ms | ours, ms | faster |"  # of the table that is drawn
PEERS_TITLE = "Speed at batch 1 on two threads, best peer = 1 (to the right is faster)"
# What a page says of the circumstances.
FACTS = {
    "isa_limits": "Limits",
    "threads": "Threads",
    "versions": "Versions",
    "torch": "torch",
    "onednn": "oneDNN",
    "torch_blocked": "torch_blocked",
}
HEAD = "<!-- Rendered by benchmarks/render.py from JSON files: change these instead. -->"


@dataclass(frozen=True)
class Result:
    """One JSON file, of the machine whose folder it is in."""

    path: Path
    report: Mapping[str, Any]

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def date(self) -> str:
        return str(self.report["context"]["date"])[:10]

    @property
    def heading(self) -> str:
        return f"{self.report['title']}, {self.date}"

    @property
    def link(self) -> str:
        """Beside the pages. The anchor is that of pages that host the code."""
        anchor = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"{self.machine}.md#{anchor}"


def results(folder: Path = RESULTS) -> list[Result]:
    """The newest first."""
    found = [Result(path, json.loads(path.read_text())) for path in folder.glob("*/*.json")]
    return sorted(found, key=lambda each: (each.date, each.path), reverse=True)


def machines(folder: Path = RESULTS) -> dict[str, str]:
    """What each machine is, by its folder."""
    return dict(json.loads((folder / "machines.json").read_text()))


def table(made: Mapping[str, Any]) -> list[str]:
    rules = ["---" if side == "l" else "--:" for side in made["align"]]
    lines = ["| " + " | ".join(row) + " |" for row in (made["columns"], *made["rows"])]
    return [*([made["title"] + ":", ""] if made["title"] else []), lines[0],
            "|" + "|".join(rules) + "|", *lines[1:], ""]  # fmt: skip


def section(result: Result) -> list[str]:
    """A heading, how it was measured, the tables, the picture and the notes of a file."""
    report, context = result.report, result.report["context"]
    lines = [f"## {result.heading}", ""]
    if context.get("command"):
        lines += ["```console", f"$ {context['command']}", "```", ""]
    lines += [each for each in (report.get("how"),) if each] + [""]
    lines += [f"{word}: {context[key]}." for key, word in FACTS.items() if context.get(key)] + [""]
    for made in report.get("tables", ()):
        lines += table(made)
    if picture(result):
        name = result.path.with_suffix(".svg").name
        lines += [f"![{report['title']}]({result.machine}/{name})", ""]
    return lines + [f"- {note}" for note in report.get("notes", ())] + [""]


def page(machine: str, title: str, found: Sequence[Result]) -> str:
    lines = [HEAD, f"# {title}", ""]
    lines += [f"- [{each.heading}](#{each.link.partition('#')[2]})" for each in found] + [""]
    for each in found:
        lines += section(each)
    return tidy(lines)


def index(titles: Mapping[str, str], found: Sequence[Result]) -> str:
    """Which results there are, by what was measured."""
    lines = [HEAD, "# Results of benchmarks", "", "By machine:", ""]
    lines += [f"- [{titles[name]}]({name}.md)" for name in titles]
    lines += ["", "By what was measured:", "", "| what | where and when |", "|---|---|"]
    for title in sorted({str(each.report["title"]) for each in found}):
        those = [each for each in found if each.report["title"] == title]
        links = ", ".join(f"[{each.machine} {each.date}]({each.link})" for each in those)
        lines.append(f"| {title} | {links} |")
    return tidy(lines)


def tidy(lines: Sequence[str]) -> str:
    """One empty line between blocks, and none at the end."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def picture(result: Result) -> str:
    """The SVG of a file: of its first table where `picture` is the title of one, else of its
    results where these are layers or timed rounds; none else."""
    records = result.report.get("results", [])
    if "picture" in result.report:
        return chart.draw(result.report["picture"], times_of(result.report["tables"][0]["rows"]))
    if by_layer.are_rows(records):
        return by_layer.draw([by_layer.Row(**each) for each in records])
    if records and all("quartiles_ms" in each for each in records):
        return time_bars.draw(records)
    return ""


def times_of(rows: Sequence[Sequence[str]]) -> dict[str, dict[str, float]]:
    """Milliseconds by model and engine, of rows of model, best peer, its ms, ours."""
    return {
        model: {peer: float(its_ms), "torch_blocked": float(ours)}
        for model, peer, its_ms, ours, *_ in rows
        if peer in chart.ENGINES
    }


def times_of_page(text: str) -> dict[str, dict[str, float]]:
    """The same of the README's table."""
    _, _, *rows = text[text.index(PEERS_HEADER) :].split("\n\n")[0].splitlines()
    return times_of([[cell.strip(" *") for cell in row.strip("| ").split("|")] for row in rows])


def rendered() -> Iterator[tuple[Path, str]]:
    """Every file and its text."""
    titles, found = machines(), results()
    for name, title in titles.items():
        yield RESULTS / f"{name}.md", page(name, title, [e for e in found if e.machine == name])
    yield RESULTS / "README.md", index(titles, found)
    for each in found:
        if drawn := picture(each):
            yield each.path.with_suffix(".svg"), drawn
    yield PEERS, chart.draw(PEERS_TITLE, times_of_page(README.read_text()))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    check = parser.parse_args(argv).check
    texts = dict(rendered())
    pages = [*RESULTS.glob("*.md"), *RESULTS.glob("*/*.svg")]
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in pages if path not in texts]
    for path in stale:
        print(path.relative_to(FOLDER.parent), file=sys.stderr)
        if not check and path in texts:
            path.write_text(texts[path])
        elif not check:
            path.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
