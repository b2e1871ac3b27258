"""One real run of a step, recorded: which operation took which values from which.

Every torch function call is seen (a ``TorchFunctionMode`` sits above autograd, so the tensors are the user's own
objects), inside modules and between them, and every call of a module's ``forward``. Recorded are *bound* operations:
those that depend on a parameter, directly or not. What depends on the batch alone is *free*: each stage can do it by
itself. A dispatch mode below watches for tensors made by what the function mode does not see: *opaque* operations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_smddp._compat.torch import (
    CAST,
    DispatchMode,
    checkpoint_region,
    visible_autograd_functions,
    without_torch_function,
    without_torch_functions,
    write_count,
)
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.ops import (
    Kind,
    asks_for_device,
    device_answer,
    is_in_compiled_code,
    is_inplace,
    kind_of,
    name_of,
    sets_flag,
    user_location,
)
from lightning_smddp.pipeline.capture.preserve_state import WrittenMemory
from lightning_smddp.pipeline.capture.records import Call, Event, Trace, each_once
from lightning_smddp.pipeline.capture.tracking import Tracking, is_plain
from lightning_smddp.pytree import leaves, map_leaves, tensors
from lightning_smddp.seeding import (
    Forward,
    Generators,
    SeededCall,
    drawing_candidates,
    forward_patches,
    same,
)

_NOTHING = torch.empty(0)

StepCall: TypeAlias = Callable[[], Any]
"""Runs the user's step on one micro-batch, and returns what that returns."""
Fetch: TypeAlias = Callable[[str], Tensor]
"""The values of a parameter, by its first name."""


def now(device: torch.device) -> float:
    """Seconds at which ``device`` has done what it was given so far.

    On a CPU without those in which others had the processor: of the thread that asks, which takes part in all work. Of
    another device's work the host's processor time says nothing.
    """
    if device.type == "cpu":
        return time.thread_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def trace(step: StepCall, module: nn.Module, device: torch.device, fetch: Fetch | None = None) -> Trace:
    """Run ``step`` once or a few times and record it. ``module`` is the root whose parameters and submodules it uses.

    Random states (torch's, Python's and numpy's) are put back. The step's other effects (buffers, attributes) are the
    caller's to undo.

    Args:
        step: what to run.
        module: see above.
        device: where its tensors are.
        fetch: called for each parameter that an operation uses, in the same order on every rank, gives its values on
            ``device`` by its first name: for models that are not whole here. Nothing is kept for a backward then.
    """
    changed_buffers: set[str] = set()
    generators = Generators(module, device)
    written = WrittenMemory(module)
    # What reads buffers before they change has to be recorded, too: if a run finds such buffers, the step runs again.
    try:
        while True:
            with generators.preserved():
                generators.seed(torch.initial_seed())  # as before each run: what was drawn before is not the step's
                result = _Tracer(module, device, changed_buffers, fetch, generators, written).run(step)
            if result.changed_buffers <= changed_buffers:
                result.external_writes = tuple(written.locations())
                return result
            changed_buffers |= result.changed_buffers
    finally:
        written.put_back()


class _OfThread(threading.local):
    """``tracer``: that of the step that runs in this thread."""

    tracer: _Tracer | None = None


_active = _OfThread()


def is_tracing() -> bool:
    """Whether a step is traced in this thread."""
    return _active.tracer is not None


def depends_on_module(value: Any) -> bool:
    """Whether there is a tensor in ``value`` that depends on a parameter in the step that is traced; False without."""
    tracer = _active.tracer
    return tracer is not None and any(tracer.find_tracked(tensor) is not None for tensor in tensors(value))


def open_modules(reason: str) -> None:
    """Let no module whose forward runs now be placed whole. Nothing happens where no step is traced."""
    if _active.tracer is not None:
        _active.tracer.refuse_whole(f"{reason}, at {user_location()}")


