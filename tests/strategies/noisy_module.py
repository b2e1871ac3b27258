"""Modules that log in all ways that Lightning has, and strategies that run their steps in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.step_results import broadcast_results
from lightning_smddp.pipeline.partition.microbatches import split
from lightning_smddp.wire.broadcast import HeaderCache
from lightning_smddp.wire.pytree import items
from tests.strategies.learners import QUIET

INPUTS, CLASSES, BATCH, COUNT = 6, 3, 8, 28  # the last batch has 4 rows


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(COUNT, INPUTS, generator=generator)
    targets = torch.arange(COUNT) % CLASSES
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)


class NoisyModule(LightningModule):
    """Everything in one module."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Linear(INPUTS, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.f1 = MulticlassF1Score(CLASSES, average="macro")
        self.mean = MeanMetric()
        self.auroc = MulticlassAUROC(CLASSES, average="macro")
        self.best = MinMaxMetric(MulticlassRecall(CLASSES))
        self.called = MetricCollection(
            {"p": MulticlassPrecision(CLASSES), "r": MulticlassRecall(CLASSES), "f": MulticlassF1Score(CLASSES)},
            prefix="called/",
        )
        self.updated = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)], prefix="updated/")
        self.margins = CatMetric()
        self.outputs: list[Any] = []
        self.by_name: dict[str, list[Any]] = {"targets": []}
        self.steps_seen, self.rows_seen = 0, 0
        self.last_logits: Tensor | None = None
        self.ends: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("plain", loss)
        self.log("number", loss.item(), on_epoch=True)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=len(inputs))
        self.log("constant", loss, on_step=False, on_epoch=True, batch_size=BATCH)
        self.log("worst", logits.max(), reduce_fx="max", on_epoch=True)
        self.log("least", logits.min(), reduce_fx=torch.min, on_epoch=True)
        self.log("correct", (logits.argmax(1) == targets).sum().float(), reduce_fx="sum", on_epoch=True)
        self.log("step", float(batch_idx))
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1(logits, targets), on_step=True, prog_bar=True)
        self.log_dict(self.called(logits, targets), on_step=True, on_epoch=False)
        self.mean.update(loss, weight=len(inputs))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.steps_seen += 1
        self.rows_seen += len(inputs)
        self.last_logits = logits
        return {"loss": loss, "logits": logits, "f1": self.f1(logits, targets)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, targets)
        self.log_dict({"val_loss": loss, "val_zero": 0.0}, prog_bar=True)
        self.auroc.update(logits.softmax(1), targets)
        self.log("val_auroc", self.auroc)
        self.updated.update(logits, targets)
        self.log_dict(self.updated)
        sure = logits.amax(1) > 0.3
        self.margins.update(logits[sure].amax(1))
        self.best.update(logits, targets)
        self.outputs.append({"loss": loss, "logits": logits})
        self.by_name["targets"].append(targets)
        self.by_name.setdefault("rows", []).extend(targets.tolist())
        return loss

    def on_validation_epoch_end(self) -> None:
        best = self.best.compute()
        self.log("val_margin", self.margins.compute().mean())
        self.log("val_best", best["max"])
        self.ends.append(
            {
                "logits": torch.cat([output["logits"] for output in self.outputs]),
                "losses": torch.stack([output["loss"] for output in self.outputs]),
                "lists": {name: list(found) for name, found in self.by_name.items()},
                "counts": (self.auroc.update_count, self.margins.update_count),
            }
        )
        self.outputs.clear()
        for found in self.by_name.values():
            found.clear()
        self.margins.reset()
        self.best.reset()

    def predict_step(self, batch: Any) -> Any:
        return {"logits": self.net(batch[0]), "names": [f"row {value}" for value in batch[1].tolist()]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """What callbacks see after each batch and each epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _look(self, trainer: Trainer, what: str) -> None:
        numbers = {
            f"{what}/{kind}/{name}": float(value)
            for kind, found in (
                ("callback", trainer.callback_metrics),
                ("bar", trainer.progress_bar_metrics),
                ("logged", trainer.logged_metrics),
            )
            for name, value in found.items()
        }
        self.seen.append(numbers)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._look(trainer, "batch")
        self.seen.append({f"output/{name}": value.detach().clone() for name, value in outputs.items()})
        self.seen.append({"steps": module.steps_seen, "rows": module.rows_seen, "logits": module.last_logits.detach()})

    def on_validation_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({"val output": outputs})

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self._look(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._look(trainer, "epoch")


class Lines(Logger):
    """Keeps what loggers get."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))


def history(strategy: Any, module: Any = None, **options: Any) -> dict[str, Any]:
    """All that can be seen of two epochs with validation, and predictions."""
    module, watch, lines = module or NoisyModule(), Watch(), Lines()
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 1, **QUIET, **options}
    trainer = Trainer(strategy=strategy, callbacks=[watch], **{**settings, "logger": lines})
    trainer.fit(module, loader(), loader())
    ends = list(module.ends)
    validated = trainer.validate(module, loader(), verbose=False)
    predictions = trainer.predict(module, loader())
    return {
        "seen": watch.seen,
        "lines": lines.lines,
        "ends": ends,
        "validated": validated,
        "predictions": predictions,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structures; numbers and tensors up to rounding, everything else exactly."""
    found, wanted = dict(items(actual)), dict(items(expected))
    assert list(found) == list(wanted)
    for path, value in wanted.items():
        if isinstance(value, (Tensor, float)):
            torch.testing.assert_close(
                found[path], value, rtol=1e-5, atol=1e-6, msg=lambda text, where=path: f"{where}: {text}"
            )
        else:
            assert (path, found[path]) == (path, value)


# ---- strategies ------------------------------------------------------------------------------------------------------


class RunsSteps:
    """The step hooks of a strategy, all through ``_run(hook, batch, ...)``."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("training_step", *args, *kwargs.values())

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict_step", *args, *kwargs.values())


class InMicroBatches(RunsSteps, SingleDeviceStrategy):
    """One process that runs every step on micro-batches, one after the other, the last one first."""

    def __init__(self, count: int = 4, **options: Any) -> None:
        super().__init__(device="cpu")
        self.count, self.capture_options = count, options
        self.capture: StepCapture | None = None

    def _run(self, hook: str, batch: Any, *rest: Any) -> Any:
        module = self.lightning_module
        if self.capture is None:
            self.capture = StepCapture(module, **self.capture_options)
        parts = split(batch, self.count)
        outputs: dict[int, Any] = {}
        for index in reversed(range(len(parts))):
            with self.capture.microbatch(index, parts[index].size, keep=False):
                getattr(module, hook)(parts[index].value, *rest)
            with self.capture.microbatch(index, parts[index].size):
                outputs[index] = self.capture.finish(getattr(module, hook)(parts[index].value, *rest))
        kept = [outputs[index] for index in range(len(parts))]
        return with_loss(hook, self.capture.results(kept).apply(module), kept, parts)


def with_loss(hook: str, output: Any, outputs: list[Any], parts: list[Any]) -> Any:
    """A training step's output, its loss with the graph of the micro-batches' losses."""
    if hook != "training_step":
        return output
    losses = [kept["loss"] if isinstance(kept, dict) else kept for kept in outputs]
    loss = sum((loss * part.weight for loss, part in zip(losses, parts, strict=True)), torch.zeros(()))
    return {**output, "loss": loss} if isinstance(output, dict) else loss


class LeavesStepError(BaseException):
    """An early stage leaves the step like this."""


class TwoStages(RunsSteps, DDPStrategy):
    """Ranks 0, 1, ... of each pipeline leave the step at ``net``; the last one sees its end.

    Not a pipeline: the last rank has the whole model, and the others take its gradients.
    """

    def __init__(self, pipelines: list[list[int]], count: int = 4) -> None:
        super().__init__()
        self.pipelines, self.count = pipelines, count
        self.capture: StepCapture | None = None
        self.caches: dict[str, HeaderCache] = {}

    def setup_environment(self) -> None:
        super().setup_environment()
        rank = dist.get_rank()
        groups = [(ranks, dist.new_group(ranks)) for ranks in self.pipelines]
        self.replica = next(i for i, ranks in enumerate(self.pipelines) if rank in ranks)
        self.pipeline = groups[self.replica][1]
        stages = [list(stage) for stage in zip(*self.pipelines, strict=True)]
        replicas = [(ranks, dist.new_group(ranks)) for ranks in stages]
        self.replicas = next(group for ranks, group in replicas if rank in ranks)
        self.last = len(self.pipelines[0]) - 1

    def configure_ddp(self) -> None:
        pass

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": len(self.pipelines), "rank": self.replica}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, self.replicas if group is None else group, reduce_op)

    def _run(self, hook: str, batch: Any, *rest: Any) -> Any:
        module = self.lightning_module
        if self.capture is None:
            self.metrics = PipelineMetrics(module, self.pipeline, self.last, self.root_device, self.replicas)
            self.capture = StepCapture(module, metrics=self.metrics)
        parts = split(batch, self.count)
        is_last = self.pipeline.rank() == self.last
        outputs = []
        for index, part in enumerate(parts):
            step: Callable[..., Any] = getattr(module, hook)
            self._early_stage(step, index, part, rest)
            if is_last:
                with self.capture.microbatch(index, part.size):
                    outputs.append(step(part.value, *rest))
        results = self.capture.results(outputs) if is_last else None
        cache = self.caches.setdefault(hook, HeaderCache())
        results = broadcast_results(results, self.pipeline, self.last, self.root_device, cache)
        output = results.apply(module, self.metrics)
        return with_loss(hook, output, outputs, parts) if is_last else output

    def _early_stage(self, step: Callable[..., Any], index: int, part: Any, rest: Any) -> None:
        def leave(*args: Any) -> None:
            raise LeavesStepError

        hook = self.lightning_module.net.register_forward_pre_hook(leave)
        try:
            with self.capture.microbatch(index, part.size, keep=False):
                step(part.value, *rest)
        except LeavesStepError:
            pass
        finally:
            hook.remove()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.pipeline.rank() == self.last:
            super().backward(closure_loss, optimizer, *args, **kwargs)
        for parameter in self.lightning_module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # zero on the other stages
            parameter.grad /= len(self.pipelines)

    def teardown(self) -> None:
        if self.capture is not None:
            self.metrics.close()
            self.capture = None
        super().teardown()
