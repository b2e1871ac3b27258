"""A model and data full of random numbers, and runs that are taken up again from each of their checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, make_trainer, samples


def augmented(x: Tensor) -> Tensor:
    """With noise from all three generators."""
    return x + 0.1 * torch.randn(INPUTS) + 0.1 * random.random() + 0.1 * float(np.random.rand())


class Pictures(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.data = samples(count)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return augmented(x), y, index


class Stream(IterableDataset[Any]):
    """Shuffles by a generator of its own, as streams do; each worker has its share."""

    def __init__(self, count: int) -> None:
        self.data = samples(count)
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        indices = list(range(len(self.data)))
        self.random.shuffle(indices)
        for index in indices if info is None else indices[info.id :: info.num_workers]:
            x, y = self.data[index]
            yield augmented(x), y, index


class Buckets(BatchSampler):
    """Batches in an order from a generator that it keeps, which goes on from epoch to epoch."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.random = np.random.default_rng(3)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        self.random.shuffle(batches)
        return iter(batches)


@dataclass(frozen=True)
class Scenario:
    """What a run is like. ``data``: map, stream, buckets, generator, two (loaders), ended (one before the other)."""

    data: str = "map"
    workers: int = 0
    accumulate: int = 1
    validate: int | None = None
    epochs: int = 3
    max_steps: int = -1
    limit: int | None = None
    count: int = 26
    batch_size: int = 4
    validated: int = 8

    def loader(self, batch_size: int | None = None) -> Any:
        size = batch_size or self.batch_size
        more: dict[str, Any] = {"num_workers": self.workers}
        if self.workers:
            more["multiprocessing_context"] = "fork"
        if self.data == "stream":
            return DataLoader(Stream(self.count), size, **more)
        if self.data == "buckets":
            return DataLoader(
                Pictures(self.count), batch_sampler=Buckets(RandomSampler(range(self.count)), size, False), **more
            )
        if self.data == "generator":
            generator = torch.Generator().manual_seed(7)
            return DataLoader(Pictures(self.count), size, shuffle=True, generator=generator, **more)
        if self.data in ("two", "ended"):
            short = DataLoader(Pictures(self.count // 3), size, shuffle=True, **more)
            both = {"long": DataLoader(Pictures(self.count), size, shuffle=True, **more), "short": short}
            return both if self.data == "two" else CombinedLoader(both, "max_size")
        return DataLoader(Pictures(self.count), size, shuffle=True, **more)


class Dropping(LightningModule):
    """Dropout in every layer, Adam, and a note of each sample that comes."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            hidden = [m for _ in range(2) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3))]
            first = [nn.Linear(INPUTS, 16), nn.Tanh(), nn.Dropout(0.3)]
            self.net = nn.Sequential(*first, *hidden, nn.Linear(16, CLASSES))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = [torch.cat([part[i] for part in batch.values() if part is not None]) for i in range(2)]
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        self.seen.append([part[2].tolist() for part in parts if part is not None])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def train_dataloader(self) -> Any:
        return self.scenario.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Pictures(self.scenario.validated), 4)


@dataclass
class Run:
    """What it saw and what it left, on one rank."""

    seen: list[Any]
    state: dict[str, Tensor]
    steps: tuple[int, int]
    validation: float | None


def make_strategy(kind: Any) -> Any:
    from lightning_smddp import PipelineStrategy, SMDDPStrategy

    if kind in ("ddp", "auto"):
        return kind
    if isinstance(kind, dict):
        return PipelineStrategy(**grouped(verbose=False, algorithm="native", **kind))
    if kind == "sharded":
        return SMDDPStrategy(**grouped(verbose=False, algorithm="native", shard="optimizer"))
    algorithm = "native" if kind == "smddp" else kind
    return SMDDPStrategy(**grouped(verbose=False, algorithm=algorithm, gradient_as_bucket_view=True))


def run(
    kind: Any,
    scenario: Scenario,
    directory: str | None = None,
    ckpt_path: Any = None,
    make_model: Any = Dropping,
    **options: Any,
) -> Run:
    """Train under the strategy ``kind``: "smddp", "ddp", "sharded" (``smddp`` with a sharded optimizer), arguments of a
    pipeline, an algorithm of ``smddp``, or a strategy.

    With a ``directory`` it saves after each step, epoch and validation.
    """
    seed_everything(11, verbose=False)
    if ckpt_path is not None:
        torch.rand(7), random.random(), np.random.rand()  # another past
    model = make_model(scenario)
    callbacks = list(options.pop("callbacks", []))
    if directory is not None:
        every = {"dirpath": directory, "save_top_k": -1, "auto_insert_metric_name": False}
        callbacks += [
            ModelCheckpoint(filename="step{step}", every_n_train_steps=1, save_on_train_epoch_end=False, **every),
            ModelCheckpoint(filename="epoch{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, **every),
        ]
        if scenario.validate is not None:
            callbacks.append(
                ModelCheckpoint(filename="val{step}", monitor="val_loss", save_on_train_epoch_end=False, **every)
            )
    trainer = make_trainer(
        make_strategy(kind) if isinstance(kind, (str, dict)) else kind,
        callbacks=callbacks,
        enable_checkpointing=options.pop("enable_checkpointing", bool(callbacks)),
        max_epochs=scenario.epochs if scenario.max_steps < 0 else -1,
        max_steps=scenario.max_steps,
        accumulate_grad_batches=scenario.accumulate,
        val_check_interval=scenario.validate,
        limit_val_batches=1.0 if scenario.validate is not None else 0,
        limit_train_batches=scenario.limit,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return Run(model.seen, _state(model, trainer), (trainer.global_step, trainer.current_epoch), _validation(trainer))


def _validation(trainer: Any) -> float | None:
    value = trainer.callback_metrics.get("val_loss")
    return None if value is None else float(value)


def _state(model: Any, trainer: Any) -> dict[str, Tensor]:
    """Weights, and the optimizer's moments of the parameters that this rank has."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = trainer.optimizers[0]
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        state |= {f"{name}.{key}": torch.as_tensor(value).clone() for key, value in moments.items()}
    return state


def differences(resumed: Run, unbroken: Run) -> list[str]:
    """In words; none if the resumed run is the end of the unbroken one, bit for bit."""
    found = []
    tail = unbroken.seen[len(unbroken.seen) - len(resumed.seen) :]
    if resumed.seen != tail:
        first = next(i for i, pair in enumerate(zip(resumed.seen, tail, strict=True)) if pair[0] != pair[1])
        found.append(f"samples differ {first} batches after the start: {resumed.seen[first]}, not {tail[first]}")
    if resumed.seen and resumed.steps != unbroken.steps:
        found.append(f"steps and epochs are {resumed.steps}, not {unbroken.steps}")
    moments = {"exp_avg", "exp_avg_sq", "step"}
    names = [name for name in unbroken.state if resumed.seen or name.rpartition(".")[2] not in moments]
    if missing := [name for name in names if name not in resumed.state]:
        return [*found, f"there is no {missing[0]}"]
    unequal = [name for name in names if not torch.equal(unbroken.state[name], resumed.state[name])]
    if unequal:
        found.append(f"{len(unequal)} of {len(names)} tensors differ, the first is {unequal[0]}")
    if resumed.validation is not None and resumed.validation != pytest.approx(unbroken.validation, rel=1e-6):
        found.append(f"the last validation gave {resumed.validation}, not {unbroken.validation}")
    return found


def checkpoints(directory: str, kinds: tuple[str, ...] = ("step", "epoch", "val")) -> list[Path]:
    """In the order of training."""
    paths = [path for kind in kinds for path in Path(directory).glob(f"{kind}*.ckpt")]
    return sorted(paths, key=lambda path: path.name)


def resume_from_each(
    kind: Any, scenario: Scenario, directory: str, chosen: int | None = None, seed: int = 0
) -> dict[str, list[str]]:
    """Body of a rank: an unbroken run, and one from each of its checkpoints, or ``chosen`` ones; what differs."""
    unbroken = run(kind, scenario, directory)
    paths = checkpoints(directory)
    if chosen is not None:
        paths = random.Random(seed).sample(paths, min(chosen, len(paths)))
    found = {path.name: differences(run(kind, scenario, ckpt_path=path), unbroken) for path in paths}
    return {name: texts for name, texts in found.items() if texts}


def all_from_each(
    kinds: list[tuple[Any, Scenario]], directory: str, chosen: int | None = None
) -> dict[str, dict[str, list[str]]]:
    """Body of a rank: :func:`resume_from_each` for many."""
    found = {}
    for number, (kind, scenario) in enumerate(kinds):
        found[str((kind, scenario))] = resume_from_each(kind, scenario, f"{directory}/{number}", chosen, number)
    return {name: texts for name, texts in found.items() if texts}
