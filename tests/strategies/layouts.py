"""Models, layouts and runs for the tests of checkpoints that are saved in one layout and resumed in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_smddp import PipelineStrategy, SMDDPFSDPStrategy, SMDDPStrategy
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, make_trainer
from tests.strategies.pipeline_learners import Gpt

BATCH, COUNT, STEPS = 8, 40, 8
WITHIN, BETWEEN = 3, 5  # steps of checkpoints: within an epoch, which has 5 steps, and at its end


def classifier() -> nn.Module:
    """With a buffer that training changes."""
    hidden = [m for _ in range(2) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())]
    return nn.Sequential(nn.Linear(INPUTS, 16), *hidden, nn.Linear(16, CLASSES))


MODELS = {"net": classifier, "gpt": Gpt}


class Model(LightningModule):
    """One of ``MODELS``, in double precision, so that sums in another order make no difference that counts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = MODELS[kind]().double()
        self.net.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.kind == "net":
            return F.cross_entropy(self.net(batch["x"]), batch["y"])
        tokens = batch["tokens"]
        return F.cross_entropy(self.net.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Lightning alone trains a batch too many when it resumes at the end of an epoch without validation."""
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return DataLoader(self.samples()[:4], 2)

    def configure_optimizers(self) -> Any:
        """Two groups, in another order than the model's."""
        parameters = list(self.parameters())
        matrices = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": matrices}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def samples(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(COUNT, INPUTS, generator=generator, dtype=torch.float64)
        tokens = torch.randint(11, (COUNT, 6), generator=generator)
        if self.kind == "net":
            return [{"x": row, "y": row[:CLASSES].argmax()} for row in x]
        return [{"tokens": row} for row in tokens]

    def train_dataloader(self) -> Any:
        """The same samples in each step, however many replicas there are."""
        data = self.samples()
        places = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        if places is None:
            return DataLoader(data, BATCH)
        sampler: Any = DistributedSampler(data, shuffle=False, **places)  # type: ignore[arg-type]
        return DataLoader(data, BATCH // places["num_replicas"], sampler=sampler)  # type: ignore[arg-type]


class Watch(Callback):
    """Keeps losses, and what there is before the first optimizer step: of the module and of its optimizer."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.start: Any = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.start is None:
            strategy = trainer.strategy
            states = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer)
            self.start = cloned(states)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    return type(value)(cloned(item) for item in value) if isinstance(value, (list, tuple)) else value


# layout -> ranks, strategy, its options
LAYOUTS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "alone": (1, None, {}),
    "pp2": (2, PipelineStrategy, {}),
    "pp3": (3, PipelineStrategy, {}),
    "pp4": (4, PipelineStrategy, {}),
    "dp2": (2, SMDDPStrategy, {}),
    "fsdp2": (2, SMDDPFSDPStrategy, {}),
    "2x2": (4, PipelineStrategy, {"pipeline_parallel_size": 2}),
    "dp2 shard": (2, SMDDPStrategy, {"shard": "optimizer"}),
    "2x2 shard": (4, PipelineStrategy, {"pipeline_parallel_size": 2, "shard": "optimizer"}),
}


@dataclass(frozen=True)
class Run:
    """A run in a layout, which saves where ``path`` says, and goes on from a checkpoint if it is given one."""

    kind: str
    layout: str
    directory: Path
    sharded: bool = False
    ckpt_path: Path | None = None

    @property
    def name(self) -> str:
        parts = [self.kind, self.layout, "sharded" if self.sharded else "plain"]
        return "-".join(parts if self.ckpt_path is None else [*parts, "from", self.ckpt_path.stem])

    def path(self, step: int) -> Path:
        """Its checkpoint after ``WITHIN`` or ``BETWEEN`` steps."""
        return self.directory / f"{self.name}-step={step}.ckpt"


def train(run: Run) -> tuple[list[float], Any]:
    """Losses, and what there was before the first step, on this rank."""
    _, strategy, options = LAYOUTS[run.layout]
    watch = Watch()
    where = {"dirpath": run.directory, "filename": run.name + "-{step}", "save_top_k": -1}
    within = ModelCheckpoint(**where, every_n_train_steps=WITHIN)
    between = ModelCheckpoint(**where, every_n_epochs=1)
    more: dict[str, Any] = {
        "max_epochs": -1,
        "max_steps": STEPS,
        "enable_checkpointing": True,
        "num_sanity_val_steps": 0,
    }
    quiet = {"verbose": False, "sharded": run.sharded}
    chosen = "auto" if strategy is None else strategy(**grouped(**quiet, **options))
    trainer = make_trainer(chosen, callbacks=[watch, within, between], **more)
    trainer.fit(Model(run.kind), ckpt_path=run.ckpt_path)
    return watch.losses, watch.start


def train_all(runs: Sequence[Run]) -> list[Any]:
    """Body of a rank."""
    return [train(run) for run in runs]


@dataclass(frozen=True)
class Result:
    """Of all ranks: the mean of their losses, and the whole state before the first step."""

    losses: list[float]
    state_dict: dict[str, Any]
    optimizer: dict[str, Any]


def execute(runs: Sequence[Run]) -> list[Result]:
    """Results of runs, which all have the same number of ranks."""
    count = LAYOUTS[runs[0].layout][0]
    assert all(LAYOUTS[run.layout][0] == count for run in runs)
    everyones = [train_all(runs)] if count == 1 else run_trainer_ranks(train_all, count, list(runs), timeout=200.0)
    return [combine([results[index] for results in everyones]) for index in range(len(runs))]


def combine(ranks: Sequence[tuple[list[float], Any]]) -> Result:
    losses = torch.tensor([losses for losses, _ in ranks], dtype=torch.float64).mean(0).tolist()
    state_dict: dict[str, Any] = {}
    optimizer: dict[str, Any] = {"state": {}}
    for _, (model, states) in reversed(ranks):
        state_dict.update(model)
        optimizer = {**optimizer, **states, "state": {**optimizer["state"], **states.get("state", {})}}
    return Result(losses, state_dict, optimizer)
