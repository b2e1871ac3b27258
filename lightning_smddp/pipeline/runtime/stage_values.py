"""Which tensors stand for which values of the graph, while a stage runs a step, and what Python may ask of them.

Of tensors of other stages these are shapes, types, devices and gradients, but no numbers.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_smddp._compat.torch import idle_node
from lightning_smddp.pipeline.capture.graph import Node
from lightning_smddp.pipeline.capture.ops import asks_for_device, device_answer, name_of
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.runtime.remote import AS_TRACED, OTHER_COURSE, RemoteTensor, ReplayError, Shape, Shapes
from lightning_smddp.pipeline.runtime.stage_graph import StageGraph
from lightning_smddp.wire.pytree import leaves, map_leaves
from lightning_smddp.wording import counted

Function: TypeAlias = Callable[..., Any]
"""What a mode of torch, or the forward of a module, is called for: a torch function, or the module's own forward."""

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

_FROM_PATTERN = {"shape", "size", "dtype", "dim", "ndim", "__len__", "stride"}  # the usual questions


class StageValues:
    """The tensors of one run, by the values of the graph that they are.

    A value of the graph is a number. In a run it is a tensor that the stage has received or made, or a
    :class:`RemoteTensor`. A change in place makes another value of the same tensor object: see :meth:`rebind`.

    Args:
        stage: its part of the graph.
        received: what the stage before has sent, by value.
        shapes: what values of earlier stages look like; also checked against what is made here.
        record: takes down the shape of what is made here, in place of the check.

    Attributes:
        here: value -> tensor with its numbers: what was received, and made values that are kept.
    """

    def __init__(
        self,
        stage: StageGraph,
        received: dict[int, Tensor],
        shapes: Shapes,
        record: Shapes | None = None,
    ) -> None:
        self.stage = stage
        self.here = received
        self.shapes = shapes
        self.record = record
        # By id, as comparing tensors compares numbers. The weak reference tells an object from a later one whose
        # memory, and so whose id, is the same.
        self._tracked: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._holders: dict[int, list[weakref.ref[Tensor]]] = defaultdict(list)  # of values that will change in place

    def value_of(self, tensor: Tensor) -> int | None:
        """The value that ``tensor`` is; None for one that depends on the batch alone."""
        entry = self._tracked.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        # One remote tensor serves all micro-batches, but each run marks it when it stands for a value there: one that
        # has no mark comes from an earlier run.
        if type(tensor) is RemoteTensor:
            raise ReplayError(
                f"At {user_location()} a tensor of another stage is used that was kept since an earlier step or "
                "micro-batch. Stages work on several micro-batches at a time: none can hand anything to the next."
            )
        return None

    def touches(self, arguments: Iterable[Any]) -> bool:
        """Whether a parameter or a value is among ``arguments``, also in lists, tuples and dicts."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) in self.stage.sources or self.value_of(argument) is not None:
                    return True
            elif isinstance(argument, (list, tuple)):
                if self.touches(argument):
                    return True
            elif isinstance(argument, dict) and self.touches(argument.values()):
                return True
        return False

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether another stage makes this value, or holds this parameter."""
        value = self.value_of(tensor)
        if value is None:
            return tensor.device.type == "meta"
        return not self.stage.makes(value)

    # ---- arguments of a node that is done here ----

    def present(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments, with the tensor that is here for each :class:`RemoteTensor` or outdated object."""
        # Nearly always the user's code has the right tensors in its hands: then its containers stay the objects that
        # they are.
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and self._current(leaf) is not leaf:
                changed: tuple[Args, Kwargs] = map_leaves(self._current, (args, kwargs))
                return changed
        return args, kwargs

    def _current(self, leaf: Any) -> Any:
        """The object that has the numbers of the value that ``leaf`` is: one that was received, or changed in place."""
        if not isinstance(leaf, Tensor):
            return leaf
        value = self.value_of(leaf)
        if value is None:
            return leaf
        return self.here.get(value, leaf)

    # ---- results of a node that is done here ----

    def note_result(self, node: Node, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Remember which values are which tensors in the result of ``node``; return it."""
        sources = node.returned.sources
        is_bare_tensor = len(sources) == 1 and isinstance(result, Tensor)
        if is_bare_tensor and sources[0][0] == "value":
            value = sources[0][1]
            if self.stage.changing_memories:
                result = self._with_own_memory(result, value, args)
            self._track(result, value)
        elif sources:
            self._note_leaves(node, leaves(result), args, kwargs)
        if node.rebinds:
            self.rebind(node, args, kwargs, done=True)
        return result

    def _note_leaves(self, node: Node, found: list[Any], args: Args, kwargs: Kwargs) -> None:
        """The same for the leaves of a result of several: tensors, arguments that come back, and constants."""
        sources = node.returned.sources
        if len(found) != len(sources):
            was = f"it returned {len(sources)} when the step was traced"
            raise ReplayError(f"{node.name} returned {counted(len(found), 'thing')}; {was}. {OTHER_COURSE}")
        has_constants = False
        for leaf, (kind, source) in zip(found, sources, strict=True):
            is_tensor = isinstance(leaf, Tensor)
            if kind == "argument":
                if is_tensor and self.value_of(leaf) is None:
                    argument = leaves((args, kwargs))[source]
                    self._track_as(leaf, argument)
                continue
            if is_tensor != (kind == "value"):
                raise ReplayError(
                    f"{node.name} returned a {type(leaf).__name__} in a place of another kind. {OTHER_COURSE}"
                )
            if is_tensor:
                self._track(leaf, source)
            else:
                has_constants = True
        if self.record is not None and has_constants:
            constants = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
            self.record.constants[node.index] = tuple(constants)

    def _track_as(self, leaf: Tensor, argument: Any) -> None:
        """Where the trace got the argument itself back, this run may have got a copy, which is the same value."""
        if not isinstance(argument, Tensor):
            return
        value = self.value_of(argument)
        if value is not None:
            self._track(leaf, value)

    def _with_own_memory(self, result: Tensor, value: int, args: Args) -> Tensor:
        """What had memory of its own in the trace must have so here, if its memory or the original's is changed.

        A received tensor may be contiguous where the original was not: ``contiguous()`` then makes no copy.
        """
        if not args or not isinstance(args[0], Tensor):
            return result
        argument = args[0]
        original = self.value_of(argument)
        if original is None:
            return result
        values = self.stage.graph.values
        memory = values[value].memory
        other = values[original].memory
        if memory == other:
            return result
        changing = self.stage.changing_memories
        if memory not in changing and other not in changing:
            return result
        if _storage_of(result) == _storage_of(argument):
            return result.clone()
        return result

    def _track(self, tensor: Tensor, value: int) -> None:
        """``tensor`` was made here, and is ``value``."""
        self._mark(tensor, value)
        if value in self.stage.kept:
            self.here[value] = tensor
        if self.record is not None:
            self.record.values[value] = Shape.of(tensor)
            return
        if self.stage.is_last:  # nobody counts on its shape
            return
        known = self.shapes.values[value]
        if tensor.shape != known.shape:
            producer = self.stage.graph.producers[value]
            maker = self.stage.nodes[producer].name
            raise ReplayError(
                f"{maker} made a tensor of shape {tuple(tensor.shape)} where {known.shape} was expected: other stages "
                "count on that. Sizes that depend on the batch's values, not on its shapes, cannot cross stages: pad, "
                "or keep them in the last module."
            )

    def _mark(self, tensor: Tensor, value: int) -> None:
        """``tensor`` stands for ``value`` from here on; whether it has numbers is another matter."""
        reference = weakref.ref(tensor)
        self._tracked[id(tensor)] = (reference, value)
        if value in self.stage.changing:
            self._holders[value].append(reference)

    # ---- results of a node that another stage does ----

    def stand_ins(self, node: Node, args: Args, kwargs: Kwargs) -> list[Any]:
        """What stands for each leaf of the result of ``node``: tensors without numbers, arguments, constants."""
        sources = node.returned.sources
        # Constants of this kind of micro-batch, where they were found; else those of the trace.
        constants = self.shapes.constants.get(node.index)
        arguments: list[Any] | None = None
        found: list[Any] = []
        for position, (kind, source) in enumerate(sources):
            if kind == "value":
                found.append(self.tensor(source))
            elif kind == "argument":
                if arguments is None:
                    arguments = leaves((args, kwargs))
                found.append(arguments[source])
            elif constants is None or constants[position] == AS_TRACED:
                found.append(source)
            else:
                found.append(constants[position])
        return found

    def tensor(self, value: int) -> Tensor:
        """The tensor that stands for ``value``: the one that is here, or a :class:`RemoteTensor`."""
        tensor = self.here.get(value)
        if tensor is None:
            tensor = self.shapes.remote_tensor(value)
        self._mark(tensor, value)
        return tensor

    # ---- changes in place ----

    def rebind(self, node: Node, args: Args, kwargs: Kwargs, done: bool) -> None:
        """Follow the changes in place of ``node``: objects that were the old value are the new one from here on.

        That are all objects of the old value, not just the argument: ``y = x.view(-1); x.add_(1)`` changes ``y``, too.
        Where the change is done here the objects have the new numbers; elsewhere they only get the new name, and what
        they hold is outdated.
        """
        arguments = []
        if node.module is None:
            arguments = leaves((args, kwargs))
        for old, new, position in node.rebinds:
            # One for each value that lies in the changed memory, as the trace has seen it. Stand-ins share no memory: a
            # stage that has only these cannot see by itself that `y` is a view of the changed `x`.
            objects = self._objects_of(old)
            if position is not None and node.module is None:
                changed = arguments[position]
                if not any(tensor is changed for tensor in objects):
                    objects.append(changed)
            for tensor in objects:
                if done and type(tensor) is not RemoteTensor:
                    self._track(tensor, new)
                else:
                    self._mark(tensor, new)

    def _objects_of(self, value: int | None) -> list[Tensor]:
        """All tensor objects that still are ``value``, which is about to end."""
        if value is None:
            return []
        found: list[Tensor] = []
        for reference in self._holders.pop(value, []):
            tensor = reference()
            if tensor is not None and self.value_of(tensor) == value:
                found.append(tensor)
        return found


class Metadata:
    """Answers questions about tensors as if all of them were here.

    Two kinds are elsewhere: a :class:`RemoteTensor`, and a parameter of another stage, which is on the meta device.

    Args:
        values: of the run.
        device: of this rank.
    """

    def __init__(self, values: StageValues, device: torch.device) -> None:
        self.values = values
        self.device = device

    def ask(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """What a function that asks for no numbers answers."""
        if not args or not isinstance(args[0], Tensor):
            return _call_with_patterns(function, args, kwargs)
        subject = args[0]
        if _is_without_numbers(subject):
            return self._of_remote(function, subject, args, kwargs)
        if len(args) > 1:
            args = map_leaves(_pattern, args)
        answer = function(*args, **kwargs)
        if answer is not None or name_of(function) != "grad_fn":
            return answer
        # Where shapes are found a received tensor is a leaf, which it is not in one process.
        if subject.requires_grad and self.values.is_elsewhere(subject):
            return idle_node()
        return None

    def _of_remote(self, function: Any, subject: Tensor, args: Args, kwargs: Kwargs) -> Any:
        name = name_of(function)
        pattern = _pattern(subject)
        if name in _FROM_PATTERN and len(args) == 1:
            self.values.value_of(subject)  # refuses one of an earlier micro-batch
            return function(pattern)
        if asks_for_device(name):
            return device_answer(name, pattern.dtype, self.device)
        if name in ("__repr__", "__format__", "__str__"):
            return f"<tensor of shape {tuple(pattern.shape)} on another stage>"
        value = self.values.value_of(subject)
        if value is None or name not in ("requires_grad", "is_leaf", "grad_fn"):
            return _call_with_patterns(function, args, kwargs)
        # As where the value is made: it requires a gradient there if it did when shapes were found, and gradients are
        # on. Of its graph there is a node that does nothing.
        requires_grad = self.values.shapes.values[value].requires_grad and torch.is_grad_enabled()
        if name == "requires_grad":
            return requires_grad
        if name == "is_leaf":
            return not requires_grad
        if requires_grad:
            return idle_node()
        return None

    def watch(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Register a hook on a gradient where the value is made: elsewhere it would act a second time."""
        subject = args[0]
        if not isinstance(subject, Tensor) or not self.values.is_elsewhere(subject):
            return function(*args, **kwargs)
        if name_of(function) == "retain_grad":
            return None
        return RemovableHandle(OrderedDict())

    def like(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """A new tensor in the likeness of another one, as ``zeros_like`` makes it: on this rank's device."""
        subject = args[0] if args else next(iter(kwargs.values()))
        if _is_without_numbers(subject) and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        return _call_with_patterns(function, args, kwargs)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_without_numbers(tensor: Tensor) -> bool:
    return type(tensor) is RemoteTensor or tensor.device.type == "meta"


def _call_with_patterns(function: Any, args: Args, kwargs: Kwargs) -> Any:
    args = map_leaves(_pattern, args)
    kwargs = map_leaves(_pattern, kwargs)
    return function(*args, **kwargs)


def _pattern(leaf: Any) -> Any:
    if type(leaf) is RemoteTensor:
        return leaf.pattern
    return leaf
