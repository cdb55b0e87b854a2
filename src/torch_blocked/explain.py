"""`torch_blocked.explain`: which layers of a model are blocked, what each costs, and why."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from torch_blocked import _C
from torch_blocked.arguments import check_flag, check_model, checked_example
from torch_blocked.compare import compared
from torch_blocked.compile import OptimizedParts
from torch_blocked.environment import env
from torch_blocked.explain_eager import eager
from torch_blocked.explain_layers import (
    Alternative,
    Layer,
    Run,
    is_blocked_tag,
    roofs,
    split_reason,
)
from torch_blocked.optimize import optimize
from torch_blocked.optimized_module import OptimizedModule, Tune, _Instead
from torch_blocked.progress import Bar
from torch_blocked.text_table import written

_DATA = "/*DATA*/null"
_RUNS = 3  # the least time of each step counts
_CHOSEN = "nothing: no other is faster in all"
_LEAST_US = 0.5  # what three digits of a millisecond can show
_TOGETHER = "keep such ops together, so that there are two reorders in all"


@dataclass
class Explanation:
    """The result of `explain`: the runs `optimized` and `eager`, with their layers and reorders.

    `layers` and `reorders` are those of `optimized`."""

    name: str
    optimized: Run
    eager: Run
    roofs: dict[str, float]

    @property
    def layers(self) -> list[Layer]:
        return self.optimized.layers

    @property
    def reorders(self) -> list[Layer]:
        return self.optimized.reorders

    def table(self) -> str:
        """Both runs as aligned text, a line for each layer; times in milliseconds."""
        return f"optimized\n{self.optimized.table()}\n\neager\n{self.eager.table()}"

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON text, also written to a file if a path is given. "runs" has the
        layers, "roofs" the machine's GFLOP/s and GB/s."""
        runs = {
            name: {"note": run.note, "layers": [each.to_dict() for each in run.layers]}
            for name, run in (("optimized", self.optimized), ("eager", self.eager))
        }
        machine = {key: env()[key] for key in ("cpu", "isa")}
        content = {"name": self.name, "runs": runs, "roofs": self.roofs, "machine": machine}
        return written(json.dumps(content), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs no network, also written to a file if a path is given: the graph, a
        roofline plot and the table."""
        page = resources.files("torch_blocked").joinpath("explain_page.html").read_text()
        data = self.to_json().replace("<", "\\u003c")  # nothing in it ends the script
        return written(page.replace(_DATA, data), path)


def explain(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    tune: Tune = True,
    errors: bool = False,
) -> Explanation:
    """Explains each layer of a model: whether it is blocked, by which implementation, what other
    implementations would cost, and if it is not blocked, why.

    Runs `model` in evaluation mode, once op by op on blocked inputs and once optimized.

    model: a model to optimize, or a module that optimize() returned, which alone is explained then.
    example_inputs, example_kwargs: as for optimize().
    tune: as for optimize(). Unless it is False, implementations that did not run are measured too;
    if it is False, only their refusals are reported.
    errors: run the optimized model's ops in float64 too. Layers then have the errors that compare()
    would tell of the optimized model and of what it was made from.
    Raises what optimize() raises and, for errors, what compare() raises for a model that cannot be
    compared."""
    check_model("explain", model)
    check_flag("explain", "errors", errors)
    is_optimized = isinstance(model, OptimizedModule | OptimizedParts)
    if is_optimized and example_inputs == () and not example_kwargs:
        args, kwargs = getattr(model, "_example", ((), {}))
    else:
        args, kwargs = checked_example("explain", model, example_inputs, example_kwargs)
    with Bar("torch_blocked: explaining", 4) as bar:
        if isinstance(model, OptimizedModule | OptimizedParts):
            optimized: nn.Module = model
            original = model._model
        else:
            optimized = optimize(model, args, example_kwargs=kwargs, tune=tune)
            original = model
        bar.update()
        run = planned(optimized, args, kwargs, errors)
        bar.update()
        none = Run([], "no model is kept")
        by_ops = none if original is None else eager(original, args, kwargs)
        bar.update()
        measured = roofs()
        bar.update()
    name = type(original if original is not None else optimized).__name__
    return Explanation(name, run, by_ops, measured)


def planned(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], errors: bool = False
) -> Run:
    """The steps of an optimized model for these arguments."""
    if isinstance(model, OptimizedParts):
        return _of_parts(model, args, kwargs, errors)
    assert isinstance(model, OptimizedModule)
    form, call = model._form_for(args, kwargs)
    if isinstance(form, _Instead):
        parts = model._parts_for(form)
        if parts is None:
            return Run([], f"the model itself runs, because {form.reason}")
        return planned(parts, args, kwargs, errors)
    run = Run(_layers(form.compiled, call.inputs))
    run.count_reorders()
    for row in compared(model, form, call, form.captured).rows if errors else ():
        layer = run.layers[row.step]
        layer.error = max(layer.error or 0.0, row.error)
        layer.added = max(layer.added or 0.0, row.added)
    if model.choice != "blocked":
        what = "the model's own ops run" if model.choice == "dense" else "the model itself runs"
        run.note = f"{what}, because they were {model.reason}; this is the plan that does not"
    return run


def _of_parts(
    model: OptimizedParts, args: tuple[Any, ...], kwargs: dict[str, Any], errors: bool
) -> Run:
    with torch.no_grad():
        model(*args, **kwargs)
    if not model._compiles:
        return Run([], f"the model itself runs, because {model._reason}")
    run = Run([], f"runs in {len(model._parts)} parts, because {model._reason}")
    for part in model._parts:
        first = len(run.layers)
        for layer in planned(part, *part._example, errors).layers:
            layer.reads = [at + first if at >= 0 else at for at in layer.reads]
            run.layers.append(layer)
    return run


def _layers(compiled: _C.Compiled, inputs: _C.Inputs) -> list[Layer]:
    layers: list[Layer] = []
    made: dict[int, int] = {}
    reports = [compiled.report(inputs) for _ in range(_RUNS)]
    for i, more in enumerate(compiled.explain(inputs)):
        step = reports[0][i]
        _, format_out, dims_out, dtype = more.writes[0]
        images = [each for each in more.reads if each[1]] or more.reads
        layer = Layer(
            module=step.module,
            op=step.op.replace("aten::", ""),
            kind="layer" if more.is_node else "reorder",
            dims_in=[each[2] for each in more.reads],
            dims_out=dims_out,
            dtype=str(dtype).removeprefix("torch."),
            format_in=images[0][1] if images else "",
            format_out=format_out,
            implementation=step.implementation,
            ms=min(each[i].microseconds for each in reports) / 1e3,
            reads=list(dict.fromkeys(made.get(each[0], -1) for each in more.reads)),
            line=step.line,
            flops=step.flops,
            bytes=step.bytes,
            alternatives=[Alternative(*each) for each in more.rivals]
            + [Alternative("", tag, more_us, whole=True) for tag, more_us in more.formats],
        )
        layer.blocked = is_blocked_tag(layer.format_in + format_out) and more.is_node
        layer.reason, layer.advice = split_reason(step.why)
        if not layer.blocked and more.kind != "boxed" and more.is_node:
            layer.reason, layer.advice = _why_plain(layer, more)
        for slot, *_ in more.writes:
            made[slot] = len(layers)
        layers.append(layer)
    return layers


def _why_plain(layer: Layer, step: _C.StepExplanation) -> tuple[str, str]:
    """Why a step is not blocked, and what to do: it could be, or it works on plain memory only."""
    blocked = next((each for each in step.formats if is_blocked_tag(each[0])), None)
    if blocked is None and step.is_fixed:
        return f"{layer.op} works on plain memory", _TOGETHER
    if blocked is None:
        return "what it reads is plain, and other formats were not timed", "use tune=True"
    tag, microseconds = blocked
    limits: dict[str, list[str]] = {}
    for each in layer.alternatives:
        if each.format == tag and each.refusal and not each.refusal.startswith("is for"):
            limits.setdefault(each.refusal, []).append(each.implementation)
    told = ", ".join(f"{' and '.join(names)} {limit}" for limit, names in limits.items())
    why = f" ({told})" if told else ""
    if microseconds == float("inf"):
        return f"no {tag} kernel{why}", ""
    more = "as long" if microseconds < _LEAST_US else f"{microseconds / 1e3:.3f} ms more"
    return f"{tag} would take {more} in all{why}", _CHOSEN
