"""``shard="optimizer"``: the optimizers of a module, of which each rank steps a share (ZeRO's first stage).

A step, by hooks of the user's own optimizer (``OptimizerShards``):

1. The closure runs, before the optimizer's own code: of a Trainer training step, backward pass and clipping. Gradients
   are averaged as ever, so each rank has all of them; for :meth:`ShardedOptimizers.clip_by_norm` it reads its share.
2. The optimizer's groups get this rank's pieces in place of the parameters, with the same parts of the gradients. It
   steps these, in the rank's flat memory (``flat_parameters.py``).
3. The groups get their parameters again, and ``FlatParameters.end_step`` brings all shares to all ranks.

They are made by ``strategies/ddp_scheme.py`` when optimizers are set up, and for the replicas of a pipeline's stage by
``bridge/partitioning.py`` at its first batch. ``optimizer_states.py`` makes their states whole for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.tensors import norm_over_ranks
from lightning_smddp.sharding.flat_parameters import FlatParameters, lay_out, movable
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, all_parameters
from lightning_smddp.sharding.optimizer_trial import why_not_elementwise, why_not_one_by_one


def shards_itself(optimizer: Optimizer) -> bool:
    """Whether it spreads its work over ranks by itself: so Lightning knows ``ZeroRedundancyOptimizer`` and its kind."""
    return hasattr(optimizer, "consolidate_state_dict")


def require_shareable(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` if parameters may not be stepped one by one."""
    if shards_itself(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} and shard='optimizer' both shard the optimizer. Use one of them: with "
            "shard='optimizer', return the optimizer that it wraps from `configure_optimizers`."
        )
    why = why_not_one_by_one(optimizer)
    if why is not None:
        raise ValueError(
            f"shard='optimizer' cannot shard {type(optimizer).__name__}: {why}. Use an optimizer that treats "
            "parameters one by one, such as AdamW, or leave out shard='optimizer'."
        )


class ShardedOptimizers:
    """All optimizers of some parameters. Creation and steps are collective.

    Args:
        parameters: in an order that is the same on all ranks.
        shards: of the optimizers of these, not cut yet, which parameters may be stepped one by one by.
        communicator: of the ranks that share the work.

    Attributes:
        shards: for each optimizer its share on this rank.
        splits: whether shares begin within parameters.
        flat: where the parameters are.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], shards: Sequence[OptimizerShards], communicator: Communicator
    ) -> None:
        self._communicator = communicator
        self._reasons: dict[str, str] = {}
        self.shards = list(shards)
        for each in shards:
            why = why_not_elementwise(each.optimizer)
            if why is not None:
                self._reasons[type(each.optimizer).__name__] = why
        self.splits = not self._reasons  # all have the same layouts
        self.flat = self._make_flat(movable(parameters))
        for each in shards:
            each.cut(self.flat, self.splits)

    def _make_flat(self, parameters: list[nn.Parameter]) -> FlatParameters:
        communicator = self._communicator
        topology = communicator.topology
        if communicator.shared_memory_refusal is not None:
            self._num_shares = topology.world_size
            layouts = lay_out(parameters, self._num_shares, self.splits)
            return FlatParameters(layouts, communicator.group.rank(), communicator.group)
        between_nodes = communicator.partners("parameters") if topology.num_nodes > 1 else None
        # As many ranks of each node have shares as the smallest node has ranks. Ranks of equal local rank, which
        # exchange what they have stepped, have neighbouring ones: with 2 nodes those of local rank 0 have 0 and 1.
        share = None
        if topology.local_rank < topology.num_shards:
            share = topology.local_rank * topology.num_nodes + topology.node_rank
        self._num_shares = topology.num_nodes * topology.num_shards
        layouts = lay_out(parameters, self._num_shares, self.splits)
        return FlatParameters(layouts, share, between_nodes, communicator.node_mesh)

    def clip_by_norm(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of an optimizer's parameters, for which each rank reads its share.

        Gradients have to be equal on all ranks. Collective.
        """
        communicator = self._communicator
        parameters = all_parameters(optimizer)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.dtype.itemsize < 4:  # norms of parts would round more
                return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        # Each rank reads its share of the gradients, and the first one those that have no shares, as all are equal.
        (shards,) = [shards for shards in self.shards if shards.optimizer is optimizer]
        own = shards.gradients(of_all=communicator.rank == 0)
        total = norm_over_ranks(own, communicator.group, norm_type, communicator.device, error_if_nonfinite)
        # Most steps need no scaling. That is known where the norm is; of a device it would have to be waited for.
        if communicator.device.type != "cpu" or not float(total) + 1e-6 <= max_norm:
            clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def describe(self) -> list[tuple[str, str]]:
        """What runs here, in rows of name and value."""
        how = "parts of parameters" if self.splits else "whole parameters"
        where = "exchanged through shared memory"
        if self._communicator.shared_memory_refusal is not None:
            where = "broadcast by the backend"
        notes = [("note", f"{name} has shares of whole parameters: {why}") for name, why in self._reasons.items()]
        return [("optimizer shards", f"{self._num_shares} of {how}, {where}"), *notes]

    def close(self) -> None:
        """Give the parameters memory of their own, and leave the optimizers alone. Not collective."""
        for shards in self.shards:
            shards.close()
        self.flat.close()
