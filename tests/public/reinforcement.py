"""Reinforcement learning with torchrl's losses, which hold the networks' parameters by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.public.cases import Learner, integers, numbers

objectives = pytest.importorskip("torchrl.objectives")
rl_modules = pytest.importorskip("torchrl.modules")
tensordict = pytest.importorskip("tensordict")


STATES, ACTIONS = 4, 3


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(STATES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


class Transitions(Learner):
    """Batches of a replay buffer: nested TensorDicts."""

    rate = 0.01

    def data(self) -> Any:
        count = 24
        fields = {
            "observation": numbers(count, STATES),
            "action": integers(0, ACTIONS, count),
            "next": {
                "observation": numbers(count, STATES, seed=3),
                "reward": numbers(count, 1, seed=4),
                "done": torch.zeros(count, 1, dtype=torch.bool),
                "terminated": integers(0, 2, count, 1).bool(),
            },
        }
        return list(tensordict.TensorDict(fields, [count]).unbind(0))

    collate = staticmethod(torch.stack)


class Dqn(Transitions):
    """A target network that follows the trained one after each batch."""

    def __init__(self) -> None:
        super().__init__()
        actor = rl_modules.QValueActor(network(ACTIONS), in_keys=["observation"], action_space="categorical")
        self.objective = objectives.DQNLoss(actor, action_space="categorical", delay_value=True)
        self.objective.make_value_estimator(gamma=0.9)
        self.target = objectives.SoftUpdate(self.objective, eps=0.9)

    def loss(self, batch: Any) -> Tensor:
        return self.objective(batch)["loss"]

    def on_train_batch_end(self, *args: Any) -> None:
        self.target.step()
