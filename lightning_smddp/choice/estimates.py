"""What a rank of each strategy holds at most: sums of the same few sizes, each with the moment at which it is so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from lightning_smddp.choice.profiles import StepProfile


@dataclass(frozen=True)
class Sizes:
    """Bytes of a whole module.

    Attributes:
        parameters, buffers: as they are.
        gradients: of all parameters that are trained.
        state: that the optimizer keeps.
        optimizer_temporary: that a step of it needs for a moment.
        batch: one batch of a rank.
    """

    parameters: int
    buffers: int
    gradients: int
    state: int
    optimizer_temporary: int
    batch: int


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds at its fullest moment, in parts. Memory that ranks share is counted once a node.

    Attributes:
        parameters: with buffers.
        gradients: in ``smddp`` they lie in the buckets that ranks exchange.
        optimizer_state: what it keeps of parameters.
        activations: what the forward keeps for the backward; of a pipeline for all micro-batches in flight.
        communication: second buckets, received tensors.
        temporary: for a moment, while the rest is there.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    communication: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts at once: what a rank needs to have."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Estimate:
    """One strategy.

    Attributes:
        name: what is shown.
        strategy: the Python expression for ``Trainer(strategy=...)``.
        memory: of the rank with most; None where the strategy cannot run the module.
        fits: whether ``memory`` is no more than there is.
        notes: what to know; why it cannot run the module.
    """

    name: str
    strategy: str
    memory: Memory | None = None
    fits: bool = False
    notes: tuple[str, ...] = ()


def fullest(moments: Sequence[Memory]) -> Memory:
    """The moment with most bytes; of equal ones the first."""
    return max(moments, key=lambda memory: memory.total)


def data_parallel(sizes: Sizes, profile: StepProfile, ranks: int, shards_state: bool = False) -> Memory:
    """``smddp``: everything on every rank; with ``shard="optimizer"`` a share of the state.

    The fullest moment is in the second step. DDP then makes its buckets anew, in the order in which gradients came in
    the first, and the old ones stay until the new ones are exchanged.
    """
    held = Memory(
        parameters=sizes.parameters + sizes.buffers,
        gradients=sizes.gradients,
        optimizer_state=_share(sizes.state, ranks) if shards_state else sizes.state,
        activations=sizes.batch,
    )
    in_step = replace(
        held,
        activations=sizes.batch + profile.kept,
        communication=sizes.gradients if ranks > 1 else 0,  # second buckets, as large as the first ones
        temporary=profile.temporary,
    )
    return fullest([in_step, replace(held, temporary=sizes.optimizer_temporary)])


def fully_sharded(sizes: Sizes, profile: StepProfile, ranks: int, units: Sequence[int], reshard: bool) -> Memory:
    """``smddp_fsdp`` on the CPUs of one node: shares of everything, and what is gathered for a moment.

    In the backward pass there are, beside a rank's shares: a unit's parameters and those of the next one, which is
    gathered meanwhile (of all units without ``reshard``); the memory in which ranks gather these two, one for the node;
    the unit's gradients, and the memory in which ranks bring them together, a part for each rank. The root's parameters
    are whole all the time, and its gradients at the end.

    Args:
        sizes: of the whole module.
        profile: of a step of one rank.
        ranks: that share everything.
        units: bytes of the parameters of each, as :func:`~lightning_smddp.sharding.units.find_units` finds them.
        reshard: units are freed behind their forward (ZeRO-3), else not (ZeRO-2).
    """
    all_units, largest = sum(units), max(units, default=0)
    two_units = min(all_units, 2 * largest)  # one that computes, and the next one
    gathered = two_units if reshard else all_units
    segments = two_units // ranks
    reduced = 2 * largest
    root = 2 * (sizes.parameters - all_units)  # all other parameters, with their gradients
    held = Memory(
        parameters=_share(sizes.parameters, ranks) + sizes.buffers,
        gradients=_share(sizes.gradients, ranks),
        optimizer_state=_share(sizes.state, ranks),
        activations=sizes.batch,
    )
    in_step = replace(
        held,
        activations=sizes.batch + profile.kept,
        communication=gathered + segments + reduced + root,
        temporary=profile.temporary,
    )
    kept = 0 if reshard else all_units  # memory in which they are whole, for the next step
    stepping = replace(held, communication=kept, temporary=sizes.optimizer_temporary // ranks)
    return fullest([in_step, stepping])


def _share(size: int, ranks: int) -> int:
    return math.ceil(size / ranks)
