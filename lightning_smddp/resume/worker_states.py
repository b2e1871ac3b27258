"""Random numbers of data loader workers that live through epochs (``persistent_workers=True``).

Other workers are seeded by their iterator, so that it is enough to know the seed. These go on from one epoch to the
next; so each tells with each batch where its random numbers were before it and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_smddp._compat.loops import iterate_as_later_epoch
from lightning_smddp.resume.random_states import RandomStates, from_plain, to_plain
from lightning_smddp.resume.rank_states import pack, unpack


def keeps_workers(loader: Any) -> bool:
    """Whether its workers live through epochs."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


class WorkerStates:
    """Lets the workers of ``loader`` tell their states, until :meth:`close`.

    Attributes:
        latest: worker -> its state after its last batch; empty until workers have been at work.
        seen: workers that have told theirs in this epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._before = loader, (loader.collate_fn, loader.worker_init_fn)
        self._telling = _Telling(*self._before)
        loader.collate_fn, loader.worker_init_fn = self._telling, self._telling.start
        self.latest: dict[int, bytes] = {}
        self.seen: set[int] = set()

    def close(self) -> None:
        """Leave the loader as it was."""
        self._loader.collate_fn, self._loader.worker_init_fn = self._before

    def iterate(self) -> Any:
        """An iterator over the loader, whose workers go on."""
        self.seen = set()
        return iter(self._loader)

    def iterate_from(self, states: dict[int, bytes]) -> Any:
        """An iterator over the loader, whose workers are started now, but begin as if they had gone on."""
        self.seen, self._telling.states, self.latest = set(), states, dict(states)
        return iterate_as_later_epoch(self._loader)

    def told(self, message: Any, at_start: dict[int, bytes]) -> Any:
        """The batch in what a worker sent. Its state before its first batch in an epoch goes to ``at_start``."""
        batch, worker, before, after = message
        if worker not in self.seen:
            self.seen.add(worker)
            at_start[worker] = before
        self.latest[worker] = after
        return batch


class _Telling:
    """Runs in a worker, in place of both functions of the loader: they are one object there too."""

    def __init__(self, collate: Callable[[Any], Any], start: Callable[[int], None] | None) -> None:
        self.collate, self.init = collate, start
        self.states: dict[int, bytes] = {}
        self.sources = RandomStates(torch.device("cpu"))
        self.state = b""

    def start(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        info = get_worker_info()
        assert info is not None
        self.sources = RandomStates(torch.device("cpu"), [info.dataset])
        if worker in self.states:
            plain = unpack(torch.frombuffer(bytearray(self.states[worker]), dtype=torch.uint8))
            self.sources.restore(from_plain(plain))
        self.state = self._capture()

    def __call__(self, samples: Any) -> Any:
        info = get_worker_info()
        assert info is not None, "only workers collate"
        batch, before = self.collate(samples), self.state
        self.state = self._capture()
        return batch, info.id, before, self.state

    def _capture(self) -> bytes:
        return pack(to_plain(self.sources.capture())).numpy().tobytes()
