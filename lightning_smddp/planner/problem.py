"""What a partition is judged by: the nodes of a step, what they cost, and what each stage may hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

PICOSECONDS = 10**12  # times are compared as whole picoseconds: sums are exact, so ties are ties


class PartitionError(ValueError):
    """No partition does what was asked for; the message says why and what to change."""


@dataclass(frozen=True)
class NodeCost:
    """One call of the step, in execution order.

    Attributes:
        name: the unit's name; a unit that is called twice makes two nodes of one name.
        forward_s, backward_s: seconds for one micro-batch.
        activation_bytes: kept from its forward to its backward, for each micro-batch in flight.
        parameters: names of the parameters it uses. A name in several nodes is a tied parameter.
        is_unit: False for what may run beside units but makes no stage by itself.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameters: tuple[str, ...] = ()
    is_unit: bool = True


@dataclass(frozen=True)
class Link:
    """What messages between two ranks cost.

    Attributes:
        latency_s, bytes_per_s: one message of n bytes takes ``latency_s + n / bytes_per_s``.
        is_hidden: whether a device or a network card copies while the rank computes. Else the cores that compute do.
    """

    latency_s: float
    bytes_per_s: float
    is_hidden: bool = False

    def seconds(self, size: float) -> float:
        """Of a message of ``size`` bytes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """What there is to place stages on.

    Attributes:
        rank_of_stage: the rank that runs each stage, in stage order; its length is the number of stages.
        in_flight: micro-batches whose activations each stage keeps at once.
        parameter_bytes: of each parameter, with its gradient and optimizer state.
        links: between the ranks of each stage and the next.
        memory_limit: bytes of a rank for parameters and activations; None for no limit.
    """

    rank_of_stage: Sequence[int]
    in_flight: Sequence[int]
    parameter_bytes: Mapping[str, int]
    links: Sequence[Link]
    memory_limit: float | None = None

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together; a rank may have several."""
        return len(self.rank_of_stage)


@dataclass(frozen=True, kw_only=True)
class PartitionProblem(Cluster):
    """Nodes to cut into stages, and what the stages have at their disposal.

    Attributes:
        nodes: the step, in execution order.
        cut_bytes: ``cut_bytes[i]`` cross from the nodes before i to node i and later, for one micro-batch; ``inf``
            where the step cannot be cut. One value more than nodes; the first and the last are not used.
    """

    nodes: Sequence[NodeCost]
    cut_bytes: Sequence[float]


class StageCosts:
    """Seconds and bytes of any stage of a problem, as whole numbers.

    A stage k of the nodes i .. j-1 takes

        sum of forward_s + backward_s of its nodes + boundary(i) + boundary(j)
        boundary(i) = 2 * (latency_s + cut_bytes[i] / bytes_per_s), each with its own link

    picoseconds for a micro-batch: at each of its two boundaries the activations pass one way and their gradients the
    other, and both ends are charged. Where links are hidden, a boundary costs what it takes longer than the mean
    stage's forward_s + backward_s, and runs beside the other one: the larger of the two counts. (Set off against the
    stage's own time instead of the mean, slow links would make uneven stages as good as even ones.) A boundary between
    two stages of one rank costs nothing; nor does the start of the first stage or the end of the last.

    It holds ``in_flight[k]`` times the activations of its nodes, and each parameter that they name once.
    """

    def __init__(self, problem: PartitionProblem) -> None:
        nodes = problem.nodes
        ranks = list(problem.rank_of_stage)
        self.problem = problem
        self.num_nodes = len(nodes)
        self.num_stages = len(ranks)
        self.stages_beside = [ranks.count(rank) for rank in ranks]  # on the stage's rank, itself counted
        self.is_allowed = [0 < cut < len(nodes) and size < math.inf for cut, size in enumerate(problem.cut_bytes)]

        # Running sums: entry i is of the nodes before i, so that of the nodes i .. j-1 is entry j less entry i.
        self.compute = _prefix(round((node.forward_s + node.backward_s) * PICOSECONDS) for node in nodes)
        self.activations = _prefix(node.activation_bytes for node in nodes)
        self.units = _prefix(node.is_unit for node in nodes)
        self.parameters = self._parameter_table()

        # By stage, what starting at each node costs. One entry more than stages: the last one is the end of the step.
        free = [0] * len(problem.cut_bytes)
        links = zip(problem.links, pairwise(ranks), strict=True)
        self.boundary = [free, *(free if a == b else self._boundary(link) for link, (a, b) in links), free]
        self.both = max if all(link.is_hidden for link in problem.links) else sum  # of two boundaries

    def _boundary(self, link: Link) -> list[int]:
        """Picoseconds of messages both ways at each cut; where none is allowed, it is never used."""
        hidden = self.compute[-1] // self.num_stages if link.is_hidden else 0  # what a stage computes meanwhile
        sizes = [0 if size == math.inf else size for size in self.problem.cut_bytes]
        return [max(0, round(2 * link.seconds(size) * PICOSECONDS) - hidden) for size in sizes]

    def _parameter_table(self) -> list[list[int]]:
        """``table[j][i]``: bytes of the parameters that the nodes i .. j-1 name."""
        # These are no running sums, as what two nodes name is there once. A row goes backwards from its end: each node
        # adds what no node between it and the end has named.
        named = [set(node.parameters) for node in self.problem.nodes]
        table = []
        for end in range(self.num_nodes + 1):
            seen: set[str] = set()
            row = [0] * (end + 1)
            for start in reversed(range(end)):
                row[start] = row[start + 1] + self.bytes_of(named[start] - seen)
                seen |= named[start]
            table.append(row)
        return table

    def bytes_of(self, names: Iterable[str]) -> int:
        """Of these parameters: weights, gradient and optimizer state together."""
        return sum(self.problem.parameter_bytes[name] for name in names)

    def computing(self, stage: int, start: int, end: int) -> int:
        """Picoseconds that a stage of the nodes ``start`` .. ``end - 1`` computes, whichever it is."""
        return self.compute[end] - self.compute[start]

    def seconds(self, stage: int, start: int, end: int) -> int:
        """Picoseconds of ``stage`` when it has the nodes ``start`` .. ``end - 1``."""
        # The boundary behind a stage is that before the next one.
        boundaries = self.both((self.boundary[stage][start], self.boundary[stage + 1][end]))
        return self.computing(stage, start, end) + boundaries

    def held(self, stage: int, start: int, end: int) -> int:
        """Bytes of activations of ``stage`` when it has these nodes."""
        return (self.activations[end] - self.activations[start]) * self.problem.in_flight[stage]

    def memory(self, stage: int, start: int, end: int) -> int:
        """Bytes of ``stage`` when it has these nodes: activations and parameters."""
        return self.held(stage, start, end) + self.parameters[end][start]

    def memory_beside(self, stage: int, start: int, end: int) -> int:
        """The same times the stages of its rank: what that has, if they are all as large."""
        return self.memory(stage, start, end) * self.stages_beside[stage]

    def ends(self, stage: int) -> list[int]:
        """The nodes before which ``stage`` may end; the last one ends with the last node."""
        if stage == self.num_stages - 1:
            return [self.num_nodes]
        return [node for node, is_allowed in enumerate(self.is_allowed) if is_allowed]

    def has_unit(self, start: int, end: int) -> bool:
        """Whether there is a unit among the nodes ``start`` .. ``end - 1``."""
        return self.units[end] > self.units[start]


def _prefix(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))
