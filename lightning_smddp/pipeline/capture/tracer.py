"""One real run of a step, recorded: which operation took which values from which.

Every torch function call is seen (a ``TorchFunctionMode`` sits above autograd, so the tensors are the user's own
objects), inside modules and between them, and every call of a module's ``forward``. Recorded are *bound* operations:
those that depend on a parameter or a random number, directly or not. What depends on the batch alone is *free*: each
stage can do it by itself. A dispatch mode below watches for tensors made by what the function mode does not see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_smddp._compat.torch import (
    CAST,
    DispatchMode,
    checkpoint_region,
    has_full_backward_hooks,
    in_checkpoint,
    visible_autograd_functions,
    without_torch_function,
    without_torch_functions,
)
from lightning_smddp.pipeline.capture.effects import Effects
from lightning_smddp.pipeline.capture.graph import refuse_backward
from lightning_smddp.pipeline.capture.notes import Notes, each_once
from lightning_smddp.pipeline.capture.ops import (
    Kind,
    asks_for_device,
    device_answer,
    is_in_compiled_code,
    kind_of,
    name_of,
    sets_flag,
    user_location,
)
from lightning_smddp.pipeline.capture.records import (
    Call,
    Event,
    Template,
    Trace,
)
from lightning_smddp.pipeline.capture.tracking import EXTENSION, is_plain
from lightning_smddp.seeding import Forward, Generators, SeededCall, drawing_candidates, same, wrapped_forwards
from lightning_smddp.wire.pytree import items, leaves, map_leaves, tensors

_NOTHING = torch.empty(0)
_BY_PYTHON = "it makes tensors of values that Python code read"

Step: TypeAlias = Callable[[], Any]
"""Runs the user's step on one micro-batch, and returns what that returns."""
Fetch: TypeAlias = Callable[[str], Tensor]
"""The values of a parameter, by its first name."""


class Instant(NamedTuple):
    """A moment: seconds by the clock, and of the processor time that this process has had."""

    wall: float
    processor: float

    def until(self, end: Instant) -> float:
        """Seconds to ``end`` without those in which other processes had the processor.

        Threads of this process that work at the same time make its processor time longer than that by the clock.
        """
        return min(end.wall - self.wall, end.processor - self.processor)


class Clock:
    """Tells moments of work on ``device``. Of a device's work the host's processor time says nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Instant:
        """The moment at which the host is; a device may be behind it."""
        wall = time.perf_counter()
        if self._device.type == "cpu":
            return Instant(wall, time.process_time())
        return Instant(wall, wall)

    def now(self) -> Instant:
        """When the device has done what it was given so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self.read()


def trace(step: Step, module: nn.Module, device: torch.device, fetch: Fetch | None = None) -> Trace:
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
    known = Trace()
    generators = Generators(module, device)
    # What reads buffers before they change has to be recorded, too: if a run finds such buffers, the step runs again.
    while True:
        with _of_one_thread, generators.preserved():
            result = _Tracer(module, device, known, fetch, generators).run(step)
        if result.changed_buffers <= known.changed_buffers:
            return result
        known.changed_buffers |= result.changed_buffers


_of_one_thread = threading.RLock()  # default generators are the process's: who else traces would draw in between
_active = threading.local()  # .tracer: that of the step that runs in this thread


def is_tracing() -> bool:
    """Whether a step is traced in this thread."""
    return getattr(_active, "tracer", None) is not None


def depends_on_module(value: Any) -> bool:
    """Whether there is a tensor in ``value`` that depends on a parameter in the step that is traced; False without."""
    tracer: _Tracer | None = getattr(_active, "tracer", None)
    return tracer is not None and any(tracer.find_tracked(tensor) is not None for tensor in tensors(value))


def open_modules(reason: str) -> None:
    """Let no module whose forward runs now be placed whole. Nothing happens where no step is traced."""
    tracer: _Tracer | None = getattr(_active, "tracer", None)
    if tracer is not None:
        for call in tracer.stack:
            call.obstacle = f"{reason}, at {user_location()}"


