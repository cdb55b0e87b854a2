"""Models with several results, losses, and Python that reads values."""

from collections import namedtuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .table import typed

Boxes = namedtuple("Boxes", ("boxes", "scores", "count"))
# One large number a row: the order of scores is clear.
CLEAR = torch.eye(24)[::7] * 10


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 17), nn.Linear(17, 8)

    def hidden(self, x):
        return self.first(x).relu()


@typed((3, 24))
class Named(_Layer):
    def forward(self, x):
        y = self.hidden(x)
        return {"hidden": y, "logits": self.last(y), "width": y.shape[1], "is_cached": False}


@typed((3, 24))
class NestedResults(_Layer):
    def forward(self, x):
        y = self.hidden(x)
        return (self.last(y), [y, None, 3], {"all": (y.mean(), True, "text")})


@typed((3, 24))
class NamedTuple(_Layer):
    def forward(self, x):
        y = self.hidden(x)
        return Boxes(self.last(y).view(-1, 2, 4), y.sigmoid(), len(x))


@typed((3, 24))
class ResultsOfManyTypes(_Layer):
    """Half, bfloat16, double, integers and bools."""

    def forward(self, x):
        y = self.last(self.hidden(x))
        sizes = torch.arange(y.shape[1]), torch.tensor(y.shape)
        return y.half(), y.bfloat16(), y.double(), y, *sizes, torch.ones_like(y, dtype=torch.bool)


@typed((3, 24))
class InputAndBuffer(_Layer):
    """Results that no op computes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(5))

    def forward(self, x):
        y = self.hidden(x)
        return x, self.table, self.last.weight, y, y[:, :4], y.T


@typed(CLEAR)
class ClearClass(nn.Module):
    """The class, its score, and whether that is large."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.linear.weight.data.mul_(0.1).add_(torch.eye(24))

    def forward(self, x):
        scores = self.linear(x).softmax(1)
        best = scores.max(1)
        order = scores.topk(1, 1).indices
        return best.values, best.indices, best.values > 0.5, order, scores.argmax(1).to(torch.int32)


@typed((3, 24), (3,))
class QuantileLoss(_Layer):
    """One number; the quantiles are float32, and the target is float32, too."""

    def forward(self, x, target):
        quantiles = torch.linspace(0.1, 0.9, 8)
        apart = target[:, None] - self.last(self.hidden(x))
        return torch.maximum(quantiles * apart, (quantiles - 1) * apart).mean()


@typed((3, 24), torch.tensor([1, 0, 5]))
class Losses(_Layer):
    """A dict of numbers."""

    def forward(self, x, target):
        y = self.last(self.hidden(x))
        smooth = F.cross_entropy(y, target, label_smoothing=0.1)
        return {
            "cross_entropy": smooth,
            "weighted": F.cross_entropy(y, target, weight=torch.linspace(0.5, 2, 8)),
            "likelihood": F.nll_loss(F.log_softmax(y, 1), target),
            "margin": F.multi_margin_loss(y, target),
        }


@typed((3, 24), (3, 8))
class LossesOfNumbers(_Layer):
    """The targets are float32 whatever the results are."""

    def forward(self, x, target):
        y = self.last(self.hidden(x))
        weight = torch.linspace(0.5, 2, 8)
        return (
            F.mse_loss(y, target),
            F.huber_loss(y, target, delta=0.5),
            F.smooth_l1_loss(y, target.to(y.dtype), reduction="sum"),
            F.binary_cross_entropy_with_logits(y, target.sigmoid(), pos_weight=weight),
            F.kl_div(F.log_softmax(y, 1), target.softmax(1), reduction="batchmean"),
            F.cosine_embedding_loss(y, target, torch.ones(3)),
        )


@typed((3, 24), (3, 8))
class BinaryCrossEntropy(_Layer):
    """Of a sigmoid. On other devices autocast refuses it."""

    def forward(self, x, target):
        return F.binary_cross_entropy(self.last(self.hidden(x)).sigmoid(), target.sigmoid())


@typed((3, 24), (3, 8))
class NegativeLikelihood(_Layer):
    def forward(self, x, target):
        y = self.last(self.hidden(x))
        return F.gaussian_nll_loss(y, target, torch.ones_like(y, dtype=torch.float32) * 0.5)


@typed((6, 3, 24))
class AlignedLoss(nn.Module):
    """The connectionist loss of a sequence, which is computed in float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 8)

    def forward(self, x):
        scores = F.log_softmax(self.linear(x), -1, dtype=torch.float32)
        targets = torch.tensor([[1, 2], [3, 3], [5, 7]])
        return F.ctc_loss(scores, targets, torch.full((3,), 6), torch.full((3,), 2))


@typed(torch.linspace(0.5, 2, 72).view(3, 24))
class BranchOnMean(_Layer):
    """Python reads a value that is far from the limit."""

    def forward(self, x):
        y = self.hidden(x)
        if x.mean() > 0:
            y = y * torch.linspace(0.5, 1.5, 17)
        return self.last(y)


@typed(torch.linspace(0.5, 2, 72).view(3, 24))
class BranchOnHidden(_Layer):
    """It reads what a layer computed."""

    def forward(self, x):
        y = self.hidden(x)
        if (y + 1).mean().item() > 0.5:
            y = y.double().log1p().to(x.dtype)
        return self.last(y), bool((y >= 0).all())


@typed((3, 24), torch.tensor(3))
class Repeated(nn.Module):
    """As often as a tensor says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x, times):
        for _ in range(int(times)):
            x = torch.lerp(x, self.linear(x).tanh(), torch.tensor(0.5, dtype=x.dtype))
        return x


@typed(CLEAR)
class EarlyExit(nn.Module):
    """Stops at the first layer that is sure."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        for layer in self.layers:
            layer.weight.data.mul_(0.1).add_(torch.eye(24))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if torch.softmax(x, 1).amax(1).min() > 0.9:
                break
        return x


@typed((3, 24))
class ByNumpy(_Layer):
    """NumPy has no bfloat16."""

    def forward(self, x):
        y = self.hidden(x)
        return self.last(torch.from_numpy(np.sqrt(y.detach().numpy() + 1)))


@typed((3, 24))
class NumberOfTensor(_Layer):
    """A float that Python computes with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.625))

    def forward(self, x):
        scale = float(self.scale)
        return self.last(self.hidden(x) * scale) / (1 + scale), x.shape[0] * 2
