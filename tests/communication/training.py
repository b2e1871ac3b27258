"""Training with DDP, stock or with our hook: the bodies' common part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.hook import GradientSynchronizer
from lightning_smddp.communication.report import Recorder
from lightning_smddp.communication.shared_memory import sum_dtype

CPU = torch.device("cpu")


class Hooked:
    """A communicator, and the synchronizers of the modules wrapped with it."""

    def __init__(
        self,
        algorithm: str | None,
        compression: Compression | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.algorithm = algorithm
        self.compression = compression
        self.recorder = Recorder(device)
        self.synchronizers: list[GradientSynchronizer] = []
        self.communicator: Communicator | None = None
        if algorithm is not None:
            group = dist.group.WORLD
            self.communicator = Communicator(group, device, timedelta(seconds=20), self.recorder.on_wait)

    def wrap(self, module: nn.Module, **ddp_options: object) -> DistributedDataParallel:
        """``module`` in DDP, stock if there is no algorithm."""
        if self.communicator is None or self.algorithm is None:
            return DistributedDataParallel(module, **ddp_options)
        synchronizer = GradientSynchronizer(self.communicator, module, self.algorithm, self.compression, self.recorder)
        self.synchronizers.append(synchronizer)
        ddp = DistributedDataParallel(module, **ddp_options)

        def hook(state, bucket):  # DDP refuses annotations that are strings
            return synchronizer.average(bucket)

        ddp.register_comm_hook(None, hook)
        return ddp

    def close(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.close()
        if self.communicator is not None:
            self.communicator.close()


@contextmanager
def hooked(
    algorithm: str | None, compression: Compression | None = None, device: torch.device = CPU
) -> Iterator[Hooked]:
    """Wraps modules, and closes everything unless the block fails."""
    wrapper = Hooked(algorithm, compression, device)
    yield wrapper
    wrapper.close()


class Given(nn.Module):
    """Its gradients are what ``forward`` is called with: a fraction of them all for each parameter."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parameters_list = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.numel = sum(parameter.numel() for parameter in self.parameters_list)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        parts = gradient.split([parameter.numel() for parameter in self.parameters_list])
        return sum((p.flatten() * part).sum() for p, part in zip(self.parameters_list, parts, strict=True))

    def gradient(self) -> torch.Tensor:
        """All gradients in one vector."""
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters_list])


def reference_all_reduce(tensors: list[Tensor]) -> Tensor:
    """What every exact algorithm has to compute: slow and obvious. ``tensors``: one of each rank."""
    wide = sum_dtype(tensors[0].dtype)
    total = torch.zeros_like(tensors[0], dtype=wide)
    for tensor in tensors:
        total += tensor.to(wide)
    return (total / len(tensors)).to(tensors[0].dtype)
