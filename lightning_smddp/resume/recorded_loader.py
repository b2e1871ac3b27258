"""A training loader whose course through an epoch is noted, and can be taken again up to where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_smddp._compat.loops import skip_indices, skips_indices
from lightning_smddp.resume.random_states import RandomStates, from_plain, to_plain
from lightning_smddp.wording import counted

_STATES = ("created", "first", "latest")


@dataclass
class Course:
    """How far a loader's iterator has come, and the random numbers it went by.

    Attributes:
        count: batches that it has given.
        created: random states before the iterator was made; None if there was none.
        first: before its first batch was asked for, which is when most samplers draw; None before that.
        latest: before the latest batch was asked for.
        workers_live: whether workers that live through epochs were at work before it.
    """

    count: int = 0
    created: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    workers_live: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Tensors, numbers and strings, for a checkpoint."""
        plain: dict[str, Any] = {"count": self.count, "workers_live": self.workers_live}
        for name in _STATES:
            state = getattr(self, name)
            if state is not None:
                state = to_plain(state)
            plain[name] = state
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Course:
        """The inverse of :meth:`to_plain`; of what earlier versions have noted beside it, nothing is taken."""
        course = cls(plain["count"], workers_live=plain["workers_live"])
        for name in _STATES:
            if plain[name] is not None:
                setattr(course, name, from_plain(plain[name]))
        return course


def keeps_workers(loader: Any) -> bool:
    """Whether its workers live through epochs."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


# All other attributes are the wrapped loader's, whether they are read or set.
_OWN = {"loader", "states", "course", "holds", "before_fetch", "_resumed", "_ahead", "_had_workers", "_starts_workers"}


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
        self.loader = loader
        self.states = states
        self.course = Course()
        self.holds = False
        self.before_fetch = before_fetch
        self._resumed: Course | None = None
        self._ahead = 0
        self._had_workers = False  # in the unbroken run, before the next iterator
        self._starts_workers = True  # the next iterator, if it needs any

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
        self._had_workers = course.created is not None

    def now(self) -> Course:
        """The course so far, which changes no more."""
        return replace(self.course)

    def __iter__(self) -> Iterator[Any]:
        if self.holds:
            return iter(())
        if self._resumed is not None:
            course, self._resumed = self._resumed, None
            return self._continue(course)
        return self._iterator()

    def _continue(self, course: Course) -> Iterator[Any]:
        """An iterator that has given ``course.count - ahead`` batches already, like the one that has."""
        # The unbroken run had three moments at which random numbers decide, and each is made again with the states
        # that were noted then:
        #   created: the iterator is made      some samplers draw their order here, and the loader its workers' seed
        #   first:   its first batch is asked  most samplers draw here
        #   latest:  its last batch is asked   only if that one comes again, as it was fetched and not yet trained
        if course.created is not None:
            self.states.restore(course.created)
        self._had_workers = course.workers_live
        iterator = self._iterator()
        if course.first is not None:
            self.states.restore(course.first)
        iterator.skip(course.count - self._ahead)
        if self._ahead and course.latest is not None:
            self.states.restore(course.latest)
        return iterator

    def _iterator(self) -> _RecordedIterator:
        """A new one of the loader's, recorded in the course."""
        # Workers that live through epochs: `lives` is whether the unbroken run had them before this iterator. In a
        # resumed run the first iterator of the process has to start them all the same.
        lives = self._had_workers and keeps_workers(self.loader)
        self.course = Course(created=self.states.capture(), workers_live=lives)
        if lives and self._starts_workers:
            iterator = _iterate_without_drawing(self.loader)
        else:
            iterator = iter(self.loader)
        self._had_workers = True
        self._starts_workers = False
        return _RecordedIterator(self, iterator)


def _iterate_without_drawing(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator whose workers are started, where the unbroken run's were there already.

    Starting them takes a seed from the generator by which the sampler draws next. Here it comes from a copy of that
    generator, so that samples have the order of the unbroken run.
    """
    # unbroken run:  workers start (a seed is drawn) | epoch 1 | epoch 2: workers are there, nothing is drawn
    # resumed run:   workers start in the middle of epoch 2, where a seed would be drawn that the other run did not draw
    original = loader.generator
    if original is None:
        state = torch.get_rng_state()
    else:
        state = original.get_state()
    copy = torch.Generator()
    copy.set_state(state)
    loader.generator = copy
    try:
        return iter(loader)
    finally:
        loader.generator = original


class _RecordedIterator(Iterator[Any]):
    def __init__(self, owner: RecordedLoader, iterator: Iterator[Any]) -> None:
        self._owner = owner
        self._course = owner.course
        self._iterator = iterator

    def __next__(self) -> Any:
        # Taken before the batch, as a checkpoint that lies in its training goes on with this very batch.
        now = self._owner.states.capture()
        self._owner.before_fetch(now)  # before `course` changes: what it notes is the course up to here
        course = self._course
        course.latest = now
        if course.first is None:
            course.first = now
        batch = next(self._iterator)
        course.count += 1
        return batch

    def skip(self, count: int) -> None:
        """Go on as if ``count`` batches had been given. Loads them where the random numbers of workers go by that."""
        if count > 0:
            self._course.first = self._owner.states.capture()
        by_index = skips_indices(self._owner.loader, self._iterator)
        for done in range(count):
            try:
                if by_index:
                    skip_indices(self._iterator)
                else:
                    next(self._iterator)
            except StopIteration:
                raise ValueError(
                    f"The checkpoint was saved after {counted(count, 'batch')} of an epoch, but the training data "
                    f"has only {done}. Resume with the data that it was saved with."
                ) from None
        self._course.count = count
