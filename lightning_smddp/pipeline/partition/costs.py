"""What a partition is judged by: seconds and bytes of each node of a step, memory, and what messages cost.

Ranks that decide by memory decide alike, as each hears what the others have.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.topology import node_identity
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.capture.boundaries import cut_into_stages, possible_cuts
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.preserve_state import dropped_gradients
from lightning_smddp.pipeline.capture.tracer import StepCall, now
from lightning_smddp.pipeline.mesh import named_tensors
from lightning_smddp.pipeline.runtime.schedules import Schedule, orders
from lightning_smddp.planner.problem import Cluster, Link, NodeCost, PartitionProblem
from lightning_smddp.planner.simulator import Action, simulate
from lightning_smddp.pytree import tensors
from lightning_smddp.seeding import Forward, forward_patches

LossIn: TypeAlias = Callable[[Any], Tensor | None]
"""The loss in what a step returned; None if there is none."""

_BACKWARD_OF_FORWARD = 2.0  # time of a backward where only the forward was measured
_MARGIN = 1.05  # times the module's bytes, for what a host needs besides
_GROUPS = Path("/sys/fs/cgroup")

# What messages cost is taken for known, by kind: a measurement tells how busy hosts are. The cores of hosts
# without devices copy, and cannot compute meanwhile.
LOOPBACK = Link(latency_s=1e-4, bytes_per_s=2e9)
NVLINK = Link(latency_s=1e-5, bytes_per_s=100e9, is_hidden=True)
NETWORK = Link(latency_s=1e-4, bytes_per_s=3e9, is_hidden=True)


def cluster_of(
    module: nn.Module,
    optimizer: Optimizer | None,
    rank_of_stage: Sequence[int],
    flights: Sequence[int],
    links: tuple[Link, ...],
    memory_limit: float | None = None,
    casts_weights: bool = False,
    num_shares: int = 1,
) -> Cluster:
    """What stages of ``module`` may use.

    Args:
        module: whose parameters take memory.
        optimizer: that keeps states of them; None if there is no training.
        rank_of_stage: for each stage the rank that runs it.
        flights: see :func:`in_flight`.
        links: between neighbouring stages' ranks.
        memory_limit: bytes of a rank.
        casts_weights: steps run under autocast, which keeps a copy of weights in 16 bits for as long as a step takes.
        num_shares: replicas that share the optimizer's states.
    """
    states = 0.0 if optimizer is None else _state_copies(optimizer) / num_shares
    sizes = {}  # by parameter, in bytes
    for name, parameter in module.named_parameters():
        sizes[name] = parameter.nbytes
        if parameter.requires_grad and optimizer is not None:
            sizes[name] = int(parameter.nbytes * (2 + states))  # the parameter, its gradient, the optimizer's states
        if casts_weights and parameter.requires_grad and parameter.dtype == torch.float32:
            sizes[name] += parameter.numel() * torch.bfloat16.itemsize
    return Cluster(rank_of_stage, flights, sizes, links, memory_limit)


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
    most = [0] * len(rank_of_stage)
    held = [0] * len(rank_of_stage)  # micro-batches that are between their forward and their backward now
    for actions in _actions(schedule, rank_of_stage, num_microbatches).values():
        for stage, kind, _ in actions:
            if kind == "F":
                held[stage] += 1
                most[stage] = max(most[stage], held[stage])
            elif kind != "W":  # a whole backward, or the part that gives the inputs' gradients
                held[stage] -= 1
    return most


def best_share(schedule: Schedule, rank_of_stage: Sequence[int], num_microbatches: int) -> float:
    """Of a step's time, how much ranks compute at best, with equal stages: a share of 1."""
    return simulate(_actions(schedule, rank_of_stage, num_microbatches)).busy_share


def _actions(schedule: Schedule, rank_of_stage: Sequence[int], num_microbatches: int) -> dict[int, list[Action]]:
    """What each rank does, in order."""
    return orders(schedule, max(rank_of_stage) + 1, len(rank_of_stage), num_microbatches)


def links_between(
    rank_of_stage: Sequence[int],
    pipelines: Sequence[Sequence[int]],
    hosts: Sequence[str],
    device_type: str,
) -> tuple[Link, ...]:
    """The link between each stage and the next; of several pipelines the slowest.

    Args:
        rank_of_stage: rank in the pipeline of each stage.
        pipelines: for each of them its ranks.
        hosts: identity of each rank's.
        device_type: where the messages are.
    """
    links = []
    for sender, receiver in pairwise(rank_of_stage):
        if device_type == "cpu":
            links.append(LOOPBACK)
        elif all(hosts[ranks[sender]] == hosts[ranks[receiver]] for ranks in pipelines):
            links.append(NVLINK)
        else:
            links.append(NETWORK)
    return tuple(links)


# ---- room for a whole module -----------------------------------------------------------------------------------------


def available_host_bytes() -> float:
    """What this process may still take of its host's memory, of its container's if that is less; inf if unknown."""
    found = math.inf
    with suppress(OSError, AttributeError):
        line = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found = 1024.0 * int(line[1])  # type: ignore[index]  # without such a line: unknown
    with suppress(OSError, ValueError):  # "max" is no limit
        limit = int((_GROUPS / "memory.max").read_text())
        found = min(found, max(0, limit - int((_GROUPS / "memory.current").read_text())))
    return found