class _Tracer(TorchFunctionMode, Notes):
    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        known: Trace,
        fetch: Fetch | None,
        generators: Generators,
    ) -> None:
        TorchFunctionMode.__init__(self)
        Notes.__init__(self, module, known, borrows=fetch is not None)
        self.module = module
        self.device = device
        self.fetch = fetch
        self.inside = False  # a function that was seen
        self.busy = False  # with our own bookkeeping
        self.lent: dict[int, str] = {}  # by `fetch`, for one operation
        self.clock = Clock(device)
        self.overhead = 0.0  # seconds
        self.regions: list[object] = []  # of `torch.utils.checkpoint`, kept so that no two have one identity
        self.generators = generators
        self.seeded_names = set(drawing_candidates(module))
        self.python_states = generators.states()[len(generators.torch) :]

    def run(self, step: Step) -> Trace:
        start = self.clock.now()
        saving: AbstractContextManager[Any] = nullcontext()
        if self.fetch is not None:  # no backward will come
            saving = saved_tensors_hooks(lambda _: _NOTHING, lambda _: _NOTHING)
        buffers = dict(self.module.named_buffers())
        # The order of modes: the function mode, entered last, sees the user's calls; the dispatch mode below sees what
        # they come to, and operators that no function announces (C++ extensions).
        outer = getattr(_active, "tracer", None)
        _active.tracer = self
        try:
            with (
                visible_autograd_functions(),
                torch.compiler.set_stance("force_eager"),  # else compiled code would leave our modes out
                saving,
                wrapped_forwards(self.module, self._wrap, list(self.modules)[1:]),
                _Unseen(self),
                self,
            ):
                result = step()
        finally:
            _active.tracer = outer
        buffers_now = dict(self.module.named_buffers())
        rebound = []
        for name, buffer in buffers.items():
            if buffers_now.get(name) is not buffer:
                rebound.append(name)
        self.trace.rebound_buffers = tuple(rebound)
        self._note_python_draws()
        self.trace.returned = each_once(map(self.find, tensors(result)))
        self.trace.seconds = start.until(self.clock.now()) - self.overhead
        return self.trace

    # ---- module calls ----

    def _wrap(self, name: str, forward: Forward) -> Forward:
        def traced(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return forward(*args, **kwargs)
            call = self._enter(name)
            with without_torch_function():
                found = leaves((args, kwargs))
                call.entry = tuple(self.find(leaf) if isinstance(leaf, Tensor) else None for leaf in found)
            seeded = self._begin_seeded(name)
            start = self.clock.now()
            overhead = self.overhead
            try:
                result = forward(*args, **kwargs)
            finally:
                # Our own bookkeeping within the call is none of the module's time.
                own = self.overhead - overhead
                call.seconds = start.until(self.clock.now()) - own
                self._note_python_draws()
                self._end_seeded(seeded)
                self.stack.pop()
                call.last = len(self.trace.events)
            with without_torch_function():
                self._leave(call, result, leaves((args, kwargs)))
            return result

        return traced

    def _begin_seeded(self, name: str) -> SeededCall | None:
        """Modules draw as in :mod:`lightning_smddp.seeding`, so that the trace takes the path of the runs to come."""
        if name not in self.seeded_names:
            return None
        begin = self.clock.now()
        call = SeededCall(self.generators)
        self.python_states = self._states_of_python()
        self.overhead += begin.until(self.clock.now())
        return call

    def _end_seeded(self, call: SeededCall | None) -> None:
        if call is None:
            return
        begin = self.clock.now()
        call.end()
        self.python_states = self._states_of_python()
        self.overhead += begin.until(self.clock.now())

    def _enter(self, name: str) -> Call:
        """Begin a call of the module ``name``: what is recorded from here on is in it."""
        self._note_python_draws()
        if self.stack:
            self.stack[-1].has_children = True
        call = Call(
            index=len(self.trace.calls),
            module=name,
            parent=self.innermost_call(),
            first=len(self.trace.events),
            checkpointed=in_checkpoint(),
            has_backward_hooks=has_full_backward_hooks(self.modules[name]),
        )
        self.trace.calls.append(call)
        self.stack.append(call)
        return call

    def _leave(self, call: Call, result: Any, arguments: list[Any]) -> None:
        """Note what ``call`` returns, and why it cannot be a unit if stages could not build that again."""
        # Code that has read bound values may have made a tensor of what it read (`torch.tensor(x.item())`), which looks
        # free. Where no inner module can have done so, the call itself has: that is a hidden operation of its.
        given = {id(leaf) for leaf in arguments}
        by_python = call.reads_bound and not call.has_children
        for leaf in tensors(result):
            if self.find(leaf) is not None or id(leaf) in given:
                continue
            if by_python and id(leaf) not in self.parameters:
                hidden = self.hide(call.index, _BY_PYTHON)
                self.track(leaf, hidden.index)
        call.last = len(self.trace.events)
        call.returned = self.template(result, arguments)
        # Other stages return a unit's result without running it. They can do that with values, which are sent to them,
        # with arguments, and with plain constants that come out of no tensor.
        for (path, leaf), (kind, source) in zip(items(result), call.returned.sources, strict=True):
            if kind != "constant":
                continue
            where = "".join(f"[{key!r}]" for key in path)
            if isinstance(leaf, Tensor):
                call.obstacle = f"its result{where} depends on the batch alone"
            elif not is_plain(leaf):
                call.obstacle = f"its result{where} is a {type(leaf).__name__}"
            elif source is not None and call.reads and isinstance(leaf, (int, float, complex, str)):
                call.obstacle = f"its result{where} is a Python value that may come out of a tensor"

    def _draws_from_known(self, arguments: list[Any]) -> bool:
        """Whether a random operation draws from a generator that is seeded: torch's default one, or a module's."""
        given = [leaf for leaf in arguments if isinstance(leaf, torch.Generator)]
        known = [*self.generators.torch, *self.generators.held()]
        return not given or any(generator is own for generator in given for own in known)

    def _states_of_python(self) -> list[Any]:
        """Of all generators but torch's default ones."""
        with without_torch_functions():
            return self.generators.states()[len(self.generators.torch) :]

    def _note_python_draws(self) -> None:
        """Charge the innermost call with Python's random numbers drawn since the last look."""
        begin = self.clock.now()
        states = self._states_of_python()
        has_drawn = not same(states, self.python_states)
        self.overhead += begin.until(self.clock.now())
        if not has_drawn:
            return
        self.python_states = states
        for call in self.stack:
            call.reads = True  # what it returns may be a number that was drawn
        if self.stack:
            self.stack[-1].draws_in_python = True
        else:
            self.trace.draws_in_python = True

    # ---- operations ----

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(function, args)
        if kind is Kind.METADATA and args and self._is_elsewhere(args[0]):
            # A parameter that is borrowed for each operation says that it is where it will be then.
            name = name_of(function)
            if asks_for_device(name):
                return device_answer(name, args[0].dtype, self.device)
        if self.inside:
            return function(*args, **kwargs)
        if kind is Kind.METADATA or kind is Kind.WATCHER or _sets_parameter(function, args):
            return self._look(function, args, kwargs)
        if kind is Kind.BACKWARD:
            if self.fetch is not None:
                refuse_backward(user_location())  # nothing is kept for it
            self.trace.backward_locations.append(user_location())
        return self._operate(function, kind, args, kwargs)

    def _operate(self, function: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run an operation of the user's, and record it. Its time is its own, that of looking at it is overhead."""
        begin = self.clock.now()
        self.busy = True
        arguments = leaves((args, kwargs))
        given = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        if kind is Kind.LIKE:
            given = given[1:]
        self.note_buffers(given)
        # What it reads and changes is asked before it runs: in place it makes other values of its arguments.
        effects = Effects(arguments, given, self.buffers, self.device)
        inputs = each_once(map(self.find, given))
        start = self.clock.now()
        overhead = self.overhead
        # `inside`: what the function itself calls is not the user's. `busy`: what our bookkeeping calls is nobody's.
        self.inside = True
        self.busy = False
        try:
            result = self._do(function, args, kwargs)
        finally:
            self.inside = False
        end = self.clock.now()
        self.busy = True
        seconds = start.until(end) - (self.overhead - overhead)
        mutated = effects.changed(function, args)
        drew = effects.has_drawn()
        event = Event(
            index=len(self.trace.events),
            function=function,
            inputs=inputs,
            parameters=each_once(self.parameters.get(id(tensor)) for tensor in given),
            call=self.innermost_call(),
            location="",
            returned=Template(None, ()),
            random=drew,
            is_seeded=drew and self._draws_from_known(arguments),
            seconds=seconds,
        )
        self._record(event, given, arguments, result, mutated)
        self.busy = False
        self.overhead += begin.until(start) + end.until(self.clock.now())
        return result

    def _look(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What changes no value and makes no tensor."""
        self.busy = True
        try:
            if kind_of(function, args) is Kind.WATCHER:
                self.watch(args[0])
            return function(*args, **kwargs)
        finally:
            self.busy = False

    def _do(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call ``function``; where parameters are elsewhere, with those that are borrowed for it."""
        if self.fetch is None:
            return function(*args, **kwargs)
        arguments = leaves((args, kwargs))
        if not any(id(leaf) in self.parameters for leaf in arguments):
            return function(*args, **kwargs)
        args, kwargs = map_leaves(self._fetched, (args, kwargs))
        try:
            return function(*args, **kwargs)
        finally:
            self.lent.clear()

    def _is_elsewhere(self, leaf: Any) -> bool:
        """Whether it is a parameter that is not on the step's device."""
        if not isinstance(leaf, Tensor) or id(leaf) not in self.parameters:
            return False
        return leaf.device.type != self.device.type

    def _fetched(self, leaf: Any) -> Any:
        name = self.parameters.get(id(leaf))
        if name is None:
            return leaf
        assert self.fetch is not None
        busy = self.busy
        self.busy = True
        value = self.fetch(name).requires_grad_(leaf.requires_grad)
        self.busy = busy
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
            event: with what was known before the operation ran.
            given: the tensors among ``arguments``.
            arguments: all leaves.
            result: what it returned.
            mutated: of the tensors, those that it changed in place.
        """
        self.note_changes(event, given, mutated)
        made = tensors(result)
        event.reads = not mutated and not made and bool(given)
        event.free = not (event.inputs or event.parameters or event.buffers_read)
        if event.reads:
            for call in self.stack:
                call.reads = True
                call.reads_bound = call.reads_bound or not event.free
        self.note_sizes(event, given, arguments)
        if event.free and not event.buffers:  # each stage does it by itself
            if event.random:  # noted for its place: what comes behind is seeded
                event.location = user_location()
                event.region = self._region()
                self.trace.events.append(event)
            fixed = set(chain.from_iterable(tensor.shape for tensor in given))
            self.note_free(event, made, mutated, fixed)
            return
        event.location = user_location()
        event.checkpointed = in_checkpoint()
        event.region = self._region()
        event.compiled = is_in_compiled_code()
        self.trace.events.append(event)
        memories = [self.memory_of(tensor) for tensor in given]
        free = {memory.number for memory in memories if not memory.bound}
        event.mutated = tuple(self.rebind(mutated, arguments, event.index))
        for leaf in made:
            is_argument = any(leaf is tensor for tensor in given)
            if not is_argument:
                # `mask.expand_as(h)` shows the mask, which all stages have, in another shape.
                memory = self.memory_of(leaf)
                self.track(leaf, event.index, binds=memory.number not in free)
        event.returned = self.template(result, arguments)

    def _region(self) -> int | None:
        region = checkpoint_region()
        if region is None:
            return None
        if not self.regions or self.regions[-1] is not region:
            self.regions.append(region)
        return len(self.regions)

    # ---- what the function mode does not see ----

    def saw_unseen(self, args: Any, kwargs: Any, result: Any) -> None:
        """An operation of torch's dispatcher, inside of a function that was seen or not."""
        begin = self.clock.read()
        given = tensors((args, kwargs))
        memories = [self.memory_of(tensor) for tensor in given]
        made = [self.memory_of(tensor) for tensor in tensors(result)]
        if any(memory.bound for memory in memories):
            # Whatever comes out of something bound is bound. Inside of a function that was seen, that function's event
            # stands for it; else a hidden event does.
            hidden = None
            if not self.inside:
                event = self.hide(self.innermost_call(), EXTENSION)
                event.inputs = each_once(map(self.find_tracked, given))
                event.parameters = each_once(memory.parameter for memory in memories)
                hidden = event.index
            for memory in made:
                memory.bound = True
                if memory.hidden is None:
                    memory.hidden = hidden
        self.overhead += begin.until(self.clock.read())

    def saw_cast(self, tensor: Tensor, result: Tensor) -> None:
        """A copy, maybe in another type, as autocast makes them of weights."""
        key = id(tensor)
        name = self.parameters.get(key, self.lent.get(key))
        if name is not None and result.dtype != tensor.dtype:
            self.trace.casts[name, result.dtype] += 1

    def saw_collective(self) -> None:
        """A collective of the user's own."""
        modules = [self.modules[call.module] for call in self.stack]
        if not any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            self.trace.collective_locations.append(user_location())


class _Unseen(DispatchMode):
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
            result = function(*args, **kwargs)
        finally:
            tracer.inside = inside
        if not tracer.busy:
            with without_torch_function():
                if function.namespace in ("c10d", "_c10d_functional"):
                    tracer.saw_collective()
                if function is CAST:
                    tracer.saw_cast(args[0], result)
                tracer.saw_unseen(args, kwargs, result)
        return result


def _sets_parameter(function: Any, args: Any) -> bool:
    return sets_flag(function) and isinstance(args[0], nn.Parameter)
