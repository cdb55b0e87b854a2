"""Models that count their calls, and where they can keep the count. Each returns the convolution of
its input plus the number of calls before."""

import collections
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


class Counting(nn.Module):
    """count() returns the number of calls before, and counts on."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x) + self.count()


class InNumber(Counting):
    calls = -1

    def count(self):
        self.calls += 1
        return self.calls


class InTensor(Counting):
    def __init__(self):
        super().__init__()
        self.calls = torch.zeros(())

    def count(self):
        now, self.calls = self.calls, self.calls + 1
        return now


class InTensorInPlace(InTensor):
    def count(self):
        self.calls.add_(1)
        return self.calls - 1


class InBuffer(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def count(self):
        now, self.calls = self.calls, self.calls + 1
        return now


class InBufferInPlace(InBuffer):
    def count(self):
        self.calls += 1
        return self.calls - 1


class InParameter(Counting):
    def __init__(self):
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def count(self):
        self.calls.add_(1)
        return self.calls - 1


class InList(Counting):
    def __init__(self):
        super().__init__()
        self.calls = []

    def count(self):
        self.calls.append(0)
        return len(self.calls) - 1


class InListOfTensors(Counting):
    def __init__(self):
        super().__init__()
        self.calls = [torch.zeros(())]

    def count(self):
        now, self.calls[0] = self.calls[0], self.calls[0] + 1
        return now


class InNestedList(Counting):
    def __init__(self):
        super().__init__()
        self.calls = {"of": {"all": [0]}}

    def count(self):
        counts = self.calls["of"]["all"]
        counts[0] += 1
        return counts[0] - 1


class InNestedTensor(Counting):
    def __init__(self):
        super().__init__()
        self.calls = {"of": [torch.zeros(())]}

    def count(self):
        self.calls["of"][0] += 1
        return self.calls["of"][0] - 1


class InDeque(Counting):
    def __init__(self):
        super().__init__()
        self.calls = collections.deque()

    def count(self):
        self.calls.append(0)
        return len(self.calls) - 1


class InCounter(Counting):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def count(self):
        self.calls["all"] += 1
        return self.calls["all"] - 1


class InArray(Counting):
    def __init__(self):
        super().__init__()
        self.calls = np.zeros(1)

    def count(self):
        self.calls[0] += 1
        return float(self.calls[0]) - 1


@dataclass
class Cache:
    calls: int = 0
    of_tensors: Tensor | None = None


class InObject(Counting):
    def __init__(self):
        super().__init__()
        self.cache = Cache()

    def count(self):
        self.cache.calls += 1
        return self.cache.calls - 1


class InTensorOfObject(Counting):
    def __init__(self):
        super().__init__()
        self.cache = Cache(0, torch.zeros(()))

    def count(self):
        now, self.cache.of_tensors = self.cache.of_tensors, self.cache.of_tensors + 1
        return now


class InSlots(Counting):
    class Slots:
        __slots__ = ("calls",)

    def __init__(self):
        super().__init__()
        self.slots = self.Slots()
        self.slots.calls = 0

    def count(self):
        self.slots.calls += 1
        return self.slots.calls - 1


class InIterator(Counting):
    def __init__(self):
        super().__init__()
        self.calls = itertools.count()

    def count(self):
        return next(self.calls)


class InClosure(Counting):
    def __init__(self):
        super().__init__()
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls - 1

        self.count = count


class InClosureOfTensor(Counting):
    def __init__(self):
        super().__init__()
        calls = torch.zeros(())

        def count():
            nonlocal calls
            now, calls = calls, calls + 1
            return now

        self.count = count


class InDefault(Counting):
    def __init__(self):
        super().__init__()

        def count(calls=[]):  # noqa: B006
            calls.append(0)
            return len(calls) - 1

        self.count = count


CALLS, CALLS_AS_TENSOR = 0, torch.zeros(())


class InGlobal(Counting):
    def __init__(self):
        super().__init__()
        global CALLS
        CALLS = 0

    def count(self):
        global CALLS
        CALLS += 1
        return CALLS - 1


class InGlobalTensor(Counting):
    def __init__(self):
        super().__init__()
        global CALLS_AS_TENSOR
        CALLS_AS_TENSOR = torch.zeros(())

    def count(self):
        global CALLS_AS_TENSOR
        now, CALLS_AS_TENSOR = CALLS_AS_TENSOR, CALLS_AS_TENSOR + 1
        return now


class InClass(Counting):
    calls = 0

    def __init__(self):
        super().__init__()
        type(self).calls = 0

    def count(self):
        type(self).calls += 1
        return self.calls - 1


class InPart(nn.Module):
    """In another module, which this one holds."""

    def __init__(self):
        super().__init__()
        self.part = InNestedList()

    def forward(self, x):
        return self.part(x)


PYTHON = [each for each in Counting.__subclasses__() if each is not InClass]
PYTHON = [*PYTHON, *InTensor.__subclasses__(), *InBuffer.__subclasses__(), InClass, InPart]


class ScriptNumber(nn.Module):
    calls: int

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x) + float(self.calls - 1)


class ScriptTensor(nn.Module):
    calls: Tensor

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.calls = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        now = self.calls
        self.calls = now + 1.0
        return self.conv(x) + now


class ScriptTensorInPlace(nn.Module):
    calls: Tensor

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.calls = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.conv(x) + (self.calls - 1.0)


class ScriptBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.conv(x) + (self.calls - 1.0)


class ScriptList(nn.Module):
    calls: list[int]

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(0)
        return self.conv(x) + float(len(self.calls) - 2)


class ScriptDict(nn.Module):
    calls: dict[str, Tensor]

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.calls = {"all": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:
        now = self.calls["all"]
        self.calls["all"] = now + 1.0
        return self.conv(x) + now


class ScriptEmpty(nn.Module):
    """As streaming models have it: the first call makes the state."""

    calls: Tensor

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.calls = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.calls) == 0:
            self.calls = torch.zeros(1)
        now = self.calls
        self.calls = now + 1.0
        return self.conv(x) + now


class ScriptNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = ScriptTensor()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


SCRIPTS = [
    ScriptNumber,
    ScriptTensor,
    ScriptTensorInPlace,
    ScriptBuffer,
    ScriptList,
    ScriptDict,
    ScriptEmpty,
    ScriptNested,
]


class AroundScript(nn.Module):
    """A script in a module of Python."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    def forward(self, x):
        return self.script(x).relu().add(0)


def scripted(kind, runs=0):
    """A script that has run before, so that TorchScript has made its optimized form, and whose
    count was set back; runs: how often."""
    script = torch.jit.script(kind().eval())
    fresh = torch.jit.script(kind().eval())
    for _ in range(runs):
        script(torch.zeros(1, 3, 8, 8))
    place = script.part if kind is ScriptNested else script
    if runs:
        before = fresh.part if kind is ScriptNested else fresh
        place.calls = before.calls
    return script


MODELS = {each.__name__: each for each in PYTHON}
MODELS |= {
    f"{each.__name__}-{runs}": lambda each=each, runs=runs: scripted(each, runs)
    for each in SCRIPTS
    for runs in (0, 4)
}
MODELS |= {
    f"around {each.__name__}": lambda each=each: AroundScript(scripted(each)) for each in SCRIPTS
}
