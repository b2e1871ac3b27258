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
and of other objects in which a trace has seen a number or tensor change between modules. Others, which change inside of
a module that is placed whole, are that stage's rank's alone: on other ranks hooks find an absent tensor there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_functions
from lightning_smddp.bridge.absent import absent_tensor
from lightning_smddp.bridge.attributes import (
    ROOT,
    Change,
    Contents,
    Copies,
    Place,
    Watch,
    apply_changes,
    copies_at,
    in_words,
    is_plain,
    object_at,
    owner_of,
    owners_in,
    slot_at,
)
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.tracer import depends_on_module
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pytree import leaves, map_leaves


class _Traced(NamedTuple):
    """A change that a trace saw.

    Attributes:
        change: what.
        is_made: whether there is a tensor in it that depends on parameters.
        is_here: whether it happens in a module that is placed whole, on this rank; None: that is not known yet.
    """

    change: Change
    is_made: bool
    is_here: bool | None = None

    @property
    def is_once(self) -> bool:
        """Of another object, and neither number nor tensor: a flag that something was done which stays, as hooks."""
        found = leaves(self.change.value)
        is_state = any(type(leaf) in (int, float) or isinstance(leaf, Tensor) for leaf in found)
        return owner_of(self.change.place) != ROOT and not is_state


class _DryRun(NamedTuple):
    """The scope of a dry run of a micro-batch, which goes on from that of the micro-batch before."""

    microbatch: int


_Scope: TypeAlias = int | _DryRun | None
"""That of a stage, by number; that of a dry run; None: attributes are as they were before the batch."""


