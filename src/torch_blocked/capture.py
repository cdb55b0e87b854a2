"""How a model's forward becomes plain data (captured.py).

The forward runs once, and csrc/graph/capture/record.cpp notes the ops that it calls, in-place ones in their
functional form. That says all unless Python looks at a tensor's values, or memory is written that
others see; torch.export then traces the model (exported.py), which takes 0.6 s and 100 MiB of
modules on a ResNet-50 against 0.05 s.

What Python asks of sizes during the run is noted with the answers (watched.py). The capture holds
for all inputs that give the same answers, and for no others: those are captured anew. Symbolic
sizes are not used: they cost 2.7 s on a ResNet-50, and minutes where a model works out its own
padding.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_blocked import _C, module_paths, structure
from torch_blocked.captured import CONSTANTS, VALUE, Capture, CaptureError, Node, Ran, lifted
from torch_blocked.exported import exported
from torch_blocked.foreign import Untold, may_write_untold
from torch_blocked.state import Changes, State
from torch_blocked.tensor import BlockedTensor
from torch_blocked.verify import difference
from torch_blocked.watched import FreeQuestions, Watch, WatchedTensor

# Ops that see how memory lies, which is not the same in a plan.
_SEE_MEMORY = {"aten::as_strided", "aten::set_", "aten::resize_"}


def capture(
    model: nn.Module, args: tuple, kwargs: dict | None = None, *, dynamic: bool = True
) -> Capture:
    """The forward of `model`, which is in evaluation mode, for arguments like these; what it
    changes of the model and of its inputs is put back.

    Blocked arguments count as dense. Raises CaptureError if neither a run nor torch.export tells
    the forward, or if it changes what it computes from."""
    args, kwargs = pytree.tree_map_only(BlockedTensor, BlockedTensor.to_dense, (args, kwargs or {}))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            recorded = _recorded(model, args, kwargs)
            if recorded is None or _calls_unknown(recorded):
                _refuse_untold_writes(model, args, kwargs)
            captured = recorded or exported(model, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:  # torch.export raises many kinds
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(f"torch.export cannot trace it: {reason[0]}") from error
    for node in captured.nodes:
        if node.name in _SEE_MEMORY:
            raise CaptureError(f"{node.name} sees how memory lies")
    captured.fixed_sizes |= not dynamic
    return captured


def capture_part(
    module: nn.Module, args: tuple, kwargs: dict, path: str, *, dynamic: bool = True
) -> Capture:
    """The forward of a module among others, at `path` in their model. Raises CaptureError unless a
    run tells all of it, and nobody could tell that it did not run: it sets nothing, its results are
    memory of its own, and it reads no tensors but its arguments and weights."""
    state = State(module)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            captured = _record(module, args, kwargs, new_results=True)
            if captured is not None and _calls_unknown(captured):
                _refuse_untold_writes(module, args, kwargs)
        changes = state.changes()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"it cannot be recorded: {error}") from error
    finally:
        state.restore()
    if captured is None or changes or captured.lifted:
        raise CaptureError("its results are not all that it does, or depend on more than arguments")
    if any(node.name in _SEE_MEMORY for node in captured.nodes):
        raise CaptureError("it sees how memory lies")
    for node in captured.nodes:
        node.module = f"{path}.{node.module}".strip(".")
    captured.fixed_sizes |= not dynamic
    return captured


def capture_sizes(
    model: nn.Module, args: tuple, kwargs: dict | None = None, *, dynamic: bool = True
) -> Capture | None:
    """What capture() gives if the forward asks for no values, by a run that computes hardly any
    (csrc/graph/capture/sizes_only.cpp): it must be compared with a capture that was checked. None where
    values may matter: an error, a look at them, a change of the model, a constant of the run."""
    args, kwargs = pytree.tree_map_only(BlockedTensor, BlockedTensor.to_dense, (args, kwargs or {}))
    if not _are_plain(args, kwargs):
        return None
    state = State(model)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _C.SizesOnly():
            warnings.simplefilter("ignore")
            captured = _record(model, args, kwargs)
    except Exception:  # of a model that checks values, too
        return None
    finally:
        changes = state.changes()
        state.restore()
    if captured is None or changes or captured.lifted:
        return None
    if any(node.name in _SEE_MEMORY for node in captured.nodes):
        return None
    captured.fixed_sizes |= not dynamic
    captured.ran = None
    return captured


def _calls_unknown(captured: Capture) -> bool:
    return any(may_write_untold(node.name) for node in captured.nodes)


def _refuse_untold_writes(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Raises CaptureError if an op writes what its schema does not say, by another run: neither the
    recorder nor torch.export would know."""
    args, kwargs = pytree.tree_map_only(Tensor, _copied, (args, kwargs))
    state, untold = State(model), Untold()
    try:
        with untold:
            model(*args, **kwargs)
    except Exception:
        if not untold.op:
            return  # an error of the model's, or of the mode: others say it
    finally:
        untold.put_back()
        state.restore()
    if untold.op:
        raise CaptureError(f"{untold.op} writes what its schema does not say")


