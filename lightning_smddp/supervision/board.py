"""What the ranks of a job tell each other, in torch's store: how far they are, who waits for whom, who failed first.

Keys, below a prefix of the run: ``who/R``: process of rank R; ``beat/R``: how far it is; ``failure``, ``hang``: empty
from the start, and set once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from lightning_smddp.communication.objects import RankFailedError
from lightning_smddp.supervision.processes import Process

# In errors of communication that are plain RuntimeErrors: gloo's and NCCL's have its name in a path, mostly; the last
# two come from the callback of a future.
_WORDS = ("gloo", "pair closure", "NCCL", "RankFailedError: ", "RankTimeoutError: ")
MAX_MESSAGE_CHARACTERS = 2000
# Modules whose functions wait for other ranks: torch's collectives, DDP's backward pass, and this package.
COMMUNICATE = ("torch.distributed", "torch.nn.parallel", "torch.autograd.graph", "lightning_smddp")
# The phases in the order in which a step comes to them. Other ones count as later than all of these.
_ORDER = ["", "setup", "forward", "backward", "optimizer", "data", "validation", "checkpoint"]


@dataclass
class Beat:
    """How far a rank is, as it says twice a second. Travels as JSON: a list of the attributes.

    Attributes:
        number: of this beat.
        step: number of finished optimizer steps; -1 before the first batch.
        phase: what the training thread does in it.
        begun: number of batches begun in this run; one more in a validation in the middle of an epoch.
        ended: how many of them at the end of the epoch that it came to last.
        waited_s: for how long its training thread waits for other ranks, or for its device; 0: it does not.
        has_work: it is its device that it waits for, which has work left.
        signal: by which it knows that the job is to stop; 0: it is not.
        answer: the first place at which this rank can stop; 0 until it is asked.
        over: 1: its run is over; 2: it needs the store no more, or knows of the failure.
    """

    number: int = 0
    step: int = -1
    phase: str = "setup"
    begun: int = 0
    ended: int = 0
    waited_s: float = 0.0
    has_work: bool = False
    signal: int = 0
    answer: int = 0
    over: int = 0


class Failure(NamedTuple):
    """The first failure of a job. Travels as JSON: a list of the attributes.

    Attributes:
        rank: the global rank that failed.
        kind: ``"failed"`` (it raised), ``"died"`` (its process ended), ``"fell silent"`` (stopped, or cut off the
            network), ``"did not come"`` (the others' collective timed out waiting for it), ``"left"`` (it ended its run
            while others were in the middle of theirs).
        text: one line: ``Rank 1 (host a, process 12) failed at step 7 (backward): ValueError: bad``.
    """

    rank: int
    kind: str
    text: str

    def error(self) -> RankFailedError:
        """The error that the other ranks raise."""
        return RankFailedError(self.rank, self.text)


class Board:
    """Made by all ranks, collectively. Afterwards one thread of each asks the store; what it has seen is for all.

    Args:
        store: shared by the ranks. It is cloned: a connection of its own.
        rank: this global rank.
        world_size: number of ranks.

    Attributes:
        own: how far this rank is. Threads write it as things go on.
        who: the process of each rank.
        local: other ranks of this host.
        beats: how far each rank is, as it was seen last; ``own`` among them.

    Raises:
        torch.distributed.DistStoreError: not all ranks came in time; the message says who is missing.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._rank, self._ranks = rank, range(world_size)
        self.own = Beat()
        number = store.add(f"smddp/supervision/starts/{rank}", 1)  # the same on all ranks
        connection = cast(Any, store).clone()  # which torch's type hints do not know
        self._store = dist.PrefixStore(f"smddp/supervision/{number}", connection)
        for key in ("failure", "hang"):
            self.set_once(key, "")  # there from now on: a look waits for no key
        own = Process.own()
        self.tell()
        self._store.set(f"who/{rank}", json.dumps(own))
        self.who = [Process(*json.loads(self._store.get(f"who/{other}"))) for other in self._ranks]
        self.local = [other for other in self._ranks if other != rank and self.who[other].namespace == own.namespace]
        self.look()

    def tell(self) -> None:
        """How far this rank is."""
        self.own.number += 1
        self._store.set(f"beat/{self._rank}", json.dumps([*vars(self.own).values()]))

    def look(self) -> str:
        """Read all beats; returns ``failure``."""
        failure, *said = self._store.multi_get(["failure", *(f"beat/{rank}" for rank in self._ranks)])
        beats = [Beat(*json.loads(beat)) for beat in said]
        beats[self._rank] = self.own
        self.beats = beats
        return failure.decode()

    def name(self, rank: int, verb: str = "") -> str:
        """``rank 1 (host a, process 12) died at step 7 (backward)``, as it was seen last; without a step before it."""
        who, beat = self.who[rank], self.beats[rank]
        step = f" at step {beat.step}" if beat.step >= 0 else ""
        return f"rank {rank} (host {who.host}, process {who.pid}){verb}{step} ({beat.phase})"

    def set_once(self, key: str, value: str) -> str:
        """Fill an empty key; returns what is there then: of whoever was first."""
        return self._store.compare_set(key, "", value).decode()


# ---- who waits for whom ----


def behind(beats: Sequence[Beat]) -> int | None:
    """The rank that the others wait for: who does not wait itself, else who is least far; None if all are as far."""
    places = [(beat.waited_s > 0.0, beat.step, [*_ORDER, beat.phase].index(beat.phase)) for beat in beats]
    late = places.index(min(places))
    return None if places[late] == max(places) else late


# ---- errors ----


def text_of(error: BaseException) -> str:
    """Type and message of an exception, in one line."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r}) in the middle of the run"
    return " ".join(text[:MAX_MESSAGE_CHARACTERS].split())


def may_follow(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of another rank's failure.

    Gloo's errors have no type of their own. torch's other ones (NCCL, the store) derive from ``DistError``. Of an
    error in a callback a ``torch.futures.Future`` keeps the text only.
    """
    if isinstance(error, (RankFailedError, dist.DistError)):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _WORDS)
