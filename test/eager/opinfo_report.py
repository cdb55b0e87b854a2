"""Runs PyTorch's database of operators over blocked tensors, all samples in all modes, and writes
docs/op_coverage.md.

    python test/eager/opinfo_report.py [--samples N] [--output PATH] [--resume PATH]

Each op runs in a process of a pool, so that a crash is counted and not the end of the report. With
--resume, what an op did is kept in a file when it is known, and a run that was ended goes on from
there."""

import argparse
import json
import multiprocessing
import os
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the processes of the pool have it, too
OUTPUT = Path(__file__).parents[2] / "docs" / "op_coverage.md"

HEAD = """# Op coverage

`python test/eager/opinfo_report.py` writes this page. It runs every operator of PyTorch {torch}'s
own database (OpInfo) that takes a floating tensor of 3 to 5 dims on blocked inputs: all arguments
blocked, only the first, only the others, mixed blocks, and mixed with channels-last; forward, and
backward where the op has one. It made {samples} comparisons with the dense result, of {limit}
of each op. {wrong} were wrong or raised an error that dense does not raise, and {crashes} crashed.

"blocked" ops ran without a dense copy in every sample with all arguments blocked, "some" ops in
some samples, and "fallback" ops in none. Views and reductions over channels give dense results by
design.

{listed}
"""
TABLE = """
## {title}

| forward | backward | ops |
|---|---|---|
"""


def report(name: str, most_samples: int | None) -> dict:
    """What an op did: its cells of the table, the comparisons, and what was wrong."""
    import torch
    from helpers.opinfo import MODES, OPS, check

    torch.set_num_threads(1)
    op, row = OPS[name], {"compared": 0, "wrong": [], "forward": "", "backward": ""}
    for direction in ("forward", "backward"):
        backward = direction == "backward"
        if backward and not op.supports_autograd:
            continue
        for mode in MODES:
            outcome = check(op, mode, backward, most_samples)
            row["compared"] += outcome.compared
            row["wrong"] += [f"{name}, {direction}, {mode}: {line}" for line in outcome.wrong]
            if mode == "all" and outcome.samples:
                row[direction] = kind(outcome)
    return row


def kind(outcome) -> str:
    if outcome.fallbacks == 0:
        return "blocked"
    return "fallback" if outcome.fallbacks == outcome.samples else "some"


def tables(rows: dict) -> str:
    """The ops by what they did: first those that fall back, then the rest."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(rows):
        groups.setdefault((rows[name]["forward"], rows[name]["backward"]), []).append(name)
    whole = {group for group in groups if set(group) <= {"blocked", ""}}
    parts = {
        "What falls back, in all samples or some": sorted(groups.keys() - whole),
        "What runs blocked": sorted(whole),
    }
    text = ""
    for title, found in parts.items():
        text += TABLE.format(title=title)
        for forward, backward in found:
            # A variant's name is a part of the op's already: "mul.int int".
            names = ", ".join(f"`{name.partition(' ')[0]}`" for name in groups[forward, backward])
            text += f"| {forward} | {backward or 'none'} | {names} |\n"
    return text


def listing(table: dict[str, str]) -> str:
    """The names in a table, with their reasons, each of which is said once."""
    names: dict[str, list[str]] = {}
    for name, why in table.items():
        names.setdefault(why, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(each)} ({why})" for why, each in names.items()) or "nothing"


def run_all(names, most_samples, resume: Path | None) -> tuple[dict, list[str]]:
    """The rows of the ops that did not crash, and the names of those that did."""
    lines = resume.read_text().splitlines() if resume and resume.exists() else []
    rows = dict(map(json.loads, lines))
    left = [name for name in names if name not in rows]
    context = multiprocessing.get_context("spawn")

    def done(name: str, row: dict | None) -> None:
        rows[name] = row
        left.remove(name)
        if resume:
            with resume.open("a") as file:
                file.write(json.dumps([name, row]) + "\n")

    while left:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            futures = {name: pool.submit(report, name, most_samples) for name in left}
            for name, future in tqdm(futures.items(), "ops", disable=None):
                try:
                    done(name, future.result())
                except BrokenProcessPool:
                    done(name, None)  # this one, or the one that ran beside it
                    break
    crashes = [name for name in names if rows[name] is None]
    return {name: rows[name] for name in names if rows[name] is not None}, crashes


def main() -> None:
    import torch
    from helpers.opinfo import NOT_COMPARED, OPS, REFUSED

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="at most so many of each op (default: all)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--resume", type=Path, help="keeps the rows there, and goes on from them")
    arguments = parser.parse_args()
    rows, crashes = run_all(OPS, arguments.samples, arguments.resume)
    rows = {name: row for name, row in rows.items() if row["compared"] or row["forward"]}
    wrong = [line for row in rows.values() for line in row["wrong"]]
    listed = f"Refused: {listing(REFUSED)}. Not compared: {listing(NOT_COMPARED)}."
    text = HEAD.format(
        torch=torch.__version__.partition("+")[0],
        samples=sum(row["compared"] for row in rows.values()),
        limit=f"at most {arguments.samples} samples" if arguments.samples else "all samples",
        wrong=len(wrong),
        crashes=len(crashes),
        listed=textwrap.fill(listed, 100),
    )
    text += tables(rows)
    arguments.output.write_text(text)
    print("\n".join([*wrong, *(f"crash in or beside {name}" for name in crashes)]))
    print(f"{len(rows)} ops, {len(wrong)} wrong, {len(crashes)} crashes -> {arguments.output}")


if __name__ == "__main__":
    main()