def _are_plain(args: tuple, kwargs: dict) -> bool:
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    return all(
        type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided for each in leaves
    )


def _recorded(model: nn.Module, args: tuple, kwargs: dict) -> Capture | None:
    """What a run of the model calls; None if these ops are not all that it does.

    A second run must call the same, with what the first has left in the model and elsewhere: it may
    count calls. It is on other values, too, where tensors are of unknown origin, as these may come
    from the inputs' values. Raises CaptureError for a model that computes from earlier calls."""
    if not _are_plain(args, kwargs):
        return None
    state = State(model)
    try:
        first = _record(model, args, kwargs)
        changes = state.changes()
        others = pytree.tree_map_only(Tensor, _other_values, (args, kwargs))
        if first is None:
            state.restore()
            if not _repeats(model, (args, kwargs), others):
                raise CaptureError(_COMPUTES_FROM.format(_named(changes)))
            return None
        if not changes and not first.lifted and _calls_the_same(model, args, kwargs, first):
            return first
        again = _record(model, *others)
        if again is not None and again.same_as(first):
            if changes.attributes:
                first.sets_attributes = True
                first.notice = (
                    f"the forward sets {', '.join(sorted(changes.attributes)[:3])}, which its "
                    "results do not depend on; the optimized model does not set it"
                )
            return first
        if changes and again is not None:
            settled = _settled(model, state, (args, kwargs), others, again)
            if settled and not difference(first.ran.results, settled.ran.results, _SETTLED):
                return settled
        state.restore()
        is_script = isinstance(model, torch.jit.ScriptModule)
        if (changes and not is_script) or not _repeats(model, (args, kwargs), others):
            raise CaptureError(_COMPUTES_FROM.format(_named(changes)))
        # TorchScript writes a graph anew after its first runs: it calls other ops for the same.
        return first if is_script else None
    finally:
        state.restore()


_COMPUTES_FROM = "the forward changes {} and computes from it"


def _named(changes: Changes) -> str:
    return changes.first() if changes else "what no attribute holds"


def _calls_the_same(model: nn.Module, args: tuple, kwargs: dict, first: Capture) -> bool:
    """Whether another call does as the first did, by a run for its sizes only."""
    try:
        with _C.SizesOnly():
            again = _record(model, args, kwargs)
    except Exception:  # of a model that checks values, too
        return False
    return again is not None and again.same_as(first)


def _repeats(model: nn.Module, example: tuple, others: tuple) -> bool:
    """Whether two calls on the same inputs, with another between, have the same results: nothing is
    computed from earlier calls. Random numbers of torch's are the same for each."""
    results = []
    for args, kwargs in (example, others, example):
        args, kwargs = pytree.tree_map_only(Tensor, _copied, (args, kwargs))
        torch.manual_seed(0)
        try:
            results.append(structure.with_tensors(_copied, model(*args, **kwargs)))
        except Exception:  # it does not take the other values
            results.append(None)
    return results[0] is None or not difference(results[0], results[2], _SETTLED)


# What is kept is what the first call computed, and nothing is rounded differently.
_SETTLED = 1e-6


