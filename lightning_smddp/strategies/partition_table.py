"""The table that says how a model was partitioned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from lightning_smddp.bridge.loss_weights import LossWeight
from lightning_smddp.pipeline.partition.costs import Cluster, best_share, problem_of
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, looks_at_other_rows
from lightning_smddp.pipeline.partition.plan import PartitionPlan
from lightning_smddp.planner.advice import Setting, advice
from lightning_smddp.strategies.options import PipelineOptions
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning_smddp.bridge.partitioned_module import PartitionedModule

_TITLE = "smddp_pipeline: pipeline parallelism"


def print_partition(
    hook: str,
    partitioned: PartitionedModule,
    microbatches: Sequence[MicroBatch],
    loss_weight: LossWeight,
) -> None:
    """Print how the module was partitioned for the step ``hook``; see :func:`describe`."""
    setup = partitioned.setup
    rows = describe(
        partitioned.plan,
        setup.options,
        partitioned.cluster,
        setup.module,
        microbatches,
        loss_weight,
    )
    rows += [("note", note) for note in partitioned.notes]
    counts = partitioned.recorder.scopes.counts
    if counts and len(microbatches) > 1:
        rows.append(
            (
                "note",
                f"{', '.join(counts)} moves once per micro-batch ({len(microbatches)} a batch); self.global_step moves "
                "once",
            )
        )
    if partitioned.sharded is not None:
        rows += partitioned.sharded.describe()
    elif setup.options.shard is not None:
        rows.append(("optimizer shards", "none: with one replica each rank has the state of its own stages alone"))
    way = f"pipelined in {counted(setup.num_stages, 'stage')}"
    if setup.groups.pipeline.size() == 1:
        way += " on one rank, so nothing overlaps: give devices= more, or use strategy='smddp'"
    print_table(_TITLE, [(hook, way), *rows], setup.module.trainer)


def describe(
    plan: PartitionPlan,
    options: PipelineOptions,
    cluster: Cluster,
    module: nn.Module,
    microbatches: Sequence[MicroBatch],
    loss_weight: LossWeight,
) -> list[tuple[str, str]]:
    """Rows of the table: units, stages, ranks, schedule, and one line of advice if there is one.

    ``loss_weight`` is of the micro-batches.
    """
    rows = [
        ("units", _units(plan)),
        ("schedule", _schedule(options, cluster, microbatches)),
        ("loss weights", loss_weight.describe()),
    ]
    rows += _of_stages(plan, cluster, module)
    norms = looks_at_other_rows(module)
    if len(microbatches) > 1 and norms:
        which = norms[0]
        if len(norms) > 1:
            which += f" and {len(norms) - 1} more"
        rows.append(("note", f"in training {which} (BatchNorm) sees the rows of a micro-batch, not of the batch"))
    setting = _setting(plan, options, cluster, microbatches)
    line = advice(setting)
    if line is not None:
        rows.append(("advice", line))
    return rows


def _of_stages(plan: PartitionPlan, cluster: Cluster, module: nn.Module) -> list[tuple[str, str]]:
    """Rows about each stage, and about each rank where ranks have several."""
    rows = []
    total = sum(plan.stage_seconds) or 1.0
    counts = {name: parameter.numel() for name, parameter in module.named_parameters()}
    of_rank: dict[int, set[str]] = {}  # names of parameters
    seconds: dict[int, float] = {}
    # Stages in the order of the model. A parameter that several stages use is counted with each of them, and once with
    # a rank that has several of these.
    for stage in plan.stages:
        number = stage.stage
        rank = cluster.rank_of_stage[number]
        nodes = plan.graph.nodes[stage.begin : stage.end]
        modules = [node.module for node in nodes if node.module is not None]
        names = {name for name, stages in plan.parameter_stages.items() if number in stages}
        of_rank.setdefault(rank, set()).update(names)
        seconds[rank] = seconds.get(rank, 0.0) + plan.stage_seconds[number]
        percent = 100 * plan.stage_seconds[number] / total
        mebibytes = plan.stage_memory[number] / 2**20
        parameters = _count_of(names, counts)
        text = f"{_range(modules)}: {percent:.0f} % of the time, {parameters} parameters, {mebibytes:.1f} MiB"
        if stage.sends:
            sent = sum(plan.graph.values[value].nbytes for value in stage.sends)
            text += f", sends {sent / 2**10:.1f} KiB a micro-batch"
        rows.append((f"stage {number} on rank {rank}", text))
    if len(of_rank) < cluster.num_stages:
        for rank, names in sorted(of_rank.items()):
            percent = 100 * seconds[rank] / total
            parameters = _count_of(names, counts)
            rows.append((f"rank {rank}", f"{percent:.0f} % of the time, {parameters} parameters"))
    return rows


def _units(plan: PartitionPlan) -> str:
    called = [node.module for node in plan.graph.nodes if node.module is not None]
    items = counted(len(plan.graph.nodes), "item")
    modules = counted(len(set(called)), "module")
    calls = counted(len(called), "call")
    return f"{modules}, {calls}; {items} in all"


def _schedule(options: PipelineOptions, cluster: Cluster, microbatches: Sequence[MicroBatch]) -> str:
    sizes = sorted({microbatch.size for microbatch in microbatches}, reverse=True)
    rows = "1 row" if sizes == [1] else " or ".join(map(str, sizes)) + " rows"
    count = counted(len(microbatches), "micro-batch")
    percent = 100 * best_share(options.schedule, cluster.rank_of_stage, len(microbatches))
    return f"{options.schedule.name}, {count} of {rows}; ranks compute {percent:.0f} % of the time at best"


def _setting(
    plan: PartitionPlan,
    options: PipelineOptions,
    cluster: Cluster,
    microbatches: Sequence[MicroBatch],
) -> Setting:
    ranks = max(cluster.rank_of_stage) + 1
    problem = problem_of(plan.graph, cluster, plan.times, options.activation_checkpointing)
    return Setting(
        nodes=problem.nodes,
        stage_seconds=plan.stage_seconds,
        num_microbatches=len(microbatches),
        num_ranks=ranks,
        batch_rows=sum(microbatch.size for microbatch in microbatches),
        is_split_given=options.split is not None,
        rule=lambda count: options.schedule.microbatches_ok(count, ranks, cluster.num_stages),
        bound=lambda count: best_share(options.schedule, cluster.rank_of_stage, count),
    )


def _range(modules: Sequence[str | None]) -> str:
    names = list(dict.fromkeys(str(name) for name in modules))
    if not names:
        return "no module"
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]}"


def _count_of(names: Iterable[str], counts: Mapping[str, int]) -> str:
    """How many numbers there are in the parameters ``names``, in words."""
    number = sum(counts[name] for name in names)
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
