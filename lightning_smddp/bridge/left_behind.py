"""What a step leaves in attributes of submodules, callbacks and their helpers, which a hook may read afterwards.

A module keeps its last attention map, a forward hook puts features into a dict, a layer counts its calls. In a pipeline
such code runs once for each micro-batch, and the values are on the rank of that stage alone. So what each run of a
stage leaves is noted; the notes of all micro-batches make up the batch's; and in hooks every rank sees it, tensors as
:class:`~lightning_smddp.pipeline.view.tensor.GlobalTensor`. Outside of hooks a rank keeps what its own code has set
last. The LightningModule's own attributes are kept by ``step_attributes.py``, but for those with tensors that the last
stage does not have::

    each micro-batch   watched: remember attributes -> run -> look: a Note by stage and owner -> undo numbers
    after the step     find_out: ranks gather what they have, and what the last stage lacks
                       share: numbers are set on every rank; tensors become GlobalTensors
    in a hook          shown: attributes have these tensors, until the hook returns
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_functions
from lightning_smddp.bridge.left_notes import Note, StepNotes, Trial
from lightning_smddp.bridge.left_reports import Reports, Shared, report
from lightning_smddp.bridge.owner_watch import (
    Found,
    OwnerWatch,
    ignored_of,
    list_at,
    owner_in_words,
    owners_in,
    set_at,
    value_at,
)
from lightning_smddp.bridge.step_attributes import AttrPath
from lightning_smddp.pipeline.capture.patches import set_within
from lightning_smddp.pipeline.capture.tracer import note_left
from lightning_smddp.pipeline.runtime.remote import RemoteTensor
from lightning_smddp.pipeline.runtime.replay import Run, active_run
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.pytree import tensors


@dataclass
class _Pass:
    """A run of the step on a micro-batch, with watches over owners by name."""

    index: int
    size: int
    weight: float
    watches: dict[str, OwnerWatch]
    static: dict[str, OwnerWatch]  # over those that no trace has seen change
    numbers: dict[str, list[Found]] = field(default_factory=dict)  # changes of those


class LeftBehind:
    """Keeps what steps of ``module`` leave with other objects.

    Attributes:
        changing: names of owners that a trace found to change, see :meth:`agree`. Of others only numbers are watched.
        is_learning: whether a trace runs.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str]) -> None:
        self.module = module
        self._ignored = ignored
        self.changing: dict[str, None] = {}
        self._owners: dict[str, Any] = {}
        self.is_learning = False
        self._is_off = False
        self._is_before_traces = False
        self._pass: _Pass | None = None
        self._notes = StepNotes()
        self._shown: list[tuple[str, AttrPath, Any]] = []  # what hooks see: owner, path and value
        self._static: dict[str, OwnerWatch] = {}  # over owners that are not `changing`, as they were last seen
        self._new: dict[str, None] = {}  # of them, those that have changed since all ranks agreed
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
        of_ranks = gather_json([*self.changing, *self._new], group, device)
        self.changing = {}
        for names in of_ranks:
            self.changing.update(dict.fromkeys(names))
        self._new = {}
        self._owners = owners_in(self.module, with_helpers=True)
        # Two names may be of one object: a callback's helper that is the module's, too. It is watched once.
        watched = {id(vars(self._owners[name])) for name in self.changing if name in self._owners}
        self._static = {}
        for name, owner in self._owners.items():
            attributes = id(vars(owner))
            if attributes not in watched:
                watched.add(attributes)
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
        names: Iterable[str] = self.changing
        static: dict[str, OwnerWatch] = {}
        if self.is_learning or self._is_before_traces:
            self._owners = owners_in(self.module, with_helpers=True)
            names = self._owners
        else:
            static = self._refreshed()
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
            if run is None or run.is_probe:
                return
            stage = run.plan.stage
            self._notes.add_run(stage, now.index, now.size, now.weight)
            # The last stage may set an attribute to a tensor of an earlier stage. It knows only the number of that
            # value in the trace, so each stage keeps what may be asked for, by number.
            if self.changing:
                self._notes.hold(stage, now.index, run.values.made_and_left())

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
        note = Note(now.index, now.size, now.weight)
        for change in found:
            note.add(change)
        stage = run.plan.stage
        self._notes.add(stage, name, note)
        if self._recorded is not None:
            recorded = self._recorded[stage, name] = {}
            for where, (_, after) in note.whole.values.items():
                recorded[where] = after

    @contextmanager
    def recorded(self) -> Iterator[Trial]:
        """Around a run for nothing of some rows at once: gives what it sets attributes to."""
        found: Trial = {}
        self._recorded = found
        try:
            yield found
        finally:
            self._recorded = None

    def aside(self) -> AbstractContextManager[None]:
        """Around other runs of the step: the notes are kept."""
        return self._notes.aside()

    def clear(self) -> None:
        """Forget what the micro-batches of the last step left; their arrays are freed with it."""
        self._notes.clear()

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
        self._reports = gather_json(report(self._notes, last_stage, self.module), group, device)
        for of_rank in self._reports:
            if of_rank["doubt"] is not None:
                doubt: str = of_rank["doubt"]
                return doubt
        return None

    def learn_counts(self, whole: Trial, parts: Sequence[Trial]) -> str | None:
        """Learn what integers count of runs of the batch at once, and of its micro-batches.

        Returns:
            What is wrong with one that counts neither rows nor calls.
        """
        return self._notes.learn_counts(whole, parts)

    def share(self, view: GlobalView) -> None:
        """Let all ranks have what :meth:`find_out` found, and prepare what hooks see. Collective."""
        reports, self._reports = self._reports, None
        if reports is None:
            return
        found = Reports(reports, self.module, self._notes, view)
        self._owners = owners_in(self.module, with_helpers=any("->" in name for name in self.changing))
        self._shown = []
        for name, where in found.places():
            # Tensors are numbered in the order in which they are made: all ranks make all of them, also for callbacks
            # that only other ranks have.
            value = found.share(name, where)
            if name in self._owners:
                self._take(name, where, value)
        self.clear()

    def _take(self, name: str, where: AttrPath, shared: Shared | None) -> None:
        """Set what is the same everywhere; keep for hooks what is on one rank."""
        if shared is None:
            self._shown.append((name, where, _unknown()))
            return
        own = vars(self._owners[name])
        value = shared.value()
        if shared.grows:
            list_at(own, where).extend(value)
        elif shared.tensors:
            self._shown.append((name, where, value))
        else:
            set_at(own, where, value)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around a hook, within the view."""
        # Outside of hooks an attribute has what this rank's own code has set last, which may be needed there: a cache.
        before = []
        for own, where, value in self._shown_places():
            before.append((own, where, value_at(own, where), value))
            set_at(own, where, value)
        try:
            yield
        finally:
            for own, where, was, value in reversed(before):
                if value_at(own, where) is value:  # else the hook has set it to something else
                    set_at(own, where, was)

    def settle(self) -> None:
        """After the run: what hooks saw is what there is."""
        for own, where, value in self._shown_places():
            set_at(own, where, value)
        self._shown = []

    def _shown_places(self) -> Iterator[tuple[dict[str, Any], AttrPath, Any]]:
        """Attributes, path and value of what hooks see, but for members of dicts that are there no more."""
        for name, where, value in self._shown:
            own = vars(self._owners[name])
            if len(where) == 1 or isinstance(own.get(where[0]), dict):
                yield own, where, value

    # ---- pieces ----

    def _watch(self, name: str) -> OwnerWatch:
        owner = self._owners[name]
        ignored = self._ignored  # of the LightningModule, whose name is empty
        if name:
            ignored = ignored_of(owner)
        return OwnerWatch(owner, ignored)


def _unknown() -> Tensor:
    """A tensor that raises where it is used: of an attribute whose value no rank can give."""
    return torch.empty(0, device="meta").as_subclass(RemoteTensor)
