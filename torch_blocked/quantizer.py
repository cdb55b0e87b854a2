"""Models of bytes: a quantizer for PyTorch's flow (torchao.quantization.pt2e), and the flow in one
call. What it makes, optimize() runs in int8.

torchao is not needed to run such a model, only to make one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from torch_blocked import module_paths, progress

_aten = torch.ops.aten

# Numbers between layers: unsigned bytes with a zero point, the range by a histogram.
_ACTIVATION = QuantizationSpec(
    dtype=torch.uint8,
    observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
    quant_min=0,
    quant_max=255,
    qscheme=torch.per_tensor_affine,
    is_dynamic=False,
)
# Weights: signed bytes, a scale for each output channel.
_WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    is_dynamic=False,
)

_LAYERS = {
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.linear.default,
}
# What runs with the sums of a layer.
_ACTIVATIONS = {
    getattr(_aten, name).default
    for name in ("relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "leaky_relu")
} | {
    getattr(_aten, name).default
    for name in ("relu_", "relu6_", "hardtanh_", "hardswish_", "silu_", "leaky_relu_")
}
_SUMS = {_aten.add.Tensor, _aten.add_.Tensor}
# What moves or chooses bytes: its result has the parameters of its input.
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
_ANNOTATION = "quantization_annotation"


class TorchBlockedQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates what torch_blocked's kernels of bytes do: convolutions and linear layers with the
    activation and the sum after them, and what moves their bytes.

    keep: paths of modules that stay in floating point, with all that they contain."""

    def __init__(self, keep: Iterable[str] = ()) -> None:
        super().__init__()
        self.keep = tuple(keep)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if node.target in _LAYERS and not self._is_kept(node):
                _annotate_layer(node)
        for node in model.graph.nodes:
            if node.target in _MOVES and _ANNOTATION not in node.meta:
                _annotate_move(node)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Nothing can be wrong with what annotate() writes."""

    def _is_kept(self, node: fx.Node) -> bool:
        path = module_paths.of_node(node.meta.get("nn_module_stack"))
        return any(path == each or path.startswith(each + ".") for each in self.keep)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _annotate_layer(layer: fx.Node) -> None:
    """The layer, and the last of what its kernel does after it, whose result becomes bytes."""
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
    inputs: dict[fx.Node, Any] = {src: _ACTIVATION, weight: _WEIGHT}
    for node in chain:
        node.meta[_ANNOTATION] = QuantizationAnnotation(_annotated=True)
    layer.meta[_ANNOTATION].input_qspec_map = inputs
    for node in chain:
        if residual is not None and node.target in _SUMS:
            node.meta[_ANNOTATION].input_qspec_map = {residual: _ACTIVATION}
    if not all(user.op == "output" for user in end.users):
        end.meta[_ANNOTATION].output_qspec = _ACTIVATION


def _same(a: fx.Node, b: fx.Node) -> bool:
    return bool(a.meta["val"].shape == b.meta["val"].shape)


def _annotate_move(node: fx.Node) -> None:
    """If its inputs are bytes already."""
    inputs = [each for each in node.all_input_nodes if each in _listed(node.args[0])]
    made = [_ANNOTATION in each.meta and each.meta[_ANNOTATION].output_qspec for each in inputs]
    if not all(made):
        return
    shared = SharedQuantizationSpec((inputs[0], node))
    specs = {each: shared for each in inputs[1:]}
    node.meta[_ANNOTATION] = QuantizationAnnotation(
        input_qspec_map={**specs, inputs[0]: _ACTIVATION}, output_qspec=shared, _annotated=True
    )


def _listed(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, Sequence) else [argument]


def quantize(
    model: nn.Module, calibration: Iterable[Tensor | tuple[Any, ...]], *, keep: Iterable[str] = ()
) -> fx.GraphModule:
    """The model with layers of bytes, for optimize() and for whatever else takes such graphs.

    calibration: inputs like those that will come, 10 to 100 of them, each a tensor or a tuple of
    arguments; their values set the ranges. The first dim, the batch, may change later.
    keep: paths of modules that stay in floating point.
    Raises ValueError without calibration or for a model in training mode, and what torch.export
    raises for a model that it cannot trace."""
    if model.training:
        raise ValueError(
            "torch_blocked::quantize: expected a model in evaluation mode, got training mode; "
            "call eval()"
        )
    cases = [each if isinstance(each, tuple) else (each,) for each in calibration]
    if not cases:
        raise ValueError(
            "torch_blocked::quantize: expected calibration inputs, got none; give some that are "
            "like those that will come"
        )
    with torch.no_grad():
        exported = torch.export.export(model, cases[0], strict=False)
        prepared = prepare_pt2e(exported.module(check_guards=False), TorchBlockedQuantizer(keep))
        prepared._forward_pre_hooks.clear()
        with progress.Bar("torch_blocked: calibrating", len(cases)) as bar:
            for case in cases:
                prepared(*case)
                bar.update()
        converted: fx.GraphModule = convert_pt2e(prepared)
        converted._forward_pre_hooks.clear()
    return converted
