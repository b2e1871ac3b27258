"""What there is to partition a model by: memory, micro-batches that stages hold at once, and links between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_smddp.pipeline.runtime.schedules import Schedule, orders
from lightning_smddp.planner.problem import Link
from lightning_smddp.planner.schedules import parse_action, simulated_bound

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Resources:
    """What there is to place stages on.

    Attributes:
        rank_of_stage: rank in the pipeline of each stage.
        in_flight: micro-batches whose activations each stage keeps at once.
        parameter_bytes: of each parameter, with its gradient and optimizer state.
        memory_limit: bytes of a rank, or None.
        links: between the ranks of each stage and the next.
    """

    rank_of_stage: tuple[int, ...]
    in_flight: tuple[int, ...]
    parameter_bytes: Mapping[str, int]
    memory_limit: float | None = None
    links: tuple[Link, ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together; a rank may have several."""
        return len(self.rank_of_stage)


def resources_for(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    rank_of_stage: Sequence[int],
    flights: Sequence[int],
    links: tuple[Link, ...],
    memory_limit: float | None = None,
    casts_weights: bool = False,
    num_shares: int = 1,
) -> Resources:
    """What stages of ``module`` may use.

    Args:
        module: whose parameters take memory.
        optimizers: that keep states of them.
        rank_of_stage: for each stage the rank that runs it.
        flights: see :func:`in_flight`.
        links: between neighbouring stages' ranks.
        memory_limit: bytes of a rank.
        casts_weights: steps run under autocast, which keeps a copy of weights in 16 bits for as long as a step takes.
        num_shares: replicas that share the optimizers' states.
    """
    # Of optimizers, the one that keeps most counts for all parameters: which of them steps one is not looked up.
    copies = max([_state_copies(optimizer) for optimizer in optimizers], default=0)
    sizes = {}  # by parameter, in bytes
    for name, parameter in module.named_parameters():
        count = parameter.numel()
        share = 1.0
        if parameter.requires_grad and optimizers:
            share = 2 + copies / num_shares  # the parameter, its gradient and the optimizer's states
        sizes[name] = int(count * parameter.dtype.itemsize * share)
        if casts_weights and parameter.requires_grad and parameter.dtype == torch.float32:
            sizes[name] += count * torch.bfloat16.itemsize
    return Resources(tuple(rank_of_stage), tuple(flights), sizes, memory_limit, links)


def _state_copies(optimizer: Optimizer) -> int:
    """Tensors of a parameter's size that an optimizer keeps for it, by its options."""
    options = optimizer.defaults
    if "betas" in options:  # Adam's kind: means of gradients and of their squares
        return 2
    if options.get("momentum") or "alpha" in options:  # SGD's momentum, RMSprop's mean of squares
        return 1
    return 0


def in_flight(schedule: Schedule, rank_of_stage: Sequence[int], num_microbatches: int) -> list[int]:
    """For each stage the most micro-batches between their forward and their backward."""
    num_stages = len(rank_of_stage)
    most = [0] * num_stages
    for actions in orders(schedule, max(rank_of_stage) + 1, num_stages, num_microbatches).values():
        held = [0] * num_stages  # micro-batches that are between their forward and their backward now
        for text in actions:
            action = parse_action(text)
            if action.kind == "F":
                held[action.stage] += 1
            elif action.kind in ("B", "I"):  # a whole backward, or the part that gives the inputs' gradients
                held[action.stage] -= 1
            most[action.stage] = max(most[action.stage], held[action.stage])
    return most


def best_share(schedule: Schedule, rank_of_stage: Sequence[int], num_microbatches: int) -> float:
    """Of a step's time, how much ranks compute at best, with equal stages: a share of 1."""
    played = {}
    for rank, actions in orders(schedule, max(rank_of_stage) + 1, len(rank_of_stage), num_microbatches).items():
        played[rank] = [parse_action(text) for text in actions]
    return simulated_bound(played)


def looks_at_other_rows(module: nn.Module) -> list[str]:
    """Names of layers that normalise over the rows they are given."""
    names = []
    for name, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS) and part.training:
            names.append(name)
    return names
