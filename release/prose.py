"""Checks Markdown: python release/prose.py FILE...

Prose wraps at 100 columns, as code does. Tables, headings, code blocks and lines without a space to
break at may be longer. An entry of CHANGELOG.md has at most 200 characters."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
ENTRY = 200


def without_code(text: str) -> str:
    """The same lines, those of fenced code blocks empty."""
    return re.sub(
        r"^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S
    )


def too_long(text: str) -> Iterator[tuple[int, str]]:
    """The number of each line of prose that could be shorter, and what is wrong with it."""
    for number, line in enumerate(without_code(text).splitlines(), 1):
        words = re.sub(r"^\s*([-*>]|\d+\.)?\s*", "", line)
        could_break = " " in words[: WIDTH + 1 - (len(line) - len(words))]
        if len(line) > WIDTH and could_break and not line.lstrip().startswith(("|", "#", "<")):
            yield number, f"expected at most {WIDTH} characters, got {len(line)}; wrap the line"


def long_entries(text: str) -> Iterator[tuple[int, str]]:
    """The same of the entries of a changelog."""
    for match in re.finditer(r"^- .*(?:\n  .*)*", text, flags=re.M):
        length = len(re.sub(r"\s+", " ", match[0].removeprefix("- ")))
        if length > ENTRY:
            number = text.count("\n", 0, match.start()) + 1
            yield number, f"expected an entry of at most {ENTRY} characters, got {length}; cut it"


def main(names: list[str]) -> int:
    found = 0
    for path in map(Path, names):
        text = path.read_text()
        wrong = [*too_long(text), *(long_entries(text) if path.name == "CHANGELOG.md" else ())]
        for number, sentence in wrong:
            print(f"{path}:{number}: {sentence}")
        found += len(wrong)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
