"""The command line: `torch-blocked` or `python -m torch_blocked`, with bench, explain, env or
selftest."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch_blocked

from . import explain_command, selftest
from .bench import by_layer, compare, inference, memory, pictures, train
from .bench.packages import NoModel
from .bench.report import WrongResult, progress
from .text_table import columns

BENCHMARKS = {
    "models": (inference, "whole models in each format, and optimized"),
    "layers": (by_layer, "the layers of models in each format, and what reorders take of them"),
    "train": (train, "training steps"),
    "memory": (memory, "what a process holds that runs a model"),
    "compare": (compare, "two JSON files of one of these"),
    "plot": (pictures, "a JSON file of one of these as a picture"),
}


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one sentence, without the usage lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_name(self)}: {message}\n")


def _name(parser: argparse.ArgumentParser) -> str:
    """How sentences of a command begin: "torch_blocked bench models"."""
    return parser.prog.removeprefix("python -m ")


def parser() -> Parser:
    made = Parser(
        prog="python -m torch_blocked",
        description="Blocked and channels-last CPU tensors for PyTorch.",
    )
    made.add_argument(
        "--version", action="version", version=f"torch_blocked {torch_blocked.__version__}"
    )
    made.set_defaults(run=lambda args: made.print_help())
    commands = made.add_subparsers(metavar="COMMAND", parser_class=Parser)
    bench = commands.add_parser("bench", help="time models, layers and training steps")
    bench.description = "Times blocked tensors beside dense ones. MODEL... alone is models MODEL..."
    bench.set_defaults(run=lambda args: bench.print_help())
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", parser_class=Parser)
    for word, (module, what) in BENCHMARKS.items():
        made_for = benchmarks.add_parser(word, help=what)
        module.add_arguments(made_for)
        made_for.set_defaults(prog=_name(made_for))
    explain = commands.add_parser("explain", help="why each layer is blocked or not, with its cost")
    explain_command.add_arguments(explain)
    explain.set_defaults(prog=_name(explain))
    env = commands.add_parser("env", help="versions, instruction set, threads and libraries")
    env.set_defaults(run=print_env)
    test = commands.add_parser("selftest", help="check this installation, in ten seconds")
    test.set_defaults(run=selftest.run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (default: sys.argv) and returns the exit code: 0, or 1 if
    a benchmark met a wrong result, or nothing that it can time.

    Raises SystemExit with code 2 for arguments that do not parse."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["bench"] and words[1:] and words[1] not in (*BENCHMARKS, "-h", "--help"):
        words.insert(1, "models")
    args = parser().parse_args(words)
    try:
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stdout = open(os.devnull, "w")  # or Python's own flush at exit would complain
        return 0
    except (WrongResult, NoModel) as error:
        progress()
        print(f"{args.prog}: {error}", file=sys.stderr)
        return 1


def print_env(args: argparse.Namespace) -> None:
    rows = [(key, text(value)) for key, value in torch_blocked.env().items()]
    print(columns(rows[0], rows[1:], "ll"))


def text(value: object) -> str:
    """A list or dict as words; "none" for an empty value or None."""
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


if __name__ == "__main__":
    sys.exit(main())
