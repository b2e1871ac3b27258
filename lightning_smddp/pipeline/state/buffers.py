"""Buffers whose values change on one rank of a pipeline, and which other ranks use them.

Every rank holds every buffer, but a change is made by one rank: by its owner in a hook, by the stage that does it in a
step. The others get the new values when a step is about to use them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import Tensor

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.wire.stream import Spec, broadcast_tensors


class SharedBuffers:
    """Keeps the buffers of a divided module up to date where steps use them.

    Attributes:
        trained: whether a training step has run since the last :meth:`share`. It may have changed any.

    Args:
        view: of the module.
        ownership: who owns what.
        rank_of_stage: of the pipeline.
    """

    def __init__(self, view: GlobalView, ownership: Ownership, rank_of_stage: Sequence[int]) -> None:
        self.view = view
        self.ownership = ownership
        self.rank_of_stage = rank_of_stage
        self.trained = False
        self._changed_in_hooks = view.changed_buffers
        self._used_elsewhere: set[str] = set()

    def learn(self, graph: StepGraph, stages: Sequence[StagePlan]) -> None:
        """Note which ranks use which buffers in a step."""
        ranks_of_unit: dict[str, set[int]] = {}
        for plan in stages:
            rank = self.rank_of_stage[plan.stage]
            for node in graph.nodes[plan.begin : plan.end]:
                if node.module is not None:
                    ranks_of_unit.setdefault(node.module, set()).add(rank)
        for name, calls in graph.buffers_used.items():
            if name not in self.ownership.buffers:
                continue
            owner = self.ownership.buffers[name]
            # It has to be sent unless all calls that use it run on its owner's rank alone.
            for call in calls:
                if _ranks_of_call(call, ranks_of_unit) != {owner}:
                    self._used_elsewhere.add(name)

    def before_training(self) -> None:
        """All ranks get what training steps use there of what hooks have changed. Collective if that is anything."""
        # What its owner alone uses in training stays there; a later `share` sends it.
        wanted = self._changed_in_hooks & self._used_elsewhere
        self._changed_in_hooks -= wanted
        self._send(wanted)

    def share(self) -> None:
        """All ranks get all that has changed. Collective if anything has."""
        if self.trained:
            wanted = set(self.ownership.buffers)
        else:
            wanted = set(self._changed_in_hooks)
        self._changed_in_hooks.clear()
        self.trained = False
        self._send(wanted)

    def _send(self, wanted: Set[str]) -> None:
        # One broadcast from each owner, in the order of ranks, with its buffers in the module's order: alike on all.
        view = self.view
        by_owner: dict[int, list[Tensor]] = {}
        for name, buffer in view.module.named_buffers():
            if name in wanted:
                owner = self.ownership.buffers[name]
                by_owner.setdefault(owner, []).append(buffer.detach())
        for owner, buffers in sorted(by_owner.items()):
            specs = [Spec.of(buffer) for buffer in buffers]
            broadcast_tensors(specs, buffers, view.group, owner, view.device)


def _ranks_of_call(call: str, ranks_of_unit: Mapping[str, set[int]]) -> set[int] | None:
    """Where a call of the module ``call`` runs; None for what is between units, which runs on all stages."""
    # A unit is a module that runs whole on a stage; a call belongs to the one that it is inside of.
    for unit, ranks in ranks_of_unit.items():
        if f"{call}.".startswith(f"{unit}."):
            return ranks
    return None
