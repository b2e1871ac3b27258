"""How long a step takes, against ``ddp`` and against pipelining by hand with torch. On simulated devices: that it runs.

Arms take turns, so that a slow minute hits all. Ratios go on the page of results; nothing is asserted of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import PipelineStrategy
from tests import devices
from tests.devices import on_gpus
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer, silent

WARM, MICROBATCHES = 3, 4  # of steps in a turn the first WARM are left out
TURNS, STEPS = {"gpu": 3, "simulated": 1}, {"gpu": 40, "simulated": 5}
# (width, layers, rows of a batch): some 130 M parameters on GPUs
SIZES = {"gpu": (4096, 8, 512), "simulated": (16, 8, 8)}


class Chain(LightningModule):
    """Linear layers, the same on all ranks; one batch, again and again."""

    def __init__(self, width: int, layers: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        self.batch = (torch.randn(rows, width), torch.randn(rows, width))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader([self.batch] * STEPS[devices.kind()], batch_size=None)


class Timed(Callback):
    """Seconds of each step, behind the first ones, and the last loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss = 0.0
        self._began = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        if batch_idx >= WARM:
            self.seconds.append(time.perf_counter() - self._began)
        self.loss = float(outputs["loss"])


def fitted(strategy: Any, **options: Any) -> Timed:
    timed = Timed()
    options = {"use_distributed_sampler": False, "num_sanity_val_steps": 0, "max_epochs": 1, **options}
    make_trainer(strategy, callbacks=[timed], **options).fit(Chain(*SIZES[devices.kind()]))
    return timed


def by_hand() -> Timed:
    """Two stages as the documentation of ``torch.distributed.pipelining`` shows, within a process group that exists."""
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    chain, timed = Chain(*SIZES[devices.kind()]), Timed()
    half = len(chain.net) // 2
    module = chain.net[rank * half : (rank + 1) * half].to(device)
    stage = PipelineStage(module, rank, 2, device, group=dist.group.WORLD)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    inputs, target = (tensor.to(device) for tensor in chain.batch)
    for index in range(STEPS[devices.kind()]):
        timed.on_train_batch_start(None, None, None, index)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(inputs) if rank == 0 else schedule.step(target=target, losses=losses)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        timed.on_train_batch_end(None, None, {"loss": loss}, None, index)
    return timed


def pipelined() -> Timed:
    options = {"schedule": "1f1b", "num_microbatches": MICROBATCHES, "split": ["net.4"]}
    return fitted(PipelineStrategy(**grouped(verbose=False, **options)))


# Of each comparison ours, then the other arm: `by_hand` uses the process group that Lightning leaves there.
ARMS: dict[str, dict[str, Callable[[], Timed]]] = {
    "ddp": {"smddp": lambda: fitted(silent()), "ddp": lambda: fitted("ddp")},
    "pipelining by hand": {"smddp_pipeline": pipelined, "by hand": by_hand},
}


def take_turns(name: str) -> dict[str, tuple[float, float]]:
    """Median seconds and last loss of each arm."""
    arms: dict[str, list[Timed]] = {arm: [] for arm in ARMS[name]}
    for _ in range(TURNS[devices.kind()]):
        for arm, run in ARMS[name].items():
            arms[arm].append(run())
    return {
        arm: (statistics.median([seconds for turn in turns for seconds in turn.seconds]), turns[-1].loss)
        for arm, turns in arms.items()
    }


@pytest.mark.slow
@on_gpus(2)
@pytest.mark.parametrize("name", ARMS)
def test_a_step(name: str, device: str, record_property: Any) -> None:
    """The slowest rank's medians and their ratio go on the page."""
    results = run_trainer_ranks(take_turns, 2, name, timeout=110)
    ours, stock = ARMS[name]
    times = {arm: max(result[arm][0] for result in results) for arm in (ours, stock)}
    if device == "gpu":
        record_property(stock, f"{times[stock] * 1e3:.2f} ms a step")
        record_property(ours, f"{times[ours] * 1e3:.2f} ms a step, {times[ours] / times[stock]:.3f} times {stock}")
    assert results[-1][ours][1] == pytest.approx(results[-1][stock][1], rel=1e-4)  # trained the same
