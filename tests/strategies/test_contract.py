"""The contract of a pipeline's step: the numbers of one process that accumulates over the same micro-batches.

A test for each rule, in the order of ``docs/pipeline.md``: what is logged, kept and returned is compared with
``AccumulationStrategy``, a plain loop; what cannot be kept is refused on all ranks, with its cause and its cure.
Rule 14, of evaluation: ``test_pipeline_schedules.py``.
"""

from __future__ import annotations

import copy
import os
import random
import re
import warnings
from collections import defaultdict, deque
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassPrecision, MulticlassRecall

from lightning_smddp import PipelineStrategy
from lightning_smddp.pipeline.capture.tracer import trace
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, make_trainer
from tests.strategies.pipeline_learners import Bench, Cases, Evaluated, Matrix, Net, assert_same, name_of

THREE = {"num_microbatches": 3}  # batches of 8 rows are parts of 3, 3 and 2
SHORT: dict[str, Any] = {"max_epochs": 2}


class Watch(Callback):
    """What hooks see behind each batch: outputs, logged values, plain attributes."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        kept = getattr(module, "shown", ())
        self.seen.append((dict(outputs or {}), metrics, {name: copy.deepcopy(getattr(module, name)) for name in kept}))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        kept = getattr(module, "shown", ())
        self.seen += [outputs, *(copy.deepcopy(getattr(module, name)) for name in kept)]


def watched(bench: Bench, model: LightningModule, *args: Any, **options: Any) -> dict[str, Any]:
    watch = Watch()
    result = bench.fit(model, *args, callbacks=[watch], **{**SHORT, **options})
    return {**result, "seen": watch.seen}


def fitted(bench: Bench, model: str, **sizes: int) -> Any:
    torch.manual_seed(7)
    return watched(bench, globals()[model](**sizes), THREE)


@contextmanager
def caught() -> Any:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def texts(found: Any, *words: str) -> list[str]:
    said = [str(warning.message) for warning in found]
    return [text for text in said if all(word in text for word in words)]


def assert_said_once(bench: Bench, found: Any, *words: str) -> None:
    """By the first rank of a pipeline."""
    is_first = bench.pipeline is not None and torch.distributed.get_rank() == 0
    assert len(texts(found, *words)) == is_first, texts(found)


# ---- 1. one weight for a micro-batch's loss and for every logged mean ----


class Tokens(LightningModule):
    """Rows of unequal lengths; ``kind`` says what its loss is a mean over."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.losses = kind, []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, CLASSES))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self.net(batch["x"]), batch["labels"]
        if self.kind == "shifted_labels":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.kind == "mask":
            loss = (logits.square().mean(2) * batch["mask"]).sum() / batch["mask"].sum()
        else:
            reduction = "sum" if self.kind == "sum" else "mean"
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", logits.max().detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for row in range(20):
            mask = torch.arange(5) < 2 + (row + row // 8) % 4
            labels = torch.randint(CLASSES, (5,), generator=generator).where(mask, -100)
            rows.append({"x": torch.randn(5, INPUTS, generator=generator), "labels": labels, "mask": mask.float()})
        rows[0]["labels"][:] = rows[1]["labels"][:] = rows[2]["labels"][:] = -100  # the first micro-batch has none
        return DataLoader(rows, batch_size=8)


def count_labels(part: dict[str, Tensor]) -> Tensor:
    return part["labels"].ne(-100).sum()


def weighted_by_name(bench: Bench) -> Any:
    return watched(bench, Tokens("mask"), {**THREE, "loss_weight": "mask"})


def weighted_by_function(bench: Bench) -> Any:
    return watched(bench, Tokens("labels"), {**THREE, "loss_weight": count_labels})


# ---- 1b. a step that returns None ----


class Skipping(Net):
    """Skips the rows of one micro-batch, and all rows of two others: behind its modules, and before them."""

    skipped = 0

    def __init__(self, whole: int) -> None:
        super().__init__(count=40)
        self.whole = whole

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 3:
            return None
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=False)
        if batch_idx == self.whole or (batch_idx == 1 and len(batch[0]) == 2):
            self.skipped += 1
            return None
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            super().on_train_batch_end(outputs, batch, batch_idx)


