"""What a step did on one micro-batch: calls of ``self.log`` and of metrics, and changes of attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from lightning_smddp.bridge.metrics import MetricCall
from lightning_smddp.bridge.step_attributes import Changes, detached
from lightning_smddp.wire.pytree import leaves, map_leaves

Key: TypeAlias = tuple[Hashable, ...]  # what was called, and how often before in this micro-batch
Returned: TypeAlias = dict[Key, list[Any]]  # by call of a metric, the leaves of its result for the batch


@dataclass
class Logged:
    """A call of ``self.log`` in a micro-batch; ``source`` is the metric call and the leaf that the value came from."""

    name: str
    value: Any
    metric: str | None
    source: tuple[Key, int] | None
    options: dict[str, Any]
    weight: float


@dataclass
class Record:
    """What a step did on one micro-batch.

    Attributes:
        size: its rows.
        weight: of its losses.
        events: calls of ``self.log`` and of metrics, in order. The n-th call for a name has the same key in each
            micro-batch, so that the calls that belong together are found by their keys.
        sources: of which call of a metric, and which leaf of its result, a tensor is; by the tensor's id.
        touched: values that are needed after the step's end, still on the graph.
        changes: of the module's attributes.
        counts: calls so far, by what was called.
    """

    size: int
    weight: float
    events: dict[Key, Logged | MetricCall] = field(default_factory=dict)
    sources: dict[int, tuple[Key, int]] = field(default_factory=dict)
    touched: list[Any] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    counts: Counter[Key] = field(default_factory=Counter)

    def add_call(self, call: MetricCall) -> None:
        """Remember the call of a metric, and which tensors stand for what it returned."""
        key = self._add(("call", call.metric, call.method), call)
        self.touched += leaves((call.args, call.kwargs))
        # What the metric shows for these rows alone says nothing of the batch. Wherever this very object turns up
        # later (logged, set or returned), it is replaced by what the metric returns for the whole batch.
        for position, leaf in enumerate(leaves(call.result)):
            if isinstance(leaf, Tensor):
                self.sources[id(leaf)] = (key, position)

    def add_log(self, name: str, value: Any, metric: str | None, options: dict[str, Any]) -> None:
        """Remember a logged value as it is now: a copy, a number, or only that a metric is logged."""
        # The value may change in place behind the call, and its graph is kept by `touched` alone until the step ends.
        self.touched.append(value)
        source = self.sources.get(id(value))
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif hasattr(value, "item"):
            value = value.item()
        if metric:
            value = None  # the metric itself is logged for the batch
        self._add(("log", name), Logged(name, value, metric, source, options, self.weight))

    def close(self, changes: Changes) -> None:
        """The micro-batch is over: keep ``changes``, and let go of the autograd graph."""
        self.touched.clear()
        self.changes = changes
        for event in self.events.values():
            if isinstance(event, MetricCall):
                event.args, event.kwargs = detached((event.args, event.kwargs))

    def apply(self, function: Callable[[Any], Any]) -> None:
        """Replace all values by what ``function`` makes of them."""
        for event in self.events.values():
            if isinstance(event, MetricCall):
                event.args = function(event.args)
                event.kwargs = function(event.kwargs)
            else:
                event.value = function(event.value)
        self.changes = function(self.changes)

    def _add(self, what: Key, event: Logged | MetricCall) -> Key:
        key = (*what, self.counts[what])
        self.counts[what] += 1
        self.events[key] = event
        return key


class Marks:
    """Stand for what metrics returned while micro-batches are combined: the batch has it already.

    A step that returns ``{"accuracy": self.accuracy(p, y)}`` has another tensor there for each micro-batch, and neither
    their mean nor their concatenation is the batch's. So the same mark replaces all of them: equal leaves combine to
    themselves. Afterwards the mark is replaced by what the metric returned for the batch.
    """

    def __init__(self, returned: Returned) -> None:
        self.marks: dict[tuple[Key, int], _Mark] = {}
        for key, values in returned.items():
            for position, value in enumerate(values):
                self.marks[key, position] = _Mark(value)

    def put_on(self, structure: Any, record: Record) -> Any:
        """``structure``, off the graph, with marks for what metrics returned in this micro-batch."""
        if not record.sources:
            return detached(structure)

        def mark(leaf: Any) -> Any:
            source = record.sources.get(id(leaf))
            if source is None:
                return leaf
            return self.marks[source]

        return detached(map_leaves(mark, structure))

    def put_on_changes(self, record: Record) -> Changes:
        """The changes of attributes in this micro-batch, with marks in the same way."""
        changes = record.changes
        marked = Changes(in_place=changes.in_place)
        for where, tail in changes.appended.items():
            marked.appended[where] = self.put_on(tail, record)
        for where, (before, after) in changes.values.items():
            marked.values[where] = (before, self.put_on(after, record))
        return marked

    @staticmethod
    def take_off(structure: Any) -> Any:
        """``structure`` with what metrics returned for the batch where marks were."""

        def unmark(leaf: Any) -> Any:
            if isinstance(leaf, _Mark):
                return leaf.value
            return leaf

        return map_leaves(unmark, structure)


class _Mark:
    """Compared by identity, so that it is the same leaf in the outputs of all micro-batches."""

    def __init__(self, value: Any) -> None:
        self.value = value
