"""Seeded random weights that keep every activation finite and of order one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm
Convolution = nn.modules.conv._ConvNd


def random_model(
    constructor: Callable[[], nn.Module], dims: tuple[int, ...], seed: int
) -> nn.Module:
    """A model in evaluation mode with weights that depend on `seed` only.

    constructor is called on the meta device: no time goes into weights that are replaced.
    dims [N, C, *spatial] is the batch of random images that sets the statistics of the batch norms:
    they are what training would leave, so a wrong or forgotten normalization shows in the result.
    Raises TypeError if a layer with parameters has no rule below.
    """
    with torch.device("meta"):
        model = constructor()
    # Not to_empty(), which imports sympy: 70 MiB that comparisons of memory would count.
    model.load_state_dict(
        {
            name: torch.empty(each.shape, dtype=each.dtype)
            for name, each in model.state_dict().items()
        },
        assign=True,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            fill(module, name)
        model.eval()
        set_statistics(model, torch.randn(dims))
    return model


def fill(module: nn.Module, name: str) -> None:
    """Fills the parameters that `module` itself holds.

    Most convolutions and linear layers follow a ReLU: variance 2 / fan-in keeps the second moment
    of the activations. Source: "Delving Deep into Rectifiers" (arXiv 1502.01852)."""
    if not any(True for _ in module.parameters(recurse=False)):
        return
    if isinstance(module, (BatchNorm, nn.LayerNorm)):
        if isinstance(module, BatchNorm):
            module.reset_running_stats()
        module.weight.uniform_(0.5, 1.5)
        module.bias.normal_(0.0, 0.2)
    elif [name for name, _ in module.named_parameters(recurse=False)] == ["layer_scale"]:
        module.layer_scale.uniform_(0.5, 1.5)
    elif isinstance(module, (Convolution, nn.Linear)):
        module.weight.normal_(0.0, math.sqrt(2.0 / fan_in(module)))
        if module.bias is not None:
            module.bias.normal_(0.0, 0.1)
    else:
        raise TypeError(
            "random_model: expected parameters of convolution, linear or batch norm, got "
            f"{type(module).__name__} at {name or 'the root'}; add a rule to fill()"
        )


def fan_in(module: nn.Module) -> int:
    """How many products one element of the output sums up."""
    weight = module.weight
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        # weight [IC, OC/groups, *kernel]; overlapping kernels add up, kernel / stride of them.
        kernel = math.prod(weight.shape[2:]) / math.prod(module.stride)
        return max(1, round(weight.shape[0] // module.groups * kernel))
    return weight[0].numel()


def set_statistics(model: nn.Module, input: torch.Tensor) -> None:
    """Sets the running mean and variance of every batch norm to those of one forward pass."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = None  # the plain average over all passes, here one
    model(input)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