def skipping(bench: Bench, whole: int) -> Any:
    model = Skipping(whole)
    with caught():  # Lightning's own, of a batch that is skipped
        result = watched(bench, model, THREE, max_epochs=1)
    return {**result, "skipped": model.skipped}


# ---- 2. "auto" finds the weight by one trial of the first batch ----


FOUND = ["labels", "shifted_labels", "sum"]


def found(bench: Bench, kind: str) -> Any:
    return watched(bench, Tokens(kind), THREE, {"loss_weight": kind})


# ---- 3. self.log ----


class Telling(nn.Linear):
    """Logs and calls a metric where it is called, inside of the model."""

    log: Any = None
    total: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.log is not None:
            self.log("inside", 1.5)
            self.log("mean inside", out.mean())
            self.log("size", float(len(x)), reduce_fx="max")
            self.total(out.sum())
        return out


class Logging(Evaluated):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.net[0] = Telling(INPUTS, 16)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.net[0].reset_parameters()
        self.total = SumMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        object.__setattr__(self.net[0], "log", self.log)
        object.__setattr__(self.net[0], "total", self.total)
        loss = super().training_step(batch, batch_idx)
        self.log_all(loss, batch)
        return loss

    def log_all(self, loss: Tensor, batch: list[Tensor]) -> None:
        for reduce_fx in ("mean", "sum", "max", "min"):
            self.log(f"{reduce_fx} loss", loss, reduce_fx=reduce_fx, on_epoch=True)
            self.log(f"{reduce_fx} number", loss.item(), reduce_fx=reduce_fx, on_epoch=True)
        self.log("by its own size", loss, batch_size=1)
        if len(batch[0]) == 2:
            self.log("sometimes", loss)
        self.log_dict({"first": loss, "second": 2.0}, on_step=False, on_epoch=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        object.__setattr__(self.net[0], "log", None)
        self.log_all(self.loss(batch), batch)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        self.log("total", self.total.compute())


# ---- 4. torchmetrics ----


class Measured(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(CLASSES, average="macro")
        self.both = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)], prefix="both/")
        self.mean, self.auroc = MeanMetric(), MulticlassAUROC(CLASSES)
        self.early, self.square = CatMetric(), MeanSquaredError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        early = self.net[:2](batch[0])
        self.early.update(early[:, 0])
        logits = self.net[2:](early)
        loss = F.cross_entropy(logits, batch[1]) + 0.1 * self.square(logits[:, 0], batch[1].float())
        self.log("half", 0.5 * self.square(early[:, 0].detach(), batch[1].float()))
        self.log("value", self.f1(logits, batch[1]))
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.both.update(logits, batch[1])
        self.log_dict(self.both, on_step=False, on_epoch=True)
        self.mean.update(loss, weight=len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.auroc.update(self.net(batch[0]).softmax(1), batch[1])
        self.log("auroc", self.auroc)

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.log("early", self.early.compute().norm())
        self.mean.reset()
        self.early.reset()


# ---- 5. what a step returns ----


class Returning(Evaluated):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        logits = self.net(batch[0])
        return {
            "loss": F.cross_entropy(logits, batch[1]),
            "logits": logits.detach(),
            "names": [f"row {int(target)}" for target in batch[1]],
            "rows": torch.tensor(len(batch[0])),
            "count": len(batch[0]),
            "correct": int((logits.argmax(1) == batch[1]).sum()),
            "mean": float(batch[0].mean()),
            "deep": {"largest": logits.detach().amax(1), "kind": "train"},
            "index": batch_idx,
        }

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        logits = self.net(batch[0])
        return logits, F.cross_entropy(logits, batch[1])


def returning(bench: Bench) -> Any:
    model = Returning()
    result = watched(bench, model, THREE)
    predictions = bench.trainer(THREE).predict(Evaluated())
    return {**result, "predictions": predictions}


class Ragged(Evaluated):
    """Returns what cannot be put together."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        return logits @ logits.T


def ragged(bench: Bench) -> Any:
    """Whole batches from there on, said once: so compared with whole batches."""
    with caught() as said:
        result = watched(
            Bench(bench.pipeline, bench.directory), Ragged(), THREE if bench.pipeline is not None else None
        )
    assert_said_once(bench, said, "`validation_step`", "shapes")
    return {"seen": [each for each in result["seen"] if isinstance(each, Tensor)]}


# ---- 6. attributes of the module, and of helpers ----


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count


class Frozen(dict[str, int]):
    """As configurations of diffusers are."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a frozen dict")