class _Tracer(TorchFunctionMode, Tracking):
    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        changed_buffers: Collection[str],
        fetch: Fetch | None,
        generators: Generators,
        written: WrittenMemory,
    ) -> None:
        TorchFunctionMode.__init__(self)
        Tracking.__init__(self, module, changed_buffers, borrows=fetch is not None)
        self.module = module
        self.modules = dict(module.named_modules())
        self.device = device
        self.fetch = fetch
        self.written = written
        self.inside = False  # a function that was seen
        self.busy = False  # with our own bookkeeping
        self.lent: dict[int, str] = {}  # by `fetch`, for one operation
        self.regions: list[object] = []  # of `torch.utils.checkpoint`, kept so that no two have one identity
        self.generators = generators
        self.seeded_names = frozenset(drawing_candidates(module))
        self.python_states = self._states_of_python()
        self.bound_draws: tuple[Any, ...] = ()  # functions that drew since the last call of a module began or ended

    def run(self, step: StepCall) -> Trace:
        saving: AbstractContextManager[Any] = nullcontext()
        if self.fetch is not None:  # no backward will come
            saving = saved_tensors_hooks(lambda _: _NOTHING, lambda _: _NOTHING)
        buffers = dict(self.module.named_buffers())
        outer, _active.tracer = _active.tracer, self
        try:
            # The order of modes: the function mode, entered last, sees the user's calls; the dispatch mode below sees
            # what they come to, and operators that no function announces (C++ extensions).
            with (
                visible_autograd_functions(),
                torch.compiler.set_stance("force_eager"),  # else compiled code would leave our modes out
                saving,
                patched(forward_patches(self.module, self._wrap, [name for name in self.modules if name])),
                _Dispatched(self),
                self,
            ):
                result = step()
        finally:
            _active.tracer = outer
        present = dict(self.module.named_buffers())
        for name in {**buffers, **present}:
            if present.get(name) is not buffers.get(name):
                self.trace.refusals.append(
                    f"The step replaces buffer {name!r} by another tensor, or none (`self.buffer = ...`), which one "
                    "stage alone would have. Change it in place (`self.buffer.copy_(...)`), or in a hook."
                )
        self._note_python_draws()
        self.trace.returned = each_once(map(self.find, tensors(result)))
        return self.trace

    # ---- module calls ----

    def _wrap(self, name: str, forward: Forward) -> Forward:
        def traced(*args: Any, **kwargs: Any) -> Any:
            self._note_python_draws()
            if self.inside:  # a function that was seen (an `autograd.Function`) calls it: no call of its own
                return self._seeded(name, forward, args, kwargs)[0]
            arguments = leaves((args, kwargs))
            call = Call(name, tuple(self.stack), first=len(self.trace.events))
            self.trace.calls.append(call)
            self.stack.append(call)
            with without_torch_function():
                call.entry = tuple(map(self.find, arguments))
            try:
                result, call.is_seeded = self._seeded(name, forward, args, kwargs)
            except BaseException:
                call.not_placeable = "it raises an exception"
                raise
            finally:
                self.stack.pop()
                call.last = len(self.trace.events)
            with without_torch_function():
                self._leave(call, result, arguments)
            return result

        return traced

    def _seeded(self, name: str, forward: Forward, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """What ``forward`` returns, and whether it draws, or comes behind draws.

        Modules draw as in :mod:`lightning_smddp.seeding`, so that the trace takes the path of the runs to come.
        """
        seeded = None
        if name in self.seeded_names:
            seeded = SeededCall(self.generators)
            self._go_on_from_seed()
        draws = False
        try:
            result = forward(*args, **kwargs)
        finally:
            self._note_python_draws()
            if seeded is not None:
                draws = seeded.end()
                self._go_on_from_seed()
        if draws:
            self.trace.drawing.add(name)
        return result, draws

    def _go_on_from_seed(self) -> None:
        self.bound_draws = ()
        self.python_states = self._states_of_python()

    def _leave(self, call: Call, result: Any, arguments: list[Any]) -> None:
        """Note what ``call`` returns, and why it cannot be a unit if stages could not build that again."""
        events = self.trace.events
        for leaf in tensors(result):
            self.find(leaf)
        call.last = len(events)
        call.seconds = sum(event.seconds for event in events[call.first :])
        call.returned = self.spec_of(result, arguments)
        if call.first == call.last:
            call.not_placeable = "its result depends on the batch alone"
        # Other stages return a unit's result without running it. They can do that with values, which are sent to them,
        # with arguments, and with plain constants that come out of no tensor.
        for leaf, (kind, _) in zip(leaves(result), call.returned.sources, strict=True):
            if kind != "constant" or (is_plain(leaf) and (leaf is None or not call.reads)):
                continue
            why = "depends on the batch alone" if isinstance(leaf, Tensor) else "other stages could not make"
            call.not_placeable = f"its result has a {type(leaf).__name__} that {why}"

    def _states_of_python(self) -> list[Any]:
        """Of all generators but torch's default ones."""
        with without_torch_functions():
            return self.generators.states()[len(self.generators.torch) :]

    def _note_python_draws(self) -> None:
        """Look whether Python's random numbers were drawn since the last look."""
        states = self._states_of_python()
        if not same(states, self.python_states):
            self.python_states = states
            self.trace.draws = True
            for call in self.stack:
                call.reads = True  # what it returns may be a number that was drawn

    # ---- operations ----

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(function, args)
        if kind is Kind.METADATA and args and self._is_elsewhere(args[0]) and asks_for_device(name_of(function)):
            # A parameter that is borrowed for each operation says that it is where it will be then.
            return device_answer(function, args, self.device)
        if self.inside:
            return function(*args, **kwargs)
        if kind is Kind.METADATA or kind is Kind.WATCHER or _sets_parameter(function, args):
            return self._look(function, kind, args, kwargs)
        if kind is Kind.BACKWARD:
            self.trace.refusals.append(
                f"The step runs a backward pass of its own at {user_location()} (`torch.autograd.grad` or `backward`). "
                "A pipeline's backward passes through several processes, so it cannot be started inside the step. Use "
                "strategy='smddp'."
            )
            if self.fetch is not None:
                raise SplitError(self.trace.refusals[0])  # nothing is kept for it
        return self._operate(function, kind, args, kwargs)

    def _look(self, function: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """What changes no value and makes no tensor."""
        self.busy = True
        try:
            if kind is Kind.WATCHER:
                self.note_hook(args[0])
            return function(*args, **kwargs)
        finally:
            self.busy = False

    def _operate(self, function: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run an operation of the user's, and record it."""
        self.busy = True
        arguments = leaves((args, kwargs))
        given = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        if kind is Kind.LIKE:
            given = given[1:]
        # What it reads and changes is asked before it runs: in place it makes other values of its arguments.
        inputs = each_once(map(self.find, given))
        parameters = each_once(self.parameters.get(id(tensor)) for tensor in given)
        index = len(self.trace.events)
        event = Event(index, function, tuple(self.stack), user_location(), inputs, parameters)
        versions = list(map(self._version, given))
        drawn_from = self.generators.states_of_torch()
        called = (args, kwargs)
        if self.fetch is not None:  # with parameters that are borrowed for it
            called = map_leaves(self._fetched, called)
        # `inside`: what the function itself calls is not the user's. `busy`: what our bookkeeping calls is nobody's.
        self.inside, self.busy = True, False
        start = now(self.device)
        try:
            result = function(*called[0], **called[1])
        finally:
            self.inside = False
            self.lent.clear()
        event.seconds = now(self.device) - start
        self.busy = True
        event.is_seeded = not same(drawn_from, self.generators.states_of_torch())
        event.random = event.is_seeded or any(isinstance(leaf, torch.Generator) for leaf in arguments)
        before = zip(given, versions, strict=True)
        mutated = [tensor for tensor, version in before if not torch.equal(self._version(tensor), version)]
        if args and is_inplace(function):  # not all of them count versions: `torch._foreach_mul_` does not
            mutated = list(each_once(mutated, tensors(args[0])))
        self._record(event, given, arguments, result, mutated)
        self.busy = False
        return result

    def _version(self, tensor: Tensor) -> Tensor:
        """What differs after a change in place: for buffers the contents, as ``batch_norm`` counts no version."""
        if id(tensor) in self.buffers:
            return tensor.clone()
        return torch.tensor(write_count(tensor))

    def _is_elsewhere(self, leaf: Any) -> bool:
        """Whether it is a parameter that is not on the step's device."""
        return isinstance(leaf, Tensor) and id(leaf) in self.parameters and leaf.device.type != self.device.type

    def _fetched(self, leaf: Any) -> Any:
        name = self.parameters.get(id(leaf))
        if name is None:
            return leaf
        assert self.fetch is not None
        value = self.fetch(name).requires_grad_(leaf.requires_grad)
        self.lent[id(value)] = name
        return value

    def _record(
        self,
        event: Event,
        given: list[Tensor],
        arguments: list[Any],
        result: Any,
        mutated: list[Tensor],
    ) -> None:
        """Complete ``event``, and append it to the trace unless it is free.

        Args:
            event: with what was known when the operation had run.
            given: the tensors among ``arguments``.
            arguments: all leaves.
            result: what it returned.
            mutated: of the tensors, those that it changed in place.
        """
        self.note_changes(event, given, mutated)
        made = tensors(result)
        event.reads = not mutated and not made and bool(given)
        event.free = not (event.inputs or event.parameters or event.buffers_read)
        for call in self.stack if event.reads else ():
            call.reads = True
        self.note_sizes(event, given, made, arguments)
        region = checkpoint_region()
        if region is not None:
            if region not in self.regions[-1:]:
                self.regions.append(region)
            event.region = len(self.regions)
        if event.free and not event.buffers:  # done by each stage
            if event.is_seeded:
                event.behind_draws = self.bound_draws
            if event.random:  # noted for its place: what comes behind is seeded
                self.trace.events.append(event)
            self.note_free(event, made, mutated)
            return
        if event.is_seeded and not event.free:
            self.bound_draws = (*self.bound_draws, event.function)
        event.compiled = is_in_compiled_code()
        self.trace.events.append(event)
        free = {storage.number for storage in map(self.storage_of, given) if not storage.bound}
        event.mutated = tuple(self.add_versions(mutated, arguments, event.index))
        for leaf in made:
            if not any(leaf is tensor for tensor in given):
                # `mask.expand_as(h)` shows the mask, which all stages have, in another shape.
                self.track(leaf, event.index, binds=self.storage_of(leaf).number not in free)
        event.returned = self.spec_of(result, arguments)

    # ---- what the function mode does not see ----

    def note_dispatched(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation of torch's dispatcher, inside of a function that was seen or not."""
        is_collective = function.namespace in ("c10d", "_c10d_functional")
        if is_collective and not any(isinstance(self.modules[call.module], nn.SyncBatchNorm) for call in self.stack):
            self.trace.refusals.append(
                f"The step calls a collective of its own at {user_location()} (`self.all_gather`, "
                "`torch.distributed`). The ranks of a pipeline are at different places of the step, and would not "
                "meet there."
            )
        if function is CAST:  # a copy in another type, as autocast makes them of weights
            name = self.parameters.get(id(args[0]), self.lent.get(id(args[0])))
            if name is not None and result.dtype != args[0].dtype:
                self.trace.casts[name, result.dtype] += 1
        given = tensors((args, kwargs))
        storages = [self.storage_of(tensor) for tensor in given]
        made = [self.storage_of(tensor) for tensor in tensors(result)]
        if not any(storage.bound for storage in storages):
            return
        # Whatever comes out of something bound is bound. Inside of a function that was seen, that function's event
        # stands for it; else an opaque one does.
        opaque: int | None = None
        if not self.inside:
            parameters = each_once(storage.parameter for storage in storages)
            opaque = self.add_opaque(tuple(self.stack), each_once(map(self.find_tracked, given)), parameters)
        for storage in made:
            storage.bound = True
            if storage.opaque is None:
                storage.opaque = opaque


class _Dispatched(DispatchMode):
    """Tells the tracer of each operation of the dispatcher."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.tracer
        inside = tracer.inside
        tracer.inside = True  # function modes see what is called here, but not as the user's
        try:
            if not tracer.busy:
                tracer.written.before(function, args, kwargs)
            result = function(*args, **kwargs)
        finally:
            tracer.inside = inside
        tracer.written.behind(function, result)
        if not tracer.busy:
            with without_torch_function():
                tracer.note_dispatched(function, args, kwargs, result)
        return result


def _sets_parameter(function: Any, args: Any) -> bool:
    return sets_flag(function) and isinstance(args[0], nn.Parameter)
