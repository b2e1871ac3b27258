"""One pass of one stage through a step: what its torch functions and modules do instead of what they do."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from lightning_smddp._compat.torch import idle_node, in_checkpoint
from lightning_smddp.pipeline.capture.foreign_writes import written_by
from lightning_smddp.pipeline.capture.graph import Node
from lightning_smddp.pipeline.capture.ops import Kind, asks_for_device, device_answer, kind_of, name_of, sets_flag
from lightning_smddp.pipeline.capture.patches import user_location
from lightning_smddp.pipeline.capture.python_random import digest
from lightning_smddp.pipeline.capture.value_sizes import deciding_tensors
from lightning_smddp.pipeline.runtime.answers import NOTHING, Answers
from lightning_smddp.pipeline.runtime.remote import AS_TRACED, OTHER_COURSE, RemoteTensor, ReplayError, Shape, Shapes
from lightning_smddp.pipeline.runtime.tails import Tail
from lightning_smddp.wire.pytree import leaves, map_leaves, rebuild
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning_smddp.pipeline.runtime.replay import Replay

Observer: TypeAlias = Callable[[Node, bool, Any], None]  # (item, whether it ends, its result)
"""(item, whether it ends, its result then): called around each item that is done for real."""

WriteWatch: TypeAlias = Callable[[list[Any]], None]
"""Called before each operation that writes something in place, but those within items, with what it writes."""

_FROM_PATTERN = {"shape", "size", "dtype", "dim", "ndim", "__len__", "stride"}  # the usual questions


class StageDone(BaseException):
    """The step has come to the next stage's first item. No ``Exception``: user code must not catch it."""


