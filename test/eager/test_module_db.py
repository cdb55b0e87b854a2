"""Every module of PyTorch's database takes blocked inputs and gives the dense result and gradients.

The modules stay as they are: their parameters and the gradients of these are dense."""

import copy

import pytest
import torch
from helpers.opinfo import MODES, can_block, converted, dense, disagreement
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import torch_blocked

pytestmark = [pytest.mark.any_isa, pytest.mark.filterwarnings("ignore")]

MODULES = {
    info.name + (" eval" if not training else ""): (info, training)
    for info in module_db
    if torch.float32 in info.dtypes
    for training in ((True, False) if info.train_and_eval_differ else (True,))
}
# For these the database has arguments of a wrong dtype.
DENSE_REFUSES = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}


def inputs_of(info, training):
    """The database's inputs that have something to block."""
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    for sample in made:
        forward = (sample.forward_input.args, sample.forward_input.kwargs)
        if any(can_block(leaf) for leaf in pytree.tree_leaves(forward)):
            yield sample.constructor_input, forward


def run(module, arguments):
    """Outputs, and gradients of the arguments, parameters and buffers; or the exception."""
    args, kwargs = arguments
    torch.manual_seed(0)
    try:
        outputs = module(*args, **kwargs)
        leaves = [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor)]
        roots = [o for o in leaves if o.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(o) for o in roots])
    except Exception as error:  # any kind: it is what is compared
        return error
    inputs = [a for a in pytree.tree_leaves(arguments) if isinstance(a, torch.Tensor)]
    parameters = [p.grad for p in module.parameters()]
    assert not any(torch_blocked.is_blocked(gradient) for gradient in parameters)
    found = [*leaves, *(a.grad for a in inputs if a.requires_grad), *parameters, *module.buffers()]
    return [None if value is None else dense(value) for value in found]


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    info, training = MODULES[name]
    for constructor, forward in inputs_of(info, training):
        torch.manual_seed(0)
        module = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
        again = copy.deepcopy(module)
        expected = run(module, converted(forward, lambda _, x: x))
        assert isinstance(expected, Exception) == (info.name in DENSE_REFUSES)
        actual = run(again, converted(forward, MODES["all"]))
        assert disagreement(expected, actual) is None, (constructor.kwargs, forward)
