"""What an integer in an attribute counts (rows, hits, or calls of the step), found out where training needs to know it.

The trial at the start knows what has moved then. A counter of rare events moves later, maybe by one in each of some
micro-batches: what it comes to for the batch is one if it counts calls, and their sum if it counts rows. So the batch
is run for nothing once more, at once and in its micro-batches, forward only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.messages import broadcast_json
from lightning_smddp.pipeline.constant_random import ConstantRandom
from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.strategies.batch_cutting import BatchCutter
from lightning_smddp.strategies.divided_module import DividedModule
from lightning_smddp.strategies.pipeline_step import LightningStep


def settle_counts(
    divided: DividedModule, cutter: BatchCutter, step: LightningStep, batch: Any, microbatches: Sequence[MicroBatch]
) -> None:
    """Let what has been kept of ``batch`` be combined, though nobody knew what integers count. Collective.

    Called where ``StepCapture.require_known_counts`` has raised on the rank where ``step`` ends. Where an integer
    counts neither rows nor calls, batches are one micro-batch from here on, but for a number that the user gave.
    """
    capture, last = step.capture, divided.runtime.last_rank
    runs = []
    with capture.aside():
        for rows in (cutter.together(batch, microbatches), *microbatches):
            runs.append(_attributes(divided, step.unscaled(), rows))
    divided.take_unforeseen(step)  # of the trials
    problem = None
    if divided.runtime.ends_here:
        problem = capture.learn_counts(runs[0], runs[1:])
    problem = broadcast_json(problem, divided.groups.pipeline, divided.device, last)
    if problem is None:
        return
    if divided.options.num_microbatches is None:
        cutter.keep_whole(step)
    if dist.get_rank() == 0:
        warnings.warn(f"At {step.place()} {problem} {cutter.consequence()}", stacklevel=2)


def _attributes(divided: DividedModule, step: LightningStep, rows: MicroBatch) -> dict[str, Any]:
    """What the step sets attributes to for ``rows``, on the rank where it ends. Collective over the pipeline."""
    with torch.random.fork_rng(devices=[]), ConstantRandom(), torch.no_grad():
        seen = divided.try_out(step, [rows])
    return {} if seen is None else seen.results.attributes
