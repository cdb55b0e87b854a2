"""Folding of batch norms into the convolutions before them, for dense models."""

from __future__ import annotations

import copy
from collections import Counter

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

Convolution = nn.modules.conv._ConvNd
BatchNorm = nn.modules.batchnorm._BatchNorm


class Untraceable(ValueError):
    """A model that torch.fx cannot trace, so that nobody knows what its batch norms follow."""


class ConvolutionTracer(fx.Tracer):
    """Traces into all but torch's own layers, and convolutions and batch norms of any class."""

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, Convolution | BatchNorm) or super().is_leaf_module(
            module, qualified_name
        )


def fold_batch_norms(model: nn.Module) -> tuple[nn.Module, int]:
    """A copy of `model` with every foldable batch norm folded, and how many were.

    A batch norm is folded where its input is a convolution's output that nothing else uses and
    each of the two runs once. model is in evaluation mode; it is left as it was.
    Raises ValueError if it is in training mode, and Untraceable."""
    if model.training:
        raise ValueError(
            "fold_batch_norms: expected a model in evaluation mode, got training mode; call eval()"
        )
    folded = copy.deepcopy(model)
    pairs = foldable_pairs(folded)
    for convolution_name, norm_name in pairs:
        convolution = folded.get_submodule(convolution_name)
        norm = folded.get_submodule(norm_name)
        transposed = isinstance(convolution, nn.modules.conv._ConvTransposeNd)
        fused = fuse_conv_bn_eval(convolution, norm, transpose=transposed)
        # fuse_conv_bn_eval keeps gradients on; a folded model is for inference.
        folded.set_submodule(convolution_name, fused.requires_grad_(False))
        folded.set_submodule(norm_name, nn.Identity())
    return folded, len(pairs)


def only_normalizes(module: nn.Module) -> bool:
    """A batch norm whose class adds nothing, as timm's add an activation."""
    return isinstance(module, BatchNorm) and type(module).forward is BatchNorm.forward


def foldable_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names (convolution, batch norm) of the pairs that can be folded, in the order they run."""
    try:
        graph = ConvolutionTracer().trace(model)
    except Exception as error:  # whatever the model's own code raises on a proxy
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Untraceable(f"batch norms cannot be folded ({reason})") from error
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    modules = dict(model.named_modules())
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module" or not only_normalizes(modules[node.target]):
            continue
        source = node.args[0]
        if (
            source.op == "call_module"
            and isinstance(modules[source.target], Convolution)
            and len(source.users) == 1
            and calls[source.target] == calls[node.target] == 1
        ):
            pairs.append((source.target, node.target))
    return pairs
