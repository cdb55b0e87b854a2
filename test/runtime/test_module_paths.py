"""Modules by their paths: in eager, and in what captures and plans say of their nodes."""

import gc
import inspect
import os
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.nets import Block
from torch import nn
from torch.nn.modules import module as hooks

import torch_blocked
from torch_blocked import module_paths
from torch_blocked.capture import capture
from torch_blocked.ops import fallback
from torch_blocked.optimized_module import OptimizedModule


class Net(nn.Module):
    """A block called twice, and an op in no part of the model."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = Block(3, 8), nn.Sequential(Block(8, 8), nn.MaxPool2d(2))

    def forward(self, x):
        x = self.rest[0](self.first(x))
        return torch.softmax(self.rest(x), 1)


IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SOFTMAX_LINE = f"{__file__}:{inspect.getsourcelines(Net.forward)[1] + 2}"
RUNS = ["first", "first.conv", "first.norm", "rest.0", "rest.0.conv", "rest.0.norm"]
RUNS += ["rest", "rest.0@1", "rest.0.conv@1", "rest.0.norm@1", "rest.1"]


@pytest.fixture
def net():
    return Net().eval()


def paths_of(model, *inputs):
    """The paths of the modules that a call runs, as each begins."""
    seen = []
    with module_paths.known():
        note = hooks.register_module_forward_pre_hook(
            lambda *_: seen.append(module_paths.current())
        )
        try:
            with torch.no_grad():
                model(*inputs)
        finally:
            note.remove()
    return seen


def test_the_module_that_runs_is_known_by_its_path(net):
    assert paths_of(net, IMAGE) == ["", *RUNS]
    assert paths_of(net, IMAGE) == ["", *RUNS]  # calls are counted anew


def test_nothing_is_installed_when_nobody_asks(net):
    with module_paths.known(), module_paths.known():
        assert len(hooks._global_forward_pre_hooks) == 1
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
    net(IMAGE)
    assert module_paths.current() == ""


@pytest.mark.parametrize("users_own", [False, True])
def test_compiled_modules_are_warned_of_the_users_hooks_only(net, users_own):
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        own = [hooks.register_module_forward_hook(lambda *_: None)] if users_own else []
        try:
            with module_paths.known():
                compiled(IMAGE)
        finally:
            for each in own:
                each.remove()
        assert warnings.filters == before
    assert any("global hooks" in str(each.message) for each in told) == users_own


def test_a_forward_that_raises_leaves_its_modules(net):
    with module_paths.known():
        with pytest.raises(RuntimeError):
            net(torch.randn(1, 5, 8, 8))
        assert module_paths.current() == ""
        assert paths_of(net, IMAGE) == ["", *RUNS]


def test_each_thread_has_its_own(net):
    seen = {}
    both = threading.Barrier(2)

    class Waits(nn.Module):
        def forward(self, x):
            both.wait()  # both threads are inside
            seen[threading.get_ident()] = module_paths.current()
            return x

    def run(name):
        model = nn.Module()
        model.forward = lambda x: getattr(model, name)(x)
        model.add_module(name, Waits())
        model(IMAGE)

    with module_paths.known():
        threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert module_paths.current() == ""
    assert sorted(seen.values()) == ["one", "two"]


OF_NODES = [
    ("first.conv", "conv2d"),
    ("first.norm", "batch_norm"),
    ("first", "relu"),
    ("rest.0.conv", "conv2d"),
    ("rest.0.norm", "batch_norm"),
    ("rest.0", "relu"),
    ("rest.0.conv@1", "conv2d"),
    ("rest.0.norm@1", "batch_norm"),
    ("rest.0@1", "relu"),
    ("rest.1", "max_pool2d"),
    ("", "softmax"),
]


class ReadsValues(Net):
    """No noted run tells this forward, so torch.export traces it."""

    def forward(self, x):
        x = x + torch.tensor(x.shape).tolist()[0]
        x.data_ptr() if not torch.compiler.is_exporting() else None
        return super().forward(x)


@pytest.mark.parametrize("model", [Net, ReadsValues])
def test_nodes_of_a_capture_carry_module_and_line(model):
    nodes = capture(model().eval(), (IMAGE,)).nodes
    found = [(node.module, node.name.removeprefix("aten::")) for node in nodes]
    assert found[-len(OF_NODES) :] == OF_NODES
    assert nodes[-1].line == SOFTMAX_LINE


# The activations and norms are in their convolutions.
OF_STEPS = {"first.conv", "rest.0.conv", "rest.0.conv@1", "rest.1", ""}


def steps_of(optimized):
    call = optimized._call(*optimized._example)
    return optimized._find(call).compiled.report(call.inputs)


def test_steps_of_a_plan_carry_them_through_a_file(net, tmp_path):
    optimized = torch_blocked.optimize(net, IMAGE, tune=False)
    steps = steps_of(optimized)
    assert {step.module for step in steps} == OF_STEPS
    assert any(step.line == SOFTMAX_LINE for step in steps)
    # A reorder has the module of the step that it is for.
    assert all(step.module in OF_STEPS for step in steps if "reorder" in step.op)
    optimized.save(tmp_path / "net.pt")
    loaded = torch_blocked.load(tmp_path / "net.pt")
    # Lines without the folders of the machine that saved them.
    assert [(s.op, s.module, s.line) for s in steps_of(loaded)] == [
        (s.op, s.module, os.path.basename(s.line)) for s in steps
    ]


def test_parts_that_torch_compile_finds_carry_them(net):
    parts = []

    def backend(graph, example_inputs):
        from torch_blocked.compile import backend

        return backend(graph, example_inputs, parts=parts)

    with torch.no_grad():
        torch.compile(net, backend=backend)(IMAGE)
    [part] = parts
    assert isinstance(part, OptimizedModule)
    assert {step.module for step in steps_of(part)} == OF_STEPS


def test_a_sentence_has_its_place_while_dynamo_traces(monkeypatch):
    class Resizes(nn.Module):
        def forward(self, x):
            return nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear")

    monkeypatch.setattr(fallback, "_warned", set())
    with pytest.warns(UserWarning, match=r"_unsafe_index.* runs on a dense copy of .*test_module"):
        torch.compile(Resizes(), backend="eager", dynamic=True)(IMAGE.to_blocked())


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.is_in, self.may_leave = threading.Event(), threading.Event()

    def forward(self, x):
        self.is_in.set()
        self.may_leave.wait()
        return x


def test_a_module_that_outlasts_its_profile_is_forgotten():
    """Nobody sees it leave: it is not kept, and is not the model of what its thread runs next."""
    model = Waits()
    alive, is_in, may_leave = weakref.ref(model), model.is_in, model.may_leave
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

    def outlast(model):
        model(torch.zeros(1))

    def next_model():
        with torch_blocked.profile() as report:
            for _ in range(3):
                net(torch.zeros(1, 3, 8, 8).to_blocked())
        return report.table()

    with ThreadPoolExecutor(1) as pool:
        with torch_blocked.profile():
            left = pool.submit(outlast, model)
            is_in.wait()
        may_leave.set()
        left.result()
        del model, left
        gc.collect()
        assert alive() is None
        assert "@" not in pool.submit(next_model).result()
