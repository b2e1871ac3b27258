"""An optimizer of which each rank steps a share: of parameters that all have (ZeRO's first stage), or of ``DTensor``.

The user's optimizer stays as it is: its class, its groups, its hooks and its schedules. Only while it steps, its groups
hold this rank's parts in the parameters' place, each a parameter of its own with the same part of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_smddp._compat.fsdp import divided_like
from lightning_smddp.sharding.flat_parameters import FlatParameters, in_memory_order

# A step of many operations on such a piece stays in a CPU's level-2 cache. With pieces of 1 MiB glibc gave each result
# fresh memory: 8192 page faults a step for 8.4 M elements, and twice the time (AdamW). A fused kernel passes over
# parameters once and makes no results: there, pieces would only cost (a sixth of a step of 8.4 M elements).
_CACHED_BYTES = 2**18


class StepsParts:
    """Lets ``optimizer`` step other parameters in the place of its own, until :meth:`close`.

    A step's closure comes before the exchange: it computes gradients of the user's parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._whole: list[list[nn.Parameter]] | None = None  # the groups' parameters, while it steps
        self._depth = 0  # of steps: torch calls hooks for that of a base class, too
        self._step_handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self.stand_next_to_step()

    def stand_next_to_step(self) -> None:
        """Be the last one before the step and the first one behind it, among hooks that others have registered."""
        # Hooks of the user's own (clipping, logging) have to see whole parameters: parts are in the groups between the
        # last hook before the step and the first one behind it.
        if self._step_handles:
            before, after = self._step_handles
            before.hooks_dict_ref().move_to_end(before.id, last=True)
            after.hooks_dict_ref().move_to_end(after.id, last=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _closure_called(args, kwargs)
        if self._depth == 0:
            self._take_parts()
        self._depth += 1
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.restore()

    def _take_parts(self) -> None:
        self._whole = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = self._parts(group["params"])

    def _parts(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What is stepped for some parameters, with gradients."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the groups their parameters again: after a step, or an error in it."""
        self._depth = 0
        if self._whole is None:
            return
        self._put_back(self._whole)
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        self._whole = None

    def _put_back(self, whole: list[list[nn.Parameter]]) -> None:
        """Behind a step, while the groups have parts."""

    def close(self) -> None:
        """Leave its steps alone."""
        for handle in self._step_handles:
            handle.remove()
        self._step_handles = []


class OptimizerShards(StepsParts):
    """Lets ``optimizer`` step this rank's share, from :meth:`cut` to :meth:`close`.

    Its state is that of this rank's pieces. A step's closure may call :meth:`cut`.

    Args:
        optimizer: the user's.

    Attributes:
        pieces: for each parameter (by ``id``) that has shares its parts that this rank steps.
        splits: a part of a parameter is stepped as it would be within the whole; else shares have whole parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.splits = True
        self.pieces: dict[int, list[ShardedPiece]] = {}
        self._flat: FlatParameters | None = None
        self._allows_state = False
        optimizer.register_state_dict_pre_hook(self._refuse_state)
        optimizer.register_load_state_dict_pre_hook(self._refuse_state)

    def cut(self, flat: FlatParameters, splits: bool) -> None:
        """Step a share of the parameters of ``flat`` from here on; others are stepped by every rank."""
        self._flat = flat
        self.splits = splits
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for number, layout in enumerate(flat.layouts):
            for slot in layout.slots:
                self.pieces[id(slot.parameter)] = []  # also where this rank's share has nothing of it
            if flat.share is None:
                continue
            for slot, low, high in layout.pieces_of_share(flat.share):
                parameter = slot.parameter
                # Smaller pieces on a CPU, where an optimizer without a fused kernel passes over them many times.
                size = high - low
                if splits and parameter.device.type == "cpu" and not is_fused:
                    size = _CACHED_BYTES // parameter.dtype.itemsize
                for begin in range(low, high, size):
                    end = min(begin + size, high)
                    values = flat.values(number, slot, begin, end)
                    if not splits:  # an optimizer that looks at whole parameters may look at their shapes
                        values = values.as_strided(parameter.size(), parameter.stride())
                    self.pieces[id(parameter)].append(ShardedPiece(begin, end, nn.Parameter(values)))

    def close(self) -> None:
        """Leave its steps alone. Its state stays that of the pieces, whose values nobody needs now."""
        super().close()
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.parameter.data = piece.parameter.new_empty(0)

    def parts_of(self, parameter: nn.Parameter) -> list[ShardedPiece]:
        """What this rank steps of a parameter: all of it, if it is not sharded."""
        pieces = self.pieces.get(id(parameter))
        return [ShardedPiece(0, parameter.numel(), parameter)] if pieces is None else pieces

    def gradients(self, of_all: bool) -> list[Tensor]:
        """This rank's share of the gradients; with ``of_all`` also those of parameters that have no shares."""
        found: list[Tensor] = []
        for parameter in all_parameters(self.optimizer):
            if id(parameter) in self.pieces:
                found += [gradient for _, gradient in self._gradients_of_pieces(parameter)]
            elif of_all and parameter.grad is not None:
                found.append(parameter.grad)
        return found

    def _take_parts(self) -> None:
        if self._flat is not None:  # maybe since the closure
            self._flat.begin_step()
            super()._take_parts()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._after(optimizer, args, kwargs)
        if self._flat is not None and self._depth == 0:
            self._flat.end_step()

    @contextmanager
    def state_allowed(self) -> Iterator[None]:
        """In this context the optimizer's state can be asked for and loaded: someone has put whole ones there."""
        self._allows_state = True
        try:
            yield
        finally:
            self._allows_state = False

    def _refuse_state(self, *_: Any) -> None:
        """The optimizer by itself has this rank's state, under no number of the whole's parameters."""
        if self._flat is not None and self._whole is None and not self._allows_state:
            name = type(self.optimizer).__name__
            raise RuntimeError(
                f"With shard='optimizer' this rank has a share of {name}'s state. Save and load it by "
                "`trainer.save_checkpoint` and `trainer.fit(..., ckpt_path=...)`, or by `fabric.save` and "
                "`fabric.load`, on all ranks. `trainer.strategy.optimizer_state(optimizer)`, or `state_dict()` of what "
                "`fabric.setup` returned, gives the whole to the first rank if all ranks call it."
            )

    def _parts(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        # The optimizer finds states by the identity of what is in its groups, and the same pieces come back each step:
        # so its state is that of pieces, without being told of them.
        found: list[nn.Parameter] = []
        for parameter in parameters:
            for piece, gradient in self._gradients_of_pieces(parameter):
                piece.grad = gradient
            found += [part.parameter for part in self.parts_of(parameter)]
        return found

    def _gradients_of_pieces(self, parameter: nn.Parameter) -> list[tuple[nn.Parameter, Tensor]]:
        """The pieces of a parameter that this rank steps, each with its part of the gradient, if there is one."""
        gradient = parameter.grad
        pieces = self.pieces.get(id(parameter))
        if gradient is None or not pieces:
            return []
        if not self.splits:  # one piece, which is the whole
            return [(pieces[0].parameter, gradient)]
        flat = in_memory_order(gradient, parameter)
        return [(piece.parameter, flat[piece.low : piece.high]) for piece in pieces]

    def _put_back(self, whole: list[list[nn.Parameter]]) -> None:
        # Pieces' gradients are views of the whole ones, which would stay in memory after the user has dropped them.
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.parameter.grad = None

    @contextmanager
    def as_pieces(self) -> Iterator[None]:
        """The optimizer has pieces here, as in a step: its ``state_dict`` is this rank's."""
        super()._take_parts()
        try:
            yield
        finally:
            self.restore()


class LocalSteps(StepsParts):
    """Lets ``optimizer`` step this rank's shares of ``DTensor`` parameters as plain tensors.

    torch sends each operation on a ``DTensor`` through its rules for placements, dozens of times for each parameter
    and step. Outside of steps groups and states are as ever.

    Args:
        optimizer: one that treats each element by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._known: dict[Tensor, tuple[dict[str, Any], dict[str, Any]]] = {}  # states: as ever, and of shares

    def _parts(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._share_of(parameter) for parameter in parameters]

    def _put_back(self, whole: list[list[nn.Parameter]]) -> None:
        # The optimizer's state has shares as its keys, where it had parameters before the step.
        states = self.optimizer.state
        for group, parameters in zip(self.optimizer.param_groups, whole, strict=True):
            for parameter, share in zip(parameters, group["params"], strict=True):
                if share is not parameter and share in states:
                    states[parameter] = self._with_placements(parameter, states.pop(share))
        self._known.clear()

    def _share_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part, with its gradient and state; the parameter itself where it is not divided."""
        if not isinstance(parameter, DTensor):
            return parameter
        share: Any = parameter.to_local().detach()
        share.requires_grad_(parameter.requires_grad)
        if parameter.grad is not None:
            share.grad = local_of(parameter.grad)
        if parameter in self.optimizer.state:
            # The step has to find state by the share, as it would by the parameter. Tensors in it are the same memory,
            # so what it writes in place is written to the state of the parameter as well; `restore` looks only for new
            # objects.
            state = self.optimizer.state.pop(parameter)
            of_share = {name: local_of(value) for name, value in state.items()}
            self._known[parameter] = (state, dict(of_share))  # a copy: the step puts its new objects into the other
            self.optimizer.state[share] = of_share
        return share  # type: ignore[no-any-return]

    def _with_placements(self, parameter: Tensor, of_share: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter from that of its share. What the step wrote in place is there already."""
        assert isinstance(parameter, DTensor)
        state, before = self._known.get(parameter, ({}, {}))
        found = {}
        for name, value in of_share.items():
            if name in before and before[name] is value:
                found[name] = state[name]
            elif isinstance(value, Tensor) and value.shape == parameter.to_local().shape:
                found[name] = divided_like(value, parameter)
            else:
                found[name] = value
        return found


@dataclass(frozen=True)
class ShardedPiece:
    """Elements [low, high) of a parameter, which this rank steps.

    Attributes:
        parameter: these elements as a parameter of their own, in the memory that a step writes: of one dimension, or,
            where parameters are not split, of the whole's shape.
    """

    low: int
    high: int
    parameter: nn.Parameter


def unwrapped(optimizer: Any) -> Any:
    """The user's optimizer where Lightning has wrapped it."""
    return getattr(optimizer, "optimizer", optimizer)


def all_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer's groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def around_step(shards: Iterable[Any]) -> Iterator[None]:
    """Around a step: hooks of ``shards`` are next to it, as users' hooks may have been registered since."""
    for each in shards:
        each.stand_next_to_step()
    try:
        yield
    finally:
        for each in shards:
            each.restore()


def _closure_called(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a step whose closure has been called already. ``args`` begins with the optimizer."""
    optimizer, *others = args
    given = dict(kwargs)
    if others:
        given["closure"] = others.pop(0)
    closure: Callable[[], Any] | None = given.get("closure")
    if closure is None:
        return args, kwargs
    # torch calls hooks before the closure, and the closure may make the gradients: it has to run while the groups still
    # have whole parameters. The optimizer then gets a closure that only returns the loss.
    with torch.enable_grad():
        loss = closure()
    given["closure"] = lambda: loss
    return (optimizer, *others), given


def local_of(value: Any) -> Any:
    """This rank's share of a divided tensor; anything else as it is."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    return value
