"""How a model's forward becomes plain data (captured.py).

The forward runs once, and csrc/graph/capture/record.cpp records the ops that it calls, in-place ops
in their functional form. This is the whole forward, unless Python looks at a tensor's values or
writes memory that other tensors share. Then torch.export traces the model (exported.py). For a
ResNet-50 that takes 0.6 s and 100 MiB of modules, and a recorded run takes 0.05 s.

The questions that Python asks about sizes are recorded with their answers (watched.py). The capture
serves all inputs that give the same answers; others are captured when they come. Symbolic sizes are
not used: they cost 2.7 s on a ResNet-50, and minutes for a model that computes its own padding.
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
from torch_blocked.refusals import is_out_of_memory
from torch_blocked.shadow import DenseView
from torch_blocked.state import Changes, State
from torch_blocked.tensor import BlockedTensor
from torch_blocked.verify import difference
from torch_blocked.watched import FreeQuestions, Watch, WatchedTensor

# Ops whose results depend on strides, which differ in a plan.
_SEE_MEMORY = {"aten::as_strided", "aten::set_", "aten::resize_"}


def capture(
    model: nn.Module, args: tuple, kwargs: dict | None = None, *, dynamic: bool = True
) -> Capture:
    """The forward of `model`, which is in evaluation mode, for arguments like these. Its changes to
    the model and to the inputs are put back.

    Blocked arguments count as dense. Raises CaptureError if neither a run nor torch.export can
    capture the forward, or if the forward changes what it computes from."""
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
            if is_out_of_memory(error):
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CaptureError(f"torch.export cannot trace it: {reason[0]}") from error
    for node in captured.nodes:
        if node.name in _SEE_MEMORY:
            raise CaptureError(f"{node.name} depends on strides")
    captured.fixed_sizes |= not dynamic
    return captured


def capture_part(
    module: nn.Module, args: tuple, kwargs: dict, path: str, *, dynamic: bool = True
) -> Capture:
    """The forward of one module, at `path` in its model. Raises CaptureError unless a run records
    all of it, and the rest of the model cannot tell whether it ran: it sets nothing, its results
    have memory of their own, and it reads only its arguments and weights."""
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
        if is_out_of_memory(error):
            raise
        raise CaptureError(f"it cannot be recorded: {error}") from error
    finally:
        state.restore()
    if captured is None or changes or captured.lifted:
        raise CaptureError("its results are not all that it does, or depend on more than arguments")
    if any(node.name in _SEE_MEMORY for node in captured.nodes):
        raise CaptureError("it depends on strides")
    for node in captured.nodes:
        node.module = f"{path}.{node.module}".strip(".")
    captured.fixed_sizes |= not dynamic
    return captured


def capture_sizes(
    model: nn.Module, args: tuple, kwargs: dict | None = None, *, dynamic: bool = True
) -> Capture | None:
    """What capture() gives if the forward asks for no values, by a run that computes hardly any
    (csrc/graph/capture/sizes_only.cpp): it must be compared with a capture that was checked. None
    where values may matter: an error, a look at them, a change of the model, a constant of the
    run."""
    args, kwargs = pytree.tree_map_only(BlockedTensor, BlockedTensor.to_dense, (args, kwargs or {}))
    if not _are_plain(args, kwargs):
        return None
    state = State(model)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _C.SizesOnly():
            warnings.simplefilter("ignore")
            captured = _record(model, args, kwargs)
    except Exception:  # a model may check values, which are zeros here
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
    """Raises CaptureError if an op writes to arguments that its schema does not mark as written.
    That takes another run, because neither the recorder nor torch.export notices."""
    args, kwargs = pytree.tree_map_only(Tensor, _copied, (args, kwargs))
    state, untold = State(model), Untold()
    try:
        with untold:
            model(*args, **kwargs)
    except Exception:
        if not untold.op:
            return  # an error of the model, or of the mode, which a later run reports
    finally:
        untold.put_back()
        state.restore()
    if untold.op:
        raise CaptureError(f"{untold.op} writes arguments, which its schema does not say")


def _are_plain(args: tuple, kwargs: dict) -> bool:
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    return all(
        type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided for each in leaves
    )


def _recorded(model: nn.Module, args: tuple, kwargs: dict) -> Capture | None:
    """The ops that a run of the model calls; None if these are not all that it does.

    A second run, after the changes of the first, must call the same ops, because the model may
    count its calls. If tensors of unknown origin appear, the second run has other input values,
    because these tensors may depend on them. Raises CaptureError for a model that computes from
    earlier calls."""
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
        # TorchScript rewrites its graph after the first runs, and then calls other ops.
        return first if is_script else None
    finally:
        state.restore()


_COMPUTES_FROM = "the forward changes {} and computes from it"


def _named(changes: Changes) -> str:
    return changes.first() if changes else "what no attribute holds"


def _calls_the_same(model: nn.Module, args: tuple, kwargs: dict, first: Capture) -> bool:
    """Whether another call does the same as the first, by a run for sizes only."""
    try:
        with _C.SizesOnly():
            again = _record(model, args, kwargs)
    except Exception:  # a model may check values, which are zeros here
        return False
    return again is not None and again.same_as(first)


def _repeats(model: nn.Module, example: tuple, others: tuple) -> bool:
    """Whether two calls on the same inputs, with another call between, have the same results. Then
    nothing is computed from earlier calls. Each call draws the same random numbers from torch."""
    results = []
    for args, kwargs in (example, others, example):
        args, kwargs = pytree.tree_map_only(Tensor, _copied, (args, kwargs))
        torch.manual_seed(0)
        try:
            results.append(structure.with_tensors(_copied, model(*args, **kwargs)))
        except Exception:  # it does not take the other values
            results.append(None)
    return results[0] is None or not difference(results[0], results[2], _SETTLED)


# Kept values are those that the first call computed, so nothing is rounded differently.
_SETTLED = 1e-6


def _settled(
    model: nn.Module, state: State, example: tuple, others: tuple, again: Capture
) -> Capture | None:
    """The second call of a model whose first call keeps something that depends only on parameters
    and sizes, such as biases of attention. None if later calls change it too, or if it depends on
    the inputs' values.

    again: a second call, on `others`; the first was on `example`. state: before both."""
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
    own = BlockedTensor, DenseView
    recorder = _C.Recorder(leaves, state, WatchedTensor, own, module_paths.place)
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
            recorder.stop(WatchedTensor)  # raises an interrupt that came while the forward ran
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
    # The recorder cannot see into blocked tensors that the model makes; torch.export can.
    blocked = [*results, *recorder.constants().values()]
    if any(isinstance(each, BlockedTensor) for each in blocked):
        return None
    if watch.reads_values or recorder.refusal():
        return None
    # First the outputs, then calls and constants: a result may add a constant.
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
    """Other values of the same range, which the model should take too."""
    if value.is_floating_point():
        return 0.75 * value.flip(list(range(value.dim())))
    return value.flatten()[:1].expand(value.numel()).view(value.shape)
