"""A pipeline's first runs of a step where devices have too little memory for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Net


class TooLarge(Net):
    """Its step is out of memory, as on a device that is too small."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        super().loss(batch)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def run_short() -> list[str]:
    texts: list[str] = []
    layouts: list[dict[str, Any]] = [{"num_microbatches": 2}, {"num_microbatches": 1}]
    for layout in layouts:
        try:
            Bench({**layout}).fit(TooLarge(), max_epochs=1)
        except torch.OutOfMemoryError as error:
            texts.append(str(error))
    return texts


def test_the_error_says_what_to_do() -> None:
    for texts in run_trainer_ranks(run_short, 2):
        assert len(texts) == 2
        for text in texts:
            assert text.startswith("CUDA out of memory. Tried to allocate 20.00 GiB. This was a run of the step")
            assert "meta_init=True" in text
            assert "num_microbatches" in text
