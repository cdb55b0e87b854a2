"""The capture by torch.export, for forwards that a run does not record completely: they write into
memory that other tensors share, or Python looks at values."""

from __future__ import annotations

import io
import logging
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_blocked import forks, module_paths, structure
from torch_blocked.captured import CONSTANTS, VALUE, Capture, CaptureError, Node, lifted
from torch_blocked.state import State
from torch_blocked.tensor import BlockedTensor
from torch_blocked.verify import difference

# Ops that may return their input itself, although their schema does not say so: some return a view,
# or a copy if strides require it, and others do nothing in evaluation mode.
_MAY_ALIAS = {
    "aten::contiguous",
    "aten::flatten",
    "aten::ravel",
    "aten::reshape",
    "aten::reshape_as",
    "aten::to",
    "aten::type_as",
    "aten::dropout",
    "aten::feature_dropout",
    "aten::alpha_dropout",
}


class _Results:
    """What a forward returned: its structure, and the places and channels of blocked tensors."""

    def __init__(self) -> None:
        self.spec: pytree.TreeSpec | None = None
        self.blocked: dict[int, int] = {}


class _WithPhysicalResults(nn.Module):
    """A model that returns the physical tensors of blocked results, because torch.export cannot
    return blocked ones. `told` holds their places and channels; torch.export puts other attributes
    back."""

    def __init__(self, model: nn.Module, told: _Results) -> None:
        super().__init__()
        self.model, self.told = model, told
        self.training = False  # eval() would reach the model's own modules

    def forward(self, *args, **kwargs):
        results, self.told.spec = structure.flatten(self.model(*args, **kwargs))
        for i, each in enumerate(results):
            if isinstance(each, BlockedTensor):
                self.told.blocked[i], results[i] = each._channels, each._physical
            elif not isinstance(each, (Tensor, *CONSTANTS)):
                raise CaptureError(f"the forward returns a {type(each).__name__}")
        return results


class _NoItemsOfBlocked(TorchFunctionMode):
    """Refuses `y[...] = value` of a blocked tensor, which torch.export does not record."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__setitem__ and isinstance(args[0], BlockedTensor):
            raise CaptureError("it writes into a view of a blocked tensor")
        return func(*args, **(kwargs or {}))


# Only one thread at a time may redirect the streams, which all threads share.
_one_at_a_time = forks.lock()
_redirected: TextIO | None = None  # the stream in place of which threads print elsewhere


@forks.in_children
def _print_again() -> None:
    """Undoes a redirection by another thread that this process was forked from."""
    if _redirected is not None and not _one_at_a_time._is_owned():  # type: ignore[attr-defined]
        sys.stderr = _redirected


@contextmanager
def _without_its_graph() -> Iterator[None]:
    """Keeps two outputs of torch.export off the terminal: the trace before a failure, and a warning
    that no line is known. The caller gets the reason and passes it on. All other output appears
    afterwards."""
    global _redirected
    printed, log = io.StringIO(), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    graph = ""
    log.addFilter(_known_line)
    try:
        with _one_at_a_time:
            before, _redirected = _redirected, sys.stderr
            try:
                with redirect_stderr(printed):
                    yield
            finally:
                _redirected = before
    except Exception as error:
        if hasattr(error, "partial_fx_graph"):
            graph = f"{error.partial_fx_graph}\n"
        raise
    finally:
        log.removeFilter(_known_line)
        sys.stderr.write(printed.getvalue().replace(graph, ""))


def _known_line(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("Unable to find user code")


def exported(model: nn.Module, args: tuple, kwargs: dict) -> Capture:
    """The capture by torch.export, for these sizes."""
    state = State(model)
    told = _Results()
    wrapped = _WithPhysicalResults(model, told)
    try:
        with _NoItemsOfBlocked(), _without_its_graph():
            program = torch.export.export(wrapped, args, kwargs, strict=False)
        writes = any(_written(node) for node in program.graph.nodes)
        if writes:
            as_traced = _CheckedViews(program).run_on(args, kwargs)
    finally:
        state.restore()
    if _breaks_a_tie(program.graph):
        raise CaptureError("it writes into a view of a blocked tensor, or into what one shows")
    if not _substitutable(program.graph):
        program = program.run_decompositions({})
        if writes and difference(as_traced, _run(program, args, kwargs), _SAME):
            raise CaptureError("torch.export loses a write into a view")
    captured = _lower(program)
    for each in captured.nodes:  # paths begin at `wrapped`
        each.module = each.module.removeprefix("model").removeprefix(".")
    captured.fixed_sizes = True
    captured.blocked, captured.out_spec = told.blocked, told.spec
    captured.lifted = lifted(model, captured.constants)
    return captured


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


# Ops that copy a view that cannot share the memory of a blocked tensor (shadow.py). Copy and base
# follow each other in eager only; a trace does not see these writes.
_COPIES = {"torch_blocked::slice_channels", "torch_blocked::to_dense"}


def _breaks_a_tie(graph: fx.Graph) -> bool:
    """Whether a copy is written, or is used after its base was written."""
    memory: dict[fx.Node, fx.Node] = {}  # for each node the first one with the same memory
    bases: dict[fx.Node, fx.Node] = {}  # for each copy its base; both as first nodes, too
    stale: set[fx.Node] = set()
    for node in graph.nodes:
        if any(memory[each] in stale for each in node.all_input_nodes):
            return True
        sources = [each for each in node.args[:1] if isinstance(each, fx.Node)]
        shares = sources and (_views(node) or _mutated(node))
        memory[node] = memory[sources[0]] if shares else node
        if sources and (schema := _schema(node)) is not None and schema.name in _COPIES:
            bases[node] = memory[sources[0]]
        written = [memory[each] for each in _written(node)]
        if any(each in bases for each in written):
            return True
        for copy, base in bases.items():  # in order: one may be a copy of another
            if base in written or base in stale:
                stale.add(copy)
    return False


# Both run ATen's ops, but some of these sum in another order for other strides.
_SAME = 1e-5


def _run(program: torch.export.ExportedProgram, args: tuple, kwargs: dict) -> Any:
    """The program's results as a list. Each run draws the same random numbers."""
    interpreter = fx.Interpreter(program.module(check_guards=False))
    return _on_copies(interpreter, args, kwargs)


