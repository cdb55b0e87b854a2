"""Callers of everything that threads share, at a time: one optimized model at old and new sizes,
its plan, its release, eager ops on the same weights, the pool, the caches, the recorder."""

import threading

import torch
from torch import nn

import torch_blocked as tb
from torch_blocked import _C

CALLERS, ROUNDS = 4, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.gate = nn.Conv2d(24, 24, 1)
        self.last = nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = self.depthwise(x) + x
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(x.mean((2, 3)))


def at_a_time(*calls):
    """Each call on a thread of its own, all from the same moment. Raises what one of them did."""
    begin, errors = threading.Barrier(len(calls)), []

    def run(call):
        begin.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]


def inference(model, sizes):
    x = torch.randn(1, 3, 40, 36)
    fast = tb.optimize(model, x)
    inputs = [torch.randn(2, 3, size, 24) for size in sizes]
    with torch.no_grad():
        expected = [model(each) for each in inputs]

    def call():
        with torch.no_grad():
            for _ in range(ROUNDS):
                for each, wanted in zip(inputs, expected, strict=True):
                    torch.testing.assert_close(fast(each), wanted, rtol=1e-3, atol=1e-4)

    def look():
        for _ in range(3):
            fast.plan(inputs[0])
            _C.packed_weight_bytes()
            _C.idle_pool_bytes()

    at_a_time(*[call] * CALLERS, look)
    at_a_time(*[call] * CALLERS, fast.release)


def eager(model):
    def call():
        with torch.no_grad():
            for _ in range(ROUNDS):
                x = torch.randn(2, 3, 96, 96).to_blocked()
                model(x)
                tb.to_blocked(torch.randn(2, 64, 96, 96)).clone()

    def forget():
        for _ in range(ROUNDS):
            tb.clear_packed_weights()
            _C.release_pool()

    def record():
        x = torch.randn(1, 3, 40, 40).to_blocked()
        for _ in range(3):
            with tb.profile():
                model(x)

    at_a_time(*[call] * CALLERS, forget, record)


def several_models():
    """They share the primitives, the measured times and the pool."""

    def call():
        model = Model().eval()
        x = torch.randn(1, 3, 33, 35)
        with torch.no_grad():
            torch.testing.assert_close(tb.optimize(model, x)(x), model(x), rtol=1e-3, atol=1e-4)

    at_a_time(*[call] * CALLERS)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(2)
    inference(Model().eval(), [20, 21, 28, 64])
    eager(Model().eval())
    several_models()
    print("callers: all results are right")
