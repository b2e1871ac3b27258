"""Which ranks make up a pipeline, which hold the same stages of different replicas, and which hold which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import is_nccl, new_group_among
from lightning_smddp.communication.groups import backend_timeout, create_group, new_name, world
from lightning_smddp.communication.tensors import CPU


@dataclass(frozen=True)
class PipelineMesh:
    """All ranks of the job by replica and by rank in their pipeline.

    Attributes:
        pipelines: for each replica its ranks, in the order of their first stages.
    """

    pipelines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, world_size: int, pipeline_parallel_size: int, placement: str = "cluster") -> PipelineMesh:
        """Arrange ``world_size`` ranks in pipelines.

        Args:
            world_size: number of all ranks.
            pipeline_parallel_size: ranks of a pipeline.
            placement: ``"cluster"`` puts a pipeline on neighbouring ranks, mostly of one node; ``"spread"`` puts the
                replicas of a stage there, so that a pipeline spans nodes.

        Raises:
            ValueError: unknown placement, or sizes that do not fit.
        """
        if placement not in ("cluster", "spread"):
            raise ValueError(
                f"placement={placement!r} is unknown. Valid: 'cluster' (a pipeline on neighbouring ranks), 'spread' "
                "(the replicas of a stage on neighbouring ranks)."
            )
        if pipeline_parallel_size < 1 or world_size % pipeline_parallel_size:
            divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
            raise ValueError(
                f"pipeline_parallel_size={pipeline_parallel_size} does not divide the world size {world_size} (number "
                f"of nodes times devices). Valid here: {divisors}."
            )
        # 8 ranks in pipelines of 4: (0 1 2 3) and (4 5 6 7), or spread, (0 2 4 6) and (1 3 5 7).
        ranks = torch.arange(world_size)
        is_spread = placement == "spread"
        pipelines = ranks.view(pipeline_parallel_size, -1).T if is_spread else ranks.view(-1, pipeline_parallel_size)
        return cls(tuple(map(tuple, pipelines.tolist())))

    @property
    def num_replicas(self) -> int:
        """How many pipelines there are."""
        return len(self.pipelines)

    def find(self, rank: int) -> tuple[int, int]:
        """Replica of a rank of the job, and its rank in that pipeline."""
        (found,) = [(replica, ranks.index(rank)) for replica, ranks in enumerate(self.pipelines) if rank in ranks]
        return found


class Channel(NamedTuple):
    """A process group, and where its collectives take their tensors from."""

    group: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True)
class Groups:
    """This rank's position in the mesh, and its process groups.

    Attributes:
        mesh: all ranks of the job.
        replica: number of this rank's pipeline.
        pipeline_rank: this rank's number in it.
        pipeline: the ranks of the pipeline.
        neighbours: the same ranks, for messages between stages: on devices, where each pair has a communicator, so
            that a send does not wait behind a receive from another rank.
        data_parallel_group: the ranks with this pipeline rank in all pipelines: they hold the same stages.
        host: the ranks of the pipeline, for what one host has to know of another: nobody waits for a device there.
    """

    mesh: PipelineMesh
    replica: int
    pipeline_rank: int
    pipeline: dist.ProcessGroup
    neighbours: dist.ProcessGroup
    data_parallel_group: dist.ProcessGroup
    host: Channel

    @classmethod
    def create(cls, mesh: PipelineMesh, timeout: timedelta, device: torch.device) -> Groups:
        """Create the groups of this rank's pipeline and of its replicas. Collective over all ranks."""
        replica, pipeline_rank = mesh.find(dist.get_rank())
        name = new_name(world())
        members = list(mesh.pipelines[replica])
        replicas = [ranks[pipeline_rank] for ranks in mesh.pipelines]
        # every rank in this order, so that nobody waits for one that waits for another
        pipeline = create_group(members, f"{name}-pipeline-{replica}", timeout, device)
        neighbours = pipeline
        if device.type != "cpu":
            neighbours = create_group(members, f"{name}-neighbours-{replica}", timeout, device, by_pairs=True)
        # Beside NCCL hosts have a gloo group of their own: a vote by NCCL would wait behind all that was queued on the
        # device before it.
        host = Channel(pipeline, device)
        if is_nccl(pipeline) and dist.is_gloo_available():
            patience = backend_timeout(timeout, of_nccl=True)  # who waits for a device here says nothing of who is late
            on_hosts = new_group_among(members, f"{name}-host-{replica}", patience, backend="gloo")
            host = Channel(on_hosts, CPU)
        data_parallel_group = create_group(replicas, f"{name}-replicas-{pipeline_rank}", timeout, device)
        return cls(mesh, replica, pipeline_rank, pipeline, neighbours, data_parallel_group, host)


@dataclass(frozen=True)
class Ownership:
    """The ranks of a pipeline that hold each parameter, and the owner of each buffer.

    A parameter is known by its first name in ``named_parameters()``, however many names it has.

    Attributes:
        parameters: name -> the ranks that hold it. The first is its owner: it writes checkpoints, and counts it in
            the norm of the gradients.
        buffers: name -> owner, of each buffer that training changes. Every rank holds every buffer.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int]

    def is_mine(self, name: str, rank: int) -> bool:
        """Whether ``rank``, one of the pipeline, has the values of parameter ``name``."""
        return rank in self.parameters[name]

    def owner(self, name: str) -> int | None:
        """The rank that writes a tensor to checkpoints, and sends its values to others; None if all have the same."""
        return self.parameters[name][0] if name in self.parameters else self.buffers.get(name)

    def shared(self) -> dict[tuple[int, ...], list[str]]:
        """For each set of two or more ranks (ascending) the parameters that exactly these ranks hold, sorted."""
        # Sorted, so that all ranks go through them in the same order.
        sets: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in sorted(self.parameters.items(), key=lambda item: sorted(item[1])):
            if len(ranks) > 1:
                sets.setdefault(tuple(sorted(ranks)), []).append(name)
        return sets


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by their first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def held_parameters(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, nn.Parameter]:
    """The parameters that ``rank`` holds, by name, in the module's order."""
    return {name: parameter for name, parameter in module.named_parameters() if ownership.is_mine(name, rank)}
