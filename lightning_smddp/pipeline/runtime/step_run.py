"""One stage's part of a step: the step's own code on every stage, other stages' tensors standing in.

Modules that are placed whole (*units*) are wrapped, and operations on tensors of other stages are seen by the class of
these tensors; everything else is plain PyTorch. A run has two parts::

    before its first own unit   units, and operations on what they return, give stand-ins; they are matched with the
                                traced order, and done only where the stage needs their numbers (`StagePlan.recomputed`)
    from there on               units run, and what was received takes the place of its stand-ins
    first unit of the next one  leaves the step by an exception, StageDone

Received tensors stand in as well until the first own unit is entered: so operations before it are not done twice, on
two stages, with other dropout, hooks that fire twice and buffers that are written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_smddp._compat.torch import without_subclass_functions, wrapper_subclass
from lightning_smddp.pipeline import activations
from lightning_smddp.pipeline.capture.graph import Node
from lightning_smddp.pipeline.capture.ops import (
    Kind,
    asks_for_device,
    device_answer,
    draws_by_value,
    kind_of,
    name_of,
    sets_flag,
    user_location,
)
from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.runtime.remote_tensor import ACTIVE, OTHER_PATH, RemoteTensor, ReplayError
from lightning_smddp.pipeline.runtime.run_modes import Reads, Watch
from lightning_smddp.pipeline.runtime.stage_program import Shapes, StageProgram
from lightning_smddp.pytree import leaves, map_leaves
from lightning_smddp.seeding import Forward, seeded
from lightning_smddp.wording import counted

_MIRRORED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge"}  # `real > remote` arrives as `remote < real`
_CONSTANTS = (int, float, str, type(None))  # that may be others for micro-batches of another kind


class StageDone(BaseException):
    """The step has come to the next stage's first unit. No ``Exception``: user code must not catch it."""


def run_stage(
    program: StageProgram,
    step: Callable[[], Any],
    received: Sequence[Tensor],
    shapes: Shapes,
    seed: int | None = None,
    made: Shapes | None = None,
    reads: list[str] | None = None,
) -> tuple[tuple[Tensor, ...], Any]:
    """Run ``step`` for the stage of ``program``, within :meth:`Wrappers.active`.

    Args:
        program: what the stage does.
        step: the user's step on one micro-batch.
        received: what the stage before sent.
        shapes: what values of earlier stages look like.
        seed: of the random numbers of this micro-batch, the same on all stages; None: they go on from where they are.
        made: gets the shapes of what is made here.
        reads: gets what Python code reads of the batch.

    Returns:
        What the next stage receives (empty on the last), and what the step returned (None unless last).

    Raises:
        ReplayError: the step took another path than when it was traced.
    """
    run = StageRun(program, received, shapes, made, reads)
    mode: AbstractContextManager[Any] = nullcontext()
    if run.keeps_all:
        mode = Watch(run)
    elif reads is not None:
        mode = Reads(run)
    if program.graph.calls_compiled:  # code between units would run through us unseen; units run compiled
        step = torch.compiler.set_stance("force_eager")(step)
    outer, ACTIVE.run = ACTIVE.run, run
    result = None
    try:
        if seed is not None:
            program.wrappers.generators.seed(seed)
        with mode:
            result = step()
        run.check_end()
        if program.is_last:
            result = map_leaves(run.real, result)
    except StageDone:
        pass
    finally:
        ACTIVE.run = outer
        run.end()
    return run.to_send(), result if program.is_last else None


