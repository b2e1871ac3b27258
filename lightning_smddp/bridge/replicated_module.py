"""A LightningModule whose training step cannot be cut: whole on every rank, each of which runs the whole step.

All ranks of a pipeline run the same step on the same batch with the same random numbers, so they stay equal, and hooks,
callbacks and other steps see what they would in one process. Replicas have batches of their own; their gradients are
averaged after each backward pass, as ``ddp`` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_smddp._compat.torch_steps import behind_backwards
from lightning_smddp.bridge.same_ranks import SameRanks
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.pipeline.gradients.whole_gradients import WholeGradients
from lightning_smddp.pipeline.partition.mesh import Groups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_CURE = (
    "It trains as in one process: right, but no faster, and each rank needs memory for the whole model. "
    "fallback='error' refuses such steps instead."
)


class ReplicatedModule:
    """Runs the steps of a module that is whole on every rank of a pipeline.

    Args:
        module: the user's.
        groups: this rank's place.
        device: of this rank.
        reason: why its training step cannot be pipelined, and where.
    """

    def __init__(self, module: LightningModule, groups: Groups, device: torch.device, reason: str) -> None:
        self.module, self.reason = module, reason
        self.same = SameRanks(module, groups.pipeline, device)
        self.gradients: WholeGradients | None = None
        self._averages = False
        self.replicas = groups.data_parallel_group if groups.mesh.num_replicas > 1 else None
        self._shares_buffers = self.replicas is not None
        if device.type != "cpu":  # the order of additions differs from run to run: let all ranks have the same
            assert dist.group.WORLD is not None
            self.gradients = WholeGradients(module, dist.group.WORLD, device)
        elif groups.mesh.num_replicas > 1:
            self.gradients = WholeGradients(module, groups.data_parallel_group, device)

    def train(self, step: Callable[[], Any], place: str, accumulates: bool = False) -> Any:
        """Run the training step called ``place`` once. Collective over the pipeline, and over the replicas."""
        if self._shares_buffers:
            self._share_buffers()
        self._shares_buffers = self.replicas is not None and not accumulates  # when ``ddp`` would
        self.same.begin()
        with self.averaging():
            output = step()
        self.same.end(output, place)
        return output

    def _share_buffers(self) -> None:
        """All replicas go on with the buffers of the first, as under ``ddp``."""
        for buffer in self.module.buffers():
            value = buffer.detach().contiguous()
            dist.broadcast(value, group=self.replicas, group_src=0)
            if value.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(value)

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Run another step once. Collective over the pipeline."""
        self.same.begin()
        return step()

    @contextmanager
    def averaging(self, accumulates: bool = False) -> Iterator[None]:
        """In this context gradients are averaged behind each backward pass, unless it only ``accumulates``."""
        if self.gradients is None or accumulates or self._averages:
            yield
            return
        self._averages = True
        try:
            with behind_backwards(self.gradients.average):
                yield
        finally:
            self._averages = False

    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter; None if no replica has found anything."""
        if self.gradients is None:
            return bad_gradients(self.module.named_parameters())
        return self.gradients.take_nonfinite()

    def warning(self) -> str:
        """Said once, where it begins."""
        return f"The training step is run as a whole on every rank, as it cannot be pipelined: {self.reason} {_CURE}"
