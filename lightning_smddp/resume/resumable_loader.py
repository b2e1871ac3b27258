"""A training loader that Lightning can save and restore, by its protocol of stateful loaders, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import Dataset, Sampler
from typing_extensions import override

from lightning_smddp._compat.trainer import skip_batch
from lightning_smddp.seeding import Generators, is_generator, set_state, state_of
from lightning_smddp.wording import counted

# All other attributes are the loader's, whether they are read or set: Lightning sets `_iterator` and `worker_init_fn`.
_OWN = {"_course", "_saved"}
_DEPTH = 4  # of a sampler in a batch sampler in Lightning's wrapper, which has one in a dataset


class RandomStates:
    """Python's, numpy's and torch's random numbers, and those of generators that loaders keep.

    Args:
        device: this rank's, whose generator counts if it is a CUDA device.

    Attributes:
        of_loaders: the generators that they keep.
        pending: what a resumed run goes on from when it trains: until then loaders give nothing. None in other runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.pending: dict[str, Any] | None = None
        self._generators = Generators(torch.nn.Module(), device)
        self.of_loaders: list[Any] = []

    def look_into(self, thing: Any, depth: int = _DEPTH) -> None:
        """Find the generators among the attributes of a loader, and of samplers and datasets in it."""
        # In the order of names, so that each has the same place in the run that saves and in the one that resumes.
        for _, value in sorted(getattr(thing, "__dict__", {}).items()):
            if is_generator(value):
                self.of_loaders.append(value)
            elif isinstance(value, (Sampler, Dataset)) and depth:
                self.look_into(value, depth - 1)

    def capture(self) -> dict[str, Any]:
        """All states as they are: tensors, numbers, strings, and tuples, lists and dicts of them."""
        own = [_plain(state_of(generator)) for generator in self.of_loaders]
        return {"run": [_plain(state) for state in self._generators.states()], "loaders": own}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back a :meth:`capture`."""
        self._generators.restore(state["run"])
        for generator, own in zip(self.of_loaders, state["loaders"], strict=False):
            set_state(generator, own)


def _plain(state: Any) -> Any:
    """Lists for numpy's arrays, which it takes as well."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class ResumableLoader:
    """Stands for ``loader`` in the Trainer, also for ``isinstance``. Its state is how it got where it is.

    An iterator that has given ``n`` batches is made again with the random numbers of its begin, leaves out ``n``
    batches, and changes nothing else: random numbers go on as they were before.

    Args:
        loader: a ``DataLoader``, or any iterable.
        states: the run's random numbers.
    """

    __class__ = property(lambda self: type(self.loader))
    _course: dict[str, Any]
    _saved: dict[str, Any] | None

    def __init__(self, loader: Any, states: RandomStates) -> None:
        vars(self).update(loader=loader, _states=states, _saved=None)
        self._course = {"batch_size": None, "count": 0, "created": None, "first": None, "latest": None}

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a Trainer has the user's own loader, and gets another one of these in its run."""
        return _as_it_is, (self.loader,)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """How far the latest iterator is.

        ``count``: batches that it has given; ``ended``: it has no more. Random states: ``created``, before it was made;
        ``first``, before its first batch was asked for, which is when most samplers draw; ``latest``, before the latest
        one was.
        """
        return dict(self._course)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin behind ``count`` batches."""
        size = getattr(self.loader, "batch_size", None)
        if "created" in state and state["batch_size"] == size:
            self._saved = self._course = state
        else:
            warn_of_repetition(f"batch_size={size} instead of {state.get('batch_size')}")

    def __iter__(self) -> Iterator[Any]:
        if self._states.pending is not None:
            return iter(())
        saved, self._saved = self._saved, None
        if saved is None:
            return self._batches(self._make())
        states = self._states
        before = states.capture()
        states.restore(saved["created"] or before)
        iterator = self._make()
        states.restore(saved["first"] or before)
        _skip(iterator, saved["count"])
        ahead: list[Any] = []
        if saved["latest"] is not None:  # this batch was fetched, and not trained
            states.restore(saved["latest"])
            ahead = list(islice(iterator, 1))
        states.restore(before)
        self._course = {**saved, "count": saved["count"] + len(ahead)}
        return chain(ahead, self._batches(iterator))

    def _make(self) -> Iterator[Any]:
        size, created = getattr(self.loader, "batch_size", None), self._states.capture()
        self._course = {"batch_size": size, "count": 0, "created": created, "first": None, "latest": None}
        return iter(self.loader)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._next(iterator)  # a variable would keep the batch
            except StopIteration:
                self._course["ended"] = True  # while others go on, in a ``CombinedLoader(..., "max_size")``
                return

    def _next(self, iterator: Iterator[Any]) -> Any:
        course = self._course
        course["latest"] = self._states.capture()
        course["first"] = course["first"] or course["latest"]
        batch = next(iterator)
        course["count"] += 1
        return batch


def _skip(iterator: Iterator[Any], count: int) -> None:
    try:
        for _ in range(count):
            skip_batch(iterator)
    except StopIteration:
        text = f"The checkpoint was saved after {counted(count, 'batch')} of an epoch, but the training data has fewer"
        raise ValueError(f"{text}. Resume with the data that it was saved with.") from None


def warn_of_repetition(why: str) -> None:
    """The first rank says that this epoch's samples begin anew."""
    rank_zero_warn(
        f"The run is not continued exactly: {why}. So this epoch's samples begin anew: some come twice in it, others "
        "not at all."
    )


def _as_it_is(loader: Any) -> Any:
    return loader
