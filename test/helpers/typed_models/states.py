"""Recurrent models, with states that are given, made or left out."""

import torch
from torch import nn
from torch.nn import functional as F

from .table import register, typed

LAYERS = {
    "lstm": lambda: nn.LSTM(17, 24),
    "lstm_batch_first": lambda: nn.LSTM(17, 24, batch_first=True),
    "lstm_both_ways": lambda: nn.LSTM(17, 9, bidirectional=True),
    "lstm_two_layers": lambda: nn.LSTM(17, 24, num_layers=2, dropout=0.5),
    "lstm_projected": lambda: nn.LSTM(17, 24, proj_size=8),
    "lstm_no_bias": lambda: nn.LSTM(17, 24, bias=False),
    "gru": lambda: nn.GRU(17, 24),
    "gru_two_layers_both_ways": lambda: nn.GRU(17, 9, 2, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(17, 24, batch_first=True),
    "rnn_relu": lambda: nn.RNN(17, 24, nonlinearity="relu"),
}

for _name, _make in LAYERS.items():
    register(_name, _make, (3, 5, 17))

register("lstm_unbatched", LAYERS["lstm"], (5, 17))
register("gru_given_state", LAYERS["gru"], (3, 5, 17), (1, 5, 24))


@typed((3, 5, 17), (1, 5, 24), (1, 5, 24))
class LstmGivenStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.linear = nn.LSTM(17, 24), nn.Linear(24, 8)

    def forward(self, x, hidden, cell):
        x, states = self.lstm(x, (hidden, cell))
        return self.linear(x), states


@typed((5, 3, 17))
class LstmOfZeros(nn.Module):
    """States of the default type."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(17, 17), nn.Linear(24, 8)
        self.lstm = nn.LSTM(17, 24, num_layers=2, batch_first=True)

    def forward(self, x):
        zeros = torch.zeros(2, x.shape[0], 24)
        x, _ = self.lstm(self.first(x), (zeros, zeros.clone()))
        return self.last(x[:, -1])


@typed((5, 3, 17))
class GruOfParameter(nn.Module):
    """A learned first state, in the type of x."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 24))
        self.gru = nn.GRU(17, 24, batch_first=True)

    def forward(self, x):
        return self.gru(x, self.start.expand(1, x.shape[0], -1).contiguous().to(x.dtype))[1]


@typed((5, 3, 17))
class LstmInFloat(nn.Module):
    """Between layers of another type."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(17, 17), nn.Linear(18, 8)
        self.lstm = nn.LSTM(17, 9, batch_first=True, bidirectional=True)

    def forward(self, x):
        y = self.first(x)
        return self.last(self.lstm(y.float())[0].to(y.dtype))


@typed((5, 3, 17))
class LstmCells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.linear = nn.LSTMCell(17, 24), nn.Linear(24, 8)

    def forward(self, x):
        hidden, cell = torch.zeros(len(x), 24), torch.zeros(len(x), 24, dtype=torch.float32)
        results = []
        for step in x.unbind(1):
            hidden, cell = self.cell(step, (hidden, cell))
            results.append(self.linear(hidden))
        return torch.stack(results, 1), cell


@typed((5, 3, 17))
class GruCells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList((nn.GRUCell(17, 24), nn.GRUCell(24, 17)))

    def forward(self, x):
        states = [torch.zeros(len(x), 24), x.new_zeros(len(x), 17)]
        for step in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = step = cell(step, states[i])
        return step


@typed((5, 3, 17))
class GatesByHand(nn.Module):
    """Gates of one product, peepholes, and a layer norm on the state."""

    def __init__(self):
        super().__init__()
        self.gates, self.norm = nn.Linear(17 + 12, 48), nn.LayerNorm(12)
        self.peephole = nn.Parameter(torch.randn(12))

    def forward(self, x):
        hidden = cell = torch.zeros(len(x), 12)
        for step in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat((x[:, step], hidden), 1)).chunk(4, 1)
            kept = torch.sigmoid(f + self.peephole * cell + 1) * cell
            cell = self.norm(kept + i.sigmoid() * g.tanh())
            hidden = o.sigmoid() * cell.tanh()
        return hidden


@typed((2, 3, 5, 8, 6))
class ConvolutionalLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Conv2d(5 + 9, 36, 3, padding=1)

    def forward(self, x):
        hidden = torch.zeros(x.shape[0], 9, *x.shape[3:])
        cell = torch.zeros_like(hidden)
        for step in x.unbind(1):
            i, f, g, o = self.gates(torch.cat((step, hidden), 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden


@typed((2, 6, 12))
class SelectiveScan(nn.Module):
    """As in Mamba: the decay and the state are float32, and the result is what x is."""

    def __init__(self):
        super().__init__()
        self.inputs, self.out = nn.Linear(12, 12 + 12 + 2 * 4), nn.Linear(12, 9)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, 5).repeat(12, 1)))
        self.skip = nn.Parameter(torch.ones(12))

    def forward(self, x):
        u, delta, b, c = self.inputs(x).split((12, 12, 4, 4), -1)
        delta = F.softplus(delta.float())
        rate = -torch.exp(self.decay.float())
        state = torch.zeros(x.shape[0], 12, 4, dtype=torch.float32)
        results = []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            state = torch.exp(step * rate) * state + step * b[:, t, None].float() * u[:, t, :, None]
            results.append((state.to(x.dtype) * c[:, t, None]).sum(-1) + self.skip * u[:, t])
        return self.out(torch.stack(results, 1))


@typed((2, 6, 12))
class WeightedByTime(nn.Module):
    """As in RWKV: sums with a running maximum, which begins at -1e38."""

    def __init__(self):
        super().__init__()
        self.r, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.decay, self.first = nn.Parameter(torch.rand(12)), nn.Parameter(torch.rand(12))

    def forward(self, x):
        r, k, v = self.r(x).sigmoid(), self.k(x).float(), self.v(x).float()
        top = bottom = torch.zeros_like(k[:, 0])
        most = torch.full_like(top, -1e38)
        results = []
        for t in range(x.shape[1]):
            now = torch.maximum(most, self.first + k[:, t])
            old, new = torch.exp(most - now), torch.exp(self.first + k[:, t] - now)
            results.append((old * top + new * v[:, t]) / (old * bottom + new))
            now = torch.maximum(most - self.decay.exp(), k[:, t])
            old, new = torch.exp(most - self.decay.exp() - now), torch.exp(k[:, t] - now)
            top, bottom, most = old * top + new * v[:, t], old * bottom + new, now
        return self.out(r * torch.stack(results, 1).to(x.dtype))


@typed((2, 6, 12))
class ExponentialAverage(nn.Module):
    """By powers of a decay and one product, in float32."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 17), nn.Linear(17, 8)
        self.alpha = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        at = torch.arange(x.shape[1])
        powers = (at[:, None] - at[None]).clamp(min=0)
        weights = self.alpha * (1 - self.alpha) ** powers
        return self.last(weights.tril() @ self.first(x))