def _on_copies(interpreter: fx.Interpreter, args: tuple, kwargs: dict) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return interpreter.run(*pytree.tree_leaves((args, kwargs)), enable_io_processing=False)


class _CheckedViews(fx.Interpreter):
    """Runs an exported program on real tensors. Raises CaptureError where ATen returns a view and
    the trace has seen a copy, or the other way, because writes there reach other values. The
    strides of torch's fake tensors sometimes differ from ATen's, at a batch of one for example, and
    the schema does not call the results of unsafe_chunk views."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__(program.module(check_guards=False))

    def run_on(self, args: tuple, kwargs: dict) -> Any:
        """The program's results as a list."""
        return _on_copies(self, args, kwargs)

    def run_node(self, node: fx.Node):
        result = super().run_node(node)
        schema = _schema(node)
        if schema is None or schema.is_mutable or (_views(node) and schema.name not in _MAY_ALIAS):
            return result
        shares = _share(result, [self.env[each] for each in node.all_input_nodes])
        if shares != (schema.name in _MAY_ALIAS and _share(*_traced(node))):
            raise CaptureError(f"{schema.name} returns a view or a copy, depending on strides")
        return result


def _share(results: Any, sources: Any) -> bool:
    """Whether a tensor among `results` shares memory with one among `sources`."""
    made, given = (
        [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]
        for tree in (results, sources)
    )
    return any(torch._C._is_alias_of(a, b) for a in made for b in given)


def _traced(node: fx.Node) -> tuple[Any, Any]:
    """The result of an op and its sources, with the strides that the trace has seen."""
    return _on_fakes(node.target, node), [each.meta["val"] for each in node.all_input_nodes]


def _written(node: fx.Node) -> list[fx.Node]:
    """The values that an op writes, in any of its arguments."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    written = [each.name for each in schema.arguments if each.is_write]
    leaves = pytree.tree_leaves([given.get(name) for name in written])
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _substitutable(graph: fx.Graph) -> bool:
    """Whether later nodes can read every in-place op's result instead of the value that it writes.
    That is so if nothing else shares the memory that it writes."""
    for node in graph.nodes:
        target = _mutated(node)
        if target is None:
            continue
        functional = _functional(node)
        if functional is None or target.op != "call_function" or _views(target):
            return False
        if _on_fakes(functional, node).dtype != node.meta["val"].dtype:
            return False
        if any(_views(user) for user in target.users if user is not node):
            return False
    return True


def _on_fakes(op, node: fx.Node) -> Tensor:
    """The result of `op` for the arguments of `node`, without values. Types may differ: x.gt(0) is
    a bool, but x.gt_(0) keeps the type of x."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with node.meta["val"].fake_mode:
        return op(*args, **kwargs)


def _functional(node: fx.Node):
    """The overload that returns what an in-place op writes. Its name may differ: pow_.Scalar is
    pow.Tensor_Scalar."""
    in_place = node.target
    name = in_place.overloadpacket.__name__
    functional = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    own = in_place._overloadname
    for overload in (own, f"Tensor_{own}", "Tensor", "default"):
        found = getattr(functional, overload, None)
        if found is not None and _types(found) == _types(in_place):
            return found
    return None


def _types(overload) -> list[str]:
    return [str(each.type) for each in overload._schema.arguments]


# As c10::MemoryFormat numbers them; the objects themselves cannot be saved.
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


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
        if isinstance(value, torch.memory_format):
            return _MEMORY_FORMATS[value]
        if not isinstance(value, (*CONSTANTS, torch.layout)):
            raise CaptureError(f"an argument is a {type(value).__name__}")
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
        if not schema.returns:
            return  # an assertion that held for these inputs
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
        module = module_paths.of_node(node.meta.get("nn_module_stack"))
        line = module_paths.line_of_node(node.meta.get("stack_trace"))
        self.result.nodes.append(Node(name, overload, arguments, outputs, module, line))
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
            example = node.meta.get("val")
            if isinstance(example, Tensor):
                result.inputs.append(value)
                result.input_metas.append((list(example.shape), example.dtype))
        elif node.op == "call_function":
            lowering.call(node)
        elif node.op == "output":
            result.outputs = [lowering.argument(each) for each in node.args[0]]
    return result