def _settled(
    model: nn.Module, state: State, example: tuple, others: tuple, again: Capture
) -> Capture | None:
    """The second call of a model that keeps at its first what follows from its parameters and from
    sizes, as biases of attention; None if later calls change it, too, or if it keeps values.

    again: a second call on `others`, the first having been on `example`; state: before both."""
    kept = State(model)
    second = _record(model, *example)
    if second is None or not second.same_as(again) or kept.changes():
        return None
    state.restore()
    for values in (others, example):
        third = _record(model, *values)
    if third is None or not third.same_as(second):
        return None
    second.sets_attributes = True
    return second


def _record(
    model: nn.Module, args: tuple, kwargs: dict, *, new_results: bool = False
) -> Capture | None:
    """One run of the model; None if its ops are not all that it does. new_results: raises
    CaptureError if a result is memory of an argument, a weight or another result."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))  # each of its own
    given = structure.flatten((args, kwargs))
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    metas = [(list(each.shape), each.dtype) for each in leaves]
    state = [*model.parameters(), *model.buffers()]
    recorder = _C.Recorder(leaves, state, WatchedTensor, module_paths.place)
    recorder.start()
    try:
        paths = module_paths.known(), module_paths.from_here()
        watched = Watch(recorder.ask, recorder.is_constant, recorder.expose)
        with watched as watch, FreeQuestions(), paths[0], paths[1]:
            results = model(*args, **kwargs)
        # Before what it wrote is put back: a result may be memory of an input.
        recorder.stop(WatchedTensor)
        ran = Ran(structure.with_tensors(_copied, results), recorder.seconds_in_ops())
    finally:
        try:
            recorder.stop(WatchedTensor)  # raises what the forward was to end with
        finally:
            recorder.restore()
    if not _are_same(given, structure.flatten((args, kwargs))):
        raise CaptureError("the forward changes what its arguments hold")
    results, out_spec = structure.flatten(results)
    if new_results and _share_memory(results, [*leaves, *state]):
        raise CaptureError("a result is memory of something else")
    if watch.takes_data:
        raise CaptureError("the forward takes .data of a tensor, through which it may write unseen")
    if recorder.refusal() and recorder.wrote_state():
        raise CaptureError("the model writes into its buffers or inputs")
    # What a model makes blocked has no values of its own here; torch.export sees inside.
    blocked = [*results, *recorder.constants().values()]
    if any(isinstance(each, BlockedTensor) for each in blocked):
        return None
    if watch.reads_values or recorder.refusal():
        return None
    # Before the calls and constants are asked for: a result may be one more of them.
    outputs = [_output(each, recorder) for each in results]
    if recorder.refusal():
        return None
    constants = {value: each.detach() for value, each in recorder.constants().items()}
    return Capture(
        nodes=[Node(*call) for call in recorder.calls()],
        inputs=list(range(len(leaves))),
        outputs=outputs,
        constants=constants,
        lifted=lifted(model, constants),
        input_metas=metas,
        metas=recorder.metas(),
        questions=sorted(set((value, what, tuple(a)) for value, what, a in recorder.questions())),
        fixed_sizes=watch.asks_strides or recorder.has_fixed_sizes(),
        out_spec=out_spec,
        ran=ran,
    )


def _are_same(before: tuple[list, object], now: tuple[list, object]) -> bool:
    """Whether arguments hold what they held."""
    return before[1] == now[1] and all(
        a is b or (not isinstance(a, Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(before[0], now[0], strict=True)
    )


def _share_memory(results: list, others: list[Tensor]) -> bool:
    made = [_memory(each) for each in results if isinstance(each, Tensor)]
    return any(
        torch._C._is_alias_of(each, other)
        for i, each in enumerate(made)
        for other in (*made[:i], *map(_memory, others))
    )


def _memory(tensor: Tensor) -> Tensor:
    return tensor._physical if isinstance(tensor, BlockedTensor) else tensor


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _output(result, recorder):
    if isinstance(result, Tensor):
        return [VALUE, recorder.value_of(result)]
    if not isinstance(result, (*CONSTANTS, torch.Size, slice, range)):
        raise CaptureError(f"the forward returns a {type(result).__name__}")
    return result


def _other_values(value: Tensor) -> Tensor:
    """Others that the model can take, too: of the same range."""
    if value.is_floating_point():
        return 0.75 * value.flip(list(range(value.dim())))
    return value.flatten()[:1].expand(value.numel()).view(value.shape)
