"""What a rank of a pipeline is to the user's code and to Lightning: to samplers, collectives, and within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_smddp._compat.torch_steps import default_group
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.strategies.base import TrainerStrategy
from lightning_smddp.strategies.checks import require_samplers_of_replicas

_PRECISION_OF = {  # step -> method of Lightning's precision plugin
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class PipelineRanks(TrainerStrategy):
    """All ranks of a pipeline work on one batch and have equal values, so between ranks what counts is replicas."""

    _groups: Groups | None = None  # from the start of the process group
    _in_step = False
    _skips = False  # the training step of this batch returned None

    @property
    def _connected(self) -> Groups:
        assert self._groups is not None, "there is no process group yet"
        return self._groups

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A pipeline is one replica to the sampler."""
        return {"num_replicas": self._connected.mesh.num_replicas, "rank": self._connected.replica}

    # In a step's code a rank is what it would be under `ddp`: one of as many as there are replicas, whose batches
    # differ. Around steps, in hooks, it is one of all. `is_global_zero` is the world's in both: one rank alone writes.

    @property
    @override
    def world_size(self) -> int:
        """Number of ranks; within a step that of replicas, as all ranks of a pipeline work on one batch.

        So it is when Lightning asks, once, behind a step that returned None on all ranks of the pipeline.
        """
        skips, self._skips = self._skips, False
        if self._in_step or skips:
            return self._connected.mesh.num_replicas
        return super().world_size

    @property
    @override
    def global_rank(self) -> int:
        """This rank; within a step the replica's number."""
        return self._connected.replica if self._in_step else super().global_rank

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this is the first of all ranks."""
        return super().global_rank == 0

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Tensors of all replicas, stacked, as all ranks of a pipeline have the same; of ``group``'s ranks if given."""
        is_of_some = group is not None and group is not dist.group.WORLD
        if self._groups is None or is_of_some:
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        if self.world_size == 1:  # as in one process
            return tensor
        with default_group(self._groups.data_parallel_group):
            return super().all_gather(tensor, group=self._groups.data_parallel_group, sync_grads=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas, as all ranks of a pipeline have the same values; over ``group`` if given."""
        if group is None and self._groups is not None:
            group = self._groups.data_parallel_group
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say yes: all ranks of the world, not one for each replica."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    @contextmanager
    def _step_context(self, hook: str) -> Iterator[None]:
        """Around the user's code of a step: precision, and ranks as ``ddp`` would have them, one for each replica."""
        replicas = default_group(self._connected.data_parallel_group)
        precision = getattr(self.precision_plugin, _PRECISION_OF[hook])()
        with precision, replicas, patched([(vars(self), "_in_step", True)]):
            yield

    def _training_starts(self) -> None:
        """Raise ``ValueError`` if a ``DistributedSampler`` of the user's takes each rank for a replica."""
        require_samplers_of_replicas(self._trainer.train_dataloader, self._connected.mesh.num_replicas)

    @property
    def _has_part_to_save(self) -> bool:
        return self._connected.replica == 0
