"""How long ranks take to exchange gradients and parameters: what each copies, at the rate of this machine's memory.

On the CPUs of one node all exchange is copying, and that costs every rank processor time. A pass is one reading and one
writing of so many bytes; which ones there are was read in the code of the strategies, and of DDP, FSDP2 and DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_smddp.choice.estimates import Sizes
from lightning_smddp.choice.step_profile import shortest

_ELEMENTS = 2**23  # 32 MiB, more than caches hold
_REPEATS = 5  # of a copy: the fastest counts


# A number below is of passes over a whole tensor. A rank that copies its share makes 1 / ranks of one.


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of a step, by strategy, which a rank spends in copying.

    Args:
        sizes: of the whole module.
        ranks: on one node.
        seconds_per_byte: of one pass.
    """

    sizes: Sizes
    ranks: int
    seconds_per_byte: float

    def data_parallel(self) -> float:
        """Gradients go into buckets; each rank sums its slice and writes it to all."""
        return self._gradients(1 + self._sum + self._others)

    def sharded_optimizer(self) -> float:
        """The same, but nobody needs the others' slices, and there is one copy of the parameters."""
        return self._gradients(1 + self._sum)

    def fully_sharded(self, reshard: bool) -> float:
        """Shares are written to memory of the node, and units read from there: once or twice."""
        gathers = 1
        if reshard:
            gathers = 2
        gathering = self._parameters(1 / self.ranks + 1)
        return self._gradients(1 + self._sum) + gathers * gathering

    def deepspeed(self, stage: int) -> float:
        """Gradients go into a bucket, which is flattened into another."""
        if stage == 3:
            gathering = self._parameters(1 / self.ranks + 2)
            return self._gradients(3 + self._sum) + 2 * gathering
        gathering = self._parameters(1 / self.ranks + 1)
        return self._gradients(4 + self._sum + 2 * self._others) + gathering

    @property
    def _others(self) -> float:
        """Of a tensor what other ranks have summed."""
        return (self.ranks - 1) / self.ranks

    @property
    def _sum(self) -> float:
        """A slice of all ranks' tensors: each one more is two readings and a writing; and the mean of them."""
        return (1.5 * (self.ranks - 1) + 1) / self.ranks

    def _gradients(self, passes: float) -> float:
        return self._seconds(passes * self.sizes.gradients)

    def _parameters(self, passes: float) -> float:
        return self._seconds(passes * self.sizes.parameters)

    def _seconds(self, size: float) -> float:
        if self.ranks == 1:
            return 0.0
        return size * self.seconds_per_byte


def pass_seconds() -> float:
    """Seconds for each byte of a copy, measured on as many threads as torch has now."""
    source = torch.ones(_ELEMENTS)
    target = torch.zeros(_ELEMENTS)
    return shortest(lambda: target.copy_(source), _REPEATS) / source.nbytes
