"""What an integer in an attribute counts (rows, hits, or calls of the step), found out where training needs to know it.

The trial at the start knows what has moved then. A counter of rare events moves later, maybe by one in each of some
micro-batches: what it comes to for the batch is one if it counts calls, and their sum if it counts rows. So the batch
is run for nothing once more, at once and in its micro-batches, forward only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.counts import UNKNOWN
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_attributes import Place
from lightning_smddp.bridge.step_results import StepResults
from lightning_smddp.pipeline.capture.constant_random import ConstantRandom
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.wire.gather import gather_json


def combined(find: Callable[[], StepResults | str], settle: Callable[[], None]) -> StepResults | str:
    """What ``find`` says that micro-batches come to; behind ``settle`` where nobody knew what integers count."""
    results = find()
    if isinstance(results, str) and results.startswith(UNKNOWN):
        settle()
        results = find()
    return results


def settle_counts(
    divided: PartitionedModule, cutter: BatchCutter, step: LightningStep, batch: Any, microbatches: Sequence[MicroBatch]
) -> None:
    """Let what has been kept of ``batch`` be combined, though nobody knew what integers count. Collective.

    Called where ``StepCapture.require_known_counts`` has raised on the rank where ``step`` ends, or ``LeftBehind`` has
    found doubts on any. Where an integer counts neither rows nor calls, batches are one micro-batch from here on, but
    for a number that the user gave.
    """
    capture = step.capture
    runs, left = [], []
    with capture.aside():
        for rows in (cutter.together(batch, microbatches), *microbatches):
            with capture.left.recorded() as found:
                runs.append(_attributes(divided, step.unscaled(), rows))
            left.append(found)
    divided.take_unforeseen(step)  # of the trials
    mine = capture.left.learn_counts(left[0], left[1:])
    if divided.runtime.ends_here:
        mine = capture.learn_counts(runs[0], runs[1:]) or mine
    problems = gather_json(mine, divided.groups.pipeline, divided.device)
    problem = next((found for found in reversed(problems) if found is not None), None)
    if problem is None:
        return
    if divided.options.num_microbatches is None:
        cutter.keep_whole(step)
    if dist.get_rank() == 0:
        warnings.warn(f"At {step.place()} {problem} {cutter.consequence()}", stacklevel=2)


def _attributes(divided: PartitionedModule, step: LightningStep, rows: MicroBatch) -> dict[Place, Any]:
    """What the step sets attributes to for ``rows``, on the rank where it ends. Collective over the pipeline."""
    with torch.random.fork_rng(devices=[]), ConstantRandom(), torch.no_grad():
        seen = divided.try_out(step, [rows])
    return {} if seen is None else {(name,): value for name, value in seen.results.attributes.items()}
