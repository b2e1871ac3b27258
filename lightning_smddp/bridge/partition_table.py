"""What there is to partition a model by, and the table that says how it was partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.pipeline.partition.cuts import Resources, problem_of
from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import PartitionPlan
from lightning_smddp.pipeline.runtime.schedules import orders
from lightning_smddp.planner.advice import Setting, advice
from lightning_smddp.planner.problem import Link
from lightning_smddp.planner.schedules import parse_action, simulated_bound
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_smddp.bridge.partitioned_module import PartitionedModule
    from lightning_smddp.bridge.replicated_module import ReplicatedModule

_TITLE = "smddp_pipeline: pipeline parallelism"

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def resources_for(
    module: nn.Module,
    options: PipelineOptions,
    optimizers: Sequence[Optimizer],
    rank_of_stage: Sequence[int],
    num_microbatches: int,
    links: tuple[Link, ...],
    casts_weights: bool = False,
    num_shares: int = 1,
) -> Resources:
    """Memory that parameters take, micro-batches that stages hold at once, and links between the stages' ranks.

    ``casts_weights``: steps run under autocast, which keeps a copy of weights in 16 bits for as long as a step takes.
    ``num_shares``: replicas that share the optimizer's states.
    """
    copies = max([_state_copies(optimizer) for optimizer in optimizers], default=0)
    sizes = {}
    for name, parameter in module.named_parameters():
        share = 1.0
        if parameter.requires_grad and optimizers:
            share = 2 + copies / num_shares  # the parameter, its gradient and the optimizer's states
        sizes[name] = int(parameter.numel() * parameter.dtype.itemsize * share)
        if casts_weights and parameter.requires_grad and parameter.dtype == torch.float32:
            sizes[name] += parameter.numel() * torch.bfloat16.itemsize
    return Resources(
        tuple(rank_of_stage),
        tuple(in_flight(options, rank_of_stage, num_microbatches)),
        sizes,
        options.partition.memory_limit,
        links,
    )


def _state_copies(optimizer: Optimizer) -> int:
    """Tensors of a parameter's size that an optimizer keeps for it, by its options."""
    if "betas" in optimizer.defaults:
        return 2
    return int(bool(optimizer.defaults.get("momentum")) or "alpha" in optimizer.defaults)


def in_flight(options: PipelineOptions, rank_of_stage: Sequence[int], num_microbatches: int) -> list[int]:
    """For each stage the most micro-batches between their forward and their backward."""
    most = [0] * len(rank_of_stage)
    active = min(num_microbatches, options.partition.active_microbatches or num_microbatches)
    for actions in orders(options.schedule, max(rank_of_stage) + 1, len(rank_of_stage), active).values():
        held = [0] * len(rank_of_stage)
        for action in map(parse_action, actions):
            held[action.stage] += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], held[action.stage])
    return most


def print_replicated(replicated: ReplicatedModule, module: LightningModule) -> None:
    """Print that training steps of ``module`` run as a whole on every rank, and why."""
    rows = [("training_step", f"replicated: the whole of it on every rank. {replicated.reason}")]
    if replicated.sharded is not None:
        rows += replicated.sharded.describe()
    print_table(_TITLE, rows, module.trainer)


def print_partition(
    hook: str,
    partitioned: PartitionedModule,
    microbatches: Sequence[MicroBatch],
    weighting: Weighting | None,
) -> None:
    """Print how the module was partitioned for the step ``hook``; see :func:`describe`."""
    setup, resources = partitioned.setup, partitioned.resources
    rows = describe(partitioned.plan, setup.options, resources, setup.module, microbatches, weighting)
    if partitioned.sharded is not None:
        rows += partitioned.sharded.describe()
    elif setup.options.shard is not None:
        rows.append(("optimizer shards", "none: with one replica each rank has the state of its own stages alone"))
    way = f"pipelined in {setup.num_stages} stages"
    print_table(_TITLE, [(hook, way), *rows], setup.module.trainer)


