"""One stage's part of a step: the step's own code again, with other stages' values standing in.

The code between modules runs on every stage. Operations on the batch alone are done for real. The others, and calls of
*units* (modules that are placed whole), are nodes of the :class:`~lightning_smddp.pipeline.capture.graph.StepGraph`,
and are matched in order::

    nodes of earlier stages      return what was received, or a RemoteTensor: a shape and a type without numbers
    nodes of this stage          are done
    first node of the next one   leaves the step by an exception, StageDone

A call that is not the node that comes next shows that the step goes another way than when it was traced, and raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_smddp._compat.torch import WithoutFunctionMode, in_checkpoint
from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, sets_flag
from lightning_smddp.pipeline.capture.patches import Compiled, Eager, RunAgain, patched_forwards
from lightning_smddp.pipeline.capture.python_random import PythonRandom, digest
from lightning_smddp.pipeline.capture.records import deciding_tensors
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.runtime.host_values import NOTHING, Answers
from lightning_smddp.pipeline.runtime.remote import (
    OTHER_COURSE,
    RemoteTensor,
    ReplayError,
    Shape,
    Shapes,
    read_told,
    write_told,
)
from lightning_smddp.pipeline.runtime.stage_graph import StageGraph, StagePlan
from lightning_smddp.pipeline.runtime.stage_values import Args, Function, Kwargs, Metadata, StageValues
from lightning_smddp.wire.pytree import leaves, rebuild, tensors

Observer: TypeAlias = Callable[[Node, bool, Any], None]
"""(node, whether it ends, its result then): called around each node that is done for real."""


@dataclass(frozen=True)
class Observers:
    """Who wants to know what of a run; each is None where nobody does.

    Attributes:
        node: called around each node that is done here.
        shapes: takes down what is made here looks like, in place of the check. With it a run's own ``shapes`` need
            only know the earlier stages, so that stage after stage can find the shapes of a new kind of micro-batch.
        reads: takes down what Python code reads of the batch.
    """

    node: Observer | None = None
    shapes: Shapes | None = None
    reads: list[str] | None = None


NOBODY = Observers()

_active = threading.local()  # .run: the replay that runs in this thread


def active_run() -> Run | None:
    """The stage's run that is under way in this thread."""
    run: Run | None = getattr(_active, "run", None)
    return run


