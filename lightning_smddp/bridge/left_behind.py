"""What a step leaves in attributes of submodules, callbacks and their helpers, which a hook may read afterwards.

A module keeps its last attention map, a forward hook puts features into a dict, a layer counts its calls. In a pipeline
such code runs once for each micro-batch, and the values are on the rank of that stage alone. So what each run of a
stage leaves is noted; the notes of all micro-batches make up the batch's; and in hooks every rank sees it, tensors as
:class:`~lightning_smddp.pipeline.view.tensor.GlobalTensor`. Outside of hooks a rank keeps what its own code has set
last. The LightningModule's own attributes are kept by ``step_attributes.py``, but for those with tensors that the last
stage does not have::

    each micro-batch   watched: remember attributes -> run -> look: a _Note by stage and owner -> undo numbers
    after the step     find_out: ranks gather what they have, and what the last stage lacks
                       share: numbers are set on every rank; tensors become GlobalTensors
    in a hook          shown: attributes have these tensors, until the hook returns
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_functions
from lightning_smddp.bridge.attribute_counts import UNKNOWN, Moved, settle_counts, unsettled_counts
from lightning_smddp.bridge.combined_changes import combine_changes
from lightning_smddp.bridge.owner_watch import (
    Found,
    OwnerWatch,
    has_remote,
    ignored_of,
    list_at,
    owner_in_words,
    owners_in,
    path_from_json,
    path_to_json,
    set_at,
    value_at,
)
from lightning_smddp.bridge.step_attributes import MISSING, AttrPath, Changes, detached, in_words
from lightning_smddp.pipeline.capture.patches import set_within
from lightning_smddp.pipeline.capture.tracer import note_left
from lightning_smddp.pipeline.runtime.remote import RemoteTensor
from lightning_smddp.pipeline.runtime.replay import Run, active_run
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.pipeline.view.tensor import GlobalTensor, Memory
from lightning_smddp.wire.encode import UnknownTypeError, decode, dtype_of, encode, name_of_dtype
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.pytree import tensors

Trial: TypeAlias = dict[tuple[int, str], dict[AttrPath, Any]]  # what attributes are set to, by stage and owner

_HELD = "held"  # among names of owners: values by number


@dataclass
class _Note:
    """What a stage's run of one micro-batch left with one owner: what is whole there, and what is not, by path."""

    index: int
    size: int
    weight: float
    whole: Changes = field(default_factory=Changes)
    remote: dict[AttrPath, _Wanted] = field(default_factory=dict)


@dataclass
class _Pass:
    """A run of the step on a micro-batch, with watches over owners by name."""

    index: int
    size: int
    weight: float
    watches: dict[str, OwnerWatch]
    static: dict[str, OwnerWatch]  # over those that no trace has seen change
    numbers: dict[str, list[Found]] = field(default_factory=dict)  # changes of those


@dataclass(frozen=True)
class _Offer:
    """A value that a stage has, as ``encode`` gives it, with path, shape and dtype of each tensor."""

    stage: int
    rank: int
    grows: bool
    plain: Any
    specs: list[Any]


@dataclass(frozen=True)
class _Wanted:
    """A value of which the last stage knows only which traced values its tensors are."""

    grows: bool
    plain: Any
    values: list[Any]  # path and number of each

    @classmethod
    def of(cls, change: Found) -> _Wanted:
        found: dict[tuple[str, ...], Tensor] = {}
        try:
            plain = encode(change.after, found)
        except UnknownTypeError:
            return cls(change.grows, None, [])
        values = [[list(path), getattr(remote, "value", -1)] for path, remote in found.items()]
        return cls(change.grows, plain, values)


