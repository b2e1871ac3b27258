"""An optimizer of which each rank steps a share: ZeRO's first stage.

The user's optimizer stays as it is: its class, its groups, its hooks and its schedules. Only while it steps, its groups
hold *pieces* instead of parameters: the parts of them that are in this rank's share, each a parameter of its own whose
gradient is the same part of the whole gradient. So its state is there for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.sharding.flat_layout import Piece, in_memory_order
from lightning_smddp.sharding.flat_parameters import FlatParameters

# A step of many operations on such a piece stays in a CPU's level-2 cache. With pieces of 1 MiB glibc gave each result
# fresh memory: 8192 page faults a step for 8.4 M elements, and twice the time (AdamW). A fused kernel passes over
# parameters once and makes no results: there, pieces would only cost (a sixth of a step of 8.4 M elements).
_CACHED_BYTES = 2**18


class OptimizerShards:
    """Lets ``optimizer`` step this rank's share, from :meth:`cut` to :meth:`close`.

    From its creation on a step's closure, which may call :meth:`cut`, comes before the step.

    Args:
        optimizer: the user's.

    Attributes:
        pieces: for each parameter (by ``id``) that has shares its parts that this rank steps.
        splits: a part of a parameter is stepped as it would be within the whole; else shares have whole parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.splits = True
        self.pieces: dict[int, list[ShardedPiece]] = {}
        self._flat: FlatParameters | None = None
        self._whole: list[list[nn.Parameter]] | None = None  # the groups' parameters, while it steps
        self._allows_state = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(self._refuse_state),
            optimizer.register_load_state_dict_pre_hook(self._refuse_state),
        ]
        self.stand_next_to_step()

    def cut(self, flat: FlatParameters, splits: bool) -> None:
        """Step a share of the parameters of ``flat`` from here on; others are stepped by every rank."""
        self._flat = flat
        self.splits = splits
        fused: set[int] = set()
        for group in self.optimizer.param_groups:
            if group.get("fused"):
                fused.update(id(parameter) for parameter in group["params"])
        for number, layout in enumerate(flat.layouts):
            for slot in layout.slots:
                self.pieces[id(slot.parameter)] = []  # also where this rank's share has nothing of it
            if flat.share is None:
                continue
            for piece in layout.pieces_of_share(flat.share):
                key = id(piece.slot.parameter)
                self.pieces[key] += self._cut(flat, number, piece, is_fused=key in fused)

    def _cut(self, flat: FlatParameters, layout: int, piece: Piece, is_fused: bool) -> Iterator[ShardedPiece]:
        """Smaller pieces on a CPU, where an optimizer without a fused kernel passes over them many times."""
        size = piece.high - piece.low
        parameter = piece.slot.parameter
        if self.splits and parameter.device.type == "cpu" and not is_fused:
            size = _CACHED_BYTES // parameter.dtype.itemsize
        for low in range(piece.low, piece.high, size):
            high = min(low + size, piece.high)
            values = flat.values(layout, Piece(piece.slot, low, high))
            if not self.splits:  # an optimizer that looks at whole parameters may look at their shapes
                values = values.as_strided(parameter.size(), parameter.stride())
            yield ShardedPiece(low, high, nn.Parameter(values))

    def stand_next_to_step(self) -> None:
        """Be the last one before the step and the first one behind it, among hooks that others have registered."""
        # Hooks of the user's own (clipping, logging) have to see whole parameters: pieces are in the groups between the
        # last hook before the step and the first one behind it.
        next_to_step(*self._handles[:2])

    def parts_of(self, parameter: nn.Parameter) -> list[ShardedPiece]:
        """What this rank steps of a parameter: all of it, if it is not sharded."""
        pieces = self.pieces.get(id(parameter))
        if pieces is None:
            return [ShardedPiece(0, parameter.numel(), parameter)]
        return pieces

    def _stepped_of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for parameter in parameters:
            for part in self.parts_of(parameter):
                found.append(part.parameter)
        return found

    def gradients(self, of_all: bool) -> list[Tensor]:
        """This rank's share of the gradients; with ``of_all`` also those of parameters that have no shares."""
        found: list[Tensor] = []
        for parameter in all_parameters(self.optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            pieces = self.pieces.get(id(parameter))
            if pieces is None:
                if of_all:
                    found.append(gradient)
            elif self.splits:
                flat = in_memory_order(gradient, parameter)
                found += [flat[piece.low : piece.high] for piece in pieces]
            elif pieces:  # the one that is the whole
                found.append(gradient)
        return found

    def has_pieces(self, parameter: nn.Parameter) -> bool:
        """Whether ranks step shares of it; each steps all of a parameter that has no share."""
        return id(parameter) in self.pieces

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The closure comes first: it computes gradients of the parameters."""
        args, kwargs = closure_called(args, kwargs)
        if self._flat is not None:  # maybe since the closure
            self._flat.begin_step()
            self._take_pieces()
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        if self._flat is not None:
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

    def _take_pieces(self) -> None:
        # The optimizer finds states by the identity of what is in its groups, and the same pieces come back each step:
        # so its state is that of pieces, without being told of them.
        self._whole = [group["params"] for group in self.optimizer.param_groups]
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            for parameter in whole:
                self._share_gradient(parameter)
            group["params"] = self._stepped_of(whole)

    def _share_gradient(self, parameter: nn.Parameter) -> None:
        """Give the pieces of a parameter their part of its gradient."""
        gradient = parameter.grad
        pieces = self.pieces.get(id(parameter))
        if gradient is None or not pieces:
            return
        if not self.splits:
            for piece in pieces:
                piece.parameter.grad = gradient
            return
        flat = in_memory_order(gradient, parameter)
        for piece in pieces:
            piece.parameter.grad = flat[piece.low : piece.high]

    def restore(self) -> None:
        """Give the groups their parameters again: after a step, or an error in it."""
        if self._whole is None:
            return
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        self._whole = None
        # Pieces' gradients are views of the whole ones, which would stay in memory after the user has dropped them.
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.parameter.grad = None

    @contextmanager
    def as_pieces(self) -> Iterator[None]:
        """The optimizer has pieces here, as in a step: its ``state_dict`` is this rank's."""
        self._take_pieces()
        try:
            yield
        finally:
            self.restore()

    def close(self) -> None:
        """Leave its steps alone. Its state stays that of the pieces, for ``optimizer_states.py``."""
        for handle in self._handles[:2]:
            handle.remove()


@dataclass(frozen=True)
class ShardedPiece:
    """Elements [low, high) of a parameter, which this rank steps.

    Attributes:
        parameter: they as a parameter of its own, in the memory that a step writes: of one dimension, or, where
            parameters are not split, of the whole's shape.
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


def next_to_step(before: Any, after: Any) -> None:
    """Make a hook before the step the last of them, and one behind it the first, by their handles."""
    before.hooks_dict_ref().move_to_end(before.id, last=True)
    after.hooks_dict_ref().move_to_end(after.id, last=False)


def closure_called(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a step whose closure has been called already. ``args`` begins with the optimizer."""
    closure: Callable[[], Any] | None = kwargs.get("closure")
    if len(args) > 1:
        closure = args[1]
    if closure is None:
        return args, kwargs
    # torch calls hooks before the closure, and the closure may make the gradients: it has to run while the groups still
    # have whole parameters. The optimizer then gets a closure that only returns the loss.
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    if len(args) > 1:
        optimizer, _, *others = args
        return (optimizer, known, *others), kwargs
    return args, {**kwargs, "closure": known}
