"""Runs PyTorch's database of operators over blocked tensors, all samples in all modes, and writes
docs/op_coverage.md.

    python test/opinfo_report.py [--samples N] [--output PATH] [--resume PATH]

Each op runs in a process of a pool, so that a crash is counted and not the end of the report. With
--resume, what an op did is kept in a file when it is known, and a run that was ended goes on from
there."""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

OUTPUT = Path(__file__).parent.parent / "docs" / "op_coverage.md"

HEAD = """# Op coverage

Written by `python test/opinfo_report.py`. Every operator of PyTorch {torch}'s own database (OpInfo)
that takes a floating tensor of 3 to 5 dims ran on blocked inputs: all arguments blocked, only the
first, only the others, mixed blocks, and mixed with channels-last; forward, and backward where the
op has one. {samples} comparisons with the dense result, of {limit} of each op: {wrong} wrong or
with an exception that dense does not raise, {crashes} crashes.

"blocked" ran without a dense copy in every sample with all arguments blocked, "some" in some of
them, "fallback" in none. Views and reductions over channels give dense results by design.

Refused: {refused}. Not compared: {not_compared}.
"""
TABLE = """
## {title}

| op | forward | backward |
|---|---|---|
"""


def report(name: str, most_samples: int | None) -> dict:
    """What an op did: its cells of the table, the comparisons, and what was wrong."""
    import torch
    from opinfo import MODES, OPS, check

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
    """What falls back first, then the rest, both in alphabetical order."""
    whole = {n for n, r in rows.items() if {r["forward"], r["backward"]} <= {"blocked", ""}}
    parts = {
        "What falls back, in all samples or some": sorted(rows.keys() - whole),
        "What runs blocked": sorted(whole),
    }
    text = ""
    for title, names in parts.items():
        text += TABLE.format(title=title)
        text += "".join(f"| {n} | {rows[n]['forward']} | {rows[n]['backward']} |\n" for n in names)
    return text


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
    from opinfo import NOT_COMPARED, OPS, REFUSED

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="at most so many of each op (default: all)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--resume", type=Path, help="keeps the rows there, and goes on from them")
    arguments = parser.parse_args()
    rows, crashes = run_all(OPS, arguments.samples, arguments.resume)
    rows = {name: row for name, row in rows.items() if row["compared"] or row["forward"]}
    wrong = [line for row in rows.values() for line in row["wrong"]]
    listed = {
        key: "; ".join(f"`{k}` ({v})" for k, v in table.items()) or "nothing"
        for key, table in (("refused", REFUSED), ("not_compared", NOT_COMPARED))
    }
    text = HEAD.format(
        torch=torch.__version__.partition("+")[0],
        samples=sum(row["compared"] for row in rows.values()),
        limit=f"at most {arguments.samples} samples" if arguments.samples else "all samples",
        wrong=len(wrong),
        crashes=len(crashes),
        **listed,
    )
    text += tables(rows)
    arguments.output.write_text(text)
    print("\n".join([*wrong, *(f"crash in or beside {name}" for name in crashes)]))
    print(f"{len(rows)} ops, {len(wrong)} wrong, {len(crashes)} crashes -> {arguments.output}")


if __name__ == "__main__":
    main()