class StageRun:
    """One run of a :class:`StageProgram`, for one micro-batch.

    Attributes:
        here: value -> tensor: received, or made here and kept.
        position: index of the node that comes next.
        has_begun: whether the first own unit was entered.
        keeps_all: all tensors that are made here are kept, not only those that are sent.
        inside: within a unit, or an operation that is done here: what it calls is its own.
        done: whether the next stage's first unit was met. User code may have caught :class:`StageDone`.
        is_over: whether the run has ended; stand-ins may live on in a checkpoint's second run.
    """

    def __init__(
        self,
        program: StageProgram,
        received: Sequence[Tensor],
        shapes: Shapes,
        made: Shapes | None,
        reads: list[str] | None,
    ) -> None:
        self.program = program
        self.graph = program.graph
        self.plan = program.plan
        self.device = program.device
        self.shapes = shapes
        self.made = made
        self.reads = reads
        self.keeps_all = program.watches or made is not None
        pairs = zip(self.plan.receives, received, strict=True)
        self.here = {value: program.as_traced(value, tensor) for value, tensor in pairs}
        self.stand_ins: dict[int, RemoteTensor] = {}
        self.position = 0
        self.has_begun = self.plan.begin == 0 and self.plan.end > 0
        self.inside = False
        self.done = False
        self.is_over = False
        self._reclassed: list[tuple[Tensor, type]] = []

    def end(self) -> None:
        """What the step does from here on, in a backward pass, is no part of the run."""
        self.is_over = True
        for tensor, kind in self._reclassed:
            tensor.__class__ = kind
        self._reclassed = []

    def to_send(self) -> tuple[Tensor, ...]:
        """What the next stage receives. Other tensors are let go, but for those that a checkpoint's second run uses."""
        here = self.here
        for old, new in self.program.written_in_place:
            if old in here:
                here.setdefault(new, here[old])  # the same object
        if self.made is not None:
            self.made.values.update((value, TensorSpec.of(tensor)) for value, tensor in here.items())
        for value in self.plan.sends:
            if value not in here:
                maker = self.graph.nodes[self.graph.producers[value]].name
                raise ReplayError(f"The step has not made what {maker} made when it was traced. {OTHER_PATH}")
        self.here = {value: tensor for value, tensor in here.items() if value in self.stand_ins}
        self.stand_ins = {}  # they know the run: what it has received is freed with the last of them
        return tuple([self.program.as_sent(here[value]) for value in self.plan.sends])

    def check_end(self) -> None:
        """The step has returned: raise ``ReplayError`` if it did so too early."""
        for node in () if self.done else self.graph.nodes[self.position :]:
            if node.module is not None or node.index in self.program.remote:
                raise ReplayError(f"The step returned before it came to {node.name}. {OTHER_PATH}")

    # ---- the traced order ----

    def stop(self) -> None:
        """Leave the step: what comes is the next stage's."""
        self.done = True
        raise StageDone

    def find(self, function: Any, values: set[int], parameters: set[str]) -> Node:
        """The next node of this function and these arguments, before the next unit."""
        graph, name = self.graph, name_of(function)
        for index in range(self.position, graph.next_unit[self.position]):
            node = graph.nodes[index]
            traced = name_of(node.function)
            is_same = name in (traced, _MIRRORED.get(traced))
            if is_same and values.issubset(node.inputs) and parameters.issubset(node.parameters):
                return node
            if index in self.program.remote:
                break  # it should have come first
        raise self._other_path(f"{name} at {user_location()}")

    def _other_path(self, got: str) -> ReplayError:
        nodes = self.graph.nodes
        expected = nodes[self.position].name if self.position < len(nodes) else "the end"
        reads = [node.location for node in nodes[: self.position] if node.reads and node.inputs]
        reason = f" Python read a tensor's value at {reads[-1]}: does the step depend on it?" if reads else ""
        return ReplayError(f"The step came to {got} where {expected} was expected. {OTHER_PATH}{reason}")

    # ---- operations ----

    def operation(self, function: Any, args: Any, kwargs: Any, found: list[Any]) -> Any:
        """An operation with a tensor or a parameter of another stage among ``found``, the leaves of its arguments."""
        if self.done and not self.is_over:
            raise StageDone
        values: set[int] = set()
        parameters: set[str] = set()
        for leaf in found:
            if type(leaf) is RemoteTensor:
                if leaf.run is not self or ACTIVE.run not in (None, self):
                    raise ReplayError(
                        f"At {user_location()} a tensor of another stage is used that was kept since an earlier step "
                        "or micro-batch. Stages work on several micro-batches at a time: none can hand anything to "
                        "the next."
                    )
                values.add(leaf.value)
            elif id(leaf) in self.program.absent:
                parameters.add(self.program.absent[id(leaf)])
        if self.has_begun or self.is_over:
            if not parameters and self.here.keys() >= values:
                return function(*map_leaves(self.real, args), **map_leaves(self.real, kwargs))
            raise ReplayError(
                f"{name_of(function)} at {user_location()} uses a tensor of another stage, as the step did not when it "
                "was traced. Let it do so in every step from the first on, such as times 0.0 until it counts."
            )
        node = self.find(function, values, parameters)
        if node.index >= self.plan.end:
            self.stop()
        self.position = node.index + 1
        if node.index in self.plan.recomputed:
            result = self.do(function, map_leaves(self.real, args), map_leaves(self.real, kwargs))
            if node.reads:
                return result
            self.note_result(node, result)
        elif node.random and self.graph.repeats_draws and not draws_by_value(function):
            self._repeat_draw(function, args, kwargs)
        return self.placeholder(node, found)

    def _repeat_draw(self, function: Any, args: Any, kwargs: Any) -> None:
        """Draw as many numbers as the stage that has the tensors does: what all stages draw next are the same then."""

        def like(leaf: Any) -> Any:
            return torch.ones_like(self.pattern(leaf)) if isinstance(leaf, Tensor) else leaf

        with torch.no_grad():
            self.do(function, map_leaves(like, args), map_leaves(like, kwargs))

    def parameter_operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An operation on a parameter of another stage, and on no stand-in."""
        kind, name = kind_of(function, args), name_of(function)
        if kind is Kind.METADATA and asks_for_device(name):
            return device_answer(function, args, self.device)
        if kind is Kind.METADATA or sets_flag(function):
            with without_subclass_functions():
                return function(*args, **kwargs)
        if kind is Kind.LIKE:
            return function(*map_leaves(self.pattern, args), **map_leaves(self.pattern, kwargs))
        return self.operation(function, args, kwargs, leaves((args, kwargs)))

    def autograd_function(self, cls: Any, apply: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``apply`` of an ``autograd.Function``, which takes no part in torch function: one operation, as traced."""
        if self.inside:
            return apply(*args, **kwargs)
        found = leaves((args, kwargs))
        if any(map(self.is_remote, found)):
            return self.operation(cls.apply, args, kwargs, found)
        result = self.do(apply, args, kwargs)
        if self.made is not None:
            self.note_result(self.find(cls.apply, set(), set()), result)
        return result

    def do(self, function: Forward, args: Any, kwargs: Any) -> Any:
        """Call ``function``; what it calls is its own."""
        before, self.inside = self.inside, True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = before

    # ---- units ----

    def unit(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """A call of a module that is placed whole."""
        if self.done:
            raise StageDone
        program, node = self.program, self.program.next_unit[self.position]
        if node is None or node.module != name:
            raise self._other_path(f"module {name!r}")
        for index in range(self.position, node.index):
            if index in program.remote:
                missing = self.graph.nodes[index].name
                raise ReplayError(f"The step went on behind {missing}, which did not come. {OTHER_PATH}")
        if node.index >= self.plan.begin:
            self.has_begun = True
            keeps = self.keeps_all or node.index in program.keeps_arguments
            found = leaves((args, kwargs) if kwargs else args) if keeps or self.stand_ins else []
            if RemoteTensor in map(type, found):
                args, kwargs = map_leaves(self.real, (args, kwargs))
                found = list(map(self.real, found))
            if keeps:
                self._note_arguments(node, found)
            if node.index >= self.plan.end:
                self.stop()
        self.position = node.index + 1
        if self.reads is not None:  # rows that the step itself has added show in no kind of micro-batch
            given = leaves((args, kwargs) if kwargs else args)
            sizes = [tuple(leaf.shape) for leaf in given if isinstance(leaf, Tensor) and type(leaf) is not RemoteTensor]
            if sizes:
                self.reads.append(f"module {name!r} with inputs of the sizes {sizes}")
        if node.is_seeded:
            return seeded(program.wrappers.generators, partial(self._result, node, forward, args, kwargs))
        return self._result(node, forward, args, kwargs)

    def _note_arguments(self, node: Node, found: list[Any]) -> None:
        """Values that are seen as the arguments of a unit, as they are when it begins."""
        if len(found) != len(node.entry):
            raise ReplayError(f"Module {node.name!r} was called with other arguments. {OTHER_PATH}")
        for value, leaf in zip(node.entry, found, strict=True):
            if value is not None and type(leaf) is not RemoteTensor:
                self.here.setdefault(value, leaf)

    def _result(self, node: Node, forward: Forward, args: Any, kwargs: Any) -> Any:
        """What a unit returns, or what stands for that."""
        single = self.program.stands_for.get(node.index)
        if single is not None:
            return self._tensor(single)
        if node.index < self.plan.begin:
            return self.placeholder(node, leaves((args, kwargs)))
        changed = leaves((args, kwargs)) if node.versions else []
        self.inside = True  # as `do`: each module of each micro-batch comes here
        try:
            if self.program.checkpointing and not node.versions:
                module = self.program.wrappers.root.get_submodule(node.name)
                result = activations.call(self.program.checkpointing, module, forward, *args, **kwargs)
            else:
                result = forward(*args, **kwargs)
        finally:
            self.inside = False
        if node.versions:
            self.note_writes(node, changed)
        if self.keeps_all or node.index in self.program.keeps_results:
            self.note_result(node, result)
        return result

    # ---- results of what is done here ----

    def note_writes(self, node: Node, found: list[Any]) -> None:
        """Keep what the tensors that ``node`` has changed in place are now. ``found``: the leaves of its arguments."""
        for old, new, position in node.versions:
            if position is not None:
                self.here[new] = found[position]
            elif old in self.here:
                self.here[new] = self.here[old]

    def note_result(self, node: Node, result: Any) -> None:
        """Keep the tensors in the result of ``node`` by their values."""
        found = leaves(result)
        sources = node.returned.sources
        if len(found) != len(sources):
            raise ReplayError(
                f"{node.name} returned {counted(len(found), 'value')} instead of {len(sources)}. {OTHER_PATH}"
            )
        for position, (leaf, (kind, source)) in enumerate(zip(found, sources, strict=True)):
            if kind == "value":
                if not isinstance(leaf, Tensor):
                    raise ReplayError(f"{node.name} returned a {type(leaf).__name__} in a tensor's place. {OTHER_PATH}")
                self.here[source] = leaf
            elif kind == "constant" and self.made is not None and isinstance(leaf, _CONSTANTS):
                self.made.constants[node.index, position] = leaf

    # ---- stand-ins ----

    def is_remote(self, leaf: Any) -> bool:
        """Whether ``leaf`` is a stand-in, or a parameter of another stage."""
        return type(leaf) is RemoteTensor or id(leaf) in self.program.absent

    def real(self, leaf: Any) -> Any:
        """The tensor that ``leaf`` stands for, if it is here; else ``leaf``: also what is kept from another run."""
        if type(leaf) is RemoteTensor and leaf.run is self:
            return self.here.get(leaf.value, leaf)
        return leaf

    def pattern(self, leaf: Any) -> Any:
        """For ``leaf``, if its numbers are elsewhere, a tensor like it."""
        if not self.is_remote(leaf):
            return leaf
        with without_subclass_functions():
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)

    def _tensor(self, value: int) -> Tensor:
        made = self.stand_ins.get(value)
        if made is None:
            spec = self.shapes.values.get(value)
            if spec is None:
                raise ReplayError(f"The shape of value {value} is not known: the stage that makes it must run first.")
            requires_grad = spec.requires_grad and torch.is_grad_enabled()
            stride = spec.stride or None  # not known, or there is no dimension
            made = wrapper_subclass(
                RemoteTensor, spec.shape, stride, dtype=spec.dtype, device=self.device, requires_grad=requires_grad
            )
            made.value, made.run = value, self
            self.stand_ins[value] = made
        return made

    def placeholder(self, node: Node, given: list[Any]) -> Any:
        """What stands for the result of ``node``; what it has changed in place are other values from now on."""
        found: list[Any] = []
        for position, (kind, source) in enumerate(node.returned.sources):
            if kind == "value":
                found.append(self._tensor(source))
            elif kind == "argument":
                found.append(given[source])
            else:
                found.append(self.shapes.constants.get((node.index, position), source))
        made = iter(found)  # in the order of the skeleton's leaves
        result = map_leaves(lambda _: next(made), node.returned.skeleton)
        self._note_versions(node, given)
        return result

    def _note_versions(self, node: Node, given: list[Any]) -> None:
        """``node`` has changed tensors in place: these objects are other values from now on."""
        for old, new, position in node.versions:
            changed: Any = self.stand_ins.get(-1 if old is None else old) if position is None else given[position]
            if changed is None:
                continue
            if type(changed) is not RemoteTensor:  # one of the batch into which something of another stage was written
                self._reclassed.append((changed, type(changed)))
                changed.__class__ = RemoteTensor
                changed.run = self
            changed.value = new
            self.stand_ins[new] = changed
