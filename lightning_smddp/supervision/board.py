"""What the ranks of a job tell each other, in torch's store.

Keys, below a prefix of the run: ``who/R``: process of rank R; ``beat/R``: how far it is; ``failure``, ``stop``,
``decision``, ``hang``: empty from the start, and set once.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from lightning_smddp.supervision.processes import Process

START_S = 60.0  # for the others' supervisors: all ranks have met just before


class Beat(NamedTuple):
    """How far a rank is, as it says twice a second. Travels as JSON: a list of the attributes.

    Attributes:
        number: of this beat.
        step, phase, batches: see ``Supervisor``.
        ended, ended_batches: how many epochs it has ended, and after how many batches the last one.
        still_s, waits: see ``Stillness``.
        answer: see ``Stops``.
        knows: of the failure.
        over: 1: its run is over; 2: it uses the store no more.
    """

    number: int
    step: int
    phase: str
    batches: int
    ended: int
    ended_batches: int
    still_s: float
    waits: str
    answer: int | None
    knows: bool
    over: int


class Board:
    """Made by all ranks, collectively. Afterwards one thread of each asks the store; what it has seen is for all.

    Args:
        store: shared by the ranks. It is cloned: a connection of its own.
        rank: this global rank.
        world_size: number of ranks.
        beat: this rank's first one.

    Attributes:
        who: the process of each rank.
        local: other ranks of this host, those behind this one first.

    Raises:
        torch.distributed.DistStoreError: not all ranks came in time; the message says who is missing.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, beat: Beat) -> None:
        self._rank = rank
        number = store.add(f"smddp/supervision/starts/{rank}", 1)  # the same on all ranks
        connection = cast(Any, store).clone()  # which torch's type hints do not know
        self._store = dist.PrefixStore(f"smddp/supervision/{number}", connection)
        self._store.set_timeout(timedelta(seconds=START_S))
        for key in ("failure", "stop", "decision", "hang"):
            self.set_once(key, "")  # there from now on: a look waits for no key
        own = Process.own()
        self.tell(beat)
        self._store.set(f"who/{rank}", json.dumps(own))
        self.who = [Process(*json.loads(self._store.get(f"who/{other}"))) for other in range(world_size)]
        ring = [*range(rank + 1, world_size), *range(rank)]
        self.local = [other for other in ring if self.who[other].namespace == own.namespace != ""]
        self._beats = [f"beat/{other}" for other in range(world_size)]
        self._seen = self._store.multi_get(self._beats)

    def tell(self, beat: Beat) -> None:
        """How far this rank is."""
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def look(self) -> tuple[str, str, str]:
        """Read all beats, for those who ask; returns ``failure``, ``stop`` and ``decision``."""
        failure, stop, decision, *self._seen = self._store.multi_get(["failure", "stop", "decision", *self._beats])
        return failure.decode(), stop.decode(), decision.decode()

    def beat(self, rank: int) -> Beat:
        """As it was seen last."""
        return Beat(*json.loads(self._seen[rank]))

    def beats(self) -> list[Beat]:
        """How far each rank is, as it was seen last, by rank; parsed anew at each call."""
        return [self.beat(rank) for rank in range(len(self.who))]

    def set_once(self, key: str, value: str) -> str:
        """Fill an empty key; returns what is there then: of whoever was first."""
        return self._store.compare_set(key, "", value).decode()
