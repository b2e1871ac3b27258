"""The best partition where ranks hold several stages, which share the rank's time and memory.

Partial partitions (``Label``) are extended stage by stage. Of two that end at the same item, one is dropped when the
other has used no more of anything; what a rank can no longer exhaust is not counted as used, which makes most labels
equal when limits are loose. When a stage still has too many labels, those that wasted least are kept and the result
is no longer proven.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import le
from typing import TypeVar

from lightning_smddp.planner.problem import StageCosts
from lightning_smddp.planner.stage_search import Cost, Windows, fewest_bytes, still_whole, windows

MAX_STEPS = 4000  # extensions tried for each stage of a pass; bounds a pass to about 0.3 s for 16 stages
COARSE = 200  # once a pass was cut short, values are searched to 1 part in this
WIDEN = 1.05  # by which the slowest stage is first raised when memory needs it; then by its square, and so on
COMPARED = 20  # a label is compared with as many others, the strongest; more costs more than it saves

T = TypeVar("T")
Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """A partition of the first items into the first stages.

    Attributes:
        end: first item that belongs to no stage yet.
        sent: bytes between ranks so far.
        seconds, memory: used by each rank; raised to the value up to which it cannot matter.
        tied: tied parameters that each rank holds and may use again.
        previous: the label without its last stage.
    """

    end: int
    sent: int
    seconds: tuple[int, ...]
    memory: tuple[int, ...]
    tied: tuple[frozenset[str], ...]
    previous: Label | None

    @property
    def cuts(self) -> Cuts:
        """First item of each stage but the first."""
        ends, label = [], self.previous
        while label is not None and label.previous is not None:
            ends.append(label.end)
            label = label.previous
        return tuple(reversed(ends))


def solve_coupled(costs: StageCosts, slowest: int, memory_limit: int | None) -> tuple[Cuts, bool] | None:
    """(cuts, whether they are proven best); None if none was found under the memory limit.

    ``slowest`` is a lower bound of the slowest stage: what it would be if no two stages shared a rank.
    """
    if memory_limit is None:
        search = CoupledSearch(costs, windows(costs, slowest, None), None)
        cuts, is_fastest = fewest_bytes(costs, search.stages), True
    else:
        found = _fastest_fitting(costs, slowest, memory_limit)
        if found is None:
            return None
        search, cuts, is_fastest = found
    rank_seconds, cuts, is_smallest = _least_rank_seconds(search, cuts)
    label = search.run(rank_seconds, by_bytes=True)
    if label is not None:
        cuts = min(label.cuts, cuts, key=search.bytes_of)
    return cuts, is_fastest and is_smallest and not search.was_cut_short


def _fastest_fitting(costs: StageCosts, slowest: int, limit: int) -> tuple[CoupledSearch, Cuts, bool] | None:
    """Search over the smallest slowest stage that fits; cuts that have it; whether it is proven the smallest."""
    loosest = costs.compute[-1] + 2 * max(map(max, costs.busy)) + max(map(max, costs.late))
    low = high = slowest
    widen = WIDEN
    is_proven = True
    search = CoupledSearch(costs, windows(costs, high, limit), limit)
    while (label := search.run()) is None:
        is_proven = is_proven and not search.was_cut_short
        if high >= loosest or not search.has_memory:
            return None
        low, high, widen = high + 1, min(loosest, max(high + 1, int(high * widen))), widen**2
        search = CoupledSearch(costs, windows(costs, high, limit), limit)
    values = [value for value in search.distinct_seconds() if value >= low]
    first, last = 0, bisect_left(values, search.slowest_stage(label.cuts))
    while first < last and (is_proven or (values[last] - values[first]) * COARSE > values[last]):
        middle = (first + last) // 2
        attempt = search.narrowed(values[middle])
        better = attempt.run()
        if better is None:
            first = middle + 1
            is_proven = is_proven and not attempt.was_cut_short
        else:
            label, search = better, attempt
            last = bisect_left(values, search.slowest_stage(label.cuts))
    return search.narrowed(search.slowest_stage(label.cuts)), label.cuts, is_proven


def _least_rank_seconds(search: CoupledSearch, cuts: Cuts) -> tuple[int, Cuts, bool]:
    """The smallest slowest rank, cuts that have it, and whether it is proven the smallest."""
    low, high = search.least_rank_seconds, search.slowest_rank(cuts)
    is_proven = True
    while low < high and (is_proven or (high - low) * COARSE > high):
        middle = (low + high) // 2
        label = search.run(middle)
        if label is None:
            low = middle + 1
            is_proven = is_proven and not search.was_cut_short
        else:
            cuts = label.cuts
            high = search.slowest_rank(cuts)
    return high, cuts, is_proven


class CoupledSearch:
    """Passes over the partitions that are made of ``stages``, under limits on each rank's totals."""

    def __init__(self, costs: StageCosts, stages: Windows, memory_limit: int | None) -> None:
        self.costs, self.stages = costs, stages
        ranks = list(dict.fromkeys(costs.problem.rank_of_stage))
        self.num_ranks = len(ranks)
        self.rank_of_stage = [ranks.index(rank) for rank in costs.problem.rank_of_stage]
        self.was_cut_short = False
        self.more_seconds = self._still_to_come(costs.seconds)
        self.more_memory = self._still_to_come(costs.memory)
        self.memory_limit = max(self.more_memory[0]) if memory_limit is None else memory_limit
        self.least_rank_seconds = -(-costs.compute[-1] // self.num_ranks)

    @property
    def has_memory(self) -> bool:
        """Whether the ranks together have room for all items: if not, no partition can do."""
        return self.num_ranks * self.memory_limit >= self._bytes_left(0, 0)

    def _bytes_left(self, stage: int, start: int) -> int:
        """At least so much is needed by the items from ``start`` on, in the stages from ``stage`` on."""
        costs = self.costs
        kept = costs.activations[-1] - costs.activations[start]
        return kept * min(costs.problem.in_flight[stage:], default=0) + costs.own[-1] - costs.own[start]

    def _still_to_come(self, cost: Cost) -> list[list[int]]:
        """``[k][r]``: at most so much is added to rank r by the stages from k on."""
        table = [[0] * self.num_ranks]
        for stage in reversed(range(self.costs.num_stages)):
            row = list(table[-1])
            row[self.rank_of_stage[stage]] += max(
                (cost(stage, start, end) for start, ends in self.stages[stage].items() for end in ends), default=0
            )
            table.append(row)
        return table[::-1]

    def narrowed(self, slowest: int) -> CoupledSearch:
        """The same search over the stages that take at most ``slowest`` picoseconds."""
        stages = [
            {a: [b for b in ends if self.costs.seconds(stage, a, b) <= slowest] for a, ends in found.items()}
            for stage, found in enumerate(self.stages)
        ]
        return CoupledSearch(self.costs, still_whole(stages, self.costs.num_items), self.memory_limit)

    def distinct_seconds(self) -> list[int]:
        """What stages can take, ascending."""
        return sorted(
            {
                self.costs.seconds(k, a, b)
                for k, found in enumerate(self.stages)
                for a, ends in found.items()
                for b in ends
            }
        )

    def _seconds_at(self, cuts: Cuts) -> list[int]:
        bounds = zip([0, *cuts], [*cuts, self.costs.num_items], strict=True)
        return [self.costs.seconds(stage, start, end) for stage, (start, end) in enumerate(bounds)]

    def slowest_stage(self, cuts: Cuts) -> int:
        """Picoseconds of the slowest stage of a partition."""
        return max(self._seconds_at(cuts))

    def slowest_rank(self, cuts: Cuts) -> int:
        """Picoseconds of the rank whose stages take longest together."""
        totals = [0] * self.num_ranks
        for rank, seconds in zip(self.rank_of_stage, self._seconds_at(cuts), strict=True):
            totals[rank] += seconds
        return max(totals)

    def bytes_of(self, cuts: Cuts) -> int:
        """Bytes that a partition sends between ranks."""
        return sum(self.costs.sent_bytes(stage, start) for stage, start in enumerate((0, *cuts)))

    def run(self, rank_seconds: int | None = None, by_bytes: bool = False) -> Label | None:
        """A partition whose ranks take at most ``rank_seconds`` picoseconds and fit the memory limit, or None.

        With ``by_bytes`` the one that sends the fewest bytes. ``was_cut_short`` then says whether labels had to be
        given up, so that a better partition, or any, may have been missed.
        """
        self.was_cut_short = False
        limit = max(self.more_seconds[0]) if rank_seconds is None else rank_seconds
        labels = {0: [self._first_label(limit)]}
        for stage in range(self.costs.num_stages):
            reached: dict[int, list[Label]] = defaultdict(list)
            for start, ends in self.stages[stage].items():
                for end in ends if start in labels else ():
                    reached[end] += self._extended(labels[start], stage, end, limit)
            labels = self._kept(reached, stage + 1, limit, by_bytes)
        return min(labels.get(self.costs.num_items, ()), key=lambda label: label.sent, default=None)

    def _first_label(self, limit: int) -> Label:
        seconds = tuple(max(0, limit - more) for more in self.more_seconds[0])
        memory = tuple(max(0, self.memory_limit - more) for more in self.more_memory[0])
        return Label(0, 0, seconds, memory, (frozenset(),) * self.num_ranks, None)

    def _extended(self, labels: Iterable[Label], stage: int, end: int, limit: int) -> list[Label]:
        """``labels``, which all end at one item, with ``stage`` added up to ``end``; those over a limit left out."""
        found = []
        for label in labels:
            start, rank = label.end, self.rank_of_stage[stage]
            names = self.costs.tied_between(start, end)
            new_bytes = sum(self.costs.problem.parameter_bytes[name] for name in names - label.tied[rank])
            seconds = label.seconds[rank] + self.costs.seconds(stage, start, end)
            memory = label.memory[rank] + self.costs.untied_bytes(stage, start, end) + new_bytes
            if seconds > limit or memory > self.memory_limit:
                continue
            held = frozenset(name for name in label.tied[rank] | names if self.costs.last_use[name] >= end)
            floor = self.memory_limit - self.more_memory[stage + 1][rank]
            extended = Label(
                end,
                label.sent + self.costs.sent_bytes(stage, start),
                _replaced(label.seconds, rank, max(seconds, limit - self.more_seconds[stage + 1][rank])),
                _replaced(label.memory, rank, max(memory, floor)),
                _replaced(label.tied, rank, held if memory > floor else frozenset()),
                label,
            )
            if self._can_be_completed(extended, stage + 1, limit):
                found.append(extended)
        return found

    def _can_be_completed(self, label: Label, stage: int, limit: int) -> bool:
        """Whether the ranks together have room for the rest of the items."""
        seconds_left = self.costs.compute[-1] - self.costs.compute[label.end]
        return self.num_ranks * limit - sum(label.seconds) >= seconds_left and self.num_ranks * self.memory_limit - sum(
            label.memory
        ) >= self._bytes_left(stage, label.end)

    def _kept(self, reached: dict[int, list[Label]], stage: int, limit: int, by_bytes: bool) -> dict[int, list[Label]]:
        """The labels worth extending by ``stage``, by end."""
        labels = [label for found in reached.values() for label in _undominated(found, by_bytes)]
        steps = {end: len(self.stages[stage].get(end, ())) for end in reached} if stage < len(self.stages) else {}
        if sum(steps.get(label.end, 0) for label in labels) > MAX_STEPS:
            self.was_cut_short = True
            labels.sort(key=lambda label: (label.sent if by_bytes else 0, self._used(label, limit)))
            total = accumulate(steps[label.end] for label in labels)
            labels = [label for label, sum_of_steps in zip(labels, total, strict=True) if sum_of_steps <= MAX_STEPS]
        kept: dict[int, list[Label]] = defaultdict(list)
        for label in labels:
            kept[label.end].append(label)
        return kept

    def _used(self, label: Label, limit: int) -> float:
        """How much of the limits is used beyond what the items so far need on average."""
        costs = self.costs
        seconds = (sum(label.seconds) - costs.compute[label.end]) / max(limit, 1)
        memory = (sum(label.memory) - costs.own[label.end]) / max(self.memory_limit, 1)
        return seconds + memory


def _replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _undominated(labels: Iterable[Label], by_bytes: bool) -> list[Label]:
    """Those of the labels with one end that use less of something than every other."""
    groups: dict[object, dict[tuple[int, ...], Label]] = defaultdict(dict)
    for label in labels:
        sent = (label.sent,) if by_bytes else ()
        groups[label.tied].setdefault(sent + label.seconds + label.memory, label)
    kept = []
    for group in groups.values():
        best: list[tuple[int, ...]] = []
        for used in sorted(group):  # what dominates comes before what it dominates
            if not any(all(map(le, other, used)) for other in best[:COMPARED]):
                best.append(used)
        kept += [group[used] for used in best]
    return kept
