"""A model's forward as plain data: what csrc/graph builds its graph from, and what a file keeps.

The forward runs once, and csrc/graph/record.cpp notes the ops that it calls, in-place ones in their
functional form. That says all unless Python looks at a tensor's values, or memory is written that
others see; torch.export then traces the model, which takes 0.6 s and 100 MiB of modules on a
ResNet-50 against 0.05 s.

A second run at other sizes must give the same nodes, else each new size is captured anew. Symbolic
sizes are not used: they cost 2.7 s on a ResNet-50, and minutes where a model works out its own
padding.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_blocked import _C

# What a list of arguments holds in place of a value of the graph.
VALUE = "value"

# Ops that may return their input itself, beyond those whose schema says so.
_MAY_ALIAS = {"aten::reshape", "aten::flatten", "aten::contiguous", "aten::to", "aten::dropout"}


class CaptureError(RuntimeError):
    """The model cannot be traced; the message says why."""


@dataclass
class Node:
    """One op. `arguments` has one entry per argument of its schema: a constant, [VALUE, id], or a
    list of these. `outputs` are the ids of what it returns, lists flattened."""

    name: str
    overload: str
    arguments: list
    outputs: list[int]


@dataclass
class Capture:
    """Values are numbered: inputs, constants (parameters and buffers) and what nodes return."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list = field(default_factory=list)  # [VALUE, id] or constants
    constants: dict[int, Tensor] = field(default_factory=dict)
    input_dims: list[list[int]] = field(default_factory=list)  # -1: any size
    in_spec: str = ""
    out_spec: str = ""


