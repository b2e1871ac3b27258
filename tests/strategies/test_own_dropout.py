"""Recurrent layers whose dropout no seed resets, as cuDNN's, on simulated devices: the first check lets them be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import CLASSES
from tests.strategies.pipeline_learners import Bench, Net

pytestmark = pytest.mark.simulated_cuda


class OwnState:
    """``torch._VF`` with the dropout of CUDA's ``lstm``."""

    def __init__(self, functions: Any) -> None:
        self._functions, self._state, self.dropped = functions, np.random.default_rng(0), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def lstm(self, *args: Any) -> Any:
        """Arguments from the sixth on: dropout, whether it trains, both directions, whether rows come first."""
        dropout, training = args[5], args[6]
        output, *states = self._functions.lstm(*args[:5], 0.0, *args[6:])
        if not (dropout and training):
            return output, *states
        self.dropped += 1
        kept = torch.from_numpy(self._state.random(tuple(output.shape), dtype=np.float32)).to(output.device) > dropout
        return output * kept / (1 - dropout), *states


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 16, num_layers=2, dropout=0.5, batch_first=True)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def loss(self, batch: list[Tensor]) -> Tensor:
        sequence, _ = self.cells(batch[0].view(len(batch[0]), 2, 4))
        return F.cross_entropy(self.net(sequence[:, -1]), batch[1])


def train() -> tuple[int, float, int]:
    functions = OwnState(torch.nn.modules.rnn._VF)
    torch.nn.modules.rnn._VF = functions
    model = Recurrent()
    found = Bench({"num_microbatches": 2}).fit(model, max_epochs=1)
    return found["steps"][0], model.cells.dropout, functions.dropped


@pytest.mark.slow
def test_the_check_does_not_mistake_it_for_a_difference() -> None:
    outcomes = run_trainer_ranks(train, 2)
    assert [(steps, dropout) for steps, dropout, _ in outcomes] == [(5, 0.5)] * 2
    assert max(dropped for *_, dropped in outcomes) >= 5  # in training it drops
