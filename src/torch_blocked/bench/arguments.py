"""Types and options of arguments that several commands share."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection
from pathlib import Path

from . import models, packages


def positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text!r}")


def input_dims(text: str) -> tuple[int, ...]:
    """`3x224x224`: the dims of one image."""
    return tuple(positive(part) for part in text.split("x"))


class InputDims(argparse.Action):
    """Dims of the inputs in the order of the model's arguments, as many as --input is given."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), values))


def output_path(text: str) -> Path:
    path = Path(text)
    if path.parent.is_dir() and not path.is_dir():
        return path
    raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text!r}")


def input_path(text: str) -> Path:
    path = Path(text)
    if path.is_file():
        return path
    raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")


def unknown(kind: str, name: str, known: Collection[str], others: str = "") -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}{others}"
    return f"unknown {kind} {name!r}; {hint}"


def model_names(text: str) -> list[str]:
    """Parses `a,b,c` of models: the package's own, those of other packages, and module:factory."""
    for name in text.split(","):
        if ":" in name or name in packages.SHORT:
            try:
                models.factory(name)
            except models.NoModel as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        elif name not in (known := models.known()):
            reason = unknown("model", name, known, f", {packages.FORMS}")
            raise argparse.ArgumentTypeError(reason)
    return text.split(",")


class ModelNames(argparse.Action):
    """All models named, each once, in the order they come."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        named = dict.fromkeys(name for each in values for name in each)
        setattr(namespace, self.dest, list(named))


def add_models(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL and --input; the parser's epilog lists the models there are."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:<20}{note}" for name, note in models.known().items())
    parser.epilog = (
        "models:\n"
        "  package:name        a model of a package that you have, with random weights, such as\n"
        f"                      timm:resnet50; packages: {', '.join(packages.PACKAGES)}\n"
        "  module:factory      a function, class or module of your own, such as my.nets:build\n"
        f"{listed}\n\n"
        "To compare on a lesser instruction set, limit torch's kernels too:\n"
        f"  ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 {parser.prog} ..."
    )
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", type=model_names, action=ModelNames, help="see below"
    )
    parser.add_argument(
        "--input",
        type=input_dims,
        action=InputDims,
        metavar="DIMS",
        help="dims of one input without the batch, such as 3x256x256; again for each further "
        "argument of the model (default: those that the model was made for; "
        f"{'x'.join(map(str, models.IMAGE))} if nothing tells)",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, help="default: torch.get_num_threads()")


def add_batch(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--batch",
        type=positive,
        default=default,
        help=f"images in a batch (default: {default})",
    )


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=positive, help="spatial extent of the inputs, all of them")


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--rounds", type=positive, default=default, help=f"timed rounds (default: {default})"
    )


def add_outputs(parser: argparse.ArgumentParser, csv: bool = True) -> None:
    parser.add_argument(
        "--json", type=output_path, metavar="PATH", help="write the results as JSON"
    )
    if csv:
        parser.add_argument(
            "--csv", type=output_path, metavar="PATH", help="write every round as CSV"
        )