class _Reads(TorchFunctionMode):
    """Notices whether Python looks at a tensor's values or memory."""

    READS = frozenset(
        {
            Tensor.item,
            Tensor.tolist,
            Tensor.numpy,
            Tensor.__array__,
            Tensor.__bool__,
            Tensor.__int__,
            Tensor.__float__,
            Tensor.__index__,
            Tensor.__contains__,
            Tensor.__dlpack__,
            Tensor.data_ptr,
            Tensor.untyped_storage,
            Tensor.storage,
            Tensor.data.__get__,
            Tensor.data.__set__,
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen |= func in self.READS
        return func(*args, **(kwargs or {}))


def capture(model: nn.Module, example_inputs: tuple, dynamic: bool) -> Capture:
    """The forward of `model`, which is in evaluation mode, on inputs like `example_inputs`.

    Raises CaptureError if neither a run nor torch.export tells it."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return _recorded(model, example_inputs, dynamic) or _exported(
                model, example_inputs, dynamic
            )
        except CaptureError:
            raise
        except Exception as error:  # torch.export raises many kinds
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(f"cannot trace the model: {reason[0]}") from error


def _recorded(model: nn.Module, inputs: tuple, dynamic: bool) -> Capture | None:
    """What a run of the model calls; None if these ops are not all that it does."""
    plain = all(type(each) in (Tensor, nn.Parameter) for each in pytree.tree_leaves(inputs))
    if not plain or any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        return None
    first = _record(model, inputs)
    if first is None:
        return None
    if dynamic and _is_freed(first, inputs, lambda other: _agree(model, first, other)):
        return first
    # Tensors of unknown origin must not come from the inputs' values.
    if _lifted(model, first) and not _agree(model, first, pytree.tree_map(_other_values, inputs)):
        return None
    return first


def _record(model: nn.Module, inputs: tuple) -> Capture | None:
    inputs = pytree.tree_map(torch.detach, inputs)  # each a tensor of its own
    leaves = pytree.tree_leaves(inputs)
    if any(each.layout != torch.strided for each in leaves):
        return None
    recorder, reads = _C.Recorder(leaves), _Reads()
    with recorder, reads:
        results = model(*inputs)
    results, out_spec = pytree.tree_flatten(results)
    outputs = [
        [VALUE, recorder.value_of(each)] if isinstance(each, Tensor) else each for each in results
    ]
    if reads.seen or recorder.refusal():
        return None
    return Capture(
        nodes=[Node(*call) for call in recorder.calls()],
        inputs=list(range(len(leaves))),
        outputs=outputs,
        constants={value: each.detach() for value, each in recorder.constants().items()},
        input_dims=[list(each.shape) for each in leaves],
        in_spec=pytree.treespec_dumps(pytree.tree_structure((inputs, {}))),
        out_spec=pytree.treespec_dumps(out_spec),
    )


def _lifted(model: nn.Module, captured: Capture) -> dict[int, Tensor]:
    """The constants that are neither parameters nor buffers."""
    own = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    return {value: each for value, each in captured.constants.items() if each.data_ptr() not in own}


def _agree(model: nn.Module, first: Capture, inputs: tuple) -> bool:
    """Whether a run on these inputs calls the same."""
    try:
        second = _record(model, inputs)
    except Exception:  # no such size for this model
        return False
    if second is None or second.nodes != first.nodes or second.outputs != first.outputs:
        return False
    lifted = _lifted(model, first)
    return all(torch.equal(each, second.constants[value]) for value, each in lifted.items())


def _is_freed(captured: Capture, inputs: tuple, agrees: Callable[[tuple], bool]) -> bool:
    """Sets to -1 what may change of the capture's input dims: the batch and the sizes of images,
    else the batch, if the model calls the same at others; True if it does."""
    for images in (True, False):
        freed = [_free_dims(dims, images) for dims in captured.input_dims]
        others = iter(freed)
        other = pytree.tree_map_only(
            Tensor, lambda x, o=others: _of_other_sizes(x, next(o)), inputs
        )
        if agrees(other):
            captured.input_dims = freed
            return True
    return False


def _free_dims(dims: list[int], images: bool) -> list[int]:
    """-1 for the batch, and with `images` for what follows the channels."""
    return [
        -1 if len(dims) > 1 and (dim == 0 or images and dim > 1) else size
        for dim, size in enumerate(dims)
    ]


def _of_other_sizes(value: Tensor, free: list[int]) -> Tensor:
    """Zeros, with another size where `free` is -1."""
    dims = list(value.shape)
    for dim, size in enumerate(dims):
        if free[dim] == -1:
            dims[dim] = size + 1 if dim == 0 else size - 64 if size > 128 else size + 64
    return value.new_zeros(dims)


def _other_values(value: Tensor) -> Tensor:
    """Others that the model can take, too: of the same range."""
    if value.is_floating_point():
        return 0.75 * value.flip(list(range(value.dim())))
    return value.flatten()[:1].expand(value.numel()).view(value.shape)


def _exported(model: nn.Module, inputs: tuple, dynamic: bool) -> Capture:
    """The same by torch.export."""
    first = _trace(model, inputs)

    def agrees(other: tuple) -> bool:
        try:
            return _trace(model, other).nodes == first.nodes
        except Exception:  # no such size for this model
            return False

    if dynamic:
        _is_freed(first, inputs, agrees)
    return first


def _trace(model: nn.Module, inputs: tuple) -> Capture:
    program = torch.export.export(model, inputs, strict=False)
    if not _substitutable(program.graph):
        program = program.run_decompositions({})
    return _lower(program)


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _mutated(node: fx.Node) -> fx.Node | None:
    """The value that an in-place op writes."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return None
    return node.args[0]


def _views(node: fx.Node) -> bool:
    schema = _schema(node)
    if schema is None:
        return node.target is operator.getitem
    return schema.name in _MAY_ALIAS or any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def _substitutable(graph: fx.Graph) -> bool:
    """Whether every in-place op can be replaced by its result in what follows: nothing else sees
    the memory that it writes."""
    for node in graph.nodes:
        target = _mutated(node)
        if target is None:
            continue
        functional = _functional(node)
        if functional is None or target.op != "call_function" or _views(target):
            return False
        if any(_views(user) for user in target.users if user is not node):
            return False
    return True


def _functional(node: fx.Node):
    """The op overload that returns what an in-place one writes."""
    packet = node.target.overloadpacket
    name = packet.__name__
    if not name.endswith("_"):
        return None
    functional = getattr(torch.ops.aten, name[:-1], None)
    return getattr(functional, node.target._overloadname, None) if functional else None


class _Lowering:
    """Numbers the values of an exported program and writes its nodes down."""

    def __init__(self) -> None:
        self.result = Capture()
        self.values: dict[fx.Node, list[int]] = {}
        self.count = 0

    def new_value(self) -> int:
        self.count += 1
        return self.count - 1

    def constant(self, tensor: Tensor) -> int:
        value = self.new_value()
        self.result.constants[value] = tensor.detach()
        return value

    def argument(self, value):
        if isinstance(value, fx.Node):
            ids = self.values[value]
            return [VALUE, ids[0]] if len(ids) == 1 else [[VALUE, each] for each in ids]
        if isinstance(value, (list, tuple)):
            return [self.argument(each) for each in value]
        if isinstance(value, Tensor):
            return [VALUE, self.constant(value)]
        return value

    def call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.values[node] = [self.values[node.args[0]][node.args[1]]]
            return
        target = node.target
        schema = _schema(node)
        if schema is None:
            raise CaptureError(f"{target} is no operator of ATen")
        written = _mutated(node)
        if written is not None:
            target = _functional(node)
        given = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
        given |= node.kwargs
        arguments = [
            self.argument(given[each.name] if each.name in given else each.default_value)
            for each in schema.arguments
        ]
        self.emit(
            schema.name if written is None else target._schema.name,
            target._schema.overload_name,
            arguments,
            node,
        )
        if written is not None:
            self.values[written] = self.values[node]

    def emit(self, name: str, overload: str, arguments: list, node: fx.Node) -> None:
        example = node.meta.get("val")
        many = isinstance(example, (list, tuple))
        outputs = [self.new_value() for _ in (example if many else [example])]
        self.result.nodes.append(Node(name, overload, arguments, outputs))
        self.values[node] = outputs


def _lower(program: torch.export.ExportedProgram) -> Capture:
    lowering = _Lowering()
    result = lowering.result
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise CaptureError("the model writes into its buffers or inputs")
    state = {**program.constants, **dict(program.named_buffers()), **program.state_dict}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            lowering.values[node] = [lowering.constant(state[names[node.name]])]
        elif node.op == "placeholder":
            value = lowering.new_value()
            lowering.values[node] = [value]
            result.inputs.append(value)
            example = node.meta.get("val")
            if not isinstance(example, Tensor):
                raise CaptureError(f"the input {node.name} is no tensor")
            result.input_dims.append(list(example.shape))
        elif node.op == "call_function":
            lowering.call(node)
        elif node.op == "output":
            result.outputs = [lowering.argument(each) for each in node.args[0]]
    result.in_spec = pytree.treespec_dumps(program.call_spec.in_spec)
    result.out_spec = pytree.treespec_dumps(program.call_spec.out_spec)
    return result