class Replay:
    """Runs a step for one stage, again and again.

    Args:
        graph: the step.
        plan: the stage.
        root: the module that the step belongs to.
        device: where its tensors are.
        checkpointing: keep only the inputs of units for backward, and run units again in it.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: StagePlan,
        root: nn.Module,
        device: torch.device,
        checkpointing: bool = False,
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.root = root
        self.device = device
        self.stage = StageGraph(graph, plan, root)
        self.checkpointing = checkpointing
        self.python_random: PythonRandom | None = None
        if graph.draws:
            self.python_random = PythonRandom(root, device if graph.shares_draws else None)

    def run(
        self,
        step: Callable[[], Any],
        received: Sequence[Tensor],
        shapes: Shapes,
        observers: Observers = NOBODY,
        answers: Answers | None = None,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run ``step`` for this stage, units patched by :func:`patched_units`.

        Args:
            step: the user's step on one micro-batch.
            received: what the stage before sent: tensors, and what Python read of them where it read any.
            shapes: what values of earlier stages look like; also checked against what is made here.
            observers: of this run.
            answers: what runs of the step on this micro-batch have read of it before.

        Returns:
            What the next stage receives (empty on the last), and what the step returned (None unless last).

        Raises:
            ReplayError: the step took another path than when it was traced, or its values have other shapes.
        """
        stage = self.stage
        # What `_to_send` of the stage before has made of its values, and so what is received here:
        #     one tensor for each value of plan.receives | numbers that Python read, as one tensor, where it read any
        told: dict[int, Any] = {}
        if stage.told and not stage.is_probe:
            told = read_told(stage.told, received[-1])
        num_values = len(self.plan.receives)
        given: dict[int, Tensor] = {}
        for value, tensor in zip(self.plan.receives, received[:num_values], strict=True):
            given[value] = self._as_traced(value, tensor)
        values = StageValues(stage, given, shapes, observers.shapes)
        run = Run(self, values, told, observers, answers)
        outer = active_run()
        _active.run = run
        result = None
        try:
            with Eager(), run:
                result = step()
            self._check_end(run)
            if stage.is_last:
                (result,), _ = values.present((result,), {})
        except StageDone:
            pass
        finally:
            _active.run = outer
        if not stage.is_last:
            result = None
        return self._to_send(run, shapes, observers), result

    def _as_traced(self, value: int, tensor: Tensor) -> Tensor:
        """Received tensors are contiguous leaves: give them the strides of old, and a copy if they are changed here."""
        known = self.graph.values[value]
        shape = Shape(tuple(tensor.shape), known.stride, tensor.dtype, tensor.requires_grad)
        # The traced strides fit the traced shape alone, and only dense ones can be those of a new tensor.
        if known.shape == shape.shape and not shape.is_contiguous() and shape.is_dense():
            strided = torch.empty_strided(
                shape.shape,
                shape.stride,
                dtype=shape.dtype,
                device=tensor.device,
            )
            return strided.copy_(tensor)
        if known.memory in self.stage.changed_here:
            return tensor.clone()
        return tensor

    def _to_send(self, run: Run, shapes: Shapes, observers: Observers) -> tuple[Tensor, ...]:
        here = run.values.here
        sent = tuple(here[value] for value in self.plan.sends)
        if observers.shapes is None:
            self._check_sent(sent, shapes)
        if self.stage.tells and not self.stage.is_probe:
            numbers = write_told(self.stage.tells, run.told, self.device)
            return (*sent, numbers)
        return sent

    def _check_end(self, run: Run) -> None:
        """The step has returned: raise ``ReplayError`` if it did so too early."""
        if run.done:
            return  # the user's code caught StageDone
        nodes, is_last = self.graph.nodes, self.stage.is_last
        # Modules have to be called. Operations behind the last one may be left out: by a step that returns earlier on
        # the last stage, and on others where nothing is missing that they send: those operations are what logging does
        # with a value, and only the last stage comes to them.
        missing = nodes[run.cursor : self.plan.end]
        if is_last and _has_no_unit(missing):
            return
        has_made_all = all(value in run.values.here for value in self.plan.sends)
        if has_made_all and _has_no_unit(nodes[run.cursor :]):
            return
        if missing:
            expected = missing[0].name
        else:
            expected = f"{nodes[self.plan.end].name}, the next stage's first item"
        raise ReplayError(f"The step returned before it came to {expected}. {OTHER_COURSE}")

    def _check_sent(self, sent: tuple[Tensor, ...], shapes: Shapes) -> None:
        if not torch.is_grad_enabled():
            return
        for value, tensor in zip(self.plan.sends, sent, strict=True):
            if shapes.values[value].requires_grad == tensor.requires_grad:
                continue
            maker = self.graph.nodes[self.graph.producers[value]]
            verb = "requires" if tensor.requires_grad else "needs no"
            raise ReplayError(
                f"What {maker.name} made {verb} a gradient; when the step was traced it was the other way round. "
                "Parameters were frozen or unfrozen since."
            )


def _has_no_unit(nodes: Sequence[Node]) -> bool:
    return all(node.module is None for node in nodes)


class StageDone(BaseException):
    """The step has come to the next stage's first node. No ``Exception``: user code must not catch it."""


