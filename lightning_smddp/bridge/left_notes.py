"""Notes of what a step leaves in attributes of submodules, callbacks and helpers, and what they come to for a batch.

Each rank has the notes of its own stages: one for each stage, owner (see ``owner_watch.py``) and micro-batch. Beside
them are the values that a stage has made and a later one may leave somewhere; these have the numbers that they have in
the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.bridge.attribute_counts import UNKNOWN, Moved, PerRow, settle_counts, unsettled_counts
from lightning_smddp.bridge.combined_changes import combine_changes
from lightning_smddp.bridge.owner_watch import Found, has_remote, owner_in_words
from lightning_smddp.bridge.step_attributes import MISSING, AttrPath, Changes, detached, in_words
from lightning_smddp.wire.encode import UnknownTypeError, encode

StageOwner: TypeAlias = tuple[int, str]  # a stage, and the name of an owner
Trial: TypeAlias = dict[StageOwner, dict[AttrPath, Any]]  # what attributes are set to
Combined: TypeAlias = dict[AttrPath, tuple[bool, Any]]  # by path: whether a list gains the value, and the value


@dataclass(frozen=True)
class Wanted:
    """A value of which the last stage knows only which traced values its tensors are."""

    grows: bool
    plain: Any  # as ``encode`` gives it; None where nobody can say what the value is
    values: list[Any]  # path and number of each tensor

    @classmethod
    def of(cls, change: Found) -> Wanted:
        """The value that ``change`` has set."""
        found: dict[tuple[str, ...], Tensor] = {}
        try:
            plain = encode(change.after, found)
        except UnknownTypeError:
            return cls(change.grows, None, [])
        values = []
        for path, tensor in found.items():
            number = getattr(tensor, "value", -1)  # of a RemoteTensor
            values.append([list(path), number])
        return cls(change.grows, plain, values)


@dataclass
class Note:
    """What a stage's run of one micro-batch left with one owner: what is whole there, and what is not, by path."""

    index: int
    size: int
    weight: float
    whole: Changes = field(default_factory=Changes)
    remote: dict[AttrPath, Wanted] = field(default_factory=dict)

    def add(self, change: Found) -> None:
        """Note a change of one attribute, or of one member of a dict."""
        if has_remote(change.after):
            self.remote[change.where] = Wanted.of(change)
        elif change.grows:
            self.whole.appended[change.where] = detached(change.after)
        else:
            before = change.before
            if before is MISSING:
                before = None
            self.whole.values[change.where] = (before, detached(change.after))


