"""int8 models: a quantizer for PyTorch's flow (torchao.quantization.pt2e), and the flow in one
call. optimize() runs the result in int8.

Only making such a model needs torchao; running it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import SymInt, Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from torch_blocked import module_paths
from torch_blocked.arguments import (
    check_model,
    checked_calibration,
    checked_modules,
    checked_paths,
    checked_target,
)
from torch_blocked.calibration import Calibration
from torch_blocked.calls import run_if_lazy
from torch_blocked.compile import OptimizedParts
from torch_blocked.optimized_module import OptimizedModule
from torch_blocked.quantization_accuracy import QuantizationAccuracy, QuantizationTry, compare
from torch_blocked.quantization_target import TargetSearch
from torch_blocked.recurrent_layers import (
    RECURRENT,
    is_plain,
    is_recurrent_result,
    split_layers,
    weights_of,
)
from torch_blocked.sized_export import sized_export
from torch_blocked.state import check_devices

_aten = torch.ops.aten

# Values between layers: unsigned bytes with a zero point, their range from a histogram.
_ACTIVATION = QuantizationSpec(
    dtype=torch.uint8,
    observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
    quant_min=0,
    quant_max=255,
    qscheme=torch.per_tensor_affine,
    is_dynamic=False,
)


def _weight(axis: int) -> QuantizationSpec:
    """Signed bytes with a scale for each output channel, which `axis` of the weight holds."""
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=axis,
        is_dynamic=False,
    )


_CONVOLUTIONS = (_aten.conv1d, _aten.conv2d, _aten.conv3d)
_TRANSPOSED = {
    _aten.conv_transpose1d.default,
    _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
}
_LAYERS = {_aten.linear.default}.union(
    _TRANSPOSED, *({each.default, each.padding} for each in _CONVOLUTIONS)
)
# Activations that run on the sums of a layer.
_ACTIVATIONS = {
    getattr(_aten, name).default
    for name in ("relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "leaky_relu")
} | {
    getattr(_aten, name).default
    for name in ("relu_", "relu6_", "hardtanh_", "hardswish_", "silu_", "leaky_relu_")
}
_SUMS = {_aten.add.Tensor, _aten.add_.Tensor}
# Ops that move or choose bytes: results have the scale and zero point of the input.
_MOVES = {
    _aten.max_pool2d.default,
    _aten.flatten.using_ints,
    _aten.view.default,
    _aten.reshape.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.cat.default,
    _aten.upsample_nearest2d.vec,
}
# Ops that read bytes and give bytes of another range: functions and averages.
_FUNCTIONS = _ACTIVATIONS | {
    _aten.sigmoid.default,
    _aten.hardsigmoid.default,
    _aten.tanh.default,
    _aten.elu.default,
    _aten.avg_pool1d.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool3d.default,
    _aten.adaptive_avg_pool1d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten.adaptive_avg_pool3d.default,
    _aten.mean.dim,
}
# The same for two values. One of them may be no bytes: a gate.
_OF_TWO = _SUMS | {_aten.mul.Tensor, _aten.mul_.Tensor}
_COMPARED = 8  # inputs for the report of quantize()
_ANNOTATION = "quantization_annotation"


class TorchBlockedQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates the ops that torch_blocked can run on bytes: convolutions and linear layers with
    the activation and the sum after them; weights and inputs of recurrent layers; ops that move
    their bytes; and functions, averages, sums and products of these that other such layers read.

    keep: paths of modules that stay in floating point, with everything in them."""

    def __init__(self, keep: Iterable[str] = ()) -> None:
        super().__init__()
        self.keep = checked_paths("TorchBlockedQuantizer", keep)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        in_float = self._read_in_float(model.graph)
        for node in model.graph.nodes:
            if node.target in _LAYERS and not self._is_kept(node):
                _annotate_layer(node, in_float)
        for node in model.graph.nodes:
            if _ANNOTATION in node.meta or self._is_kept(node):
                continue
            if node.target in RECURRENT and is_plain(node):
                _annotate_recurrent(node)
            elif node.target in _MOVES:
                _annotate_move(node)
            elif node.target in _FUNCTIONS | _OF_TWO:
                _annotate_function(node, in_float)
        return model

    def _read_in_float(self, graph: fx.Graph) -> set[fx.Node]:
        """Nodes that take no bytes: those that stay in floating point, those that only such nodes
        read, and sizes."""
        found = set[fx.Node]()
        for node in reversed(graph.nodes):
            passes_on = node.target in _MOVES | _FUNCTIONS | _OF_TWO and node.users
            if (
                self._is_kept(node)
                or isinstance(node.meta.get("val"), SymInt)
                or (passes_on and found.issuperset(node.users))
            ):
                found.add(node)
        return found

    def validate(self, model: fx.GraphModule) -> None:
        """Does nothing: annotations of annotate() are always valid."""

    def _is_kept(self, node: fx.Node) -> bool:
        path = module_paths.of_module(node.meta.get("nn_module_stack"))
        return any(path == each or path.startswith(each + ".") for each in self.keep)


