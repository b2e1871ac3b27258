"""What there is to divide a model by, and the table that says how it was divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_smddp.pipeline.division import Division
from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.pipeline.schedules import orders
from lightning_smddp.pipeline.splitting import Resources
from lightning_smddp.strategies.pipeline_options import PipelineOptions

if TYPE_CHECKING:
    pass


def resources_for(
    module: nn.Module,
    options: PipelineOptions,
    optimizers: Sequence[Optimizer],
    rank_of_stage: Sequence[int],
    num_microbatches: int,
) -> Resources:
    """Memory that parameters take, and micro-batches that stages hold at once."""
    copies = max([_state_copies(optimizer) for optimizer in optimizers], default=0)
    sizes = {}
    for name, parameter in module.named_parameters():
        share = 2 + copies if parameter.requires_grad and optimizers else 1
        sizes[name] = parameter.numel() * parameter.dtype.itemsize * share
    return Resources(
        tuple(rank_of_stage),
        tuple(in_flight(options, rank_of_stage, num_microbatches)),
        sizes,
        options.memory_limit,
    )


def _state_copies(optimizer: Optimizer) -> int:
    """Tensors of a parameter's size that an optimizer keeps for it, by its options."""
    if "betas" in optimizer.defaults:
        return 2
    return int(bool(optimizer.defaults.get("momentum")) or "alpha" in optimizer.defaults)


def in_flight(options: PipelineOptions, rank_of_stage: Sequence[int], num_microbatches: int) -> list[int]:
    """For each stage the most micro-batches between their forward and their backward."""
    most = [0] * len(rank_of_stage)
    active = min(num_microbatches, options.active_microbatches or num_microbatches)
    for actions in orders(options.schedule, max(rank_of_stage) + 1, len(rank_of_stage), active).values():
        held = [0] * len(rank_of_stage)
        for action in actions:
            stage, kind = _parse(action)
            held[stage] += {"F": 1, "B": -1, "I": -1}.get(kind, 0)
            most[stage] = max(most[stage], held[stage])
    return most


def _parse(action: str) -> tuple[int, str]:
    kind = next(letter for letter in action if letter.isalpha())
    return int(action.partition(kind)[0]), kind


def describe(
    division: Division,
    options: PipelineOptions,
    resources: Resources,
    module: nn.Module,
    microbatches: Sequence[MicroBatch],
) -> list[tuple[str, str]]:
    """Rows of the table: units, stages, schedule."""
    sizes = sorted({m.size for m in microbatches}, reverse=True)
    units = [item for item in division.program.items if item.module is not None]
    rows = [
        ("units", f"{len(dict.fromkeys(item.module for item in units))} modules, {len(units)} calls"),
        (
            "schedule",
            f"{options.schedule.name}, {len(microbatches)} micro-batches of {' or '.join(map(str, sizes))} rows",
        ),
    ]
    total = sum(division.stage_seconds) or 1.0
    counts = {name: p.numel() for name, p in module.named_parameters()}
    for plan in division.splitting.plans(len(division.program.items)):
        stage = plan.stage
        own = [item.module for item in division.program.items[plan.begin : plan.end] if item.module is not None]
        names = dict.fromkeys(n for item in division.program.items[plan.begin : plan.end] for n in item.parameters)
        sent = sum(division.program.values[v].nbytes for v in plan.sends)
        rows.append(
            (
                f"stage {stage} (rank {resources.rank_of_stage[stage]})",
                f"{_range(own)}: {100 * division.stage_seconds[stage] / total:.0f} % of the time, "
                f"{_count(sum(counts[n] for n in names))} parameters, {division.stage_memory[stage] / 2**20:.1f} MiB"
                + (f", sends {sent / 2**10:.1f} KiB" if plan.sends else ""),
            )
        )
    return rows


def _range(modules: Sequence[str | None]) -> str:
    names = list(dict.fromkeys(str(name) for name in modules))
    if not names:
        return "no module"
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _count(number: Any) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
