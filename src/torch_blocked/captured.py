"""A model's forward as plain data. csrc/graph builds its graph from it, and files hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Marks a value of the graph in a list of arguments.
VALUE = "value"
# What a forward may return beside tensors: the same for all inputs that give the same answers.
CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class CaptureError(RuntimeError):
    """The model cannot be traced; the message says why."""


@dataclass
class Node:
    """One op. `arguments` has one entry per argument of its schema: a constant, [VALUE, id], or a
    list of these. `outputs` are the ids of what it returns, lists flattened."""

    name: str
    overload: str
    arguments: list[Any]
    outputs: list[int]
    # Where the model calls it (module_paths.py): the path of the module, and the user's line.
    module: str = field(default="", compare=False)
    line: str = field(default="", compare=False)


@dataclass
class Ran:
    """The results of a recorded run, and the time of its ops. That is less than the time of the
    forward, which includes Python, except for what only a first run does."""

    results: Any
    seconds: float


@dataclass
class Capture:
    """Values are numbered: inputs, constants (parameters and buffers) and what nodes return."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # [VALUE, id] or constants
    constants: dict[int, Tensor] = field(default_factory=dict)
    # Those that are neither parameters nor buffers.
    lifted: list[int] = field(default_factory=list)
    # Sizes and types of the inputs that the forward ran with.
    input_metas: list[tuple[list[int], torch.dtype]] = field(default_factory=list)
    # Those of other inputs, for which a run recorded the same.
    also: list[list[tuple[list[int], torch.dtype]]] = field(default_factory=list)
    # Sizes and types of results that no rule gives (infer.cpp), for the inputs of the run.
    metas: dict[int, tuple[list[int], torch.dtype]] = field(default_factory=dict)
    # What was asked of sizes: value, what (a dim, or as in watched.py), answer.
    questions: list[tuple[int, int, list[int]]] = field(default_factory=list)
    # It holds for inputs of these sizes only.
    fixed_sizes: bool = False
    # Which outputs are blocked tensors, by place: their channels. The value is the physical tensor.
    blocked: dict[int, int] = field(default_factory=dict)
    out_spec: Any = None  # a TreeSpec
    # A notice to the user, or empty.
    notice: str = ""
    # Whether the forward sets attributes of the model, which a caller may want to put back.
    sets_attributes: bool = False
    # The run that was recorded, for whoever compares with it; no file keeps it.
    ran: Ran | None = field(default=None, compare=False, repr=False)

    def is_random(self) -> bool:
        """Whether an op draws numbers: two runs give different results."""
        return any(
            torch.Tag.nondeterministic_seeded in getattr(overload_of(node), "tags", ())
            and not _drops_nothing(node)
            for node in self.nodes
        )

    def is_one_tensor(self) -> bool:
        """Whether what it returns is an ordinary tensor and nothing else."""
        return self.out_spec.is_leaf() and not self.blocked and isinstance(self.outputs[0], list)

    def rounds(self) -> bool:
        """Whether an op rounds to steps that are further apart than floats."""
        return any(node.name == "aten::round" or "quantize_" in node.name for node in self.nodes)

    def _kinds(self) -> list[tuple[int, torch.dtype]]:
        return [(len(dims), dtype) for dims, dtype in self.input_metas]

    def same_as(self, other: Capture) -> bool:
        """Whether it calls the same ops with the same numbers, for inputs of the same kinds.
        Parameters and buffers must be the same tensors, and constants that the forward makes must
        have the same values."""
        return (
            self._kinds() == other._kinds()
            and self.nodes == other.nodes
            and self.outputs == other.outputs
            and self.blocked == other.blocked
            and self.out_spec == other.out_spec
            and self.lifted == other.lifted
            and self.constants.keys() == other.constants.keys()
            and all(
                torch.equal(each, other.constants[value])
                if value in self.lifted
                else _place(each) == _place(other.constants[value])
                for value, each in self.constants.items()
            )
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def overload_of(node: Node) -> Any:
    """The op, as torch.ops has it."""
    namespace, _, name = node.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, node.overload or "default", None)


def _drops_nothing(node: Node) -> bool:
    """Whether an op that may draw random numbers draws none, because nothing is dropped."""
    names = [each.name for each in overload_of(node)._schema.arguments]
    given = dict(zip(names, node.arguments, strict=False))
    off = given.get("train", given.get("training")) is False
    return off or given.get("dropout_p") == 0


def lifted(model: nn.Module, constants: dict[int, Tensor]) -> list[int]:
    """The constants that are neither parameters nor buffers of the model."""
    own = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    return [value for value, each in constants.items() if each.data_ptr() not in own]