class _QuantizerButFor(TorchBlockedQuantizer):
    """Leaves these nodes in floating point, too."""

    def __init__(self, keep: Iterable[str], nodes: Collection[str]) -> None:
        super().__init__(keep)
        self.nodes = nodes

    def _is_kept(self, node: fx.Node) -> bool:
        return node.name in self.nodes or super()._is_kept(node)


def _is_layer(node: fx.Node) -> bool:
    return node.target in _LAYERS or (node.target in RECURRENT and is_plain(node))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _annotate_layer(layer: fx.Node, in_float: Collection[fx.Node]) -> None:
    """Annotates the layer, and the last op that its kernel includes. Its result becomes bytes if
    any reader takes them."""
    end, chain = layer, [layer]
    residual: fx.Node | None = None
    while (user := _only_user(end)) is not None:
        after_sum = residual is not None
        if user.target in _ACTIVATIONS and (after_sum or end is layer):
            end = user
        elif user.target in _SUMS and not after_sum and len(user.args) == 2:
            other = next((each for each in user.args if each is not end), None)
            if not isinstance(other, fx.Node) or _ANNOTATION in user.meta or not _same(end, other):
                break
            residual, end = other, user
        else:
            break
        chain.append(end)
        if end.target in _ACTIVATIONS and after_sum:
            break
    src, weight = layer.all_input_nodes[:2]
    inputs: dict[fx.Node, Any] = {
        src: _ACTIVATION,
        weight: _weight(axis=1 if layer.target in _TRANSPOSED else 0),
    }
    for node in chain:
        node.meta[_ANNOTATION] = QuantizationAnnotation(_annotated=True)
    layer.meta[_ANNOTATION].input_qspec_map = inputs
    for node in chain:
        if residual is not None and node.target in _SUMS:
            node.meta[_ANNOTATION].input_qspec_map = {residual: _ACTIVATION}
    if not all(user.op == "output" or user in in_float for user in end.users):
        end.meta[_ANNOTATION].output_qspec = _ACTIVATION


def _annotate_recurrent(layer: fx.Node) -> None:
    """Annotates the weights that meet the states of a recurrent layer, which stay numbers. And its
    input with the weights that meet it, if the input is bytes already or the result of another
    recurrent layer. Other inputs, spectra say, span decades, and so do their weights: on bytes the
    voices of resemblyzer were lost."""
    of_inputs, of_states = weights_of(layer)
    specs = dict[fx.Node, Any].fromkeys(of_states, _weight(axis=0))
    source = layer.all_input_nodes[0]
    if _makes_bytes(source) or is_recurrent_result(source):
        specs |= {source: _ACTIVATION, **dict.fromkeys(of_inputs, _weight(axis=0))}
    layer.meta[_ANNOTATION] = QuantizationAnnotation(input_qspec_map=specs, _annotated=True)


