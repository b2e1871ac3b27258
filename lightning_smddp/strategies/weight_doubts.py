"""When the weights of micro-batches, which were found with the first batch, have to be compared again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smddp.pipeline.microbatches import MicroBatch


@dataclass
class WeightDoubts:
    """Of a training step.

    Attributes:
        of_tail: something new has run behind the last module since weights were compared.
        in_a_batch_that_counts: and its gradients could not be dropped.
        new_tails: in how many batches that was so.
        weighs_unevenly: a batch had micro-batches whose weights are not their shares of its rows.
    """

    of_tail: bool = False
    in_a_batch_that_counts: bool = False
    new_tails: int = 0
    weighs_unevenly: bool = False

    def note_tail(self, is_new: bool, may_drop: bool) -> None:
        """What has run behind the last module; ``may_drop``: the batch need not count."""
        self.of_tail = self.of_tail or is_new
        self.new_tails += is_new
        self.in_a_batch_that_counts = is_new and not may_drop

    def of_weights(self, microbatches: Sequence[MicroBatch]) -> bool:
        """Whether these are the first whose weights are not their shares of the rows: no trial has seen such ones."""
        if self.weighs_unevenly:
            return False
        rows = sum(microbatch.size for microbatch in microbatches)
        shares = [(microbatch.weight, microbatch.size / rows) for microbatch in microbatches]
        self.weighs_unevenly = any(not math.isclose(weight, share) for weight, share in shares)
        return self.weighs_unevenly
