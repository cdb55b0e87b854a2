"""The recipes of docs/recipes.md: what they change is the time, not the results.

    pip install --no-deps -r benchmarks/third_party.txt
    python benchmarks/recipes.py [YOLO MONAI ...] --threads 2 [--rounds 9] [--list]

A recipe is a heading with two blocks of code: what its package's users write, which ends with
`inputs` and `run(input)`, and the lines that change. Both ways run in one process on all inputs; if
all results are the same, they are timed in interleaved rounds on the first. A recipe whose package
is missing is named and left out. Exits with 1 if a result differs, or a recipe raises."""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import harness

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
# Of the largest value of a tensor, or number, of the results.
TOLERANCE = 1e-4
OTHER_NAMES = {"PIL": "pillow"}  # what imports do not call as PyPI does
OURS = ("torch", "torch_blocked")
HEADER = ["recipe", "version", "inputs", "error", "without, ms", "with, ms", "median", "speed"]


@dataclass(frozen=True)
class Recipe:
    """before defines `inputs` and `run`; lines change what `run` calls. prepare, in a comment of
    the page, makes random weights such that results tell right from wrong."""

    name: str
    prepare: str
    before: str
    lines: str

    @property
    def packages(self) -> list[str]:
        """What it imports, as PyPI calls it, without torch and what is ours."""
        nodes = list(ast.walk(ast.parse(self.before + self.lines)))
        modules = [
            each.name for node in nodes if isinstance(node, ast.Import) for each in node.names
        ]
        modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        tops = dict.fromkeys(module.partition(".")[0] for module in modules)
        others = [top for top in tops if top not in {*OURS, *sys.stdlib_module_names}]
        return [OTHER_NAMES.get(top, top.replace("_", "-")) for top in others]

    @property
    def release(self) -> str:
        """The version of the package that the heading names, else of the last."""
        named = [each for each in self.packages if each in self.name.lower()]
        return version(["torch", *self.packages, *named][-1])

    @property
    def statements(self) -> list[ast.stmt]:
        """Those of `lines` that are no imports."""
        body = ast.parse(self.lines).body
        return [each for each in body if not isinstance(each, ast.Import | ast.ImportFrom)]


def recipes(page: Path) -> dict[str, Recipe]:
    """Those of a page by heading. Raises ValueError for a heading with other than two blocks."""
    found = {}
    for part in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
        name = part.partition("\n")[0]
        blocks = re.findall(r"^```py\n(.*?)^```$", part, re.M | re.S)
        prepare = re.search(r"^<!-- prepare\n(.*?)^-->$", part, re.M | re.S)
        if len(blocks) != 2:
            raise ValueError(f"{page.name}, {name!r}: expected 2 blocks of code, got {len(blocks)}")
        found[name] = Recipe(name, prepare[1] if prepare else "", *blocks)
    return found


def missing(recipe: Recipe) -> list[str]:
    def is_installed(package: str) -> bool:
        try:
            return bool(version(package))
        except PackageNotFoundError:
            return False

    return [package for package in recipe.packages if not is_installed(package)]


def namespace(recipe: Recipe, changed: bool) -> dict[str, Any]:
    """What its code defines, from one seed, as it was or changed."""
    import torch

    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": recipe.name}
    for code in (recipe.before, recipe.prepare, recipe.lines if changed else ""):
        exec(compile(code, f"{recipe.name} of the recipes", "exec"), names)
    return names


def numbers(value: Any) -> list[tuple[str, Any]]:
    """The places and values of a result; floats and arrays of other libraries as tensors."""
    import numpy
    import torch
    from zoo.forms import leaves

    def tensor(each: Any) -> Any:
        is_number = isinstance(each, float | numpy.ndarray | numpy.generic)
        return torch.as_tensor(each) if is_number else each

    return [(place, tensor(each)) for place, each in leaves(value)]


