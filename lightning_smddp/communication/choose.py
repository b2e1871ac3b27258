"""``algorithm="auto"``: each algorithm is timed on this very cluster, at the size of the model's own buckets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_smddp.communication.algorithms import Algorithm
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.objects import gather

DEFAULT_BUCKET_MB = 25.0  # DDP's own
_SECONDS_EACH = 0.15  # for one algorithm
_LEAST_REPEATS, _MOST_REPEATS = 3, 20
_TIMING_SLOT = 2**30  # no bucket has so high a number


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        algorithm: its name.
        size: bytes that were averaged.
        seconds: what each algorithm took; empty when nothing was timed.
    """

    algorithm: str
    size: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.seconds:
            return self.algorithm
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.algorithm} (measured at {self.size / 2**20:.3g} MiB: {times})"


def choose(
    communicator: Communicator, module: nn.Module, compression: Compression | None, bucket_cap_mb: float | None
) -> Choice:
    """The fastest algorithm for buckets of ``module``'s gradients, the same on all ranks. Collective."""
    if compression is not None and compression.method == "powersgd" and communicator.compresses(compression):
        return Choice("torch's PowerSGD")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    names = communicator.available()
    if not trained or len(names) == 1:
        return Choice(names[0])
    bucket_bytes = int((bucket_cap_mb or DEFAULT_BUCKET_MB) * 2**20)
    size = min(sum(parameter.nbytes for parameter in trained), bucket_bytes)
    seconds = {name: time_algorithm(name, communicator, compression, size) for name in names}
    fastest = min(names, key=seconds.__getitem__)  # the first of several, so `native` where all are equal
    return Choice(fastest, size, seconds)


def time_algorithm(name: str, communicator: Communicator, compression: Compression | None, size: int) -> float:
    """Seconds of an all-reduce of ``size`` bytes by ``name``: the median, of the slowest rank. Collective."""
    algorithm = communicator.algorithm(name, compression)
    tensor = torch.zeros(max(size // 4, 1), device=communicator.device)
    # The first call maps memory and connects, the second tells how many more there is time for. That number comes from
    # the slowest rank's time: all ranks have to make as many calls.
    warm_up = [_call_s(algorithm, tensor) for _ in range(2)]
    call_s = max(gather(warm_up[1], communicator.group))
    affordable = int(_SECONDS_EACH / max(call_s, 1e-6))
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, affordable))
    seconds = sorted([_call_s(algorithm, tensor) for _ in range(repeats)])
    algorithm.close()
    medians: list[float] = gather(seconds[repeats // 2], communicator.group)
    return max(medians)


def _call_s(algorithm: Algorithm, tensor: Tensor) -> float:
    """Seconds of one all-reduce, on a device with its work."""
    start = time.perf_counter()
    reduce_once(algorithm, tensor, _TIMING_SLOT)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start