class StepNotes:
    """What the stages of this rank have left in a step, and what is known of the integers in it from step to step."""

    def __init__(self) -> None:
        self._notes: dict[StageOwner, dict[int, Note]] = defaultdict(dict)  # by micro-batch
        self._held: dict[int, dict[int, Note]] = defaultdict(dict)  # by stage: values for later stages' notes
        self._sizes: dict[int, dict[int, tuple[int, float]]] = defaultdict(dict)  # by stage: of its micro-batches
        self._per_row: dict[str, PerRow] = defaultdict(dict)  # by owner
        self._per_row_held: PerRow = {}
        self._settled: dict[StageOwner, dict[AttrPath, int]] = defaultdict(dict)  # what a trial has shown

    def add(self, stage: int, name: str, note: Note) -> None:
        """Keep what ``stage`` has left with the owner ``name``."""
        self._notes[stage, name][note.index] = note

    def add_run(self, stage: int, index: int, size: int, weight: float) -> None:
        """Keep that ``stage`` has run a micro-batch, whether or not it has left anything."""
        self._sizes[stage][index] = (size, weight)

    def hold(self, stage: int, index: int, values: Mapping[int, Tensor]) -> None:
        """Keep ``values``, by number, that a later stage may ask ``stage`` for; behind :meth:`add_run`."""
        size, weight = self._sizes[stage][index]
        changes = Changes()
        for number, tensor in values.items():
            changes.values[number,] = (None, tensor.detach())
        self._held[stage][index] = Note(index, size, weight, changes)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around other runs of the step: the notes are kept."""
        notes = dict(self._notes)
        held = dict(self._held)
        sizes = dict(self._sizes)
        self.clear()
        try:
            yield
        finally:
            self.clear()
            self._notes.update(notes)
            self._held.update(held)
            self._sizes.update(sizes)

    def clear(self) -> None:
        """Forget what the micro-batches of the last step left; their arrays are freed with it."""
        self._notes.clear()
        self._held.clear()
        self._sizes.clear()
        self._settled.clear()

    # ---- for the batch ----

    def places(self) -> list[StageOwner]:
        """Stages and owners of which there are notes."""
        return sorted(self._notes)

    def of_stage(self, stage: int, name: str) -> Combined:
        """What a stage has left with an owner in all micro-batches together."""
        # What a trial has shown of this batch's integers goes before what rules say.
        found = _combined(self._ordered(stage, name), self._per_row[name], is_held=False)
        for where, value in self._settled[stage, name].items():
            found[where] = (False, value)
        return found

    def wanted(self, stage: int, name: str) -> dict[AttrPath, Wanted]:
        """Of what a stage has left with an owner, that of which other stages have the tensors."""
        notes = self._ordered(stage, name)
        found = {}
        for where, want in notes[-1].remote.items():
            # Where micro-batches take several paths, a number means several values: then nobody can say which.
            if all(note.remote.get(where) == want for note in notes):
                found[where] = want
            else:
                found[where] = replace(want, plain=None)
        return found

    def held(self) -> Iterator[tuple[int, int, Tensor]]:
        """Number, stage and tensor of each value that is kept for a later stage, of all rows of the batch."""
        for stage, notes in self._held.items():
            in_order = [notes[index] for index in sorted(notes)]
            combined = _combined(in_order, self._per_row_held, is_held=True)
            for (number,), (_, tensor) in combined.items():
                yield number, stage, tensor

    def held_as(self, stage: int, number: int, where: AttrPath) -> Tensor:
        """The value ``number`` that ``stage`` keeps, combined as what ``where`` is set to, which may be a loss."""
        # The same tensors that :meth:`held` combines by number, under the name that they get: a loss is weighted.
        notes = self._held[stage]
        in_order = []
        for index in sorted(notes):
            note = notes[index]
            changes = Changes()
            if (number,) in note.whole.values:
                changes.values[where] = note.whole.values[number,]
            in_order.append(replace(note, whole=changes))
        _, tensor = _combined(in_order, self._per_row_held, is_held=True)[where]
        assert isinstance(tensor, Tensor)
        return tensor

    def _ordered(self, stage: int, name: str) -> list[Note]:
        """Of all micro-batches, also of those that have changed nothing."""
        notes = self._notes[stage, name]
        ordered = []
        for index, (size, weight) in sorted(self._sizes[stage].items()):
            ordered.append(notes.get(index) or Note(index, size, weight))
        return ordered

    # ---- what integers count ----

    def doubt(self) -> str | None:
        """Of which integer a trial has to show first what it counts."""
        for stage, name in self._notes:
            for moved in self._unknown_counts(stage, name):
                return UNKNOWN + in_words(owner_in_words(name), moved.where)
        return None

    def learn_counts(self, whole: Trial, parts: Sequence[Trial]) -> str | None:
        """Learn what integers count of runs of the batch at once, and of its micro-batches.

        Returns:
            What is wrong with one that counts neither rows nor calls.
        """
        # All are settled, also behind one that is wrong: the batch then has a value for each of them.
        first = None
        for place in self._notes:
            stage, name = place
            problem = settle_counts(
                self._unknown_counts(stage, name),
                whole.get(place, {}),
                [part.get(place, {}) for part in parts],
                self._per_row[name],
                self._settled[place],
                owner_in_words(name),
            )
            first = first or problem
        return first

    def _unknown_counts(self, stage: int, name: str) -> list[Moved]:
        changes = [note.whole for note in self._ordered(stage, name)]
        return unsettled_counts(changes, self._per_row[name], self._settled[stage, name], members=True)


def without_remote(changes: Changes) -> Changes:
    """``changes`` but for values with tensors of other stages."""
    values = {}
    for where, (before, after) in changes.values.items():
        if not has_remote(after):
            values[where] = (before, after)
    return replace(changes, values=values)


def _combined(notes: Sequence[Note], per_row: PerRow, is_held: bool) -> Combined:
    """What notes of all micro-batches come to; ``is_held``: of values that are kept for later stages."""
    last = notes[-1].whole
    changes = [_without_repeats(note.whole, last, is_held) for note in notes[:-1]]
    changes.append(last)
    sizes = [note.size for note in notes]
    weights = [note.weight for note in notes]
    appended, values = combine_changes(changes, sizes, weights, per_row)
    combined: Combined = {}
    for where, tail in appended:
        combined[where] = (True, tail)
    for where, value in values.items():
        combined[where] = (False, value)
    return combined


def _without_repeats(changes: Changes, last: Changes, is_held: bool) -> Changes:
    """``changes`` without tensors that later micro-batches made once more: caches, reparametrized weights.

    What modules make of other rows is something else, but for zeros.
    """
    values = {}
    for where, (before, after) in changes.values.items():
        _, later = last.values.get(where, (None, None))
        if not _is_repeated(before, after, later, is_held):
            values[where] = (before, after)
    return Changes(changes.appended, values)


def _is_repeated(before: Any, after: Any, later: Any, is_held: bool) -> bool:
    """Whether a ``later`` micro-batch has made the same tensor once more."""
    if not isinstance(after, Tensor) or not isinstance(later, Tensor):
        return False
    if after.dim() == 0 or after.shape != later.shape:
        return False
    # A cache replaces one of its shape. What a stage has made has nothing before it: there zeros say nothing, as
    # those of other rows are equal, too.
    was_there = isinstance(before, Tensor) and before.shape == after.shape
    if not was_there and not (is_held and bool(later.any())):
        return False
    return torch.equal(after, later)