class Run(TorchFunctionMode):
    """One pass of a :class:`~lightning_smddp.pipeline.runtime.replay.Replay` through the step."""

    def __init__(
        self,
        replay: Replay,
        given: dict[int, Tensor],
        shapes: Shapes,
        observe: Observer | None,
        record: Shapes | None,
        reads: list[str] | None = None,
        told: dict[int, Any] | None = None,
        answers: Answers | None = None,
        writes: WriteWatch | None = None,
    ) -> None:
        super().__init__()
        self.answers, self.asked = None if replay.graph.shares_draws else answers, 0  # draws are other ones each time
        self.told = {} if told is None else told
        self.replay, self.plan, self.nodes = replay, replay.plan, replay.graph.nodes
        self.environment, self.shapes, self.observe, self.record = given, shapes, observe, record
        self.reads, self.writes = reads, writes
        self.tracked: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.holders: dict[int, list[weakref.ref[Tensor]]] = defaultdict(list)  # of values that will change in place
        self.cursor, self.inside, self.diverged, self.done = 0, False, False, False
        self.random, self.shares_draws = replay.python_random, replay.graph.shares_draws
        self.tail: Tail | None = None  # where somebody wants to know of it
        self.seed: int | None = None  # what items draw follows from the state at the first one, alike on all stages

    # ---- what user code calls ----

    def unit(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of unit ``name``."""
        if self.tail is not None:
            self.tail.note_numbers(args, kwargs)
        item = self._next(name, None)
        if item is None:  # behind the last traced item
            return self._unforeseen_unit(name, forward, args, kwargs)
        try:
            return self._own_unit(item, forward, args, kwargs)
        finally:
            if self.random is not None and item.draws_in_python:
                assert self.seed is not None
                self.random.seed(self.seed + 1 + len(self.nodes) + item.index)  # all stages go on from there, alike

    def _own_unit(self, item: Node, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``item``: computed where it is this stage's, else a stand-in of its shape."""
        if item.index not in self.replay.mine:
            return self._stand_in(item, args, kwargs)
        if item.inputs:
            args, kwargs = self.present(args, kwargs)
        if self.random is None:
            return self._unit(item, forward, args, kwargs)
        assert self.seed is not None
        with self.random.put_back():  # what units draw is not drawn on other stages
            self.random.seed(self.seed + 1 + item.index)
            return self._unit(item, forward, args, kwargs)

    def _unforeseen_unit(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do it if all of it is here; else it belongs to a course that stages have to know of."""
        args, kwargs = self.present(args, kwargs)
        held = [*self.replay.root.get_submodule(name).parameters(), *leaves((args, kwargs))]
        if any(type(leaf) is RemoteTensor or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in held):
            raise ReplayError(
                f"The step calls module {name!r} at {user_location()}, behind its last one. {OTHER_COURSE}"
            )
        return self._do(forward, args, kwargs)

    def _unit(self, item: Node, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module of this stage, checkpointed where that is asked for."""
        if self.observe is not None:
            self.observe(item, False, None)
        wanted = self.replay.checkpointing or (item.checkpointed and in_checkpoint())
        if wanted and torch.is_grad_enabled() and not item.rebinds:  # what it changed could not be run again
            with _plainly_saved():
                result = self._do(checkpoint, (forward, *args), {**kwargs, "use_reentrant": False})
        else:
            result = self._do(forward, args, kwargs)
        if self.observe is not None:
            self.observe(item, True, result)
        return self._note(item, result, args, kwargs)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return function(*args, **kwargs)
        kind = kind_of(function, args)
        if kind is Kind.METADATA:
            return self._metadata(function, args, kwargs)
        if kind is Kind.WATCHER:
            return self._watch(function, args, kwargs)
        if self.writes is not None and (written := written_by(function, args, kwargs)):
            self.writes(written)
        if self.tail is not None:
            self.tail.note_numbers(args, kwargs)
        if kind is Kind.LIKE and not self._touches(args[1:] if args else list(kwargs.values())[1:]):
            return self._like(function, args, kwargs)
        if self.tail is not None and self.cursor > self.replay.last_unit:
            self.tail.note(function, args, kwargs)
        if not (self._touches(args) or (kwargs and self._touches(kwargs.values()))):
            if self.shares_draws or function not in self.replay.graph.random_functions:
                return self._free(function, args, kwargs)
        elif sets_flag(function) and isinstance(args[0], nn.Parameter):
            return function(*args, **kwargs)
        return self._of_item(kind, function, args, kwargs)

    def _of_item(self, kind: Kind, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of the trace: done where it is this stage's, else a stand-in for its result."""
        item = self._next(None, function)
        if item is not None and item.index not in self.replay.mine:
            return self._stand_in(item, args, kwargs)
        args, kwargs = self.present(args, kwargs)
        if item is None:
            if kind is Kind.BACKWARD:  # much of its graph is elsewhere
                raise ReplayError(f"The step runs a backward pass of its own at {user_location()}. {OTHER_COURSE}")
            return function(*args, **kwargs)
        if self.random is None or not self.shares_draws:
            return self._operation(item, function, args, kwargs)
        assert self.seed is not None
        with self.random.apart(self.seed + 1 + item.index):
            return self._operation(item, function, args, kwargs)

    def _operation(self, item: Node, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function between this stage's modules."""
        if self.observe is not None:
            self.observe(item, False, None)
        if item.checkpointed and in_checkpoint():
            with _plainly_saved():
                result = self._do(function, args, kwargs)
        else:
            result = self._do(function, args, kwargs)
        if self.observe is not None:
            self.observe(item, True, result)
        if item.tells:
            self.told[item.index] = result
        return self._note(item, result, args, kwargs)

    def _free(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An operation on the batch alone."""
        result = self._answer(function, args, kwargs)
        if self.reads is not None:
            made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
            if not made:
                self.reads.append(f"{result!r}, which Python reads at {user_location()}")
            else:  # whose size may depend on the batch's values, or on what is drawn
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in made)
                self.reads.append(f"a result of shape {shapes} from {name_of(function)} at {user_location()}")
        return result

    def _answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What ``function`` returns; if that are numbers, and another run has asked for them, without asking again."""
        if self.answers is None:
            return function(*args, **kwargs)
        result = self.answers.find(self.asked, function, (args, kwargs))
        if result is NOTHING:
            result = function(*args, **kwargs)
            self.asked += self.answers.note(self.asked, function, (args, kwargs), result)
        else:
            self.asked += 1
        return result

    # ---- items ----

    def _next(self, module: str | None, function: Any) -> Node | None:
        """The item that this call is; None behind the last one."""
        cursor, replay = self.cursor, self.replay
        if self.random is not None and self.seed is None:
            self.seed = digest(self.random.get())
        item = self.nodes[cursor] if cursor < len(self.nodes) else None
        is_next = item is not None and item.module == module and (module or item.function == function)
        if cursor == self.plan.end and not replay.is_last and (is_next or not replay.is_rehearsal):
            self.done = True
            raise StageDone
        if item is not None and is_next and not self.diverged:
            self.cursor += 1
            return item
        if replay.is_last and cursor >= self.plan.begin and cursor > replay.last_unit:
            self.diverged = True  # the step's end is this stage's alone: it may differ
            return None
        got = f"module {module!r}" if module is not None else f"{name_of(function)} at {user_location()}"
        expected = "the end" if item is None else f"module {item.name!r}" if item.module is not None else item.name
        told = [self.nodes[index].location for index in self.told]
        reason = f" Python read a tensor's value at {told[-1]}: does the step depend on it?" if told else ""
        raise ReplayError(f"The step came to {got} where {expected} was expected. {OTHER_COURSE}{reason}")

    def _do(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = False

    def _note(self, item: Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remember which values an item made here are which tensors; return its result."""
        sources = item.returned.sources
        if len(sources) == 1 and sources[0][0] == "value" and isinstance(result, Tensor):
            if self.replay.changing_memories:
                result = self._own_memory(result, sources[0][1], args)
            self._track(result, sources[0][1])
        elif sources:
            self._note_structure(item, leaves(result), args, kwargs)
        if item.rebinds:
            self._rebind(item, args, kwargs, done=True)
        return result

    def _note_structure(self, item: Node, found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sources = item.returned.sources
        if len(found) != len(sources):
            was = f"it returned {len(sources)} when the step was traced"
            raise ReplayError(f"{item.name} returned {counted(len(found), 'thing')}; {was}. {OTHER_COURSE}")
        for leaf, (kind, source) in zip(found, sources, strict=True):
            if isinstance(leaf, Tensor) != (kind == "value") and kind != "argument":
                raise ReplayError(
                    f"{item.name} returned a {type(leaf).__name__} in a place of another kind. {OTHER_COURSE}"
                )
            if kind == "value":
                self._track(leaf, source)
            elif kind == "argument" and isinstance(leaf, Tensor) and self._value_of(leaf) is None:
                given = leaves((args, kwargs))[source]
                value = self._value_of(given) if isinstance(given, Tensor) else None
                if value is not None:  # a copy where the trace had the argument itself
                    self._track(leaf, value)
        if self.record is not None and any(kind == "constant" for kind, _ in sources):
            self.record.constants[item.index] = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in found)

    def _own_memory(self, result: Tensor, value: int, args: tuple[Any, ...]) -> Tensor:
        """What had memory of its own in the trace must have so here, if its memory or the original's is changed.

        A received tensor may be contiguous where the original was not: ``contiguous()`` then makes no copy.
        """
        original = self._value_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if original is None:
            return result
        values, changing = self.replay.graph.values, self.replay.changing_memories
        memory, other = values[value].memory, values[original].memory
        if memory == other or not (memory in changing or other in changing):
            return result
        shared = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        return result.clone() if shared else result

    def _stand_in(self, item: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an item of another stage returns."""
        if self.reads is not None:
            self._note_sizes(item, leaves((args, kwargs)))
        if item.tells and not self.replay.is_rehearsal:
            return self.told[item.index]
        if item.free and any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
            item.function(*args, **kwargs)  # a generator of the step's own goes on from here on each stage
        if item.rebinds:
            self._rebind(item, args, kwargs, done=False)
        sources = item.returned.sources
        if item.returned.skeleton is ... and sources[0][0] == "value":
            return self._tensor(sources[0][1])
        arguments: list[Any] | None = None
        found: list[Any] = []
        constants = self.shapes.constants.get(item.index)
        for position, (kind, source) in enumerate(sources):
            if kind == "value":
                found.append(self._tensor(source))
            elif kind == "argument":
                arguments = leaves((args, kwargs)) if arguments is None else arguments
                found.append(arguments[source])
            else:
                found.append(source if constants is None or constants[position] == AS_TRACED else constants[position])
        with self:  # containers may ask what they are given
            return rebuild(item.returned.skeleton, found)

    def _note_sizes(self, item: Node, arguments: list[Any]) -> None:
        """What the size of an item's result depends on besides the sizes of tensors."""
        assert self.reads is not None
        known = [None if type(leaf) is RemoteTensor else leaf for leaf in arguments]
        masks = deciding_tensors(name_of(item.function), known)
        if self.random is not None or masks:
            counts = [int(mask.sum()) for mask in masks]
            self.reads.append(f"{item.name}{_sizes(arguments)}{counts}")

    # ---- values ----

    def _tensor(self, value: int) -> Tensor:
        """The tensor that stands for ``value``: received, or a ghost."""
        tensor = self.environment.get(value)
        if tensor is None:
            tensor = self.shapes.ghost(value)
        self._mark(tensor, value)
        return tensor

    def _mark(self, tensor: Tensor, value: int) -> None:
        reference = weakref.ref(tensor)
        self.tracked[id(tensor)] = (reference, value)
        if value in self.replay.changing:
            self.holders[value].append(reference)

    def _track(self, tensor: Tensor, value: int) -> None:
        self._mark(tensor, value)
        if value in self.replay.keeps:
            self.environment[value] = tensor
        if self.record is not None:
            self.record.values[value] = Shape.of(tensor)
        elif not self.replay.is_last and tensor.shape != (known := self.shapes.values[value]).shape:
            maker = self.nodes[self.replay.graph.producers[value]].name
            raise ReplayError(
                f"{maker} made a tensor of shape {tuple(tensor.shape)} where {known.shape} was expected: other stages "
                "count on that. Sizes that depend on the batch's values, not on its shapes, cannot cross stages: pad, "
                "or keep them in the last module."
            )

    def made_and_left(self) -> dict[int, Tensor]:
        """The values that this stage has made, of those that the step leaves in attributes."""
        graph, plan = self.replay.graph, self.plan
        made = [value for value in graph.left if plan.begin <= graph.producers.get(value, -1) < plan.end]
        return {value: self.environment[value] for value in made if value in self.environment}

    def _value_of(self, tensor: Tensor) -> int | None:
        entry = self.tracked.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        if type(tensor) is RemoteTensor:
            raise ReplayError(
                f"At {user_location()} a tensor of another stage is used that was kept since an earlier step or "
                "micro-batch. Stages work on several micro-batches at a time: none can hand anything to the next."
            )
        return None

    def _touches(self, arguments: Any) -> bool:
        """Whether a parameter or a bound value is among ``arguments``."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) in self.replay.sources or self._value_of(argument) is not None:
                    return True
            elif isinstance(argument, (list, tuple)):
                if self._touches(argument):
                    return True
            elif isinstance(argument, dict) and self._touches(argument.values()):
                return True
        return False

    def present(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with real tensors where a ghost, or a tensor changed elsewhere, stands for one."""
        if not any(self._is_stale(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            return args, kwargs

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = self._value_of(leaf)
            return leaf if value is None else self.environment.get(value, leaf)

        changed: tuple[tuple[Any, ...], dict[str, Any]] = map_leaves(real, (args, kwargs))
        return changed

    def _is_stale(self, tensor: Tensor) -> bool:
        value = self._value_of(tensor)
        return value is not None and self.environment.get(value, tensor) is not tensor

    def _rebind(self, item: Node, args: tuple[Any, ...], kwargs: dict[str, Any], done: bool) -> None:
        """Follow changes in place: tensors that were the old value are the new one from here on."""
        arguments = leaves((args, kwargs)) if item.module is None else []
        for old, new, position in item.rebinds:
            references = self.holders.pop(old, []) if old is not None else []
            objects = [t for r in references if (t := r()) is not None and self._value_of(t) == old]
            if position is not None and item.module is None and not any(t is arguments[position] for t in objects):
                objects.append(arguments[position])
            for tensor in objects:
                if done and type(tensor) is not RemoteTensor:
                    self._track(tensor, new)
                else:
                    self._mark(tensor, new)

    # ---- questions about tensors of other stages ----

    def _metadata(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        subject = args[0] if args else None
        if not isinstance(subject, Tensor):
            return function(*map_leaves(_pattern, args), **map_leaves(_pattern, kwargs))
        if type(subject) is RemoteTensor or subject.device.type == "meta":
            return self._describe(function, subject, args, kwargs)
        if len(args) > 1:
            args = map_leaves(_pattern, args)
        result = function(*args, **kwargs)
        if result is None and name_of(function) == "grad_fn" and subject.requires_grad and self._is_elsewhere(subject):
            return idle_node()
        return result

    def _describe(self, function: Any, subject: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Metadata of a ghost, or of a parameter of another stage (on the meta device), as if they were here."""
        name, device = name_of(function), self.replay.device
        if name in _FROM_PATTERN and len(args) == 1:
            self._value_of(subject)
            return function(_pattern(subject))
        if asks_for_device(name):
            return device_answer(name, _pattern(subject).dtype, device)
        if name in ("__repr__", "__format__", "__str__"):
            return f"<tensor of shape {tuple(_pattern(subject).shape)} on another stage>"
        value = self._value_of(subject)
        if value is not None:
            requires_grad = self.shapes.values[value].requires_grad and torch.is_grad_enabled()
            if name == "requires_grad":
                return requires_grad
            if name == "is_leaf":
                return not requires_grad
            if name == "grad_fn":
                return idle_node() if requires_grad else None
        return function(*map_leaves(_pattern, args), **map_leaves(_pattern, kwargs))

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether another stage makes this value, or holds this parameter."""
        value = self._value_of(tensor)
        if value is None:
            return tensor.device.type == "meta"
        return not self.plan.begin <= self.replay.graph.producers[value] < self.plan.end

    def _watch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hooks on gradients belong where the value is made: elsewhere they would act a second time."""
        if not isinstance(args[0], Tensor) or not self._is_elsewhere(args[0]):
            return function(*args, **kwargs)
        return None if name_of(function) == "retain_grad" else RemovableHandle(OrderedDict())

    def _like(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        subject = args[0] if args else next(iter(kwargs.values()))
        if (type(subject) is RemoteTensor or subject.device.type == "meta") and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.replay.device}
        return function(*map_leaves(_pattern, args), **map_leaves(_pattern, kwargs))


def _sizes(arguments: list[Any]) -> list[Any]:
    """Whole numbers and slices among ``arguments``, on which the shape of a result may depend."""
    return [str(leaf) for leaf in arguments if isinstance(leaf, (int, slice))]


def _pattern(leaf: Any) -> Any:
    return leaf.pattern if type(leaf) is RemoteTensor else leaf


def _plainly_saved() -> saved_tensors_hooks:
    """Within the user's own checkpoint: keep saved tensors, as its function cannot be run again for one stage alone."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