class AttributeScopes:
    """The attributes of a LightningModule, and of what it uses, during batches.

    Args:
        module: the LightningModule.
        ignored: its attributes that are not the user's.

    Attributes:
        counts: integers and flags that traces saw change between modules, in words.
        changed: everything that they saw change, in words.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str]) -> None:
        self.module = module
        self.counts: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self._ignored = ignored
        self._followed: dict[Place, None] = {ROOT: None}  # owners
        self._written: dict[Place, None] = {}  # tensors that are written in place
        self._learning: tuple[Watch, Copies] | None = None  # before a trace, and copies as below
        self._traced: list[_Traced] = []  # by the last trace
        self._undecided: list[_Traced] = []  # until a batch shows whether the last stage changes them
        self._elsewhere: dict[Place, Tensor | None] = {}  # what hooks find there; None for what there is
        self._base: Watch | None = None  # from before the batch on
        self._scope: _Scope = None  # which is in place
        self._contents: dict[_Scope, Contents] = {}
        self._copies: Copies = {}  # of what is written in place, in all scopes

    # ---- during a batch ----

    def within(self, stage: int | None, index: int) -> AbstractContextManager[None]:
        """Around a run of ``stage``, or one for nothing (None), on micro-batch ``index``."""
        if stage is None:
            return self._for_nothing(index)
        self._enter(stage, stage)
        return nullcontext()

    @contextmanager
    def _for_nothing(self, index: int) -> Iterator[None]:
        self._enter(_DryRun(index), _DryRun(index - 1))
        try:
            yield
        finally:
            self._enter(None, None)

    def side_effects(self) -> list[Change]:
        """What the run that is under way, and those before it, have left in attributes of the LightningModule."""
        watch, copies = self._learning or (self._base, self._copies)
        assert watch is not None, "no micro-batch is running"
        with without_torch_functions():
            return [change for change in watch.changes(watch.now(), copies) if not change.place[0]]

    def settle(self, effects: Sequence[Change], touched: Mapping[int, Tensor]) -> None:
        """Let tensors in :meth:`side_effects` be what they are here, by id: other stages have made or written some."""
        if self._learning is not None:
            return

        def here(leaf: Any) -> Any:
            after = touched.get(id(leaf), leaf)
            is_other = isinstance(leaf, RemoteTensor) or (after is not leaf and after.data_ptr() != leaf.data_ptr())
            return after if is_other else leaf

        apply_changes(self.module, [Change(place, map_leaves(here, value)) for place, value, _ in effects])

    def changes(self) -> list[Change]:
        """What the runs of this rank's last stage have done."""
        self._enter(None, None)
        stages = [scope for scope in self._contents if isinstance(scope, int)]
        if self._base is None or not stages:
            return []
        found = self._base.changes(self._contents[max(stages)], self._copies)
        return [change for change in found if not any(isinstance(leaf, RemoteTensor) for leaf in leaves(change.value))]

    def end(self, changes: Sequence[Change] = ()) -> None:
        """The batch is over: the last stage's plain :meth:`changes`, and what stays on this rank. On all ranks."""
        found = self.changes()
        numbers = []
        for traced in self._undecided:
            place, name = traced.change.place, in_words(traced.change.place)
            if _is_among(place, changes):
                continue
            # What a trace saw change, and the last stage has not: inside of a module of another stage, as hooks do.
            is_here = _is_among(place, found) if traced.is_here is None else traced.is_here
            self._elsewhere[place] = None
            if type(traced.change.value) in (int, float):
                numbers.append(f"`{name}`")
            if traced.is_made and not is_here:
                self._elsewhere[place] = absent_tensor(
                    f"`{name}` is set by a module that is on another rank, and is not on this one. Let the step keep "
                    f"it in an attribute of the LightningModule: `self.kept = {name}`."
                )
        self._undecided = []
        if numbers:
            rank_zero_warn(
                f"{', '.join(numbers)}: changed inside of modules that are placed whole, so right on their stage's "
                "rank alone, and changed once for each micro-batch. Keep such numbers in attributes of the "
                "LightningModule."
            )
        self.drop()
        stays = [change for change in found if change.place in self._elsewhere or not is_plain(change)]
        apply_changes(self.module, [*stays, *changes])

    def drop(self) -> None:
        """Throw away what runs have done."""
        if self._base is not None:
            self._base.put_back(self._base.before)
        self._base = None
        self._scope = None
        self._contents.clear()
        self._copies.clear()

    def _enter(self, scope: _Scope, known: _Scope) -> None:
        """Let attributes be those of ``scope``, which goes on from ``known``, or from what was before the batch."""
        if scope == self._scope:
            return
        if self._base is None:
            found = [(place, object_at(self.module, place)) for place in self._followed]
            self._base = Watch({place: owner for place, owner in found if hasattr(owner, "__dict__")}, self._ignored)
        elif self._scope is not None:
            self._contents[self._scope] = self._base.now()
        self._base.put_back(self._contents.get(known, self._base.before))
        if scope is not None and (scope != known or scope not in self._contents):
            self._copies |= copies_at(self.module, self._written)
        self._scope = scope

    # ---- what a trace sees ----

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Around a traced run of the step: what does it change, of anything?"""
        before = Watch(owners_in(self.module), self._ignored)
        # Writes to tensors of other objects are refused, so the copies are made where all can see that.
        copies = copies_at(self.module, Watch({ROOT: self.module}, self._ignored).tensors())
        self._learning = before, copies
        try:
            yield
            self._traced = []
            with without_torch_functions():
                for change in before.changes(before.now(), copies):
                    where, key = change.place[:-1], change.place[-1]
                    # Where a number becomes a tensor, `self.hits += tensor` writes into that from the next batch on.
                    if type(change.value) is Tensor and type(before.before[where].get(key)) in (int, float):
                        change = change._replace(is_written=True)
                    self._traced.append(_Traced(change, depends_on_module(change.value)))
            before.put_back(before.before)
            apply_changes(self.module, [traced.change for traced in self._traced if traced.is_once])
        finally:
            self._learning = None

    def learn(self, units: Mapping[str, bool]) -> None:
        """Follow what the last trace has seen change between modules, and note what changes inside of ``units``.

        Args:
            units: names of modules that are placed whole, and whether they are on this rank.
        """
        for traced in self._traced:
            place, value, is_written = traced.change
            name = in_words(place)
            inside = [is_here for unit, is_here in units.items() if f"{place[0]}.".startswith(f"{unit}.")]
            if not traced.is_once and name not in self.changed:
                self._undecided.append(traced._replace(is_here=inside[0] if inside else None))
            self.changed[name] = None
            if inside or traced.is_once:
                continue
            self._followed[owner_of(place)] = None
            if is_written:
                self._written[place] = None
            if type(value) in (int, bool):
                self.counts[name] = None
        self._traced = []

    def absent_shown(self) -> AbstractContextManager[None]:
        """Around a hook: what is on other ranks raises where it is used."""
        slots = [(*slot_at(self.module, place), absent) for place, absent in self._elsewhere.items()]
        return patched([slot for slot in slots if isinstance(slot[0], dict) and slot[2] is not None])


def _is_among(place: Place, changes: Iterable[Change]) -> bool:
    """Whether it, or what it is in, or something in it has changed."""
    return any(all(map(operator.eq, place, change.place)) for change in changes)