def apart(found: Any, expected: Any) -> float:
    """The largest difference, of the largest value there; infinite where the results are of other
    kinds, dims or types, or other values that are no floats."""
    import torch
    from zoo.forms import distance

    found, expected = numbers(found), numbers(expected)
    if [place for place, _ in found] != [place for place, _ in expected]:
        return float("inf")
    errors = [0.0]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            same_kind = isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype
            errors.append(distance(ours, theirs) if same_kind else float("inf"))
        elif isinstance(theirs, torch.Tensor):
            same = isinstance(ours, torch.Tensor) and torch.equal(ours, theirs)
            errors.append(0.0 if same else float("inf"))
        else:
            errors.append(0.0 if ours == theirs else float("inf"))
    return max(errors)


def case(name: str, page: str, threads: int, rounds: int) -> dict[str, Any]:
    """The largest error over all inputs, and, if that is small, the times of both ways."""
    import torch
    from zoo.row import torchvision_without_library

    from torch_blocked.bench.measure import on_threads, time_interleaved

    recipe = recipes(Path(page))[name]
    torchvision_without_library()
    with on_threads(threads), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        without, with_it = namespace(recipe, False), namespace(recipe, True)
        pairs = list(zip(without["inputs"], with_it["inputs"], strict=True))
        errors = [apart(with_it["run"](ours), without["run"](theirs)) for theirs, ours in pairs]
        result = {"inputs": len(errors), "error": max(errors)}
        ours = [str(each.message) for each in said if "torch_blocked" in str(each.message)]
        result["warnings"] = list(dict.fromkeys(ours))
        if max(errors) <= TOLERANCE:
            ways = {
                name: lambda names=names: names["run"](names["inputs"][0])
                for name, names in (("without", without), ("with", with_it))
            }
            times = time_interleaved(ways, rounds)
            result["rounds_ms"] = {name: times[name].rounds_ms for name in ways}
    result["torch"] = torch.__version__
    return result


def row_of(recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Least and median milliseconds; speeds are the ratio of the least."""
    error = f"{result['error']:.1g}"
    cells = [recipe.name, recipe.release, str(result["inputs"]), error]
    if "rounds_ms" not in result:
        return [*cells, "-", "-", "-", "-"]
    without, with_it = result["rounds_ms"]["without"], result["rounds_ms"]["with"]
    medians = f"{statistics.median(without):.2f}, {statistics.median(with_it):.2f}"
    speed = f"{min(without) / min(with_it):.2f}x"
    return [*cells, f"{min(without):.2f}", f"{min(with_it):.2f}", medians, speed]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, threads=2, rounds=9)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of headings; all without")
    parser.add_argument("--page", type=Path, default=PAGE, help="another page")
    parser.add_argument("--list", action="store_true", help="prints the recipes and runs nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = parse(argv)
    known = recipes(args.page)
    rows, faults, said = [], [], []
    wanted = [name for name in known if any(part in name for part in args.names or [""])]
    if not wanted:
        print(f"recipes.py: expected a part of {', '.join(known)}", file=sys.stderr)
        return 2
    for name in wanted:
        lacks = missing(known[name])
        if args.list or lacks:
            print(f"{name}: {'not installed: ' + ', '.join(lacks) if lacks else 'can run'}")
            continue
        words = (name, str(args.page), args.threads, args.rounds)
        try:
            result = harness.in_process(__file__, *words, env=harness.on_cores(args.threads))
        except harness.Failed as error:
            faults.append(f"{name}: {error}")
            continue
        rows.append(row_of(known[name], result))
        harness.progress(*rows[-1])
        if not result["error"] <= TOLERANCE:
            faults.append(f"{name}: its results differ by {result['error']:.2g}")
        said += [f"{name}: {each}" for each in result["warnings"]]
    if rows or faults:
        table = harness.Table("", HEADER, rows, text_columns=2)
        harness.finish(args, [table] if rows else [], [*faults, *said], rounds=args.rounds)
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = os.environ["YOLO_OFFLINE"] = "1"  # nothing is downloaded
    sys.exit(harness.run(main, case))
