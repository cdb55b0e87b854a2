"""`torch.compile(model, backend="torch_blocked")`: each graph that Dynamo finds, optimized.

Parameters that Dynamo passes in are constants of the graph until somebody writes to them.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from torch_blocked import _C, forks, module_paths, structure
from torch_blocked.arguments import checked_paths
from torch_blocked.calls import checked_inputs, refuse_tracing
from torch_blocked.captured import CaptureError
from torch_blocked.optimized_module import (
    OptimizedModule,
    Tune,
    check_dtype,
    check_tune,
)
from torch_blocked.refusals import (
    refuse_conversion,
    refuse_in_parts,
    refuse_state_dict,
    refuse_training,
)
from torch_blocked.state import unchanged, version_of
from torch_blocked.submodules import Submodules


@dataclass(frozen=True)
class _Place:
    """Where a graph of Dynamo comes from: the path of the module whose forward it is, and the
    modules inside that."""

    within: str
    parts: dict[str, str]

    @classmethod
    def here(cls) -> _Place:
        return cls(module_paths.by_frames(), module_paths.parts_by_frames())


class _WithParameters(nn.Module):
    """A graph module with some of its inputs bound."""

    graph: fx.GraphModule

    def __init__(
        self, graph: fx.GraphModule, bound: dict[int, Tensor], count: int, place: _Place
    ) -> None:
        super().__init__()
        self.graph, self.place = graph, place
        self.positions = list(bound)
        self.count = count
        for position, tensor in bound.items():
            self.register_buffer(f"bound{position}", tensor.detach())

    def forward(self, *args: Any) -> Any:
        free = iter(args)
        values = [
            getattr(self, f"bound{i}") if i in self.positions else next(free)
            for i in range(self.count)
        ]
        if _C.Recorder.is_running():
            return _Located(self.graph, self.place).run(*values)
        return self.graph(*values)


class _Located(fx.Interpreter):
    """Runs a graph of Dynamo, which calls no modules, and says which module each node is from."""

    def __init__(self, graph: fx.GraphModule, place: _Place) -> None:
        super().__init__(graph)
        self.place = place

    def run_node(self, n: fx.Node) -> Any:
        inner = module_paths.of_node(n.meta.get("nn_module_stack"), self.place.parts)
        path = ".".join(filter(None, (self.place.within, inner)))
        line = module_paths.line_of_node(n.meta.get("stack_trace"))
        with module_paths.entered(path, line):
            return super().run_node(n)


class OptimizedParts(nn.Module):
    """A model that no single graph describes, because Python decides on values, say. If modules
    that can be captured hold most of its layers, these are optimized (submodules.py). Otherwise
    torch.compile cuts the model, and each part is optimized when it first runs."""

    _model: nn.Module
    _submodules: Submodules | None
    _compiled: Callable[..., Any] | None

    def __init__(
        self,
        model: nn.Module,
        reason: str,
        *,
        tune: Tune = True,
        dtype: torch.dtype | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # no submodule: its parameters stay its own
        self._reason, self._compiles = reason, True
        if isinstance(model, torch.jit.ScriptModule):  # torch.compile does not take these
            self._run_itself()
        self._parts: list[OptimizedModule] = []
        self._paths: list[str] = []
        self._settings: dict[str, Any] = {"tune": tune, "dtype": dtype, "keep": keep}
        make = functools.partial(OptimizedModule, **self._settings)
        self._submodules, self._is_settled = Submodules(model, make), False
        object.__setattr__(self, "_compiled", None)
        self._lock = forks.lock()
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's. Raises TypeError for tensors without memory of their own."""
        compiles = self._compiles and not _C.Recorder.is_running()
        if compiles:
            refuse_tracing()
            leaves = structure.flatten((args, kwargs))[0]
            checked_inputs(leaves)
            # torch.compile takes a NumPy array for a tensor. The model itself may refuse it.
            compiles = not any(type(each).__module__ == "numpy" for each in leaves)
        with torch.no_grad():
            if not compiles:
                return self._model(*args, **kwargs)
            self.settle(*args, **kwargs)
            if self._submodules is not None:
                return self._submodules(*args, **kwargs)
            return self._by_dynamo(*args, **kwargs)

    def settle(self, *args: Any, **kwargs: Any) -> None:
        """The first time, decides how the model is taken apart, by a run for these arguments that
        leaves the model as it was. Raises what the model raises."""
        with self._lock:
            if self._is_settled or self._submodules is None:
                return
            with torch.no_grad(), unchanged(self._model), torch.random.fork_rng(devices=[]):
                self._submodules(*args, **kwargs)
            if not self._compiles:
                self._submodules = None
            elif self._submodules.are_worth_it():
                self._paths, self._parts = map(list, zip(*self._submodules.parts(), strict=True))
            else:
                self._submodules = None
                compiler = functools.partial(backend, options=self._settings, parts=self._parts)
                compiled = torch.compile(self._model, backend=compiler)
                object.__setattr__(self, "_compiled", compiled)
            self._is_settled = True

    def _by_dynamo(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            result = self._model(*args, **kwargs)  # its own error is the best one
            self._give_up(error)
            return result

    def _give_up(self, error: Exception) -> None:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._reason = f"torch.compile cannot trace it: {reason}"
        self._run_itself()

    def _run_itself(self) -> None:
        self._compiles = False
        warnings.warn(
            f"torch_blocked::optimize: the model itself runs, because {self._reason}", stacklevel=5
        )

    def train(self, mode: bool = True) -> OptimizedParts:
        """Only train(False), which does nothing. Raises NotImplementedError otherwise."""
        if mode:
            refuse_training()
        return self

    @property
    def choice(self) -> str:
        """What runs: "parts", or "model" if torch.compile cannot trace the model either."""
        return "parts" if self._compiles else "model"

    @property
    def reason(self) -> str:
        """Why the model is not captured whole."""
        return self._reason

    def steps(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ValueError: each part has steps of its own, which plan() shows."""
        refuse_in_parts(self._reason, "plan() shows these", ValueError)

    def release(self) -> NoReturn:
        """Raises ValueError: the model's own code runs between the parts, on its weights."""
        refuse_in_parts(self._reason, "there is nothing to release", ValueError)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: it has no parameters of its own."""
        refuse_state_dict()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError, as state_dict() does."""
        refuse_state_dict()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OptimizedParts:
        """Allows only calls that change nothing. Raises NotImplementedError for other types and
        devices."""
        refuse_conversion(fn)
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises NotImplementedError, as save() does."""
        refuse_in_parts(self._reason, "copy the model", NotImplementedError)

    def plan(self) -> str:
        """The reason, and the plans of the parts that have run, in the order of their first run."""
        if not self._compiles:
            return f"runs: the model itself, because {self._reason}"
        title = f"runs in {len(self._parts)} parts, because {self._reason}"
        plans = [part.plan() for part in self._parts]
        if self._paths:
            plans = [f"{path}\n{plan}" for path, plan in zip(self._paths, plans, strict=True)]
        return "\n\n".join([title, *plans])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises NotImplementedError: Python code lies between the parts."""
        refuse_in_parts(self._reason, "save the model", NotImplementedError)


def _ask_tensors_for_data(graph: fx.GraphModule) -> bool:
    """Makes the graph read .data from the tensor itself, so that a blocked tensor notices it and
    may expect uncounted writes. Returns whether the graph takes .data at all."""
    taken = [n for n in graph.graph.nodes if n.target is torch._C._autograd._get_data_attr]  # type: ignore[attr-defined]
    for node in taken:
        node.target, node.args = getattr, (node.args[0], "data")
    if taken:
        graph.recompile()
    return bool(taken)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    unknown = options.keys() - {"tune", "dtype", "keep"}
    if unknown:
        raise ValueError(
            "torch_blocked::compile: expected the options 'tune', 'dtype' and 'keep', got "
            f"{', '.join(map(repr, sorted(unknown)))}; leave others out"
        )
    settings = {"tune": True, "dtype": None, "keep": ()} | options
    check_dtype(settings["dtype"])
    check_tune(settings["tune"])
    return settings | {"keep": checked_paths("compile", settings["keep"])}


def backend(
    graph: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    parts: list[OptimizedModule] | None = None,
) -> object:
    """The compiler that torch.compile calls. A graph that needs gradients, or that cannot be
    captured, runs as Dynamo wrote it. options: `tune`, `dtype` and `keep`, as for optimize().
    parts: collects the optimized modules. Raises ValueError for other options."""
    settings = _checked(options or {})
    place = _Place.here()
    bound = {
        i
        for i, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) or hasattr(value, "_dynamo_static_input_type")
    }
    takes_data = _ask_tensors_for_data(graph)
    versions: tuple[Any, ...] = ()
    optimized: OptimizedModule | None = None
    refused = False

    def build(args: tuple[Any, ...]) -> OptimizedModule | None:
        if takes_data:
            return None
        parameters = {i: args[i] for i in sorted(bound)}
        inputs = tuple(each for i, each in enumerate(args) if i not in bound)
        optimized = OptimizedModule(
            _WithParameters(graph, parameters, len(args), place).eval(),
            **settings,
        )
        try:
            optimized._prepare(inputs, {})
        except CaptureError:
            return None
        except TypeError:
            if parts is None:
                raise
            return None  # a tensor that the model made itself: the graph takes it
        return optimized

    def run(*args: Any) -> Any:
        nonlocal versions, optimized, refused
        needs_gradient = torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad for each in args
        )
        if needs_gradient or refused:
            return graph(*args)
        now = tuple((args[i].data_ptr(), version_of(args[i])) for i in sorted(bound))
        if optimized is None or now != versions:
            optimized, versions = build(args), now
            if optimized is None:
                refused = True
                return graph(*args)
            if parts is not None:
                parts.append(optimized)
        return optimized(*(each for i, each in enumerate(args) if i not in bound))

    return run
