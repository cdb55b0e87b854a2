"""`torch_blocked.strict(reorders=, views=)` and what warnings say: the module and the line."""

import inspect

import pytest
import torch
from torch import nn

import torch_blocked


class Part(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LINE = f"{__file__}:{inspect.getsourcelines(Part.forward)[1] + 1}"


def model_of(function):
    return nn.Sequential(nn.ReLU(), Part(function))


def blocked():
    return torch.randn(2, 17, 6, 5).to_blocked("nChw8c")


def refused(function, **rules):
    x, model = blocked(), model_of(lambda x: function(x))
    with torch_blocked.strict(**rules), pytest.raises(NotImplementedError) as caught:
        model(x)
    return str(caught.value)


def test_a_fallback_names_module_and_line():
    sentence = refused(lambda x: x.renorm(2, 1, 1))
    assert f" in 1 ({__file__}:" in sentence


def test_reorders_may_be_refused_or_counted():
    x = blocked()
    sentence = refused(lambda x: x.to_dense(), reorders=False)
    assert sentence.startswith("torch_blocked::to_dense: expected no more reorders")
    assert f"nChw8c -> nchw [2, 17, 6, 5] in 1 ({__file__}:" in sentence
    with torch_blocked.strict(reorders=2):
        x.to_dense()
        with torch_blocked.strict(reorders=1):
            x.to_dense()
        with pytest.raises(NotImplementedError, match="no more reorders"):
            x.to_dense()
    with torch_blocked.strict(reorders=2):
        with torch_blocked.strict():  # rules of the outer hold inside
            x.to_dense()
            x.to_dense()
            with pytest.raises(NotImplementedError, match="no more reorders"):
                x.to_dense()
    with torch_blocked.strict():
        x.to_dense()
    x.to_dense()


def test_reorders_of_views_count():
    refused(lambda x: x.permute(0, 2, 3, 1), reorders=False)


@pytest.mark.parametrize("view", [lambda x: x.permute(0, 2, 3, 1), lambda x: x[:, :3]])
def test_views_that_are_copies_may_be_refused(view):
    sentence = refused(view, views=False)
    assert "expected views in the memory of nChw8c (2, 17, 6, 5)" in sentence
    assert f" in 1 ({__file__}:" in sentence
    with torch_blocked.strict():
        view(blocked())


def test_views_in_the_same_memory_are_none():
    with torch_blocked.strict(views=False, reorders=False):
        blocked_x = torch.ones(2, 16, 4, 4)
    with torch_blocked.strict(views=False, reorders=1):
        blocked_x.to_blocked("nChw8c")[:, :8].relu()


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), ("no", TypeError)])
def test_what_is_no_number_is_refused(value, error):
    with pytest.raises(error, match="expected"), torch_blocked.strict(reorders=value):
        pass


def test_a_warning_names_module_and_line(monkeypatch):
    monkeypatch.setattr("torch_blocked.ops.fallback._warned", set())
    with pytest.warns(UserWarning, match=r"in 1 \(.*test_strict.py:\d+\)"):
        model_of(lambda x: x.renorm(2, 1, 1))(blocked())


class Loses(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.part = nn.Conv2d(4, 8, 3), Part(lambda x: x.contiguous())

    def forward(self, x):
        x = self.part(self.conv(x))
        return x.to(memory_format=torch.channels_last).relu().permute(0, 2, 3, 1)


def test_where_channels_last_is_lost():
    model = Loses().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    [loss] = torch_blocked.channels_last_losses(model, x)
    assert (loss.module, loss.dims) == ("part", (2, 8, 6, 6))
    assert loss.op == "aten.clone.default" and loss.line.startswith(f"{__file__}:")
    model.part = nn.Identity()
    assert torch_blocked.channels_last_losses(model, x) == []
    with pytest.raises(ValueError, match="expected an input in channels-last, got none"):
        torch_blocked.channels_last_losses(model, x.contiguous())


def test_an_optimized_model_is_refused_its_reorders_and_runs_on():
    """The model itself, which would run without them, does not take its place."""
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU()).eval()
    x = torch.randn(1, 16, 20, 20)
    with torch.no_grad():
        fast = torch_blocked.optimize(net, x, tune=False)
        reorders = fast.plan().count("\nreorder ")
        for _ in range(2):
            if reorders:
                with (
                    torch_blocked.strict(reorders=0),
                    pytest.raises(NotImplementedError, match="no more reorders"),
                ):
                    fast(x)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert fast.choice == "blocked" and reorders in (0, 2)
