"""When the weights of micro-batches, which were found with the first batch, have to be compared again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.tails import NEW_FUNCTIONS, NEW_OWNERS

_FIRST_LOOK, _GROWTH = 4, 2


@dataclass
class WeightDoubts:
    """Of a training step.

    Attributes:
        of_tail: something new has run behind the last module since weights were compared.
        new_tails: in how many batches that were functions.
        weighs_unevenly: a batch had micro-batches whose weights are not their shares of its rows.
        batches: that were trained.
        next_look: so many of them, and weights are compared whatever was seen; None is never.
        is_suspicion: they did not fit the last time that this was done.
    """

    of_tail: bool = False
    new_tails: int = 0
    weighs_unevenly: bool = False
    batches: int = 0
    next_look: int | None = _FIRST_LOOK
    is_suspicion: bool = False

    def note_tail(self, news: int, counts: bool) -> None:
        """What has run behind the last module, see ``tails.py``, and whether the batch ``counts``."""
        self.of_tail = self.of_tail or news > NEW_OWNERS
        self.new_tails += news == NEW_FUNCTIONS
        self.batches += counts

    def take_look(self) -> bool:
        """Whether it is time to compare, whatever was seen: at distances that grow, so that it costs little."""
        if self.next_look is None or self.batches < self.next_look:
            return False
        self.next_look = max(_FIRST_LOOK, _GROWTH * self.batches)
        return True

    def suspect(self, doubtful: bool) -> bool:
        """Whether what does not fit now did not fit the batch before either; else the next one is looked at."""
        confirmed = doubtful and self.is_suspicion
        self.is_suspicion = doubtful and not confirmed
        if self.is_suspicion:
            self.next_look = self.batches + 1
        return confirmed

    def of_weights(self, microbatches: Sequence[MicroBatch]) -> bool:
        """Whether these are the first whose weights are not their shares of the rows: no trial has seen such ones."""
        if self.weighs_unevenly:
            return False
        rows = sum(microbatch.size for microbatch in microbatches)
        shares = [(microbatch.weight, microbatch.size / rows) for microbatch in microbatches]
        self.weighs_unevenly = any(not math.isclose(weight, share) for weight, share in shares)
        return self.weighs_unevenly
