"""The table that says how a model was partitioned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_smddp.bridge.loss_weights import LossWeight
from lightning_smddp.pipeline.partition.costs import best_share
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, looks_at_other_rows
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning_smddp.bridge.partitioned_module import PartitionedModule


def print_partition(
    hook: str,
    partitioned: PartitionedModule,
    microbatches: Sequence[MicroBatch],
    loss_weight: LossWeight,
) -> None:
    """Print how the module was partitioned for the step ``hook``; ``loss_weight`` is of the micro-batches."""
    setup = partitioned.setup
    rows = [
        (hook, f"pipelined in {counted(setup.num_stages, 'stage')}"),
        ("schedule", _schedule(partitioned, microbatches)),
        ("loss weights", loss_weight.describe()),
        *_stages(partitioned),
        *(("note", note) for note in _notes(partitioned, len(microbatches))),
    ]
    if partitioned.sharded is not None:
        rows += partitioned.sharded.describe()
    print_table("smddp_pipeline: pipeline parallelism", rows, setup.module.trainer)


def _schedule(partitioned: PartitionedModule, microbatches: Sequence[MicroBatch]) -> str:
    schedule = partitioned.setup.options.schedule
    sizes = sorted({microbatch.size for microbatch in microbatches}, reverse=True)
    rows = "1 row" if sizes == [1] else " or ".join(map(str, sizes)) + " rows"
    count = counted(len(microbatches), "micro-batch")
    share = best_share(schedule, partitioned.plan.cluster.rank_of_stage, len(microbatches))
    return f"{schedule.name}, {count} of {rows}; ranks compute {share:.0%} of the time at best"


def _stages(partitioned: PartitionedModule) -> Iterator[tuple[str, str]]:
    """A row for each stage, in the order of the model; a parameter that several stages use counts with each of them."""
    plan = partitioned.plan
    seconds, memory = plan.decision["stage_seconds"], plan.decision["stage_memory"]
    total = sum(seconds) or 1.0
    sizes = {name: parameter.numel() for name, parameter in partitioned.setup.module.named_parameters()}
    for stage in plan.stages:
        number = stage.stage
        modules = [node.module for node in plan.graph.nodes[stage.begin : stage.end] if node.module is not None]
        span = " .. ".join(dict.fromkeys([modules[0], modules[-1]])) if modules else "no module"
        parameters = sum(sizes[name] for name, stages in plan.parameter_stages.items() if number in stages)
        text = f"{span}: {seconds[number] / total:.0%} of the time, {parameters:,} parameters"
        yield (
            f"stage {number} on rank {plan.cluster.rank_of_stage[number]}",
            f"{text}, {memory[number] / 2**20:.1f} MiB",
        )


def _notes(partitioned: PartitionedModule, num_microbatches: int) -> Iterator[str]:
    yield from partitioned.notes
    norms = looks_at_other_rows(partitioned.setup.module)
    counts = partitioned.recorder.scopes.counts
    if num_microbatches == 1:
        return
    if norms:
        yield f"in training {norms[0]} (BatchNorm) sees the rows of a micro-batch, not of the batch"
    if counts:
        yield f"{', '.join(counts)} moves once per micro-batch; self.global_step once per batch"
