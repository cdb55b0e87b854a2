"""The command benchmarks/recipes.py, on recipes of our own, and what docs/recipes.md promises; no
package of a recipe is needed."""

import re
from pathlib import Path

import numpy
import pytest
import recipes
import torch

pytestmark = pytest.mark.any_isa
TEXT = (Path(recipes.__file__).parent / "third_party.txt").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", TEXT, re.M))
OURS = recipes.recipes(recipes.PAGE)

BEFORE = """
import torch

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
inputs = [torch.rand(1, 3, 12, 12), torch.rand(2, 3, 9, 16)]


def run(images):
    with torch.no_grad():
        return {"map": model(images), "peak": model(images).max().item()}
"""
LINES = {
    "right": "import torch_blocked as tb\n\nmodel = tb.optimize(model, inputs[0])",
    "wrong": "model[0].bias.data += 0.01",
    "raises": "model = nothing_of_that_name",
    "prepared": "assert prepared",
}
PREPARE = {"prepared": "<!-- prepare\nprepared = model\n-->\n\n"}


def page_of(folder, **more):
    """A page with a recipe for each of LINES; more: imports of others that are right."""
    text = "# Recipes\n"
    for name, lines in LINES.items():
        blocks = [f"```py\n{code.strip()}\n```\n" for code in (BEFORE, lines)]
        text += f"\n## {name}\n\n{PREPARE.get(name, '')}" + "\nWords.\n\n".join(blocks)
    for name, imports in more.items():
        text += f"\n## {name}\n\n```py\n{imports}\n```\n\n```py\nmodel = None\n```\n"
    (folder / "page.md").write_text(text)
    return folder / "page.md"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Exit status and lines of a run of all of them."""
    page = page_of(tmp_path_factory.mktemp("page"), absent="import no_such_package")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *words, sep=" ", **_: lines.append(sep.join(words)))
        status = recipes.main(["--page", str(page), "--threads", "1", "--rounds", "2"])
    return status, "\n".join(lines).splitlines()


def test_a_recipe_that_changes_nothing_but_the_time_is_timed_both_ways(ran):
    row = next(line for line in ran[1] if line.startswith("| right"))
    inputs, error, without, with_it = [cell.strip() for cell in row.split("|")][3:7]
    assert inputs == "2" and float(error) < 1e-5 and float(without) > 0 and float(with_it) > 0


def test_what_differs_is_told_and_not_timed(ran):
    row = next(line for line in ran[1] if line.startswith("| wrong"))
    assert [cell.strip() for cell in row.split("|")][5:9] == ["-"] * 4
    assert any(line.startswith("wrong: its results differ by 0.0") for line in ran[1])
    assert ran[0] == 1


def test_a_recipe_that_raises_is_told(ran):
    assert "raises: NameError: name 'nothing_of_that_name' is not defined" in ran[1]


def test_what_is_not_installed_is_left_out(ran):
    assert "absent: not installed: no-such-package" in ran[1]


def test_random_weights_may_be_prepared(ran):
    assert any(line.startswith("| prepared") for line in ran[1])


def test_a_heading_has_two_blocks(tmp_path):
    (tmp_path / "page.md").write_text("## alone\n\n```py\nx = 1\n```\n")
    with pytest.raises(ValueError, match="'alone': expected 2 blocks of code, got 1"):
        recipes.recipes(tmp_path / "page.md")


def test_a_name_that_no_recipe_has(capsys):
    assert recipes.main(["no such recipe"]) == 2 and "YOLO" in capsys.readouterr().err


@pytest.mark.parametrize(
    "found, expected, error",
    [
        ([1.0, "cat"], [1.0, "cat"], 0.0),
        ([1.0, "cat"], [1.0, "dog"], float("inf")),
        ([1.01], [1.0], 0.01),
        ({"a": numpy.ones(2)}, {"a": numpy.full(2, 2.0)}, 0.5),
        ({"a": numpy.ones(2)}, {"b": numpy.ones(2)}, float("inf")),
        (torch.ones(2), torch.ones(3), float("inf")),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), float("inf")),
        (torch.ones(2), None, float("inf")),
    ],
)
def test_apart(found, expected, error):
    assert recipes.apart(found, expected) == pytest.approx(error)


@pytest.mark.parametrize("recipe", OURS.values(), ids=list(OURS))
def test_the_page_has_recipes_of_three_lines_for_packages_that_are_pinned(recipe):
    assert 1 <= len(recipe.statements) <= 3
    assert recipe.packages and all(package in PINS for package in recipe.packages)
    assert {"inputs", "run"} <= set(compile(recipe.before, recipe.name, "exec").co_names)
    compile(recipe.prepare, recipe.name, "exec")
