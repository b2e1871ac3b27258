"""A training loader whose course through an epoch is noted, and can be taken again up to where it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_smddp._compat.loops import skip_indices, skips_indices, work_is_left
from lightning_smddp.resume.random_states import RandomStates, from_plain, to_plain
from lightning_smddp.resume.worker_states import WorkerStates, keeps_workers
from lightning_smddp.wording import counted


@dataclass
class Course:
    """How far a loader's iterator has come, and the random numbers it went by.

    Attributes:
        count: batches that it has given.
        created: random states before the iterator was made.
        first: before its first batch was asked for, which is when most samplers draw; None before that.
        latest: before the latest batch was asked for.
        begin: samples of each replica that an earlier run with another layout has left out in front.
        workers: for workers that live through epochs, their random states before this iterator's first batches.
        workers_live: whether they were at work before it.
        workers_now: their states after their last batches.
        work_left: whether they have been asked for more batches than they have given.
        exhausted: whether there are no more.
        uncertain: whether that was so before this iterator, and some have not said yet what came of it.
    """

    count: int = 0
    created: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    begin: int = 0
    workers: dict[int, bytes] = field(default_factory=dict)
    workers_live: bool = False
    workers_now: dict[int, bytes] = field(default_factory=dict)
    work_left: bool = False
    exhausted: bool = False
    uncertain: bool = False

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        states = {"created": self.created, "first": self.first, "latest": self.latest}
        return {
            "count": self.count,
            "begin": self.begin,
            "workers": _to_tensors(self.workers),
            "workers_live": self.workers_live,
            "workers_now": _to_tensors(self.workers_now),
            "work_left": self.work_left,
            "exhausted": self.exhausted,
            "uncertain": self.uncertain,
            **{name: None if state is None else to_plain(state) for name, state in states.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Course:
        """The inverse of :meth:`to_plain`."""
        states = {name: plain[name] and from_plain(plain[name]) for name in ("created", "first", "latest")}
        workers = {name: _from_tensors(plain[name]) for name in ("workers", "workers_now")}
        return cls(**{**plain, **states, **workers})


def _to_tensors(states: Mapping[int, bytes]) -> list[list[Any]]:
    return [[worker, torch.frombuffer(bytearray(state), dtype=torch.uint8)] for worker, state in sorted(states.items())]


def _from_tensors(plain: list[list[Any]]) -> dict[int, bytes]:
    return {int(worker): state.numpy().tobytes() for worker, state in plain}


_OWN = {
    "loader",
    "states",
    "course",
    "holds",
    "workers",
    "before_fetch",
    "_resumed",
    "_ahead",
    "_workers_start",
    "_leaves_work",
}


class RecordedLoader:
    """Stands for ``loader`` where Lightning iterates over it; all else is the loader's own.

    Args:
        loader: a ``DataLoader`` or any iterable.
        states: the run's random numbers.
        before_fetch: called with the random states before each batch is asked for.
    """

    course: Course
    holds: bool  # iterate over nothing for now

    def __init__(
        self, loader: Any, states: RandomStates, before_fetch: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self.loader, self.states, self.course, self.holds = loader, states, Course(), False
        self.before_fetch = before_fetch
        self.workers = WorkerStates(loader) if keeps_workers(loader) else None
        self._resumed: Course | None = None
        self._ahead = 0
        self._workers_start: dict[int, bytes] = {}
        self._leaves_work = False  # of an earlier epoch, to workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            vars(self)[name] = value
        else:  # Lightning sets `_iterator`
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def resume(self, course: Course, ahead: int) -> None:
        """Let the next iterator begin where ``course`` was, ``ahead`` batches before."""
        self._resumed, self._ahead = course, ahead

    def begin_anew(self, course: Course) -> None:
        """Let the next iterator be the first one after that of ``course``."""
        self._workers_start = course.workers_now

    def now(self) -> Course:
        """The course so far, which changes no more."""
        if self.workers is None:
            return replace(self.course)
        return replace(
            self.course,
            workers=dict(self.course.workers),
            workers_now=dict(self.workers.latest),
            work_left=work_is_left(self.loader) and not self.course.exhausted,
            uncertain=self.course.uncertain and len(self.workers.seen) < self.loader.num_workers,
        )

    def close(self) -> None:
        """Leave the loader as it was."""
        if self.workers is not None:
            self.workers.close()

    def __iter__(self) -> Iterator[Any]:
        if self.holds:
            return iter(())
        if self._resumed is not None:
            course, self._resumed = self._resumed, None
            return self._continue(course)
        self._leaves_work = self.now().work_left
        self.course = Course(created=self.states.capture())
        return self._iterator()

    def _continue(self, course: Course) -> Iterator[Any]:
        """An iterator that has given ``course.count - ahead`` batches already, like the one that has."""
        if course.created is not None:  # else there is nothing to take again
            self.states.restore(course.created)
        self._workers_start = course.workers if course.workers_live else {}
        self._leaves_work = False
        self.course = Course(created=self.states.capture(), begin=course.begin)
        if course.begin:
            _leave_out(self.loader, course.begin)
        iterator = self._iterator()
        if course.first is not None:
            self.states.restore(course.first)
        iterator.skip(course.count - self._ahead)
        if self._ahead and course.latest is not None:
            self.states.restore(course.latest)
        return iterator

    def _iterator(self) -> _RecordedIterator:
        """A new one of the loader's, recorded in the course."""
        if self.workers is None:
            return _RecordedIterator(self, iter(self.loader))
        start, self._workers_start = self._workers_start, {}
        self.course.workers = dict(start or self.workers.latest)
        self.course.workers_live = bool(self.course.workers)
        self.course.uncertain = self._leaves_work
        return _RecordedIterator(self, self.workers.iterate_from(start) if start else self.workers.iterate())


class _RecordedIterator(Iterator[Any]):
    def __init__(self, owner: RecordedLoader, iterator: Iterator[Any]) -> None:
        self._owner, self._course, self._iterator = owner, owner.course, iterator

    def __next__(self) -> Any:
        course, now = self._course, self._owner.states.capture()
        self._owner.before_fetch(now)
        course.latest = now
        if course.first is None:
            course.first = now
        try:
            batch = self._fetch(self._iterator)
        except StopIteration:
            course.exhausted = True
            raise
        course.count += 1
        return batch

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        workers = self._owner.workers
        return next(iterator) if workers is None else workers.told(next(iterator), self._course.workers)

    def skip(self, count: int) -> None:
        """Go on as if ``count`` batches had been given. Loads them where the random numbers of workers go by that."""
        if count > 0:
            self._course.first = self._owner.states.capture()
        by_index = skips_indices(self._owner.loader, self._iterator)
        skip = skip_indices if by_index else self._fetch
        for done in range(count):
            try:
                skip(self._iterator)
            except StopIteration:
                raise ValueError(
                    f"The checkpoint was saved after {counted(count, 'batch')} of an epoch, but the training data "
                    "has only "
                    f"{done}. Resume with the data that it was saved with."
                ) from None
        self._course.count = count


class _From:
    """A sampler without its first samples, for one iteration; then ``owner`` has its own again."""

    def __init__(self, owner: Any, begin: int) -> None:
        self.owner, self.sampler, self.begin = owner, owner.sampler, begin
        owner.sampler = self

    def __iter__(self) -> Iterator[int]:
        self.owner.sampler = self.sampler
        return itertools.islice(iter(self.sampler), self.begin, None)

    def __len__(self) -> int:
        return len(self.sampler)


def _leave_out(loader: Any, samples: int) -> None:
    """Let the next iteration begin ``samples`` later."""
    _From(loader.batch_sampler, samples)