class Run(TorchFunctionMode):
    """One pass of a :class:`Replay` through the step: what its torch functions and modules do instead.

    Args:
        replay: whose pass.
        values: of this pass; what was received is in them.
        told: numbers that Python has read on earlier stages, by node. Those of this stage come along.
        observers: of this pass.
        answers: see :meth:`Replay.run`.

    Attributes:
        cursor: index of the node that comes next.
        done: whether the next stage's first node was met.
        plan: of the stage.
    """

    def __init__(
        self,
        replay: Replay,
        values: StageValues,
        told: dict[int, Any],
        observers: Observers,
        answers: Answers | None,
    ) -> None:
        super().__init__()
        self.replay = replay
        self.stage = replay.stage
        self.plan = replay.plan
        self.nodes = replay.graph.nodes
        self.values = values
        self.told = told
        self.observers = observers
        self.metadata = Metadata(values, replay.device)
        self.answers: Answers | None = None
        if not replay.graph.shares_draws:  # draws are other ones each time
            self.answers = answers
        self.asked = 0  # questions to the batch so far
        self.cursor = 0
        self.done = False
        self.inside = False  # a node that is done for real: what it calls is its own
        self._diverged = False  # behind the last module, where the last stage may go another way
        self.random = replay.python_random
        self.shares_draws = replay.graph.shares_draws
        self.seed: int | None = None  # what nodes draw follows from the state at the first one, alike on all stages

    @property
    def is_probe(self) -> bool:
        """Whether no node is done in this run: what it does to Python's objects does not count."""
        return self.stage.is_probe

    # ---- what user code calls ----

    def unit(self, name: str, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        """A call of the module ``name``, which is placed whole: run here, or answered with what other stages have told.

        Raises:
            ReplayError: the traced step has another node at this point.
        """
        node = self._next(name, None)
        if node is None:  # behind the last traced node
            return self._unforeseen_unit(name, forward, args, kwargs)
        try:
            if node.index not in self.stage.own:
                return self._stand_in(node, args, kwargs)
            return self._own_unit(node, forward, args, kwargs)
        finally:
            # Only the stage that has the unit has drawn in it. All stages go on from one new state, by a number that no
            # node is seeded with.
            if self.random is not None and node.draws_in_python:
                assert self.seed is not None
                self.random.seed(self.seed + 1 + len(self.nodes) + node.index)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return function(*args, **kwargs)
        # Each torch function of the user's code between modules comes here, on each stage. First what needs no numbers
        # of tensors, and so is no node: questions, hooks on gradients, and tensors in the likeness of another one.
        kind = kind_of(function, args)
        if kind is Kind.METADATA:
            return self.metadata.ask(function, args, kwargs)
        if kind is Kind.WATCHER:
            return self.metadata.watch(function, args, kwargs)
        touches = self.values.touches
        if kind is Kind.LIKE and not touches(_behind_first(args, kwargs)):
            return self.metadata.like(function, args, kwargs)
        # A function is a node if it depends on a value, or draws what other stages would draw differently.
        if touches(args) or (kwargs and touches(kwargs.values())):
            if sets_flag(function) and isinstance(args[0], nn.Parameter):
                return function(*args, **kwargs)
        elif self.shares_draws or function not in self.replay.graph.random_functions:
            return self._free(function, args, kwargs)
        return self._operation(kind, function, args, kwargs)

    # ---- calls that are nodes ----

    def _next(self, module: str | None, function: Any) -> Node | None:
        """The node that this call is; None behind the last one.

        Raises:
            StageDone: it is the first node of the next stage.
            ReplayError: it is another call than the one that comes next in the graph.
        """
        cursor = self.cursor
        stage = self.stage
        if self.random is not None and self.seed is None:
            states = self.random.get()
            self.seed = digest(states)
        node: Node | None = None
        is_next = False
        if cursor < len(self.nodes):
            node = self.nodes[cursor]
            is_next = node.module == module and (module is not None or node.function == function)
        # A stage is done when it comes to the next one's first node, or to any other call in its place: whether that is
        # the right one is for the next stage to see. A probe has no next stage, so it looks.
        if cursor == self.plan.end and not stage.is_last and (is_next or not stage.is_probe):
            self.done = True
            raise StageDone
        if is_next and not self._diverged:
            self.cursor += 1
            return node
        if stage.is_last and cursor >= self.plan.begin and cursor > stage.last_unit:
            self._diverged = True  # the step's end is this stage's alone: it may differ
            return None
        raise self._other_course(module, function, node)

    def _other_course(self, module: str | None, function: Any, node: Node | None) -> ReplayError:
        """The error for a call of ``module``, or else of ``function``, where ``node`` comes next."""
        got = f"{name_of(function)} at {user_location()}"
        if module is not None:
            got = f"module {module!r}"
        expected = "the end"
        if node is not None:
            expected = node.name
            if node.module is not None:
                expected = f"module {node.name!r}"
        reason = ""
        if self.told:
            last = list(self.told)[-1]
            location = self.nodes[last].location
            reason = f" Python read a tensor's value at {location}: does the step depend on it?"
        return ReplayError(f"The step came to {got} where {expected} was expected. {OTHER_COURSE}{reason}")

    def _own_unit(self, node: Node, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        """The result of a module that is this stage's."""
        if node.inputs:
            args, kwargs = self.values.present(args, kwargs)
        if self.random is None:
            return self._call_unit(node, forward, args, kwargs)
        assert self.seed is not None
        with self.random.put_back():  # what units draw is not drawn on other stages
            self.random.seed(self.seed + 1 + node.index)
            return self._call_unit(node, forward, args, kwargs)

    def _call_unit(self, node: Node, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a module of this stage, checkpointed where that is asked for."""
        observe = self.observers.node
        if observe is not None:
            observe(node, False, None)
        # A unit that changes tensors in place cannot be run again, which `checkpoint` does in backward.
        wanted = self.replay.checkpointing or (node.checkpointed and in_checkpoint())
        if wanted and torch.is_grad_enabled() and not node.rebinds:
            again = RunAgain(forward, args, kwargs)
            checkpoint_kwargs = {**kwargs, "use_reentrant": False}
            with _plainly_saved():
                result = self._do(checkpoint, (again, *args), checkpoint_kwargs)
        else:
            result = self._do(forward, args, kwargs)
        if observe is not None:
            observe(node, True, result)
        return self.values.note_result(node, result, args, kwargs)

    def _unforeseen_unit(self, name: str, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        """Do it if all of it is here; else it belongs to another path, which stages have to know of."""
        args, kwargs = self.values.present(args, kwargs)
        unit = self.replay.root.get_submodule(name)
        for leaf in [*unit.parameters(), *leaves((args, kwargs))]:
            # Parameters of other stages are on the meta device. A `RemoteTensor` does not answer by itself.
            if type(leaf) is RemoteTensor or (isinstance(leaf, Tensor) and leaf.is_meta):
                raise ReplayError(
                    f"The step calls module {name!r} at {user_location()}, behind its last one. {OTHER_COURSE}"
                )
        return self._do(forward, args, kwargs)

    def _operation(self, kind: Kind, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """An operation between modules that is a node: done where it is this stage's, else a stand-in."""
        node = self._next(None, function)
        if node is not None and node.index not in self.stage.own:
            return self._stand_in(node, args, kwargs)
        args, kwargs = self.values.present(args, kwargs)
        if node is None:
            if kind is Kind.BACKWARD:  # much of its graph is elsewhere
                raise ReplayError(f"The step runs a backward pass of its own at {user_location()}. {OTHER_COURSE}")
            return function(*args, **kwargs)
        if self.random is None or not self.shares_draws:
            return self._own_operation(node, function, args, kwargs)
        assert self.seed is not None
        with self.random.apart(self.seed + 1 + node.index):
            return self._own_operation(node, function, args, kwargs)

    def _own_operation(self, node: Node, function: Any, args: Args, kwargs: Kwargs) -> Any:
        observe = self.observers.node
        if observe is not None:
            observe(node, False, None)
        if node.checkpointed and in_checkpoint():
            with _plainly_saved():
                result = self._do(function, args, kwargs)
        else:
            result = self._do(function, args, kwargs)
        if observe is not None:
            observe(node, True, result)
        if node.tells:
            self.told[node.index] = result
        return self.values.note_result(node, result, args, kwargs)

    def _do(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        self.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = False

    def _stand_in(self, node: Node, args: Args, kwargs: Kwargs) -> Any:
        """What a node of another stage returns."""
        reads = self.observers.reads
        if reads is not None:
            arguments = leaves((args, kwargs))
            self._note_sizes(reads, node, arguments)
        if node.tells and not self.is_probe:
            return self.told[node.index]
        if node.free and _has_generator(args, kwargs):
            node.function(*args, **kwargs)  # a generator of the step's own goes on from here on each stage
        if node.rebinds:
            self.values.rebind(node, args, kwargs, done=False)
        # Nearly all results are one tensor, whose skeleton is `...`.
        returned = node.returned
        if returned.skeleton is ...:
            kind, source = returned.sources[0]
            if kind == "value":
                return self.values.tensor(source)
        found = self.values.stand_ins(node, args, kwargs)
        with self:  # containers may ask what they are given
            return rebuild(returned.skeleton, found)

    def _note_sizes(self, reads: list[str], node: Node, arguments: list[Any]) -> None:
        """Take down what the size of a node's result depends on besides the sizes of tensors."""
        known = []
        sizes = []
        for leaf in arguments:
            known.append(None if type(leaf) is RemoteTensor else leaf)
            if isinstance(leaf, (int, slice)):
                sizes.append(str(leaf))
        masks = deciding_tensors(name_of(node.function), known)
        if self.random is not None or masks:
            counts = [int(mask.sum()) for mask in masks]
            reads.append(f"{node.name}{sizes}{counts}")

    # ---- operations on the batch alone ----

    def _free(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An operation on the batch alone: each stage does it for itself."""
        result = self._answer(function, args, kwargs)
        reads = self.observers.reads
        if reads is None:
            return result
        # A probe writes down what may be different with another batch, and so may lead to another path: numbers that
        # Python reads, and sizes, which may depend on the batch's values or on what is drawn.
        location = user_location()
        made = tensors(result)
        if made:
            sizes = [str(tuple(tensor.shape)) for tensor in made]
            reads.append(f"a result of shape {', '.join(sizes)} from {name_of(function)} at {location}")
        else:
            reads.append(f"{result!r}, which Python reads at {location}")
        return result

    def _answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What ``function`` returns; if that are numbers, and another run has asked for them, without asking again."""
        if self.answers is None:
            return function(*args, **kwargs)
        arguments = (args, kwargs)
        result = self.answers.find(self.asked, function, arguments)
        if result is not NOTHING:
            self.asked += 1
            return result
        result = function(*args, **kwargs)
        if self.answers.note(self.asked, function, arguments, result):
            self.asked += 1
        return result


@contextmanager
def patched_units(root: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Let calls of ``units`` go through the replay that runs; outside of one they are what they were."""

    def wrap(name: str, forward: Function) -> Function:
        def unit(*args: Any, **kwargs: Any) -> Any:
            run: Run | None = getattr(_active, "run", None)
            if run is None or run.inside:
                return forward(*args, **kwargs)
            # A unit is done or stood in for as a whole: what it calls inside is none of the run's business, and may run
            # compiled. If a mode of the user's lies above ours, ours stays on, and `inside` makes it pass everything.
            with WithoutFunctionMode(run) as unseen, Compiled(unseen):
                return run.unit(name, forward, args, kwargs)

        return unit

    with patched_forwards(root, wrap, dict.fromkeys(units), compiled=True):
        yield


def _behind_first(args: Args, kwargs: Kwargs) -> Sequence[Any]:
    """The arguments of ``zeros_like`` and its kind behind the tensor in whose likeness another one is made."""
    given = [*args, *kwargs.values()]
    return given[1:]


def _has_generator(args: Args, kwargs: Kwargs) -> bool:
    return any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs)))


def _plainly_saved() -> saved_tensors_hooks:
    """Within the user's own checkpoint: keep saved tensors, as its function cannot be run again for one stage alone."""

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    return saved_tensors_hooks(as_it_is, as_it_is)