class LeftBehind:
    """Keeps what steps of ``module`` leave with other objects.

    Attributes:
        changing: names of owners that a trace found to change, see :meth:`agree`. Of others only numbers are watched.
        is_learning: whether a trace runs.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str]) -> None:
        self.module, self._ignored = module, ignored
        self.changing: dict[str, None] = {}
        self._owners: dict[str, Any] = {}
        self.is_learning = False
        self._is_off = False
        self._is_before_traces = False
        self._pass: _Pass | None = None
        self._notes: dict[tuple[int, str], dict[int, _Note]] = defaultdict(dict)  # by stage and owner, by micro-batch
        self._held: dict[int, dict[int, _Note]] = defaultdict(dict)  # by stage: values for later stages' notes
        self._per_row: dict[str, dict[AttrPath, bool]] = defaultdict(dict)
        self._shown: list[tuple[str, AttrPath, Any]] = []
        self._static: dict[str, OwnerWatch] = {}  # over owners that are not `changing`, as they were last seen
        self._new: dict[str, None] = {}  # of them, those that have changed since all ranks agreed
        self._sizes: dict[int, dict[int, tuple[int, float]]] = defaultdict(dict)  # by stage: of its micro-batches
        self._settled: dict[tuple[int, str], dict[AttrPath, int]] = defaultdict(dict)  # what a trial has shown
        self._recorded: Trial | None = None
        self._reports: list[Any] | None = None  # of all ranks
        self._warned: set[tuple[str, str]] = set()  # owners and attributes that :meth:`_warn_of_writes` has named

    # ---- runs of the step ----

    def learning(self) -> AbstractContextManager[None]:
        """Around a trace: all owners are watched, to find those that change."""
        return set_within(self, "is_learning", True)

    def before_traces(self) -> AbstractContextManager[None]:
        """Around a trial before the first trace: all owners are watched, so that nothing of it stays."""
        return set_within(self, "_is_before_traces", True)

    def agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks watch what any of them found to change: callbacks may be on some ranks only. Collective."""
        found = gather_json([*self.changing, *self._new], group, device)
        self.changing, self._new = dict.fromkeys(name for part in found for name in part), {}
        self._owners = owners_in(self.module, with_helpers=True)
        watched = {id(vars(self._owners[name])) for name in self.changing if name in self._owners}
        # Two names may be of one object: a callback's helper that is the module's, too. It is watched once.
        self._static = {}
        for name, owner in self._owners.items():
            if id(vars(owner)) not in watched:
                watched.add(id(vars(owner)))
                self._static[name] = self._watch(name)

    def has_news(self) -> bool:
        """Whether owners have changed, since all ranks agreed, that no trace saw change."""
        return bool(self._new)

    def unwatched(self) -> AbstractContextManager[None]:
        """Around a step that every rank runs as a whole, once: what it does stays done."""
        return set_within(self, "_is_off", True)

    @contextmanager
    def watched(self, index: int, size: int, weight: float) -> Iterator[None]:
        """Around one run of the step on micro-batch ``index``: what it does to numbers and lists is undone."""
        if self._is_off:
            yield
            return
        # A trace watches all owners. Later runs look at those that a trace has seen change, and at numbers of others.
        if self.is_learning or self._is_before_traces:
            self._owners = owners_in(self.module, with_helpers=True)
            names, static = dict.fromkeys(self._owners), {}
        else:
            names, static = self.changing, self._refreshed()
        watches = {name: self._watch(name) for name in names if name in self._owners}
        self._pass = now = _Pass(index, size, weight, watches, static)
        try:
            yield
        finally:
            self._pass = None
            with without_torch_functions():
                for name, watch in watches.items():
                    watch.restore(of_members_alone=not name)
                for name, found in now.numbers.items():
                    for change in found:
                        now.static[name].undo(change)

    def _refreshed(self) -> dict[str, OwnerWatch]:
        """Watches over owners that do not change in steps, as they are now, behind hooks and trials."""
        with without_torch_functions():
            for name, watch in self._static.items():
                if watch.is_touched():
                    self._static[name] = OwnerWatch(watch.owner, watch.ignored)
        return self._static

    def look(self) -> None:
        """Note what has changed. At the end of the step's code, or where a stage leaves it."""
        now = self._pass
        if now is None:
            return
        run = active_run()
        with without_torch_functions():
            # The LightningModule has the empty name. Its attributes are `step_attributes.py`'s, but for members of
            # dicts. An owner that no trace saw change costs one comparison until it is touched.
            for name, watch in now.static.items():
                if not watch.is_touched():
                    continue
                self._warn_of_writes(run, name, watch)
                found = [change for change in watch.numbers() if name or change.is_member]
                if found:
                    self._new[name] = None
                    now.numbers[name] = found
            for name, watch in now.watches.items():
                self._warn_of_writes(run, name, watch)
                found = [change for change in watch.found() if name or change.is_member]
                if found and self.is_learning:
                    self.changing[name] = None
                    note_left(tensors([change.after for change in found]))
                self._keep(run, name, now, found)
            for name, found in now.numbers.items():
                self._keep(run, name, now, found)
            if run is not None and not run.is_probe:
                self._sizes[run.plan.stage][now.index] = (now.size, now.weight)
            # The last stage may set an attribute to a tensor of an earlier stage. It knows only the number of that
            # value in the trace, so each stage keeps what may be asked for, by number.
            if run is not None and self.changing and not run.is_probe:
                held = {(value,): (None, tensor.detach()) for value, tensor in run.values.made_and_left().items()}
                self._held[run.plan.stage][now.index] = _Note(now.index, now.size, now.weight, Changes(values=held))

    def _warn_of_writes(self, run: Run | None, name: str, watch: OwnerWatch) -> None:
        """Say which tensors are written that no trace saw written: those of the LightningModule itself are followed."""
        if not name or self.is_learning or run is None or run.is_probe:
            return
        for attribute in watch.written():
            if (name, attribute) in self._warned:
                continue
            self._warned.add((name, attribute))
            warnings.warn(
                f"The tensor `{owner_in_words(name)}.{attribute}` is written in place since this batch, though not "
                "when the step was traced: for each micro-batch, and on some ranks only. Its values are not one "
                "process's from here on. Write it from the first batch on, so that the step runs as a whole, or keep "
                "it in an attribute of the LightningModule itself.",
                stacklevel=2,
            )

    def _keep(self, run: Run | None, name: str, now: _Pass, found: Sequence[Found]) -> None:
        if run is None or run.is_probe:
            return
        note = _note(now, found)
        self._notes[run.plan.stage, name][note.index] = note
        if self._recorded is not None:
            after = {where: value for where, (_, value) in note.whole.values.items()}
            self._recorded[run.plan.stage, name] = after

    @contextmanager
    def recorded(self) -> Iterator[Trial]:
        """Around a run for nothing of some rows at once: gives what it sets attributes to."""
        found: Trial = {}
        self._recorded = found
        try:
            yield found
        finally:
            self._recorded = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around other runs of the step: the notes are kept."""
        notes, held, sizes = dict(self._notes), dict(self._held), dict(self._sizes)
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

    # ---- after the step ----

    def find_out(self, last_stage: int, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """Find out together what the batch's step has left where, for :meth:`share`. Collective.

        Nothing is sent where no trace found anything.

        Returns:
            Of which number a trial has to show first what it counts: the same on every rank.
        """
        self._reports = None
        if not self.changing:
            return None
        self._reports = gather_json(self._report(last_stage), group, device)
        return next((report["doubt"] for report in self._reports if report["doubt"] is not None), None)

    def learn_counts(self, whole: Trial, parts: Sequence[Trial]) -> str | None:
        """Learn what integers count of runs of the batch at once, and of its micro-batches.

        Returns:
            What is wrong with one that counts neither rows nor calls.
        """
        first = None
        for stage, name in self._notes:
            unknown, settled = self._unknown_counts(stage, name), self._settled[stage, name]
            of_whole = whole.get((stage, name), {})
            of_parts = [part.get((stage, name), {}) for part in parts]
            problem = settle_counts(unknown, of_whole, of_parts, self._per_row[name], settled, owner_in_words(name))
            first = first or problem
        return first

    def _unknown_counts(self, stage: int, name: str) -> list[Moved]:
        changes = [note.whole for note in self._ordered(stage, name)]
        return unsettled_counts(changes, self._per_row[name], self._settled[stage, name], members=True)

    def _doubt(self) -> str | None:
        for stage, name in self._notes:
            for moved in self._unknown_counts(stage, name):
                return UNKNOWN + in_words(owner_in_words(name), moved.where)
        return None

    def share(self, view: GlobalView) -> None:
        """Let all ranks have what :meth:`find_out` found, and prepare what hooks see. Collective."""
        reports, self._reports = self._reports, None
        if reports is None:
            return
        # A value that the last stage names only by number is built of what other stages hold; else the value of the
        # latest stage that left one is taken, as in one process the latest assignment stays.
        offers: dict[tuple[str, AttrPath], list[_Offer]] = defaultdict(list)
        held: dict[int, _Offer] = {}
        wanted: dict[tuple[str, AttrPath], _Wanted] = {}
        for rank, report in enumerate(reports):
            for name, key, stage, *rest in report["offers"]:
                offers[name, path_from_json(key, self.module)].append(_Offer(stage, rank, *rest))
            for name, key, *rest in report["wanted"]:
                wanted[name, path_from_json(key, self.module)] = _Wanted(*rest)
            held |= {value: _Offer(stage, rank, False, None, [spec]) for value, stage, spec in report["held"]}
        owners = self._owners = owners_in(self.module, with_helpers=any("->" in name for name in self.changing))
        self._shown = []
        for name, where in dict.fromkeys([*offers, *wanted]):
            # Tensors are numbered in the order in which they are made: all ranks make all of them.
            want = wanted.get((name, where))
            if want is not None:
                made, plain, grows = self._of_held(want, held, where, view), want.plain, want.grows
            else:
                chosen = max(offers[name, where], key=operator.attrgetter("stage"))
                made, plain, grows = self._of_offer(name, where, chosen, view), chosen.plain, chosen.grows
            if name not in owners:
                continue  # a callback of other ranks
            if made is None:
                self._shown.append((name, where, _unknown()))
            else:
                self._take(name, where, decode(plain, made), bool(made), grows)
        self.clear()

    def _take(self, name: str, where: AttrPath, value: Any, has_tensors: bool, grows: bool) -> None:
        """Set what is the same everywhere; keep for hooks what is on one rank."""
        own = vars(self._owners[name])
        if grows:
            list_at(own, where).extend(value)
        elif has_tensors:
            self._shown.append((name, where, value))
        else:
            set_at(own, where, value)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around a hook, within the view."""
        put: list[tuple[dict[str, Any], AttrPath, Any, Any]] = []
        for name, where, value in self._shown:
            own = vars(self._owners[name])
            if len(where) == 1 or isinstance(own.get(where[0]), dict):
                put.append((own, where, value_at(own, where), value))
                set_at(own, where, value)
        try:
            yield
        finally:
            for own, where, before, value in reversed(put):
                if value_at(own, where) is value:  # else the hook has set it to something else
                    set_at(own, where, before)

    def settle(self) -> None:
        """After the run: what hooks saw is what there is."""
        for name, where, value in self._shown:
            own = vars(self._owners[name])
            if len(where) == 1 or isinstance(own.get(where[0]), dict):
                set_at(own, where, value)
        self._shown = []

    # ---- pieces ----

    def _watch(self, name: str) -> OwnerWatch:
        owner = self._owners[name]
        ignored = self._ignored  # of the LightningModule, whose name is empty
        if name:
            ignored = ignored_of(owner)
        return OwnerWatch(owner, ignored)

    def _report(self, last_stage: int) -> dict[str, Any]:
        """What this rank's stages have, and what the last one would like to have, as JSON."""
        doubt = self._doubt()
        if doubt is not None:
            return {"doubt": doubt, "offers": [], "wanted": [], "held": []}
        offers: dict[tuple[str, AttrPath], list[Any]] = {}
        wanted: dict[tuple[str, AttrPath], list[Any]] = {}
        for stage, name in sorted(self._notes):
            ordered = self._ordered(stage, name)
            for where, (grows, value) in self._of_stage(stage, name).items():
                found: dict[tuple[str, ...], Tensor] = {}
                try:
                    plain = encode(value, found)
                except UnknownTypeError:
                    wanted[name, where] = [grows, None, []]
                    continue
                offers[name, where] = [stage, grows, plain, [_spec(path, tensor) for path, tensor in found.items()]]
            if stage != last_stage:
                continue
            for where, want in ordered[-1].remote.items():
                agreed = None  # where micro-batches take several paths, and the numbers mean several values
                if all(note.remote.get(where) == want for note in ordered):
                    agreed = want.plain
                wanted[name, where] = [want.grows, agreed, want.values]
        held = []
        for stage, notes in self._held.items():
            for (value,), (_, tensor) in self._combined(_HELD, [notes[index] for index in sorted(notes)]).items():
                held.append([value, stage, _spec((), tensor)])
        return {"doubt": None, "offers": self._keyed(offers), "wanted": self._keyed(wanted), "held": held}

    def _ordered(self, stage: int, name: str) -> list[_Note]:
        """Of all micro-batches, also of those that have changed nothing."""
        notes, sizes = self._notes[stage, name], self._sizes[stage]
        return [notes.get(index) or _Note(index, *sizes[index]) for index in sorted(sizes)]

    def _of_stage(self, stage: int, name: str) -> dict[AttrPath, tuple[bool, Any]]:
        """What a stage has left with an owner, by path, and whether a list gains it."""
        found = self._combined(name, self._ordered(stage, name))
        return found | {where: (False, value) for where, value in self._settled[stage, name].items()}

    def _keyed(self, found: dict[tuple[str, AttrPath], list[Any]]) -> list[list[Any]]:
        keyed = []
        for (name, where), rest in found.items():
            keys = path_to_json(where, self.module)
            if keys is not None:
                keyed.append([name, keys, *rest])
        return keyed

    def _combined(self, name: str, notes: Sequence[_Note]) -> dict[AttrPath, tuple[bool, Any]]:
        """What notes of all micro-batches come to, by path, and whether a list gains it."""
        is_held, last = name == _HELD, notes[-1].whole
        changes = [_without_repeats(note.whole, last, is_held) for note in notes[:-1]]
        changes.append(last)
        sizes, weights = [note.size for note in notes], [note.weight for note in notes]
        appended, values = combine_changes(changes, sizes, weights, self._per_row[name])
        combined: dict[AttrPath, tuple[bool, Any]] = {where: (True, tail) for where, tail in appended}
        return combined | {where: (False, value) for where, value in values.items()}

    def _of_offer(self, name: str, where: AttrPath, chosen: _Offer, view: GlobalView) -> dict[tuple[str, ...], Tensor]:
        local: dict[tuple[str, ...], Tensor] = {}
        if chosen.rank == view.rank:
            _, value = self._of_stage(chosen.stage, name)[where]
            encode(value, local)
        made: dict[tuple[str, ...], Tensor] = {}
        for spec in chosen.specs:
            path = tuple(spec[0])
            made[path] = _global(view, chosen.rank, spec, local.get(path))
        return made

    def _of_held(
        self, want: _Wanted, held: dict[int, _Offer], where: AttrPath, view: GlobalView
    ) -> dict[tuple[str, ...], Tensor] | None:
        """Tensors by path; None where no stage has kept one."""
        if want.plain is None or any(value not in held for _, value in want.values):
            return None
        made: dict[tuple[str, ...], Tensor] = {}
        for path, value in want.values:
            source, local = held[value], None
            if source.rank == view.rank:
                notes = self._held[source.stage]
                renamed = [_only(notes[index], (value,), where) for index in sorted(notes)]
                _, local = self._combined(_HELD, renamed)[where]
            made[tuple(path)] = _global(view, source.rank, source.specs[0], local)
        return made