def free_device_bytes(device: torch.device) -> float:
    """Of a CUDA device; inf for others."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0]


def fits_on_devices(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank's device has room for all of ``module``. Collective over ``group``, all ranks.

    As much again is for the trace, and for the gradients of its last modules.
    """
    size = sum(parameter.nbytes for parameter in module.parameters())
    return all(gather(2 * size <= free_device_bytes(device), group))


def fits_on_hosts(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of each host can have the whole ``module`` there. Collective over ``group``, all ranks."""
    needed = sum(tensor.nbytes for tensor in named_tensors(module).values() if tensor.device.type != "cpu")
    everyones = gather((node_identity(), needed, available_host_bytes()), group)
    for host, _, free in everyones:  # what ranks of one host need adds up
        if free < _MARGIN * sum(of_rank for its_host, of_rank, _ in everyones if its_host == host):
            return False
    return True


# ---- nodes -----------------------------------------------------------------------------------------------------------


class NodeTimes(NamedTuple):
    """Seconds of each node for one micro-batch."""

    forward: list[float]
    backward: list[float]

    @classmethod
    def of_trace(cls, graph: StepGraph) -> NodeTimes:
        """As traced, forward only; backward is a multiple of it."""
        forward = [node.seconds for node in graph.nodes]
        return cls(forward, [_BACKWARD_OF_FORWARD * seconds for seconds in forward])


def problem_of(graph: StepGraph, cluster: Cluster, times: NodeTimes, checkpointing: Checkpointing) -> PartitionProblem:
    """What the partition has to solve."""
    forwards, backwards = list(times.forward), list(times.backward)
    # Layers are of one kind if their names differ in numbers only ("blocks.3.mlp" is as "blocks.4.mlp"), and their
    # parameters and activations are as large. One measurement of each may be cold, or disturbed: the median
    # counts for all.
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for node in graph.nodes:
        if node.module is not None:
            sizes = tuple(cluster.parameter_bytes[name] for name in node.parameters)
            kinds[re.sub(r"\d+", "#", node.name), sizes, node.activation_bytes].append(node.index)
    for alike in kinds.values():
        for seconds in (forwards, backwards):
            typical = median(seconds[index] for index in alike)
            for index in alike:
                seconds[index] = typical
    costs = []
    for node, forward, backward in zip(graph.nodes, forwards, backwards, strict=True):
        is_unit, kept = node.module is not None, node.activation_bytes
        if is_unit and checkpointing:  # nothing is kept in between; unless offloaded, forward runs again in backward
            backward, kept = backward + (checkpointing is True) * forward, 0
        costs.append(NodeCost(node.name, forward, backward, kept, node.parameters, is_unit))
    cut_bytes = [math.inf] * (len(costs) + 1)
    for cut in possible_cuts(graph):
        _, second = cut_into_stages(graph, [cut])
        cut_bytes[cut] = graph.nbytes(second.receives)
    return PartitionProblem(nodes=costs, cut_bytes=cut_bytes, **vars(cluster))


def time_nodes(graph: StepGraph, step: StepCall, loss_of: LossIn, root: nn.Module, device: torch.device) -> NodeTimes:
    """Run the step once, forward, and backward if it has a loss; no gradients stay.

    Units are timed. Operations between them are so short that their forward is taken from the trace, and their backward
    counts with the unit behind them.
    """
    timer = _UnitTimer(device)
    with ExitStack() as stack:
        stack.enter_context(patched(forward_patches(root, timer.timed, graph.units)))
        stack.enter_context(dropped_gradients(root))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # to compile it anew for the timer takes long
        loss = loss_of(step())
        if loss is not None and loss.requires_grad:
            timer.since = now(device)
            loss.backward()
            timer.enter_backward(None)
    times = NodeTimes.of_trace(graph)
    calls = Counter(node.module for node in graph.nodes)
    for node in graph.nodes:
        if node.module is None:
            times.backward[node.index] = 0.0
        else:
            times.forward[node.index] = timer.forward[node.module] / calls[node.module]
            times.backward[node.index] = timer.backward[node.module] / calls[node.module]
    times.backward[-1] += timer.backward[None]
    return times


class _UnitTimer:
    """Times forward and backward of units, by name, of all their calls together.

    One that is shared may be called within another, whose time it is then. Gradients reach a unit's results when the
    backward of all behind it is done: from then on the time is the unit's, until they reach another one's. What comes
    before the first is that of None.
    """

    def __init__(self, device: torch.device) -> None:
        self.forward: dict[str, float] = defaultdict(float)
        self.backward: dict[str | None, float] = defaultdict(float)
        self.since = 0.0  # in backward
        self._device = device
        self._inside = False  # of a unit's forward
        self._in_backward: str | None = None

    def timed(self, name: str, forward: Forward) -> Forward:
        """A unit's forward: behind it backward's time is the unit's from the first gradient of its results on."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            self._inside = True
            began = now(self._device)
            result = forward(*args, **kwargs)
            self.forward[name] += now(self._device) - began
            self._inside = False
            for tensor in tensors(result):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda gradient: self.enter_backward(name))
            return result

        return call

    def enter_backward(self, name: str | None) -> None:
        """Backward comes to this unit: the time until now is that of the one where it has been."""
        time = now(self._device)
        self.backward[self._in_backward] += time - self.since
        self.since, self._in_backward = time, name
