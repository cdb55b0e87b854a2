"""Models of other packages, in every form and at other sizes, against the dense model.

    pip install --no-deps -r benchmarks/third_party.txt
    python benchmarks/third_party.py [--models monai,detr] [--forms eager,optimized] [--list]

--no-deps: the packages must never bring another torch. Prints a line per model and form: ok with
the largest error, wrong and by how much, the first line of an error, or a signal. A refusal that
torch_blocked words itself counts as neither right nor wrong. Exits with 1 if anything is wrong, is
another error, takes too long or ends its process."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import harness
import torch

from torch_blocked.bench.report import circumstances

NAMES = ("eager", "optimized", "compiled", "loaded")
OK, REFUSED = "ok", "refused"
DENSE = "dense"


@dataclass(frozen=True)
class Result:
    """What a model did in a form. status: ok, refused, wrong, error, signal or timeout."""

    model: str
    form: str
    status: str
    detail: str


def line(result: Result) -> str:
    """As it is printed."""
    return f"{result.model:44} {result.form:10} {result.status:8} {result.detail}".rstrip()


def rows(table: str) -> dict:
    """The rows by name. table: "module:attribute"."""
    module, attribute = table.split(":")
    return {row.name: row for row in getattr(importlib.import_module(module), attribute)}


def say(**fields) -> None:
    """One line of JSON to the parent process."""
    print(json.dumps(fields), file=sys.__stdout__, flush=True)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def run_form(form: str, model, expected: list, tune: bool) -> tuple[str, str]:
    """Status and detail of one form at all sizes: the worst of them, and where it was met first."""
    from zoo.forms import FORMS, Wrong, compare

    say(form=form, at="the example")
    problems: list[tuple[str, str]] = []
    worst = 0.0
    run = None
    for each in expected:
        say(form=form, at=list(each.size))
        try:
            run = run or FORMS[form](model, expected[0].inputs, tune)
            worst = max(worst, compare(run(each.inputs), each, form))
        except Wrong as error:
            problems.append(("wrong", f"at {list(each.size)}: {error}"))
        except Exception as error:  # any, of any package
            status = REFUSED if "torch_blocked::" in str(error) else "error"
            problems.append((status, f"at {list(each.size)}: {first_line(error)}"))
            if run is None:
                break
    if not problems:
        return OK, f"{len(expected)} sizes, {worst:.1g}"
    status = next(
        kind for kind in ("wrong", "error", REFUSED) if any(kind == p[0] for p in problems)
    )
    of_kind = [detail for kind, detail in problems if kind == status]
    return status, f"{len(of_kind)} of {len(expected)} sizes, {of_kind[0]}"


def child(table: str, name: str, forms: Sequence[str], tune: bool) -> None:
    """The process of one model: says each form when it begins and its result when it ends."""
    from zoo.forms import built, expectations
    from zoo.row import torchvision_without_library

    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr  # what packages print must not reach the parent
    torchvision_without_library()
    row = rows(table)[name]
    try:
        say(form=DENSE, at="")
        model = built(row)
        expected = expectations(row, model)
    except Exception as error:  # the table is wrong, not torch_blocked
        say(result=asdict(Result(name, DENSE, "error", first_line(error))))
        return
    for form in forms:
        status, detail = run_form(form, model, expected, tune)
        say(result=asdict(Result(name, form, status, detail)))


def lines_of(process: subprocess.Popen, seconds: float) -> Iterator[dict]:
    """What a child says. Raises TimeoutError if it says nothing for that long."""
    while True:
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        text = process.stdout.readline()
        if not text:
            return
        yield json.loads(text)


def results_of(
    command: Callable[[str, Sequence[str]], list], name: str, forms: Sequence[str], limit: float
) -> Iterator[Result]:
    """The results of a model; where its process ends early, the rest of the forms get another."""
    left = list(forms)
    while left:
        at, ended = {"form": left[0], "at": "start"}, ""
        with tempfile.TemporaryFile() as log:
            # Unbuffered: select sees no lines that wait in a buffer.
            process = subprocess.Popen(
                command(name, left), stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
            try:
                for said in lines_of(process, limit):
                    at = said
                    if "result" in said:
                        result = Result(**said["result"])
                        yield result
                        left = [] if result.form == DENSE else left[left.index(result.form) + 1 :]
                        at = {"form": left[0] if left else "", "at": "start"}
            except TimeoutError:
                process.kill()
                ended = f"timeout after {limit:.0f} s"
            process.wait()
            log.seek(0)
            errors = log.read().decode(errors="replace")
        if left:
            yield died(name, at, process.returncode, ended, errors)
            left = left[left.index(at["form"]) + 1 :] if at["form"] in left else []


def died(name: str, at: dict, code: int, ended: str, errors: str) -> Result:
    """The result of a form whose process ended."""
    place = f"at {at['at']}"
    if ended:
        return Result(name, at["form"], "timeout", f"{ended} {place}")
    if code < 0:
        return Result(name, at["form"], "signal", f"{signal.Signals(-code).name} {place}")
    last = (errors.strip().splitlines() or [""])[-1][:160]
    return Result(name, at["form"], "error", f"process ended with {code} {place}: {last}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", default="", help="substrings of names; all models without")
    parser.add_argument("--forms", default=",".join(NAMES), help=", ".join(NAMES))
    parser.add_argument("--list", action="store_true", help="prints the table and runs nothing")
    parser.add_argument("--table", default="zoo:ROWS", help="another table: module:attribute")
    parser.add_argument("--load", nargs="+", help="runs nothing, takes results of such files")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a size")
    parser.add_argument(
        "--tune", action="store_true", help="time kernels; a model that is faster dense runs dense"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def pinned(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"


def table_of(results: Sequence[Result], forms: Sequence[str]) -> harness.Table:
    """A row per model: its largest error where a form is right, else the status."""
    cells: dict[str, dict[str, str]] = {}
    for each in results:
        error = each.detail.split(", ")[-1]
        cells.setdefault(each.model, {})[each.form] = error if each.status == OK else each.status
    rows = []
    for model, found in cells.items():
        release = pinned(model.split("/")[0]).split(" ", 1)[1]
        rows.append([model, release, *(found.get(form, found.get(DENSE, "")) for form in forms)])
    return harness.Table("", ["model", "version", *forms], rows, text_columns=2 + len(forms))


def check(chosen: argparse.Namespace, names: Sequence[str], forms: Sequence[str]) -> None:
    """Ends with status 2 if a form or the models are unknown."""
    from zoo.forms import FORMS

    unknown = [form for form in forms if form not in FORMS]
    if unknown or not names:
        what = f"forms of {', '.join(FORMS)}" if unknown else "a part of a model's name"
        got = ", ".join(unknown) or chosen.models
        print(f"third_party.py: expected {what}, got {got}; see --list, --help", file=sys.stderr)
        sys.exit(2)


def run_all(chosen: argparse.Namespace, names: Sequence[str], forms: Sequence[str]) -> list[Result]:
    """The results of all models, printed and written as they come."""

    def command(name: str, left: Sequence[str]) -> list:
        options = ["--table", chosen.table, "--forms", ",".join(left)]
        options += ["--threads", str(chosen.threads)]
        options += ["--tune"] if chosen.tune else []
        return [sys.executable, __file__, "--child", name, *options]

    begin = time.monotonic()
    found: list[Result] = []
    for name in names:
        for result in results_of(command, name, forms, chosen.timeout):
            found.append(result)
            print(line(result), flush=True)
        write(chosen, found, forms)
    print(f"{len(names)} models, {time.monotonic() - begin:.0f} s: {summary(found)}")
    return found


def loaded(paths: Sequence[str]) -> list[Result]:
    """The results in these files; of a model and form in several, the last."""
    reports = [json.loads(Path(path).read_text()) for path in paths]
    entries = [Result(**each) for report in reports for each in report["results"]]
    return list({(each.model, each.form): each for each in entries}.values())


def write(chosen: argparse.Namespace, found: Sequence[Result], forms: Sequence[str]) -> None:
    if chosen.json:
        context = circumstances(threads=chosen.threads)
        tables = [table_of(found, forms)]
        records = [asdict(each) for each in found]
        harness.write(chosen.json, chosen.title, context, tables, results=records)


def summary(found: Sequence[Result]) -> str:
    counts = Counter(each.status for each in found)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    chosen = parse(argv)
    forms = chosen.forms.split(",")
    if chosen.child:
        torch.set_num_threads(chosen.threads)
        child(chosen.table, chosen.child, forms, chosen.tune)
        return 0
    wanted = chosen.models.split(",")
    names = [name for name in rows(chosen.table) if any(each in name for each in wanted)]
    check(chosen, names, forms)
    if chosen.list:
        for name in names:
            row = rows(chosen.table)[name]
            sizes = ", ".join("x".join(map(str, size)) for size in row.sizes)
            print(f"{name:44} {pinned(row.package):40} {sizes}")
        return 0
    if chosen.load:
        found = [each for each in loaded(chosen.load) if each.model in names]
        write(chosen, found, forms)
        print("\n".join(map(line, found)), summary(found), sep="\n")
    else:
        found = run_all(chosen, names, forms)
    return 0 if {each.status for each in found} <= {OK, REFUSED} else 1


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, whatever a package may try
    sys.exit(harness.run(main))