# ---- changes ---------------------------------------------------------------------------------------------------------


def without_remote(changes: Changes) -> Changes:
    """``changes`` but for values with tensors of other stages."""
    values = {name: pair for name, pair in changes.values.items() if not has_remote(pair[1])}
    return replace(changes, values=values)


def _note(now: _Pass, found: Sequence[Found]) -> _Note:
    note = _Note(now.index, now.size, now.weight)
    for change in found:
        if has_remote(change.after):
            note.remote[change.where] = _Wanted.of(change)
        elif change.grows:
            note.whole.appended[change.where] = detached(change.after)
        else:
            before = change.before
            if before is MISSING:
                before = None
            note.whole.values[change.where] = (before, detached(change.after))
    return note


def _only(note: _Note, where: AttrPath, name: AttrPath) -> _Note:
    """The change at ``where`` alone, under another name, by which it may be a loss."""
    values = {}
    if where in note.whole.values:
        values[name] = note.whole.values[where]
    return _Note(note.index, note.size, note.weight, Changes(values=values))


def _without_repeats(changes: Changes, last: Changes, is_held: bool) -> Changes:
    """``changes`` without tensors that later micro-batches made once more: caches, reparametrized weights.

    What modules make of other rows is something else, but for zeros.
    """
    values = {}
    for where, (before, after) in changes.values.items():
        later = last.values.get(where, (None, None))[1]
        if isinstance(after, Tensor) and isinstance(later, Tensor) and after.dim() and after.shape == later.shape:
            is_known = isinstance(before, Tensor) and before.shape == after.shape
            if (is_known or (is_held and bool(later.any()))) and torch.equal(after, later):
                continue
        values[where] = (before, after)
    return Changes(changes.appended, values)


def _unknown() -> Tensor:
    """A tensor that raises where it is used: of an attribute whose value no rank can give."""
    return torch.empty(0, device="meta").as_subclass(RemoteTensor)


# ---- messages --------------------------------------------------------------------------------------------------------


def _spec(path: Sequence[str], tensor: Tensor) -> list[Any]:
    return [list(path), list(tensor.shape), name_of_dtype(tensor.dtype)]


def _global(view: GlobalView, home: int, spec: Sequence[Any], local: Tensor | None) -> GlobalTensor:
    _, shape, dtype = spec
    with torch.inference_mode(False):  # it stays when a validation is over
        pattern = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        values = None  # on ranks that do not have it
        if local is not None:
            values = local.detach().clone(memory_format=torch.contiguous_format)
        return GlobalTensor(view, home, pattern, values, Memory())
