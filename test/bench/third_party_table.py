"""A table for benchmarks/third_party.py with a model of our own, and forms that go wrong."""

import os
import signal
import sys
import time

import torch
from torch import nn
from zoo.forms import FORMS, call, eager
from zoo.inputs import images
from zoo.row import Row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 9, 3, padding=1)
        self.norm = nn.BatchNorm2d(9)

    def forward(self, x, scale=None):
        y = torch.relu(self.norm(self.conv(x)))
        return {"map": y if scale is None else y * scale, "mean": y.mean((2, 3))}


def keywords(batch: int, *spatial: int):
    return {"x": torch.randn(batch, 3, *spatial), "scale": torch.tensor(3.0)}


SIZES = ((1, 8, 8), (2, 9, 7))
ROWS = (
    Row("pip/positional", Net, images(3), SIZES),
    Row("pip/keyword", Net, keywords, SIZES),
    Row("pip/refused_by_dense", Net, images(4), SIZES),
)


def off(model, example, tune):
    """The second size's result is a hundredth too large."""

    def run(inputs):
        result = call(model, inputs)
        if inputs[0].shape[0] == 2:
            result["map"] *= 1.01
        return result

    return run


def renamed(model, example, tune):
    return lambda inputs: {"maps": call(model, inputs)["map"], "mean": call(model, inputs)["mean"]}


def raises(model, example, tune):
    raise RuntimeError("no such thing\nand more")


def refuses(model, example, tune):
    raise NotImplementedError("torch_blocked::optimize: expected another model, got this")


def killed(model, example, tune):
    os.kill(os.getpid(), signal.SIGSEGV)


def ends(model, example, tune):
    print("a last word", file=sys.stderr, flush=True)
    os._exit(3)


def hangs(model, example, tune):
    time.sleep(600)


def chatters(model, example, tune):
    print("not for the parent")
    return eager(model, example, tune)


for form in (off, renamed, raises, refuses, killed, ends, hangs, chatters):
    FORMS[form.__name__] = form
