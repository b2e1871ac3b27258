"""PowerSGD (Vogels et al., NeurIPS 2019): matrices travel as two thin factors, by torch's hook, among all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from lightning_smddp.communication.algorithms import in_thread
from lightning_smddp.communication.compression import Compression

_FIRST_STEP = 2  # DDP makes its buckets anew behind the first; torch's hook wants one more
_EPSILON = 1e-8  # so that a matrix of zeros has factors of zeros
_closed: list[dist.ProcessGroup] = []


class PowerSGD:
    """Averages buckets over all ranks, each matrix as an approximation of low rank. The first two steps are exact.

    Args:
        group: of all ranks, used by this object alone.
        thread: an executor of one thread.
        compression: rank of the approximation, error feedback.
    """

    def __init__(self, group: dist.ProcessGroup, thread: ThreadPoolExecutor, compression: Compression) -> None:
        self._thread = thread
        self._steps = 0
        self._state = PowerSGDState(
            group,
            compression.rank,
            _FIRST_STEP,
            use_error_feedback=compression.error_feedback,
            orthogonalization_epsilon=_EPSILON,
        )

    def new_step(self) -> None:
        """Before a step's first bucket. Torch counts steps by the last, which does not come here where it is sparse."""
        self._state.iter = self._steps
        self._steps += 1

    def average(self, bucket: GradBucket) -> Future[Any]:
        """Begin to replace the bucket by its mean."""
        number, tensor, parameters, last = bucket.index(), bucket.buffer(), bucket.parameters(), bucket.is_last()
        # Gradients that torch's hook can compress, whatever their strides are.
        gradients = []
        for parameter, part in zip(parameters, tensor.split([each.numel() for each in parameters]), strict=True):
            if part.numel():
                gradients.append(part.view(parameter.shape[0], -1) if parameter.dim() > 1 else part)
        # What it asks of DDP's bucket.
        matrices: Any = SimpleNamespace(
            index=lambda: number, buffer=lambda: tensor, is_last=lambda: last, gradients=lambda: gradients
        )
        if tensor.is_cuda:
            return powerSGD_hook(self._state, matrices).then(lambda done: self._kept(number, done.value()))
        # In a thread, and one bucket after the other: each of the hook's steps blocks one of gloo's two threads until
        # the other one has done the next message.
        return in_thread(self._thread, lambda: self._kept(number, powerSGD_hook(self._state, matrices).wait()))

    def close(self) -> None:
        """The group belongs to the caller, and is kept for a while all the same.

        A thread of gloo's lets go of the hook's last step some time behind its end. Were it the last to hold the group,
        it would wait for itself then, and end the process.
        """
        _closed[:] = [self._state.process_group]

    def _kept(self, number: int, mean: Tensor) -> Tensor:
        """``mean``; where it is not finite, which is so on all ranks, nothing of it is remembered."""
        state = self._state
        if number in state.q_memory_dict and not bool(mean.isfinite().all()):
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.pop(number, None)
        return mean
