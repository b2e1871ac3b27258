"""What a step's values look like for a new kind of micro-batch: one forward pass, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.remote import ReplayError, Shapes
from lightning_smddp.pipeline.runtime.replay import Observers, Replay, WriteWatch, patched_units
from lightning_smddp.pipeline.runtime.staged_step import StagedStep, Step, write_watch
from lightning_smddp.wire.broadcast import broadcast_structure


def infer_shapes(
    runtime: PipelineRuntime, staged: StagedStep, step: Step, microbatch: MicroBatch, train: bool, index: int = 0
) -> Shapes | None:
    """What values look like for micro-batch ``index`` on the path ``staged``. Collective over the pipeline.

    Each stage runs once, with what the stages before have told: the shapes of their values, and what they send.

    Returns:
        None on every rank if the step takes another path.

    Raises:
        Exception: on every rank, where a stage raises one: its own there, a ``RuntimeError`` elsewhere.
    """
    group, device = runtime.groups.pipeline, runtime.device
    shapes = Shapes(values={})
    received: list[Tensor] = []
    with preserve_state(runtime.root, device), patched_units(runtime.root, staged.graph.units):
        for stage, rank in enumerate(runtime.rank_of_stage):
            report: Any = None
            failure: Exception | None = None
            if rank == runtime.groups.pipeline_rank:
                watch = write_watch(runtime.writes, step, index)
                try:
                    with torch.set_grad_enabled(train):
                        report = _run_stage(staged.replays[stage], step, microbatch, index, (received, shapes), watch)
                except Exception as error:  # of the user's code: the others wait for a word
                    failure, report = error, {"failed": f"{type(error).__name__}: {error}"}
            report = broadcast_structure(report, group, rank, device)
            if "failed" in report:
                raise failure or RuntimeError(f"Stage {stage} failed with {report['failed']}")
            if report["other_path"]:
                return None
            shapes.merge(Shapes.from_json(report["shapes"]))
            received = report["sent"]
            if stage < runtime.num_stages - 1:
                _require_gradients(received, staged.stage_cuts.live[stage], shapes, train)
    return shapes


def _run_stage(
    replay: Replay,
    step: Step,
    microbatch: MicroBatch,
    index: int,
    known: tuple[Sequence[Tensor], Shapes],
    watch: WriteWatch,
) -> dict[str, Any]:
    """A report for all ranks: the shapes that a stage has found, and what it sends. ``known``: of earlier stages."""
    received, shapes = known
    found = Shapes(values={})
    try:
        with step.around(index, microbatch, keep=replay.stage.is_last):
            observers = Observers(shapes=found, write=watch)
            sent, _ = replay.run(lambda: step(microbatch), received, shapes, observers)
    except ReplayError:
        return {"other_path": True}
    finally:
        step.forget()
    return {"other_path": False, "shapes": found.to_json(), "sent": [tensor.detach() for tensor in sent]}


def _require_gradients(received: Sequence[Tensor], live: Sequence[int], shapes: Shapes, train: bool) -> None:
    """Received tensors require gradients as they would in training: what is made of them then does so, too.

    ``received`` may be longer than ``live``: behind the values there may be numbers that Python has read.
    """
    for value, tensor in zip(live, received, strict=False):
        tensor.requires_grad_(train and shapes.values[value].requires_grad)