def describe(
    plan: PartitionPlan,
    options: PipelineOptions,
    resources: Resources,
    module: nn.Module,
    microbatches: Sequence[MicroBatch],
    weighting: Weighting | None,
) -> list[tuple[str, str]]:
    """Rows of the table: units, stages, ranks, schedule, and one line of advice if there is one.

    ``weighting`` is of the micro-batches' losses; None if no weights are right, so that the batch stays whole.
    """
    if weighting is None:
        microbatches = [MicroBatch(None, sum(microbatch.size for microbatch in microbatches), 1.0)]
        weights = "each batch is one micro-batch, so stages do not overlap; the warning has why, and a cure"
    else:
        weights = weighting.describe()
    rows = [
        ("units", _units(plan)),
        ("schedule", _schedule(options, resources, microbatches)),
        ("loss weights", weights),
    ]
    total = sum(plan.stage_seconds) or 1.0
    counts = {name: parameter.numel() for name, parameter in module.named_parameters()}
    of_rank: dict[int, set[str]] = {}
    for stage in plan.stage_cuts.plans(len(plan.graph.nodes)):
        number = stage.stage
        rank = resources.rank_of_stage[number]
        items = plan.graph.nodes[stage.begin : stage.end]
        modules = [item.module for item in items if item.module is not None]
        names = {name for name, stages in plan.homes.items() if number in stages}
        of_rank.setdefault(rank, set()).update(names)
        percent, mebibytes = 100 * plan.stage_seconds[number] / total, plan.stage_memory[number] / 2**20
        parameters = _count(sum(counts[name] for name in names))
        text = f"{_range(modules)}: {percent:.0f} % of the time, {parameters} parameters, {mebibytes:.1f} MiB"
        if stage.sends:
            sent = sum(plan.graph.values[value].nbytes for value in stage.sends)
            text += f", sends {sent / 2**10:.1f} KiB a micro-batch"
        rows.append((f"stage {number} on rank {rank}", text))
    if len(of_rank) < resources.num_stages:
        for rank, names in sorted(of_rank.items()):
            seconds = 0.0
            for holder, of_stage in zip(resources.rank_of_stage, plan.stage_seconds, strict=True):
                if holder == rank:
                    seconds += of_stage
            parameters = _count(sum(counts[name] for name in names))
            rows.append((f"rank {rank}", f"{100 * seconds / total:.0f} % of the time, {parameters} parameters"))
    if len(microbatches) > 1 and (norms := looks_at_other_rows(module)):
        which = norms[0]
        if len(norms) > 1:
            which += f" and {len(norms) - 1} more"
        rows.append(("note", f"in training {which} (BatchNorm) sees the rows of a micro-batch, not of the batch"))
    line = advice(replace(_setting(plan, options, resources, microbatches), stays_whole=weighting is None))
    if line is not None:
        rows.append(("advice", line))
    return rows


def looks_at_other_rows(module: nn.Module) -> list[str]:
    """Names of layers that normalise over the rows they are given."""
    return [name for name, m in module.named_modules() if isinstance(m, _BATCH_NORMS) and m.training]


def _units(plan: PartitionPlan) -> str:
    calls = [node.module for node in plan.graph.nodes if node.module is not None]
    items = counted(len(plan.graph.nodes), "item")
    modules = counted(len(set(calls)), "module")
    return f"{modules}, {counted(len(calls), 'call')}; {items} in all"


def _schedule(options: PipelineOptions, resources: Resources, microbatches: Sequence[MicroBatch]) -> str:
    sizes = sorted({microbatch.size for microbatch in microbatches}, reverse=True)
    rows = " or ".join(map(str, sizes))
    counts = counted(len(microbatches), "micro-batch")
    text = f"{options.schedule.name}, {counts} of {rows} row{'s' if sizes != [1] else ''}"
    bound = _bound(options, resources, len(microbatches))
    return f"{text}; ranks compute {100 * bound:.0f} % of the time at best"


def _bound(options: PipelineOptions, resources: Resources, count: int) -> float:
    ranks, stages = max(resources.rank_of_stage) + 1, resources.num_stages
    active = min(count, options.partition.active_microbatches or count)
    played = orders(options.schedule, ranks, stages, active)
    return simulated_bound({rank: [parse_action(text) for text in actions] for rank, actions in played.items()})


def _setting(
    plan: PartitionPlan, options: PipelineOptions, resources: Resources, microbatches: Sequence[MicroBatch]
) -> Setting:
    ranks = max(resources.rank_of_stage) + 1
    problem = problem_of(plan.graph, resources, plan.reference, options.activation_checkpointing)
    return Setting(
        nodes=problem.nodes,
        stage_seconds=plan.stage_seconds,
        schedule=options.schedule.name,
        num_microbatches=len(microbatches),
        num_ranks=ranks,
        batch_rows=sum(microbatch.size for microbatch in microbatches),
        stages_per_rank=options.stages_per_rank,
        is_split_given=options.split is not None,
        rule=lambda count: options.schedule.microbatches_ok(count, ranks, resources.num_stages),
        bound=lambda count: _bound(options, resources, count),
    )


def _range(modules: Sequence[str | None]) -> str:
    names = list(dict.fromkeys(str(name) for name in modules))
    if not names:
        return "no module"
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]}"


def _count(number: Any) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
