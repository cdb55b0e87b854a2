"""The command line: `python -m torch_blocked {bench, env}`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch_blocked

from .bench import convolution, dispatch, inference, memory, train

# Words after `bench` that are not models, and what they time.
NOT_MODELS = {"conv": convolution, "dispatch": dispatch, "memory": memory, "train": train}


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one sentence, without the usage lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (default: sys.argv) and returns the exit code.

    Raises SystemExit with code 2 for arguments that do not parse."""
    parser = Parser(
        prog="torch_blocked", description="Blocked and channels-last CPU tensors for PyTorch."
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["bench"] and words[1:2] and words[1] in NOT_MODELS:
        return run_apart(words[1], words[2:])
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    inference.add_arguments(
        commands.add_parser(
            "bench",
            help="time models in each format; bench conv: layers; bench train: steps; "
            "bench dispatch: the cost of an op's way to its kernel; bench memory: of a process",
        )
    )
    env = commands.add_parser("env", help="versions, instruction set, threads and libraries")
    env.set_defaults(run=print_env)
    args = parser.parse_args(words)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    return int(args.run(args))


def run_apart(word: str, arguments: Sequence[str]) -> int:
    parser = Parser(prog=f"torch_blocked bench {word}")
    NOT_MODELS[word].add_arguments(parser)
    args = parser.parse_args(arguments)
    return int(args.run(args))


def print_env(args: argparse.Namespace) -> int:
    environment = torch_blocked.env()
    width = max(map(len, environment))
    for key, value in environment.items():
        print(f"{key:<{width}}  {text(value)}")
    return 0


def text(value: object) -> str:
    """A list or dict as words; what is empty or None as "none"."""
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


if __name__ == "__main__":
    sys.exit(main())
