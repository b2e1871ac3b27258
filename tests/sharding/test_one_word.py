"""A model that does not fit trains after one word is changed: in a cgroup, in which the kernel kills."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import SMDDPStrategy
from tests.faults import memory
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.learners import make_trainer

RANKS, WIDTH, LAYERS = 3, 1024, 16  # 64 MiB of parameters, and with AdamW four times as much on each rank
ROOM = 1000 * 2**20  # `smddp` takes 1,130 MiB, what shards 590 (FSDP2) to 890 (DeepSpeed)
STRATEGIES = {
    "optimizer": SMDDPStrategy(shard="optimizer"),
    "fsdp": "smddp_fsdp",
    "deepspeed": "smddp_deepspeed_stage_3",
}
_M_MMAP_THRESHOLD = -3  # of malloc.h


class Deep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0] * 100).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(36, WIDTH)), 4)


def train(strategy: Any, cgroup: str) -> list[float]:
    if strategy == STRATEGIES["deepspeed"]:
        import deepspeed  # noqa: F401  # the program's own memory is not the model's

    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)  # what is freed is given back
    memory.join(Path(cgroup))
    module = Deep()
    make_trainer(strategy, max_steps=2).fit(module)
    return module.losses


@pytest.fixture
def cgroup():
    if reason := memory.no_cgroups():
        pytest.skip(f"no memory cgroup: {reason}")
    with memory.cgroup(ROOM) as path:
        yield path


@pytest.mark.slow
def test_the_model_does_not_fit(cgroup):
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_trainer_ranks(train, RANKS, "smddp", str(cgroup))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRATEGIES)
def test_another_word_and_it_trains(kind, cgroup):
    losses = run_trainer_ranks(train, RANKS, STRATEGIES[kind], str(cgroup))
    assert losses[0][-1] < losses[0][0]
