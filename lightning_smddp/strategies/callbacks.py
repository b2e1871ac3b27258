"""Callbacks: one logs what gradient communication costs, one draws what each rank of a pipeline did when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_smddp.communication.objects import gather
from lightning_smddp.pipeline.runtime.spans import SpanRecorder
from lightning_smddp.planner.timeline import Span, draw, to_perfetto
from lightning_smddp.strategies.tables import say

_SUFFIXES = (".svg", ".png", ".json")


class MonitorCommunication:
    """Log what gradient communication costs, every ``log_every_n_steps``, as a callback.

    Logs ``smddp/exposed_ms`` (backward stood still, last step) and ``smddp/waited_ms`` (for others, a step on average)
    to all loggers. Does nothing with other strategies.
    """

    _logged_step = 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Log after a batch that ended in an optimizer step."""
        scheme = getattr(trainer.strategy, "_scheme", None)
        synchronizers = getattr(scheme, "synchronizers", ())
        if not synchronizers or not trainer.log_every_n_steps:
            return
        step = trainer.global_step
        # A batch that only accumulates ends at the step of the one before.
        if step == self._logged_step or step % trainer.log_every_n_steps:
            return
        self._logged_step = step
        recorder = synchronizers[-1].recorder
        totals = recorder.read()
        steps = max(totals.steps, 1)
        metrics = {"smddp/exposed_ms": 1e3 * recorder.last_exposed_s, "smddp/waited_ms": 1e3 * totals.waited_s / steps}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)


class RecordTimeline:
    """Record one training step of ``strategy="smddp_pipeline"``, and write it as a picture or a trace.

    Times of ranks are put on one axis by a barrier before the step; on one machine their clocks agree to
    microseconds, between machines to the time that the barrier takes.

    Args:
        paths: one or several files: ``.svg`` and ``.png`` are pictures (by matplotlib, the extra ``plot``), ``.json`` a
            trace for https://ui.perfetto.dev or ``chrome://tracing``. The first rank writes them.
        batch_idx: of the first epoch that is trained: which batch to record. Not 0, which is traced and checked too.

    Raises:
        ValueError: a path has another suffix.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], batch_idx: int = 3) -> None:
        if isinstance(paths, (str, Path)):
            paths = [paths]
        self.paths = [Path(path) for path in paths]
        for path in self.paths:
            if path.suffix not in _SUFFIXES:
                raise ValueError(f"{path}: use files that end in {', '.join(_SUFFIXES)}.")
        if batch_idx < 1:
            raise ValueError(f"batch_idx={batch_idx} has to be at least 1: the first batch is traced and checked too.")
        self.batch_idx = batch_idx
        self.spans: list[Span] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say so if nothing will be written."""
        if not hasattr(trainer.strategy, "_pipelined"):
            rank_zero_warn("PipelineTimeline writes nothing: only strategy='smddp_pipeline' has a timeline.")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say so if the batch did not come."""
        if _engine(trainer) is not None and not self.spans:
            rank_zero_warn(f"PipelineTimeline wrote nothing: there was no batch_idx={self.batch_idx}.")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to record if this is the batch that was asked for, at one moment on all ranks."""
        engine = _engine(trainer)
        if engine is None or batch_idx != self.batch_idx or self.spans:
            return
        # Clocks of ranks have nothing in common, and all leave a barrier at nearly the same time: that is 0 for each.
        trainer.strategy.barrier()
        engine.recorder = SpanRecorder(dist.get_rank(), trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Gather all ranks' spans, and write them."""
        engine = _engine(trainer)
        if engine is None or engine.recorder is None:
            return
        self.spans = list(chain.from_iterable(gather(engine.recorder.spans)))
        engine.recorder = None
        if trainer.is_global_zero:
            self.write(trainer.strategy.options.schedule.name)
            say(f"PipelineTimeline wrote {', '.join(map(str, self.paths))}", trainer)

    def write(self, title: str) -> None:
        """Write what was recorded to all paths."""
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json":
                path.write_text(json.dumps(to_perfetto(self.spans)))
            else:
                draw(self.spans, title, path)


def _engine(trainer: Any) -> Any:
    """The engine of the Trainer's pipeline, once its module is partitioned."""
    pipelined = getattr(trainer.strategy, "_pipelined", None)
    partitioned = getattr(pipelined, "partitioned", None)
    return None if partitioned is None else partitioned.runtime.engine