class Counting(Evaluated):
    shown = ("correct", "rows", "calls", "last", "total", "report")

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.history = Meter(), []
        self.config = Frozen(width=1)
        self.long, self.recent, self.seen = [*range(2000)], deque(maxlen=2), set()
        self.by_name: dict[str, Any] = defaultdict(list)
        self.correct, self.rows, self.calls, self.last = torch.tensor(0), 0, 0, torch.zeros(())
        self.total, self.trained = torch.zeros(()), torch.zeros(())
        self.report = {"trained": self.trained}  # the same tensor

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.calls += 1
        early = self.net[:2](batch[0])
        self.total.mul_(0.9).add_(early.detach().mean())
        self.trained.add_(len(early))
        logits = self.net[2:](early)
        loss = F.cross_entropy(logits, batch[1])
        self.correct = self.correct + (logits.argmax(1) == batch[1]).sum()
        self.rows += len(batch[0])
        self.last = logits.detach()
        self.meter.update(loss.item(), len(batch[0]))
        self.history.append(loss.item())
        self.long.append(batch_idx)
        self.recent.append(loss.item())
        self.seen.add((batch_idx, len(batch[0])))
        self.by_name["loss"].append(loss.item())
        self.by_name["last"] = batch_idx
        self.log("running", self.correct / self.rows)
        self.log("early", early.detach().mean())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = self.net[0](batch[0])
        self.last = x.detach()
        self.rows += len(x)
        self.log("val_loss", F.cross_entropy(self.net[1:](x), batch[1]))


def counting(bench: Bench) -> Any:
    model = Counting()
    # The sanity check comes before there are stages, and runs whole batches.
    result = watched(bench, model, THREE, num_sanity_val_steps=0)
    kept = [model.history, model.long, list(model.recent), sorted(model.seen), dict(model.by_name)]
    return {**result, "meter": (model.meter.sum, model.meter.count), "kept": kept, "kind": type(model.by_name)}


