"""Tells Sphinx how to read this project's docstrings, which are plain text for `help()`.

An entry is a line that begins with arguments and a colon (`dtype: of the result`), or with Returns,
Raises or Source, and the indented or unfinished lines that follow it. Aligned columns and prompts
are shown as they are."""

import inspect
import re
from collections.abc import Iterator

from sphinx.application import Sphinx

NAMED = re.compile(r"([a-z_][\w ,*]*): (.*)")
FIELDS = {"Returns ": "returns", "Raises ": "raises-what", "Source: ": "source"}
TITLES = {"raises-what": "Raises", "source": "Source"}


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}


def process(_app: Sphinx, _what: str, _name: str, obj: object, _options: object, lines: list[str]):
    """Replaces `lines` by reStructuredText."""
    text = "\n".join(lines).strip()
    paragraphs = re.split(r"\n\s*\n", text) if text else []
    known = arguments_of(obj)
    lines[:] = [line for paragraph in paragraphs for line in converted(paragraph, known)]


def arguments_of(obj: object) -> set[str]:
    """Names that an entry may begin with: arguments, or attributes of a class."""
    try:
        names = set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        names = set()
    return names | {name for name in dir(obj) if not name.startswith("_")} | {"dims"}


def converted(paragraph: str, known: set[str]) -> list[str]:
    if re.search(r"^\s*>>>|\S {3,}\S", paragraph, re.MULTILINE):
        return ["::", "", *(f"    {line}" for line in paragraph.splitlines()), ""]
    fields: list[str] = []
    plain: list[str] = []
    for kind, words in entries(paragraph, known):
        if kind == "":
            plain.append(marked(words))
        elif kind in TITLES.values():
            fields.append(f":{kind}: {marked(words)}")
        elif kind == "returns":
            fields.append(f":returns: {marked(words)}")
        else:
            fields += [f":param {name}: {marked(words)}" for name in kind.split(", ")]
    return [*(line for words in plain for line in (words, "")), *fields, ""]


def entries(paragraph: str, known: set[str]) -> Iterator[tuple[str, str]]:
    """(kind, words) of each entry; the kind is "" for plain sentences, or arguments' names."""
    kind, words = "", []
    for line in paragraph.splitlines():
        found = beginning(line, known)
        if found:
            if words:
                yield kind, " ".join(words)
            kind, words = found[0], [found[1]]
        elif line.strip():
            if words and kind and not line[0].isspace() and words[-1].endswith("."):
                yield kind, " ".join(words)  # a sentence after an entry
                kind, words = "", []
            words.append(line.strip())
    if words:
        yield kind, " ".join(words)


def beginning(line: str, known: set[str]) -> tuple[str, str] | None:
    for word, kind in FIELDS.items():
        if line.startswith(word):
            return TITLES.get(kind, kind), line.removeprefix(word)
    match = NAMED.match(line)
    if match and set(match[1].split(", ")) <= known:
        return match[1], match[2]
    return None


def marked(words: str) -> str:
    """Code as code, and nothing else taken for markup."""
    parts = re.split(r"(`[^`]+`)", words)
    return "".join(
        f"`{part}`" if part.startswith("`") else re.sub(r"([*|\\_])", r"\\\1", part)
        for part in parts
    )
