"""The program that a job runs in each rank: ``python -m tests.faults.train CASE``."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_smddp import PipelineStrategy, SMDDPStrategy
from lightning_smddp.strategies.run_supervision import RunSupervision
from tests.faults import journal
from tests.faults.case import Case
from tests.faults.injection import Fault, Injection
from tests.strategies.grouped import grouped

INPUTS, WIDTH, CLASSES, BATCH = 8, 160, 2, 4


_run = RunSupervision.run


@wraps(_run)  # it is pickled by its name
def recorded_run(self: RunSupervision, *args: Any, **kwargs: Any) -> Any:
    """Notes what a rank raises in the end: with ``spawn`` nobody else sees that."""
    with journal.noted_error(self.strategy.global_rank, "explained"):
        return _run(self, *args, **kwargs)


RunSupervision.run = recorded_run  # type: ignore[method-assign]


def rows(count: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(INPUTS, generator=generator), number % CLASSES) for number in range(count)]


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Model(LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            hidden = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), *hidden, nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def _loader(self, batches: int) -> DataLoader[Any]:
        count = batches * BATCH
        kind: Any = Stream(count) if self.case.stream else Rows(count)
        return DataLoader(kind, batch_size=BATCH, num_workers=self.case.workers)

    def train_dataloader(self) -> Any:
        case, replicas = self.case, 1 if self.case.strategy == "smddp_pipeline" else self.case.world_size
        if case.batches is not None:
            return self._loader(case.batches[self.global_rank])
        return self._loader(case.steps * (1 if case.stream else replicas))

    def val_dataloader(self) -> Any:
        return self._loader(4 * self.case.world_size)


class Pace(Callback):
    """Steps that take a while, and journals."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.case.launcher == "spawn":
            journal.take_stderr(trainer.global_rank)
        journal.note(trainer.global_rank, "started", port=os.environ.get("MASTER_PORT"))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.case.step_s)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        at = {"type": type(exception).__name__, "text": str(exception), "step": trainer.global_step}
        journal.note(trainer.global_rank, "raised", **at)


class Asleep(Injection):
    """A fault that others sleep through, in the same hook: behind each, ranks of a pipeline wait for each other."""

    def __init__(self, fault: Fault, case: Case) -> None:
        super().__init__(fault)
        self.case = case

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.fault.step:
            self._sleep(self.case.asleep.get(trainer.global_rank, 0.0))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _sleep(self, seconds: float) -> None:
        nap = seconds if self.case.deeply else 0.01
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(nap)


def make_strategy(case: Case) -> Any:
    methods = {"script": "popen", "torchrun": "popen", "spawn": "spawn" if case.real else "fork"}
    method = methods[case.launcher]
    if case.strategy == "ddp":
        return DDPStrategy(timeout=timedelta(seconds=case.timeout), start_method=method)  # type: ignore[arg-type]
    kind = SMDDPStrategy if case.strategy == "smddp" else PipelineStrategy
    quiet = {"verbose": False, "collective_timeout": case.timeout, "start_method": method}
    return kind(**grouped(**{**quiet, **case.options}))


def make_trainer(case: Case, where: Path) -> Trainer:
    callbacks: list[Callback] = [Pace(case), *(Asleep(fault, case) for fault in case.faults)]
    if case.save_every > 0:
        when = {"every_n_train_steps": case.save_every, "save_on_exception": case.saves_on_exception}
        callbacks.append(ModelCheckpoint(where / "saved", filename="{step}", save_top_k=2, monitor="step", mode="max",
                                         **when))  # fmt: skip
    options = {
        "accelerator": "cpu", "devices": case.devices, "num_nodes": case.nodes,
        "max_steps": case.steps, "max_epochs": -1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": case.save_every > 0,
        "limit_val_batches": 0, "default_root_dir": where / "root",
    }  # fmt: skip
    return Trainer(strategy=make_strategy(case), callbacks=callbacks, **{**options, **case.trainer})


def _name(case: Case) -> str:
    """Of this process among those of the job: its rank, or ``main``."""
    if "RANK" in os.environ:
        return os.environ["RANK"]
    if case.launcher != "script" and "LOCAL_RANK" not in os.environ:
        return "main"
    node, local_rank = int(os.environ.get("NODE_RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    return str(node * case.devices + local_rank)


def main(path: str) -> None:
    where = Path(path).parent
    case = Case.read(Path(path))
    journal.take_stderr(_name(case))
    warnings.filterwarnings("ignore")  # they are tested elsewhere, and hide what is looked for here
    torch.set_num_threads(1)
    trainer, model = make_trainer(case, where), Model(case)
    trainer.fit(model, ckpt_path=case.resume)
    journal.note(trainer.global_rank, "finished", step=trainer.global_step)


if __name__ == "__main__":
    main(sys.argv[1])