class Stopping(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.trainer.should_stop = True
        return loss


# ---- 7. attributes of modules that are placed whole ----


class Attending(nn.Linear):
    """Keeps a map, as attention layers do, and a number."""

    attention: Tensor | None = None
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        self.attention = out.detach().softmax(-1)
        self.scale = float(out.detach().abs().mean())
        return out


class Outside(nn.Sequential):
    """Keeps a map of what a module in it, which is placed by itself, has made."""

    attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.attention = out.detach().softmax(-1)
        return out


class Attended(Net):
    def __init__(self) -> None:
        super().__init__()
        for index in (0, 4):
            kept = self.net[index].state_dict()
            self.net[index] = Attending(self.net[index].in_features, self.net[index].out_features)
            self.net[index].load_state_dict(kept)
        self.net[0] = Outside(self.net[0], nn.Tanh())


def attention() -> Any:
    """On each rank: what reading the first layer's map in a hook gives, and what is said of its number."""
    results: list[str] = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            for keeps in (module.net[0], module.net[0][0]):
                try:
                    results.append(f"sum {float(keeps.attention.sum()):.3f}")
                except Exception as error:
                    results.append(f"{type(error).__name__}: {error}")

    with caught() as said:
        pipelined(callbacks=[Reads()]).fit(Attended())
    return results, texts(said, "scale")


class Mended(Attended):
    """The cure: the map in an attribute of the module itself."""

    shown = ("attention",)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.attention = self.net[0].attention
        return loss


def mended(bench: Bench) -> Any:
    with caught():  # its number has no cure here
        return watched(bench, Mended(), THREE)


# ---- 8. BatchNorm, buffers, hooks of parameters ----


class Normalised(Net):
    """BatchNorm, a queue in a buffer, and a hook that clamps a parameter's gradient."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.net[1] = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh())
        self.register_buffer("queue", torch.zeros(4, CLASSES))

    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.queue.copy_(torch.cat([self.queue, logits.detach()])[-4:])
        return F.cross_entropy(logits, batch[1])


def rows_of_parts() -> int:
    """How many micro-batches "auto" makes of 40 rows where BatchNorm trains."""
    bench = Bench({})
    trainer = bench.trainer(max_epochs=1)
    with caught():
        trainer.fit(Normalised(batch_size=40, count=40))
    return trainer.strategy._last_pipelined().batcher.count


# ---- 9. state from the end of a step to the next one's begin ----


class Remembering(Net):
    memory: Any = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:2](batch[0]) + self.memory
        logits = self.net[2:](x)
        self.memory = logits.detach().mean()
        return F.cross_entropy(logits, batch[1])


# ---- 10. random numbers ----


class Rescaled(nn.Module):
    """Draws with Python, numpy and torch within a module that is placed whole."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2) * (0.5 + random.random()) * float(np.random.uniform(0.5, 1))


class Drawing(Net):
    def __init__(self) -> None:
        super().__init__(layers=6)
        self.net[1], self.net[3] = Rescaled(), nn.Sequential(nn.Tanh(), nn.Dropout(0.3))
        self.net[7] = Rescaled()
        self.generator = torch.Generator().manual_seed(5)
        self.of_python, self.of_numpy = random.Random(5), np.random.default_rng(5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        x = F.dropout(x, 0.2) * (1 + random.random() + np.random.rand())
        x = self.net[4:6](x) + torch.rand(16, generator=self.generator) * self.of_python.random()
        x = x * self.of_numpy.uniform(0.5, 1)
        return F.cross_entropy(self.net[6:](x), batch[1])


# ---- 11. how a batch is cut ----


class TimeFirst(Net):
    """A square batch, time first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.rnn = nn.GRU(INPUTS, 16)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        _, hidden = self.rnn(batch[0])
        return F.cross_entropy(self.net[2:](hidden[0]), batch[1])

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        batches = [[torch.randn(6, 6, INPUTS, generator=generator), torch.arange(6) % CLASSES] for _ in range(3)]
        return DataLoader(batches, batch_size=None)


class CutByHand(TimeFirst):
    def split_batch(self, batch: list[Tensor], count: int) -> list[Any]:
        parts = zip(batch[0].tensor_split(count, 1), batch[1].tensor_split(count), strict=True)
        return [(list(part), len(part[1])) for part in parts]


def not_cut(bench: Bench) -> Any:
    one = {"num_microbatches": 1}
    with caught() as said:
        result = watched(bench, TimeFirst(), THREE if bench.pipeline is not None else one)
    assert_said_once(bench, said, "one micro-batch", "split_batch")
    return result


# ---- 12. what is refused ----


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithLBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class BackwardInside(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + slope.square().mean()


class WritesParameters(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)
        return super().training_step(batch, batch_idx)


OUTSIDE = torch.zeros(2)


class WritesOutside(Net):
    """Into a tensor that is no attribute of the module."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        torch.add(OUTSIDE, out.detach().sum(), out=OUTSIDE)
        return F.cross_entropy(out, batch[1])


REFUSALS: list[tuple[type[Net], str]] = [
    (Manual, "automatic_optimization"),
    (WithLBFGS, "LBFGS"),
    (BackwardInside, "grad"),
    (WritesParameters, "net.0.weight"),
    (WritesOutside, "Keep it in an attribute of the LightningModule itself"),
]


# ---- 13. control flow ----


class Branching(Net):
    """By the epoch, the batch's index, its shape and a random number."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:2](batch[0])
        if self.current_epoch == 1 or batch_idx == 2:
            x = x * 2
        if len(batch[0]) == 2:
            x = self.net[2:4](x)
        if random.random() > 0.5:
            x = x + 1
        return F.cross_entropy(self.net[4:](x), batch[1])


class Deciding(Net):
    """By an activation, which decides otherwise in the second epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:2](batch[0]) + 10 * self.current_epoch
        if x.mean() > 5:
            x = torch.sin(x)
        x = self.net[2:4](x)
        return F.cross_entropy(self.net[4:](x), batch[1])


# ---- 15. the check ----


class Escaping(Net):
    """A number of a module is used elsewhere, where nothing that sees tensors can notice."""

    def __init__(self) -> None:
        super().__init__()
        kept = self.net[0].state_dict()
        self.net[0] = Attending(INPUTS, 16)
        self.net[0].load_state_dict(kept)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.net[0].scale


# ---- 16. hooks see the whole module ----


class Whole(Callback):
    held = 0  # elements of parameters on this rank

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.seen_by_first: list[float] = []
        self.average: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self.seen.append(float(torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.average[name] = 0.9 * self.average.get(name, 0.0) + 0.1 * parameter.detach()
        if trainer.is_global_zero:
            self.seen_by_first += [float(parameter.detach().cpu().norm()) for parameter in pl_module.parameters()]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen += [float(value.norm()) for value in self.average.values()]
        self.held = sum(p.numel() for p in pl_module.parameters() if type(p) is nn.Parameter)


def hooked(bench: Bench, model: str) -> Any:
    """``Net`` logs nothing: between its last hook and the end of the epoch ranks meet nowhere else."""
    whole = Whole()
    result = bench.fit(globals()[model](), THREE, callbacks=[whole], gradient_clip_val=0.5, **SHORT)
    is_first = bench.pipeline is None or torch.distributed.get_rank() == 0  # the others read nothing
    return {**result, "hooks": whole.seen, "first": whole.seen_by_first if is_first else None, "held": whole.held}


# ---- the tests -------------------------------------------------------------------------------------------------------


LOGGING, MEASURED = (partial(fitted, model=model) for model in ("Logging", "Measured"))
RULES: dict[str, list[Any]] = {
    "1 one weight for losses and means": [weighted_by_name, weighted_by_function],
    "1b what has no loss does not count": [partial(skipping, whole=whole) for whole in (0, 2)],
    "2 auto finds the weight": [*(partial(found, kind=kind) for kind in FOUND)],
    "3 logs are reduced over micro-batches": [LOGGING],
    "4 metrics are called for each micro-batch": [MEASURED],
    "5 outputs are put together": [returning],
    "6 attributes go from micro-batch to micro-batch and to all ranks": [counting],
    "7 an attribute of the module helps": [mended],
    "8 normalisation, buffers and hooks of parameters see micro-batches": [partial(fitted, model="Normalised")],
    "10 random numbers follow from the micro-batch": [partial(fitted, model="Drawing")],
    "11 the user's function cuts, and a batch that can be read in two ways is one micro-batch":
        [partial(fitted, model="CutByHand"), not_cut],
    "13 paths by what all ranks know are found before the schedule": [partial(fitted, model="Branching", layers=6)],
}  # fmt: skip
HOOKED = [partial(hooked, model=model) for model in ("Evaluated", "Net")]
CASES = [case for cases in RULES.values() for case in cases]
STOPPED = partial(fitted, model="Stopping")
TWO = Matrix([*CASES, ragged, STOPPED, *HOOKED], timeout=300.0)
SEVERAL_STAGES = Matrix([LOGGING, MEASURED, counting], pipeline={"schedule": "interleaved_1f1b"})


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{rule}-{name_of(case)}") for rule, cases in RULES.items() for case in cases]
)
def test_rule(case: Any) -> None:
    TWO.compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SEVERAL_STAGES.cases, ids=name_of)
def test_3_4_6_also_where_a_rank_has_several_stages(case: Any) -> None:
    SEVERAL_STAGES.compare(case)


def test_5_evaluation_runs_whole_batches_where_outputs_cannot_be_put_together() -> None:
    """In lockstep, where it cannot be cut: `test_pipeline_hooks.py`."""
    results = TWO.results(ragged)
    expected = ragged(Bench(None))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_6_a_stop_that_is_asked_for_in_a_step_is_heard() -> None:
    results = TWO.compare(STOPPED)
    assert [result["steps"][0] for result in results] == [2, 2]


def test_7_what_a_placed_module_keeps_is_on_its_rank_and_raises_elsewhere_with_the_cure() -> None:
    (first, said), (second, unsaid) = REFUSED.results(("attention",))
    assert all(text.startswith("sum ") for text in first)
    for place in (0, 1):
        assert all("`self.kept = self.net.0" in text for text in second[place::2]), second
    assert len(said) == 1
    assert "net.0" in said[0] or "net.4" in said[0]
    assert unsaid == []


def test_8_auto_makes_micro_batches_of_sixteen_rows_for_batch_norm() -> None:
    assert REFUSED.results(("rows_of_parts",)) == [2, 2]


def test_9_state_for_the_next_micro_batch_is_refused_by_name() -> None:
    for text in REFUSED.results(("refused", "Remembering")):
        assert "memory" in text


@pytest.mark.parametrize(("model", "cause"), REFUSALS, ids=[model.__name__ for model, _ in REFUSALS])
def test_12_what_cannot_be_cut_is_refused_with_the_word_to_use(model: type[Net], cause: str) -> None:
    for text in REFUSED.results(("refused", model.__name__)):
        assert cause in text
        assert "smddp" in text
        assert "smddp_fsdp" in text


def test_12_what_a_trace_has_written_outside_is_put_back() -> None:
    root, other = nn.Linear(2, 2), torch.arange(4.0)

    @torch.no_grad()
    def step() -> None:
        other[2:].add_(1)
        other.mul_(2)  # what was before the first write counts
        torch.ones(2).zero_()

    (place,) = trace(step, root, torch.device("cpu")).external_writes
    assert "test_contract.py" in place
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_13_a_path_by_an_activation_that_changes_is_an_error_on_all_ranks() -> None:
    for text in REFUSED.results(("refused", "Deciding")):
        assert "Error" in text
        assert "test_contract.py" in text


def test_15_the_check_at_the_start_sees_what_nothing_else_sees() -> None:
    for text in REFUSED.results(("refused", "Escaping")):
        assert "does not compute what the step computes" in text
        assert re.search(r"the gradient of 'net\.\d' has norm", text)


@pytest.mark.parametrize("case", HOOKED, ids=name_of)
def test_16_hooks_see_the_whole_module(case: Any) -> None:
    expected = TWO.alone(case)
    first, second = TWO.results(case)
    held = [first["held"], second["held"]]
    assert all(held)
    assert sum(held) == expected["held"]
    assert_same(first, {**expected, "held": held[0]})
    assert_same(second, {**expected, "first": None, "held": held[1]})


# ---- bodies of ranks ----


def pipelined(**options: Any) -> Trainer:
    strategy = PipelineStrategy(**grouped(**{**THREE, "verbose": False}))
    return make_trainer(strategy, **{"max_epochs": 2, **options})


def refused(name: str) -> str:
    try:
        with caught():
            pipelined().fit(globals()[name]())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing on rank {os.environ['RANK']}"


def scene(name: str, *args: Any) -> Any:
    return globals()[name](*args)


REFUSED = Cases(
    scene,
    [
        ("attention",),
        ("rows_of_parts",),
        *(("refused", model.__name__) for model, _ in REFUSALS),
        ("refused", "Remembering"),
        ("refused", "Escaping"),
        ("refused", "Deciding"),
    ],
    timeout=240.0,
)
