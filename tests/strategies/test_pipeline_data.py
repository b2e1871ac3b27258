"""Data that differs between the ranks of a pipeline, and batches of any structure: the first rank's batch counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, name_of, outcome


def other_seed_on_each_rank() -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(7 + rank)
    return rank


class Seeded(Net):
    """Each rank draws other random numbers from the first batch on."""

    def __init__(self) -> None:
        super().__init__(count=16)

    def on_fit_start(self) -> None:
        other_seed_on_each_rank()


class Shuffled(Seeded):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size, shuffle=True)


def shuffled(bench: Bench) -> Any:
    return bench.fit(Shuffled())


class OwnSampler(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count).tolist()


class Sampled(Seeded):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size, sampler=OwnSampler(self.count))


def own_sampler(bench: Bench) -> Any:
    return bench.fit(Sampled())


class Weighted(Seeded):
    def train_dataloader(self) -> Any:
        sampler = WeightedRandomSampler([0.1, 0.9] * (self.count // 2), self.count)
        return DataLoader(samples(self.count), batch_size=self.batch_size, sampler=sampler, drop_last=True)


def weighted_sampler(bench: Bench) -> Any:
    return bench.fit(Weighted(), max_epochs=1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(21):
            x = torch.randn(8)
            yield x, x[:3].argmax()


class Streamed(Seeded):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=8)


def stream(bench: Bench) -> Any:
    return bench.fit(Streamed(), max_epochs=1)


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.data = samples(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.randn(8), y


class Augmented(Seeded):
    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=8)


def augmented(bench: Bench) -> Any:
    return bench.fit(Augmented(), max_epochs=1)


class AugmentedLater(Evaluated):
    """In training, not in validation."""

    on_fit_start = Seeded.on_fit_start

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]) * self.trainer.training, batch[1]]


def augmented_after_transfer(bench: Bench) -> Any:
    return bench.fit(AugmentedLater(count=16), max_epochs=1)


class Workers(Seeded):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(samples(24), generator=generator)
        return DataLoader(samples(24), batch_size=8, sampler=sampler, num_workers=1, persistent_workers=False)


def workers(bench: Bench) -> Any:
    return bench.fit(Workers(), max_epochs=1)


# ---- structures ----


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def as_dict(rows: list[Any]) -> Any:
    x, y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    return {"input": {"x": x}, "target": y, "names": [f"row {int(t)}" for t in y], "size": len(rows), "tag": "train"}


class Dicts(Net):
    def __init__(self) -> None:
        super().__init__(batch_size=7, count=17)
        self.names: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch["tag"] == "train"
        assert len(batch["names"]) == len(batch["target"])
        self.names.extend(batch["names"])
        return self.loss([batch["input"]["x"], batch["target"]])

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size, collate_fn=as_dict)


def dicts(bench: Bench) -> Any:
    model = Dicts()
    return bench.fit(model, {"num_microbatches": 3}, max_epochs=1), model.names


class Dataclasses(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) is Pair
        return self.loss([batch.x, batch.y])

    def train_dataloader(self) -> Any:
        def collate(rows: list[Any]) -> Pair:
            return Pair(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))

        return DataLoader(samples(self.count), batch_size=self.batch_size, collate_fn=collate)


def dataclasses(bench: Bench) -> Any:
    return bench.fit(Dataclasses(), max_epochs=1)


class Rows(Net):
    """A batch is a list of samples of any length, as detection models take it."""

    def training_step(self, batch: list[dict[str, Tensor]], batch_idx: int) -> Any:
        x = torch.stack([row["x"].mean(0) for row in batch])
        return self.loss([x, torch.stack([row["y"] for row in batch])])

    def train_dataloader(self) -> Any:
        def collate(rows: list[Any]) -> list[dict[str, Tensor]]:
            return [{"x": x.expand(1 + index % 3, -1), "y": y} for index, (x, y) in enumerate(rows)]

        return DataLoader(samples(self.count), batch_size=self.batch_size, collate_fn=collate)


def rows(bench: Bench) -> Any:
    return bench.fit(Rows(), max_epochs=1)


class Combined(Net):
    """Two loaders at once."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])

    def train_dataloader(self) -> Any:
        first = DataLoader(samples(24), batch_size=6)
        return CombinedLoader({"a": first, "b": DataLoader(samples(12), batch_size=6)}, "max_size_cycle")


def combined(bench: Bench) -> Any:
    return bench.fit(Combined(), max_epochs=1)


def without_sampler_of_lightning(bench: Bench) -> Any:
    model = Shuffled()
    trainer = bench.trainer(use_distributed_sampler=False, max_epochs=1)
    trainer.fit(model)
    return outcome(model, trainer)


CASES = [
    shuffled,
    stream,
    augmented_after_transfer,
    dicts,
    combined,
]
# Where the ranks' batches come from is nothing to the pipeline.
MORE_CASES = [
    own_sampler,
    weighted_sampler,
    augmented,
    workers,
    dataclasses,
    rows,
    without_sampler_of_lightning,
]
TWO = Matrix(CASES)
MORE = Matrix(MORE_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES, ids=name_of)
def test_more_equals_one_process(case: Case) -> None:
    MORE.compare(case)
