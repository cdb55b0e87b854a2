"""benchmarks/results: pages and pictures are those of the JSON files; and what scripts share."""

import json
import re
import sys
from pathlib import Path

import harness
import pytest
import render

pytestmark = pytest.mark.any_isa
ROOT = Path(render.__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]


def test_pages_and_pictures_are_those_of_the_json_files(capsys):
    assert render.main(["--check"]) == 0, f"{capsys.readouterr().err}python benchmarks/render.py"


def test_every_result_says_what_and_where():
    titles = render.machines()
    for result in render.results():
        assert result.machine in titles and result.path.name.startswith(result.date), result.path
        assert result.report["context"].keys() >= {"date", "cpu", "command"}, result.path
        for table in result.report["tables"]:
            widths = {len(row) for row in (table["columns"], table["align"], *table["rows"])}
            assert len(widths) == 1, (result.path, table["title"])
    headings = [(result.machine, result.heading) for result in render.results()]
    assert len(set(headings)) == len(headings)


def test_links_to_results_lead_to_headings():
    pages = {page.name: page.read_text() for page in render.RESULTS.glob("*.md")}
    anchors = {result.link for result in render.results()}
    for document in [*DOCUMENTS, *render.RESULTS.glob("*.md")]:
        for name, anchor in re.findall(r"results/([\w-]+\.md)(#[\w-]+)?", document.read_text()):
            assert name in pages, (document, name)
            assert not anchor or name + anchor in anchors, (document, name + anchor)


def test_the_picture_of_the_readme_shows_a_table_of_results():
    page = render.README.read_text()
    shown = render.times_of_page(page)
    tables = [table for result in render.results() for table in result.report["tables"]]
    known = [render.times_of(each["rows"]) for each in tables if each["columns"][2:3] == ["its ms"]]
    assert len(shown) > 10
    assert any(all(times.get(name) == row for name, row in shown.items()) for times in known)
    for model, times in shown.items():
        faster = f"{render.chart.speeds(times)['torch_blocked']:.2f}x |"
        assert faster in page[page.index(render.PEERS_HEADER) :].split(f"| {model} |")[1][:80]
    assert page.index(render.PEERS_HEADER) < page.index("docs/peers.svg")


def test_a_script_writes_what_is_rendered(tmp_path, capsys, monkeypatch):
    path = tmp_path / "zen9" / "2026-12-01-cats.json"
    path.parent.mkdir()
    monkeypatch.setattr(sys, "argv", ["cats.py", "--threads", "3"])
    args = harness.parser("Cats, and dogs.\n\nMore.", rounds=2).parse_args(
        ["--threads", "3", "--json", str(path)]
    )
    table = harness.Table("of fur", ["cat", "kind", "ms"], [["chelsea", "tabby", "1.5"]], 2)
    harness.finish(args, [table], ["a note"], rounds=args.rounds)
    out = capsys.readouterr().out
    assert "3 threads" in out and "| chelsea | tabby | 1.5 |" in out and out.endswith("a note\n")
    report = json.loads(path.read_text())
    assert report["title"] == "Cats, and dogs" and report["context"]["rounds"] == 2
    assert report["context"]["command"] == "python benchmarks/cats.py --threads 3"
    report["context"]["date"] = "2026-12-01 10:00 UTC"
    section = "\n".join(render.section(render.Result(path, report)))
    assert "## Cats, and dogs, 2026-12-01" in section and "Threads: 3." in section
    assert "of fur:\n\n| cat | kind | ms |\n|---|---|--:|\n| chelsea | tabby | 1.5 |" in section
    assert "- a note" in section and render.picture(render.Result(path, report)) == ""


CASES = """
import os, sys, harness

def case(what):
    os.write(1, b"chatter\\n")
    if what == "raise":
        raise ValueError("no such\\nthing")
    return [what, os.environ["OMP_NUM_THREADS"]]

sys.exit(harness.run(lambda: 3, case))
"""


def test_a_case_has_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    script = tmp_path / "cases.py"
    script.write_text(CASES)
    assert harness.in_process(str(script), "cat", env=harness.on_cores(1)) == ["cat", "1"]
    with pytest.raises(harness.Failed, match="thing"):
        harness.in_process(str(script), "raise", env=harness.on_cores(1))
