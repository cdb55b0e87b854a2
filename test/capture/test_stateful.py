"""Models that compute from what earlier calls have left behind, wherever that is: the count is
never frozen into the optimized model, and it is what it was where it lies in the model."""

import pytest
import torch
from helpers.stateful_models import MODELS
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked.optimized_module import OptimizedModule

pytestmark = [
    pytest.mark.any_isa,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch_blocked..optimize. the model itself runs"),
]

# Outside of the model, where no snapshot reaches: what runs in optimize() is counted, too. A
# parameter counts the run that asks the model itself for its errors.
ELSEWHERE = {
    "InArray",
    "InIterator",
    "InClosure",
    "InClosureOfTensor",
    "InDefault",
    "InGlobal",
    "InGlobalTensor",
    "InClass",
    "InParameter",
}


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_counted_on(name):
    torch._dynamo.reset()
    x = torch.randn(1, 3, 8, 8)
    model, fresh = (MODELS[name]().eval() for _ in range(2))
    fresh.load_state_dict(model.state_dict())
    fast = tb.optimize(model, x, tune=False, verify=False)
    assert "because the" in fast.plan().splitlines()[0]
    assert not isinstance(fast, OptimizedModule)
    results = [fast(x) for _ in range(4)]
    with torch.no_grad():
        expected = [results[0] + i if name in ELSEWHERE else fresh(x) for i in range(4)]
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)


class ScriptNoting(nn.Module):
    """Keeps what its results do not depend on."""

    last: Tensor
    seen: list[Tensor]

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = torch.zeros(0)
        self.seen = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.mean()
        self.seen.append(self.last)
        return self.conv(x)


def test_what_a_script_notes_is_put_back_and_named():
    model = torch.jit.script(ScriptNoting().eval())
    x = torch.randn(1, 3, 8, 8)
    with pytest.warns(UserWarning, match="the forward sets ScriptNoting.last, ScriptNoting.seen"):
        fast = tb.optimize(model, x, tune=False)
    assert fast.choice == "blocked"
    torch.testing.assert_close(fast(x), model.conv(x), rtol=1e-4, atol=1e-5)
    assert model.last.numel() == 0 and [each.tolist() for each in model.seen] == [[0.0]]


def test_a_script_with_state_says_why_it_runs_itself():
    model = MODELS["ScriptTensor-0"]().eval()
    said = "the model itself runs, because the forward changes ScriptTensor.calls"
    with pytest.warns(UserWarning, match=said):
        tb.optimize(model, torch.randn(1, 3, 8, 8), tune=False)
