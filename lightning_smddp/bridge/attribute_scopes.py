"""During a batch each stage has its own attributes, and behind it the last stage's count.

The step's code runs once for each micro-batch, on each stage up to that stage's end, and sometimes for nothing: in a
trace, or in a dry run that finds its path. So ``self.calls += 1`` is done by all of these, and a line at the step's end
by the last stage alone. A *scope* is what attributes are for one stage. It goes on from micro-batch to micro-batch, as
in one process that runs one after the other::

    before the batch     self.calls == 5
    stage 0              6  7  8  9          of four micro-batches
    stage 1, the last    6  7  8  9
    behind the batch     9, on all ranks

Between two micro-batches of one stage nothing has to be done for it: attributes are looked at where another stage's
scope, or a dry run, comes in between, and once behind the batch. Followed are all attributes of the LightningModule,
and those of other objects that a trace has seen change between modules. Others, which change inside of a module that is
placed whole, are that stage's rank's alone: on other ranks hooks find an absent tensor there.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_functions, write_count
from lightning_smddp.bridge.absent import absent_tensor
from lightning_smddp.bridge.attributes import (
    Change,
    Snapshot,
    apply_changes,
    container_of,
    is_plain,
)
from lightning_smddp.bridge.owners import Place, in_words, is_of_module, owner_named, owners_in
from lightning_smddp.pipeline.capture.tracer import depends_on_module
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.wire.pytree import leaves, map_leaves

_MISSING = object()


class _Traced(NamedTuple):
    """A change that a trace saw; ``is_made`` if there is a tensor in it that depends on parameters."""

    place: Place
    kind: str
    value: Any
    is_made: bool
    is_sum: bool  # a number became a tensor: `self.hits += tensor` writes into that from the next batch on

    @classmethod
    def of(cls, before: Snapshot, change: Change) -> _Traced:
        place, kind, value = change
        old = before.attributes[place[0]].get(place[1]) if len(place) == 2 else None
        is_sum = type(old) in (int, float) and type(value) is Tensor
        return cls(place, kind, value, depends_on_module(value), is_sum)

    @property
    def is_number(self) -> bool:
        return type(self.value) in (int, float)

    @property
    def is_state(self) -> bool:
        found = leaves(self.value)
        return self.kind != "set" or any(type(leaf) in (int, float) or isinstance(leaf, Tensor) for leaf in found)


class AttributeScopes:
    """The attributes of a LightningModule, and of what it uses, during batches.

    Args:
        module: the LightningModule.
        ignored: its attributes that are not the user's.
        warn: called with texts, on all ranks alike.

    Attributes:
        counts: integers and flags that traces saw change between modules, in words.
        changed: everything that they saw change, in words.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: frozenset[str],
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.module = module
        self.warn = warn
        self.counts: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self._ignored = ignored
        self._followed: dict[str, set[str]] = {}  # by owner, but of the LightningModule
        self._written: dict[Place, None] = {}  # tensors that are written in place
        self._learning: tuple[Snapshot, dict[Place, Tensor]] | None = None  # before a trace, and copies as below
        self._traced: list[_Traced] = []  # by the last trace
        self._undecided: dict[Place, _Traced] = {}  # until a batch shows whether the last stage changes them
        self._numbers: dict[str, bool] = {}  # that change inside of modules, and whether that was said
        self._elsewhere: dict[Place, Tensor | None] = {}  # what hooks find there; None for what there is
        self._base: Snapshot | None = None  # before the batch
        self._stage = -1  # whose scope is in place; -1 for none
        self._snapshots: dict[Any, Snapshot] = {}  # by stage, and by ("dry", micro-batch)
        self._copies: dict[int, dict[Place, Tensor]] = {}  # by stage, of what is written in place

    # ---- during a batch ----

    @contextmanager
    def within(self, stage: int | None, index: int) -> Iterator[None]:
        """Around a run of ``stage``, or one for nothing (None), on micro-batch ``index``."""
        if stage is not None:
            self._enter(stage)
            yield
            return
        trainer: Any = vars(self.module).get("_trainer")
        stops = getattr(trainer, "should_stop", None)
        with without_torch_functions():
            base = self._begin()
            self._leave()
            self._snapshots.get(("dry", index - 1), base).put_back()
        _with_copies(self.module, self._written)
        try:
            yield
        finally:
            with without_torch_functions():
                self._snapshots["dry", index] = base.current()
                base.put_back()
            if stops is not None:
                trainer.should_stop = stops

    def side_effects(self) -> list[Change]:
        """What the run that is under way, and those before it, have left in attributes of the LightningModule."""
        with without_torch_functions():
            before, copies = self._learning or (self._begin(), self._copies.get(self._stage, {}))
            found = list(before.changes_to(before.current(), copies))
        return [change for change in found if not change[0][0] or change[0][0].startswith("->")]

    def settle(self, effects: Sequence[Change], touched: Mapping[int, Tensor]) -> None:
        """Let tensors in :meth:`side_effects` be what they are here, by id: other stages have made or written some."""

        def here(leaf: Any) -> Any:
            after = touched.get(id(leaf), leaf)
            is_other = isinstance(leaf, RemoteTensor) or (after is not leaf and after.data_ptr() != leaf.data_ptr())
            return after if is_other else leaf

        if self._learning is not None:
            return
        for place, kind, value in effects:
            settled = map_leaves(here, value)
            if all(map(operator.is_, leaves(settled), leaves(value))):
                continue
            if kind == "extend":
                container_of(self.module, place)[place[-1]][-len(value) :] = settled
            else:
                apply_changes(self.module, [(place, "members" if kind == "members" else "set", settled)])

    def changes(self, stage: int) -> tuple[list[Change], list[Place]]:
        """What the runs of ``stage``, the last one, have done: plain data and tensors.

        Then places that the trace saw change, and this stage has not changed.
        """
        found = self._changes_of(stage)
        places = [place for place, _, _ in found]
        elsewhere = [place for place in self._undecided if not _is_among(place, places)]
        plain = [(place, kind, map_leaves(_detached, value)) for place, kind, value in found if is_plain(place, value)]
        return plain, elsewhere

    def end(self, changes: Sequence[Change] = (), elsewhere: Sequence[Place] = ()) -> None:
        """The batch is over: the last stage's :meth:`changes`, and what stays on this rank. On all ranks."""
        found = self._changes_of(max(self._copies, default=-1))
        self._decide(elsewhere, [place for place, _, _ in found])
        self.drop()
        stays = [change for change in found if change[0] in self._elsewhere or not is_plain(change[0], change[2])]
        apply_changes(self.module, [*stays, *changes])

    def drop(self) -> None:
        """Throw away what runs have done."""
        if self._base is not None:
            self._base.put_back()
        self._base = None
        self._stage = -1
        self._snapshots.clear()
        self._copies.clear()

    def _begin(self) -> Snapshot:
        if self._base is None:
            owners = {name: owner_named(self.module, name) for name in ("", *self._followed)}
            attributes = {name: vars(owner) for name, owner in owners.items() if owner is not None}
            self._base = Snapshot(attributes, self._follows)
        return self._base

    def _enter(self, stage: int) -> None:
        if self._stage == stage:
            return
        base = self._begin()
        self._leave()
        self._snapshots.get(stage, base).put_back()
        if stage not in self._copies:
            self._copies[stage] = _with_copies(self.module, self._written)
        self._stage = stage

    def _leave(self) -> None:
        if self._stage >= 0:
            self._snapshots[self._stage] = self._begin().current()
        self._stage = -1

    def _changes_of(self, stage: int) -> list[Change]:
        self._leave()
        if self._base is None or stage not in self._snapshots:
            return []
        found = self._base.changes_to(self._snapshots[stage], self._copies[stage])
        return [change for change in found if not any(isinstance(leaf, RemoteTensor) for leaf in leaves(change[2]))]

    def _follows(self, owner: str, attribute: str) -> bool:
        return attribute in self._followed[owner] if owner else attribute not in self._ignored

    # ---- what a trace sees ----

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Around a traced run of the step: what does it change, of anything?"""

        def is_seen(owner: str, attribute: str) -> bool:
            if owner:
                return not is_of_module(attribute) and attribute != "_trainer"
            return attribute not in self._ignored

        with without_torch_functions():
            before = Snapshot({name: vars(owner) for name, owner in owners_in(self.module).items()}, is_seen)
            # Writes to tensors of other objects are refused, so the copies are made where all can see that.
            places = [place for place, _ in before.tensors() if not place[0]]
        self._learning = before, _with_copies(self.module, places)
        try:
            yield
            with without_torch_functions():
                found = list(before.changes_to(before.current(), self._learning[1]))
                self._traced = [_Traced.of(before, change) for change in found]
                states = {traced.place[:2] for traced in self._traced if traced.is_state}
                before.put_back(lambda *attribute: is_seen(*attribute) and (not attribute[0] or attribute in states))
        finally:
            self._learning = None

    def learn(self, units: Mapping[str, bool]) -> None:
        """Follow what the last trace has seen change between modules, and say what changes inside of ``units``.

        Args:
            units: names of modules that are placed whole, and whether they are on this rank.
        """
        for traced in self._traced:
            place = traced.place
            self.changed[in_words(place)] = None
            owner = f"{place[0].partition('->')[0]}."
            inside = [is_here for name, is_here in units.items() if owner.startswith(f"{name}.")]
            if inside:
                self._note_elsewhere(traced, inside[0])
                continue
            if place[0]:
                # What is no number and no tensor may be set once, with something else that stays done: a flag that
                # hooks are installed.
                if not traced.is_state:
                    continue
                self._followed.setdefault(place[0], set()).add(place[1])
            if traced.kind == "write" or traced.is_sum:
                self._written[place] = None
            if type(traced.value) in (int, bool):
                self.counts[in_words(place)] = None
            self._undecided[place] = traced
        self._traced = []
        self._warn_of_numbers()

    def _decide(self, elsewhere: Iterable[Place], changed_here: Sequence[Place]) -> None:
        for place in map(tuple, elsewhere):
            if place in self._undecided:  # else of a callback that this rank does not have
                self._note_elsewhere(self._undecided[place], _is_among(place, changed_here))
        self._undecided = {}
        self._warn_of_numbers()

    def _note_elsewhere(self, traced: _Traced, is_here: bool) -> None:
        """It changes on the rank of one stage alone, not the last one: there it is, and elsewhere a tensor raises."""
        name = in_words(traced.place)
        if traced.is_number:
            self._numbers.setdefault(name, False)
        if not (traced.is_number or traced.is_made):
            return
        self._elsewhere[traced.place] = None
        if traced.is_made and not is_here:
            self._elsewhere[traced.place] = absent_tensor(
                f"`{name}` is set by a module that is on another rank, and is not on this one. Let the step keep it in "
                f"an attribute of the LightningModule: `self.kept = {name}`."
            )

    def _warn_of_numbers(self) -> None:
        new = [f"`{name}`" for name, is_said in self._numbers.items() if not is_said]
        self._numbers = dict.fromkeys(self._numbers, True)
        if new:
            self.warn(
                f"{', '.join(new)}: changed inside of modules that are placed whole, so right on their stage's rank "
                "alone, and changed once for each micro-batch. Keep such numbers in attributes of the LightningModule."
            )

    @contextmanager
    def absent_shown(self) -> Iterator[None]:
        """Around a hook: what is on other ranks raises where it is used."""
        before = []
        for place, absent in self._elsewhere.items():
            container = container_of(self.module, place)
            if absent is not None and container is not None:
                before.append((container, place[-1], container.get(place[-1], _MISSING), absent))
                container[place[-1]] = absent
        try:
            yield
        finally:
            for container, key, value, absent in reversed(before):
                if container.get(key) is not absent:
                    continue  # the hook has set it
                if value is _MISSING:
                    del container[key]
                else:
                    container[key] = value


def _with_copies(module: nn.Module, places: Iterable[Place]) -> dict[Place, Tensor]:
    """Let copies stand for tensors that are written in place."""
    copies = {}
    for place in places:
        container = container_of(module, place) or {}
        value = container.get(place[-1])
        if type(value) is Tensor and not value.requires_grad and not value.is_meta:
            with torch.inference_mode(False), torch.no_grad():  # writes to inference tensors are not counted
                copies[place] = container[place[-1]] = value.clone()
    return copies


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _is_among(place: Place, places: Iterable[Place]) -> bool:
    """Whether it, or what it is in, or something in it is among ``places``."""
    return any(all(one == other for one, other in zip(place, known, strict=False)) for known in places)


def writes_of(tensor: Tensor) -> int:
    """How often it was written; torch does not count that of inference tensors."""
    if tensor.is_inference():
        return 0
    return write_count(tensor)
