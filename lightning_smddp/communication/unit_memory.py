"""What compression remembers of sharded parameters: as one tensor for each of them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import all_gather_single
from lightning_smddp.communication.compression import (
    ErrorFeedback,
    Parts,
    add_parts,
    collect_parts,
    require_same_sizes,
    totals_of,
)
from lightning_smddp.communication.inter_node import ScatterExchange
from lightning_smddp.communication.unit_layouts import UnitLayout


@dataclass(frozen=True)
class Exchanges:
    """Who remembers what. With both exchanges, values pass the first and then the second one.

    Attributes:
        shard_group: the ranks that share each parameter.
        replica_group: the ranks that have the same share; None if there is one copy of everything.
        owners: the ranks in ``shard_group`` whose parts this one brings to ``partners``, in their order.
        partners: exchanges these parts; None on one node.
        replicas: the memory of the exchange in ``replica_group``, if there is one.
        members: the ranks that take part in that one for the same element.
    """

    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None
    owners: tuple[int, ...]
    partners: ScatterExchange | None
    replicas: ErrorFeedback | None
    members: int


class UnitMemory:
    """The memory of all units, in the scale of the gradients' mean over all ranks.

    Args:
        layouts: of the units, in the same order on all ranks.
        exchanges: what remembers.
        device: of the exchanges.
    """

    def __init__(self, layouts: Sequence[UnitLayout], exchanges: Exchanges, device: torch.device) -> None:
        self._layouts = layouts
        self._exchanges = exchanges
        self._device = device

    def state_dict(self, keeps: bool) -> dict[str, dict[str, Tensor]]:
        """What is remembered of each trained parameter, as of ``GradientSynchronizer.state_dict``. Collective.

        Args:
            keeps: this rank wants it; else it gets nothing.
        """
        group = self._exchanges.shard_group
        of_shards: Parts = {}
        if self._exchanges.partners is not None:
            of_shards = _all_parts(self._exchanges.partners.feedback)
        of_replicas = _all_parts(self._exchanges.replicas)
        state: dict[str, Tensor] = {}
        # One unit after the other: no rank but the one that keeps has more at a time than the memory of one unit.
        for layout in self._layouts:
            own = self._own(layout, of_shards, of_replicas)
            gathered = own.new_empty(group.size() * own.numel())
            all_gather_single(gathered, own, group)
            if keeps:
                state |= _by_parameter(layout, gathered.cpu(), group.size())
        if not keeps:
            return {}
        return {"error_feedback": state}

    def _own(self, layout: UnitLayout, of_shards: Parts, of_replicas: Parts) -> Tensor:
        """What all ranks together remember of this one's part of a unit."""
        exchanges = self._exchanges
        # A rank remembers what it lost of the parts that it brings to the exchange between nodes: its own and those of
        # its partners. An exchange without compression gives each its own part, summed over the nodes.
        consists_of, numel = layout.whole(exchanges.owners)
        brought = torch.zeros(len(exchanges.owners), numel, device=self._device)
        own = brought.view(-1)
        add_parts(own, consists_of, of_shards)
        if exchanges.partners is not None:
            own = brought.new_empty(numel)
            exact = ScatterExchange(exchanges.partners.group)
            exact.reduce(brought, own)
        if exchanges.replica_group is not None:
            own = own / exchanges.replica_group.size()  # each copy has the mean over its own ranks
            own_layout, _ = layout.whole([exchanges.shard_group.rank()])
            add_parts(own, own_layout, of_replicas)
            dist.all_reduce(own, group=exchanges.replica_group)
        return own

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a :meth:`state_dict`, saved under any number of ranks and nodes. Not collective.

        Each rank takes what belongs to its own part. What is of parameters that are in no unit is left out.

        Raises:
            ValueError: the state belongs to another model.
        """
        exchanges = self._exchanges
        errors = state.get("error_feedback", {})
        own_parts: Parts = {}
        for layout in self._layouts:
            numels = {name: shape.numel() for name, shape, _ in layout.parameters()}
            known = {name: errors[name] for name in numels if name in errors}
            require_same_sizes(known, numels)
            own_layout, _ = layout.whole([exchanges.shard_group.rank()])
            for piece in own_layout.pieces:
                if piece.name in known:
                    values = known[piece.name][piece.begin : piece.end]
                    values = values.to(self._device, copy=True)  # the checkpoint may be a file mapped into memory
                    own_parts[piece.name] = [(piece.begin, values)]
        # The exchange between nodes takes all of it, if there is one. Else each member of the exchange between replicas
        # takes an equal share, as all of them have the same part.
        partners, replicas = exchanges.partners, exchanges.replicas
        if partners is not None and partners.feedback is not None:
            partners.feedback.restore_parts(own_parts)
            own_parts = {}
        if replicas is not None:
            shares: Parts = {}
            for name, parts in own_parts.items():
                shares[name] = [(begin, values / exchanges.members) for begin, values in parts]
            replicas.restore_parts(shares)


def _by_parameter(layout: UnitLayout, values: Tensor, size: int) -> dict[str, Tensor]:
    """What ``values``, the parts of all ``size`` ranks in their order, are of each trained parameter of the unit."""
    all_ranks, _ = layout.whole(range(size))
    parts: Parts = {}
    collect_parts(parts, all_ranks, values)
    trained = {}
    for name, shape, trains in layout.parameters():
        if trains:
            trained[name] = shape.numel()
    return totals_of(parts, trained)


def _all_parts(feedback: ErrorFeedback | None) -> Parts:
    """What a rank remembers, and what it has to remember of before the first step."""
    if feedback is None:
        return {}
    parts = feedback.parts()
    for name, restored in feedback.restored.items():
        parts[name] = [*parts.get(name, ()), *restored]
    return parts
