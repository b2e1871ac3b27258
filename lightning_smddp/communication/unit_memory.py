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
        self._layouts, self._exchanges, self._device = layouts, exchanges, device

    def state_dict(self, keeps: bool) -> dict[str, dict[str, Tensor]]:
        """What is remembered of each trained parameter, as of ``GradientSynchronizer.state_dict``. Collective.

        Args:
            keeps: this rank wants it; else it gets nothing.
        """
        group, size = self._exchanges.shard_group, self._exchanges.shard_group.size()
        partners = self._exchanges.partners
        of_shards = _all_parts(partners.feedback if partners is not None else None)
        of_replicas = _all_parts(self._exchanges.replicas)
        state: dict[str, Tensor] = {}
        for layout in self._layouts:
            own = self._own(layout, of_shards, of_replicas)
            gathered = own.new_empty(size * own.numel())
            all_gather_single(gathered, own, group)
            if keeps:
                parts: Parts = {}
                collect_parts(parts, layout.whole(range(size))[0], gathered.cpu())
                trained = {name: shape.numel() for name, shape, trains in layout.parameters() if trains}
                state |= totals_of(parts, trained)
        return {"error_feedback": state} if keeps else {}

    def _own(self, layout: UnitLayout, of_shards: Parts, of_replicas: Parts) -> Tensor:
        """What all ranks together remember of this one's part of a unit."""
        exchanges = self._exchanges
        pieces, numel = layout.whole(exchanges.owners)
        brought = torch.zeros(len(exchanges.owners), numel, device=self._device)
        add_parts(brought.view(-1), pieces, of_shards)
        own = brought.view(-1)
        if exchanges.partners is not None:
            own = brought.new_empty(numel)
            ScatterExchange(exchanges.partners.group).reduce(brought, own)
        if exchanges.replica_group is not None:
            own = own / exchanges.replica_group.size()  # each copy has the mean over its own ranks
            add_parts(own, layout.whole([exchanges.shard_group.rank()])[0], of_replicas)
            dist.all_reduce(own, group=exchanges.replica_group)
        return own

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a :meth:`state_dict`, saved under any number of ranks and nodes. Not collective.

        Each rank takes what belongs to its own part. What is of parameters that are in no unit is left out.

        Raises:
            ValueError: the state belongs to another model.
        """
        exchanges, parts = self._exchanges, Parts()
        errors = state.get("error_feedback", {})
        for layout in self._layouts:
            numels = {name: shape.numel() for name, shape, _ in layout.parameters()}
            require_same_sizes({name: errors[name] for name in numels if name in errors}, numels)
            for piece in layout.whole([exchanges.shard_group.rank()])[0].pieces:
                if piece.name in errors:
                    # The checkpoint may be a file mapped into memory.
                    own = errors[piece.name][piece.begin : piece.begin + piece.numel].to(self._device, copy=True)
                    parts[piece.name] = [(piece.begin, own)]
        partners, replicas = exchanges.partners, exchanges.replicas
        if partners is not None and partners.feedback is not None:
            partners.feedback.restore_parts(parts)
            parts = {}
        if replicas is not None:
            replicas.restore_parts({name: [(b, v / exchanges.members) for b, v in own] for name, own in parts.items()})


def _all_parts(feedback: ErrorFeedback | None) -> Parts:
    """What a rank remembers, and what it has to remember of before the first step."""
    if feedback is None:
        return {}
    parts = feedback.parts()
    for name, restored in feedback.restored.items():
        parts[name] = [*parts.get(name, ()), *restored]
    return parts
