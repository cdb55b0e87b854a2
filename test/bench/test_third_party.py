"""The command benchmarks/third_party.py, on models of our own: no other package is needed."""

import json
import os
import re
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
import third_party
import torch
import zoo
from zoo.forms import Expected, Wrong, compare
from zoo.timed import TIMED

from torch_blocked.bench.networks import MODELS

pytestmark = pytest.mark.any_isa
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

Status = namedtuple("Status", "code lines results")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command on the table of ours, its models in processes of their own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))

    def call(*options) -> Status:
        path = tmp_path / "out.json"
        options = ["--table", "third_party_table:ROWS", "--json", str(path), *options]
        code = third_party.main(options)
        results = json.loads(path.read_text())["results"] if path.exists() else []
        lines = capsys.readouterr().out.splitlines()
        return Status(code, lines, {(each["model"], each["form"]): each for each in results})

    return call


def test_a_right_model_is_right_in_every_form(run):
    code, lines, results = run("--models", "positional,keyword")
    assert {form for _, form in results} == {"eager", "optimized", "compiled", "loaded"}
    assert [each["status"] for each in results.values()] == ["ok"] * 8, lines
    assert all(each["detail"].startswith("2 sizes, ") for each in results.values())
    assert "8 ok" in lines[-1] and code == 0


def test_what_is_wrong_or_dies_is_told_and_the_other_forms_still_run(run):
    forms = "off,killed,renamed,ends,raises,refuses,chatters"
    code, lines, results = run("--models", "positional", "--forms", forms)
    found = {form: (each["status"], each["detail"]) for (_, form), each in results.items()}
    assert list(found) == forms.split(",") and code == 1
    assert found["off"] == ("wrong", "1 of 2 sizes, at [2, 9, 7]: .map by 0.01")
    assert found["killed"] == ("signal", "SIGSEGV at [1, 8, 8]")
    assert found["renamed"][0] == "wrong" and "structure" in found["renamed"][1]
    assert found["ends"][0] == "error" and "a last word" in found["ends"][1]
    assert found["raises"] == (
        "error",
        "1 of 2 sizes, at [1, 8, 8]: RuntimeError: no such thing",
    )
    assert found["refuses"][0] == "refused"
    assert found["chatters"][0] == "ok"


def test_a_refusal_leaves_the_exit_status_at_0(run):
    assert run("--models", "positional", "--forms", "refuses").code == 0


def test_what_says_nothing_for_long_is_ended(run):
    code, lines, _ = run("--models", "positional", "--forms", "hangs", "--timeout", "4")
    assert code == 1 and "timeout" in lines[0]


def test_a_row_that_the_dense_model_refuses_is_an_error(run):
    code, lines, _ = run("--models", "refused_by_dense", "--forms", "eager")
    assert code == 1 and re.match(r"pip/refused_by_dense +dense +error", lines[0])


@pytest.mark.parametrize("option", ["--forms=eager,quick", "--models=no_such"])
def test_an_unknown_form_or_model_is_refused(run, option):
    with pytest.raises(SystemExit, match="2"):
        run(option)


def test_list_names_package_and_sizes(run):
    code, lines, _ = run("--list")
    assert code == 0 and len(lines) == 3
    assert re.match(r"pip/positional +pip [\d.]+ +1x8x8, 2x9x7", lines[0])


def test_load_merges_results_of_several_runs(run, tmp_path):
    results = [["off", "wrong"], ["eager", "ok"], ["off", "ok"]]
    for i, (form, status) in enumerate(results):
        entry = {"model": "pip/keyword", "form": form, "status": status, "detail": "2 sizes, 1e-7"}
        (tmp_path / f"{i}.json").write_text(json.dumps({"results": [entry]}))
    files = [str(tmp_path / f"{i}.json") for i in range(3)]
    assert run("--load", *files[:2]).code == 1
    code, lines, merged = run("--load", *files)
    assert code == 0 and [each["status"] for each in merged.values()] == ["ok", "ok"]


def test_the_table_has_a_row_per_model():
    found = [
        third_party.Result("pip/a", "eager", "ok", "2 sizes, 3e-07"),
        third_party.Result("pip/a", "loaded", "refused", "1 of 2 sizes, at [1]: because"),
        third_party.Result("pip/b", "dense", "error", "no such size"),
    ]
    table = third_party.table_of(found, ["eager", "loaded"])
    assert table.columns == ["model", "version", "eager", "loaded"]
    (a, version, *right), (b, _, *wrong) = table.rows
    assert (a, b) == ("pip/a", "pip/b") and re.fullmatch(r"[\d.]+", version)
    assert right == ["3e-07", "refused"] and wrong == ["error", "error"]


Pair = namedtuple("Pair", "a b")


def expected(value):
    return Expected((1,), (), value, value)


@pytest.mark.parametrize(
    "found, wanted",
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("inf")])),
        (torch.tensor([float("nan")]), torch.tensor([float("inf")])),
        ((torch.ones(2),), [torch.ones(2)]),
        ((torch.ones(2), torch.ones(2)), Pair(torch.ones(2), torch.ones(2))),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        (torch.ones(2), None),
        (3, torch.ones(2)),
    ],
)
def test_compare_finds_what_differs(found, wanted):
    with pytest.raises(Wrong):
        compare(found, expected(wanted))


def test_compare_takes_equal_results():
    value = {"a": [torch.tensor([1.0, float("inf"), float("nan")]), None, 3], "b": torch.ones(0)}
    assert compare(value, expected(value)) == 0.0


def test_the_table_is_as_promised():
    names = [row.name for row in zoo.ROWS]
    assert len(set(names)) == len(names) >= 60
    text = (BENCHMARKS / "third_party.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", text, re.M))
    for row in zoo.ROWS:
        assert row.package in pins, row.name
        assert 3 <= len(row.sizes) - 1 <= 7 and len(set(row.sizes)) == len(row.sizes), row.name


def test_the_dependency_group_holds_the_packages_of_the_table():
    with open(ROOT / "pyproject.toml", "rb") as file:
        group = tomllib.load(file)["dependency-groups"]["third_party"]
    text = (BENCHMARKS / "third_party.txt").read_text()
    models = re.findall(r"^[\w.-]+==[\w.]+$", text.split("# What these import.")[0], re.M)
    assert group == models
    assert {each.split("==")[0] for each in group} == {row.package for row in zoo.ROWS}


def test_models_that_are_timed_are_pinned_too():
    text = (BENCHMARKS / "third_party.txt").read_text()
    for name, row in TIMED.items():
        assert name not in MODELS and f"{row.package}==" in text.replace("_", "-"), name