def _same(a: fx.Node, b: fx.Node) -> bool:
    """Whether both are tensors whose sizes are the same for all inputs."""
    if not _is_tensor(a) or not _is_tensor(b):
        return False
    sizes = a.meta["val"].shape, b.meta["val"].shape
    return len(sizes[0]) == len(sizes[1]) and all(
        statically_known_true(x == y) for x, y in zip(*sizes, strict=True)
    )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads, without sizes."""
    return [each for each in node.all_input_nodes if _is_tensor(each)]


def _annotate_move(node: fx.Node) -> None:
    """Annotates a node that moves bytes, if its inputs are bytes already."""
    inputs = [each for each in node.all_input_nodes if each in _listed(node.args[0])]
    if not all(map(_makes_bytes, inputs)):
        return
    shared = SharedQuantizationSpec((inputs[0], node))
    specs = {each: shared for each in inputs[1:]}
    node.meta[_ANNOTATION] = QuantizationAnnotation(
        input_qspec_map={**specs, inputs[0]: _ACTIVATION}, output_qspec=shared, _annotated=True
    )


def _makes_bytes(node: fx.Node) -> bool:
    return _ANNOTATION in node.meta and node.meta[_ANNOTATION].output_qspec is not None


def _annotate_function(node: fx.Node, in_float: Collection[fx.Node]) -> None:
    """Annotates a function, if its input is bytes and its readers can take bytes."""
    inputs = [each for each in _operands(node) if _makes_bytes(each)]
    of_bytes = inputs and (len(inputs) == len(_operands(node)) or node.target in _OF_TWO)
    takers = _LAYERS | RECURRENT | _MOVES | _FUNCTIONS | _OF_TWO
    if not of_bytes or not any(
        user.target in takers and user not in in_float for user in node.users
    ):
        return
    then = _only_user(node) if node.target in _SUMS else None
    end = then if then is not None and then.target in _ACTIVATIONS else node
    for each in (node, end):
        each.meta[_ANNOTATION] = QuantizationAnnotation(_annotated=True)
    node.meta[_ANNOTATION].input_qspec_map = dict.fromkeys(inputs, _ACTIVATION)
    end.meta[_ANNOTATION].output_qspec = _ACTIVATION


def _listed(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, Sequence) else [argument]


def quantize(
    model: nn.Module,
    calibration: Iterable[Tensor | tuple[Any, ...] | dict[str, Any]],
    *,
    keep: Iterable[str] = (),
    report: Callable[[QuantizationAccuracy], object] | None = None,
    target: float | Callable[[fx.GraphModule], bool] | None = None,
) -> fx.GraphModule:
    """Converts the model to a graph with int8 layers, for optimize() and other readers of such
    graphs.

    calibration: 10 to 100 inputs like those that will come, each a tensor, a tuple of arguments or
        a dict of arguments by name.
        Their values set the ranges, the rounding of weights (weight_rounding.py) and the correction
        of biases (bias_correction.py). Other batches and sizes may come later, as far as the
        model's own code allows. For sizes that the graph does not serve, the graph and its
        optimized form raise ValueError (sized_export.py).
    keep: paths of modules that stay in floating point.
    report: called with the accuracy loss of the model and of each layer on some of the calibration
        inputs (QuantizationAccuracy); print shows it as a table.
    target: the accuracy that the result must have. The layers that harm it most for their work stay
        in floating point, as few as it takes. A number is the largest relative error of the
        results, between 0 and 1, measured as in the report, which then also lists the tries. A
        function is called with quantized graphs, each as it would be returned; it says whether the
        graph is accurate enough.
    `meta["kept"]` of the result: paths of the modules that stay in floating point, of `keep` first.
    Raises TypeError for another kind of model or calibration. Raises ValueError without
    calibration, for inputs whose sizes no single graph serves, for a path that no module has, for a
    model in training mode or that torch.export cannot trace, and for a target that the model does
    not reach in floating point."""
    _check_model(model)
    keep = checked_modules("quantize", model, keep)
    target = checked_target(target)
    cases = checked_calibration(calibration, model)
    run_if_lazy(model, cases[0], {})
    with torch.no_grad():
        exported = sized_export(model, cases)
        _write_padding_in_numbers(exported.module)
        split_layers(exported.module)
        calibrated = Calibration(exported.module, cases, _is_layer)

    def converted(names: Collection[str] = ()) -> fx.GraphModule:
        return calibrated.converted(_QuantizerButFor(keep, names))

    def finish(graph: fx.GraphModule, more: Sequence[str] = ()) -> tuple[str, ...]:
        exported.put_check_into(graph)
        graph.meta["kept"] = kept = (*keep, *more)
        return kept

    compared, tries = cases[-_COMPARED:], list[QuantizationTry]()
    if target is None:
        result = converted()
        finish(result)
    else:
        search = TargetSearch(calibrated, converted, finish, target, compared)
        result, tries = search.found(), search.tries
    if report:
        accuracy = compare(calibrated.in_float, result, compared, _is_layer)
        sorted_tries = sorted(tries, key=lambda each: len(each.kept))
        report(replace(accuracy, tries=tuple(sorted_tries)))
    return result


def _check_model(model: Any) -> None:
    check_model("quantize", model)
    if isinstance(model, OptimizedModule | OptimizedParts):
        raise TypeError(
            "torch_blocked::quantize: expected a model, got one that optimize() has returned; "
            "quantize the model that was optimized, and optimize the result"
        )
    if model.training:
        raise ValueError(
            "torch_blocked::quantize: expected a model in evaluation mode, got training mode; "
            "call eval()"
        )
    check_devices("quantize", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "torch_blocked::quantize: expected a model that torch.export traces, got a "
            "ScriptModule; quantize the model that was compiled with torch.jit"
        )


def _write_padding_in_numbers(module: fx.GraphModule) -> None:
    """Replaces padding="same" and the like by numbers: torchao would not fold the batch norms of
    such convolutions."""
    for node in list(module.graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in _CONVOLUTIONS or node.target is not packet.padding:
            continue
        src, weight, bias, stride, word, dilation, groups = _arguments(node)
        kernel = weight.meta["val"].shape[2:]
        pads = [0] * len(kernel)
        if word == "same":
            pads = [each * (size - 1) for each, size in zip(dilation, kernel, strict=True)]
        with module.graph.inserting_before(node):
            if any(each % 2 for each in pads):  # the odd zero is at the end
                both = [size for each in reversed(pads) for size in (each // 2, each - each // 2)]
                src = module.graph.call_function(_aten.pad.default, (src, both))
                src.meta, pads = dict(node.meta), [0] * len(kernel)
            numbers = module.graph.call_function(
                packet.default,
                (src, weight, bias, stride, [each // 2 for each in pads], dilation, groups),
            )
        numbers.meta = dict(node.meta)
        node.replace_all_uses_with(numbers)
        module.graph.erase_node(node)
    module.recompile()


def _arguments(node: fx.Node) -> list[Any]:
    """The arguments of a convolution, lists with a number for each spatial dim."""
    schema = cast(torch._ops.OpOverload, node.target)._schema
    given: dict[str, Any] = {
        each.name: each.default_value for each in schema.arguments if each.has_default_value()
    }
    given |= zip((each.name for each in schema.arguments), node.args, strict=False)
    given |= node.kwargs
    spatial = given["weight"].meta["val"].dim() - 2
    for name in ("stride", "dilation"):
        numbers = list(given[name])
        given[name] = numbers * spatial if len(numbers) == 1 else numbers
    return [given[each.name] for each in schema.arguments]
