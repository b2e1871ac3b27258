"""Who came to the start of a job: every rank leaves a card in the store, and all of them hear one judgement.

The first process to arrive reads the cards and writes the judgement; the others wait for it. All of it is JSON.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from lightning_smddp.communication.errors import StartError
from lightning_smddp.wording import counted

_COMPARED = ("torch", "lightning", "lightning_smddp")  # versions of these have to be equal
_FAREWELL_S = 1.5  # for others to hear why the start failed
_PATIENCE_S = 1.0  # beyond the limit, for the judgement to come
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1  # between two looks at the store
_SHOWN = 8  # ranks, in messages


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, amount: int) -> int: ...  # noqa: D102
    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself.

    Attributes:
        rank: global rank that it was started as.
        world_size: number of ranks that it was told.
        versions: of torch, Lightning, this package and Python.
        problem: why it cannot take part, or None.
    """

    rank: int
    world_size: int
    versions: Mapping[str, str]
    problem: str | None = None
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def parse(cls, text: bytes) -> RankInfo:
        """The card in ``text``. Raises :class:`StartError` if it is none."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise StartError(f"The job's store holds something that is not a rank's card ({error}).") from None

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def versions(lightning: str) -> dict[str, str]:
    """The versions on a card, given Lightning's."""
    import torch

    import lightning_smddp

    return {
        "torch": torch.__version__,
        "lightning": lightning,
        "lightning_smddp": lightning_smddp.__version__,
        "python": platform.python_version(),
    }


def contradiction(cards: Sequence[RankInfo]) -> str | None:
    """Why the ranks that are there can never start, whoever comes; None if nothing speaks against it."""
    for card in cards:
        if card.problem is not None:
            return f"{card} cannot start: {card.problem}"
    return _different_worlds(cards) or _surplus(cards) or _different_versions(cards)


def missing(cards: Sequence[RankInfo], world_size: int) -> list[int]:
    """The ranks that are not there."""
    present = {card.rank for card in cards}
    return sorted(set(range(world_size)) - present)


def meet(
    store: Store,
    card: RankInfo,
    deadline: float,
    limit_s: float,
    serves: bool = False,
) -> None:
    """Leave ``card`` and wait until all ranks have done so.

    Args:
        store: of this start alone.
        card: this rank's.
        deadline: by ``time.monotonic()``.
        limit_s: what the deadline came from, for the message.
        serves: the store ends with this process, so the others have to have read the judgement before.

    Raises:
        StartError: ranks are missing at the deadline, or contradict each other.
    """
    # Keys of the store:
    #     arrivals     how many ranks have come; adding to it gives each a number of its own
    #     arrival N    the card of number N
    #     waiting      how many ranks wait for the others; the first of them is the judge. It need not be arrival 1,
    #                  which a second rank 0 may be that left its card and ended
    #     judgement    what is wrong or null, and the number of cards that it is about
    #     heard        how many ranks have read an error
    number = leave(store, card)
    if store.add("waiting", 1) == 1:
        error, admitted = _judge(store, card.world_size, deadline, limit_s)
        store.set("judgement", json.dumps([error, admitted]))
    else:
        error, admitted = _wait_for_judgement(store, card.world_size, deadline, limit_s)
    # A judgement is about the first cards, so many. Of a rank that came later it says nothing.
    if error is None and number > admitted:
        error = contradiction(_Arrivals(store).all())
        if error is None:
            error = f"{card} came after all {admitted} ranks had started."
    if error is not None:
        store.add("heard", 1)
        if serves:
            listeners = card.world_size
            if time.monotonic() > deadline:
                listeners = admitted  # nobody else comes
            _let_others_hear(store, listeners)
        raise StartError(error)


def leave(store: Store, card: RankInfo) -> int:
    """Leave ``card`` there without waiting; returns its number, from 1."""
    number = store.add("arrivals", 1)
    text = json.dumps(asdict(card))
    store.set(f"arrival {number}", text)
    return number


def _let_others_hear(store: Store, count: int) -> None:
    """Wait until so many ranks have heard the judgement, but not long: some may never come."""
    limit = time.monotonic() + _FAREWELL_S
    while store.add("heard", 0) < count and time.monotonic() < limit:
        time.sleep(_FIRST_PAUSE_S)


class _Arrivals:
    """The cards in a store, each read once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cards: list[RankInfo] = []
        self._pause = _FIRST_PAUSE_S

    def all(self) -> list[RankInfo]:
        """What is there by now, in the order of arrival."""
        count = self.store.add("arrivals", 0)
        while len(self.cards) < count:
            key = f"arrival {len(self.cards) + 1}"
            if not self.store.check([key]):  # `leave` has counted it, and not written it yet
                break
            text = self.store.get(key)
            self.cards.append(RankInfo.parse(text))
        return self.cards

    def pause(self) -> None:
        """Wait before the next look: a little at first, half as long again each time, up to a limit."""
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE_S)


def _judge(
    store: Store,
    world_size: int,
    deadline: float,
    limit_s: float,
) -> tuple[str | None, int]:
    """What is wrong, or None, and the number of cards it is judged by."""
    # What contradicts itself is told at once: those who are there need not wait for the rest of the limit.
    arrivals = _Arrivals(store)
    while True:
        cards = arrivals.all()
        error = contradiction(cards)
        if error is not None or not missing(cards, world_size):
            return error, len(cards)
        if time.monotonic() > deadline:
            return _absent(cards, world_size, limit_s), len(cards)
        arrivals.pause()


def _wait_for_judgement(
    store: Store,
    world_size: int,
    deadline: float,
    limit_s: float,
) -> tuple[str | None, int]:
    """The judge's word; this rank's own if that one is silent."""
    arrivals = _Arrivals(store)
    while not store.check(["judgement"]):
        if time.monotonic() > deadline + _PATIENCE_S:
            cards = arrivals.all()
            error = contradiction(cards)
            if error is None:
                error = _absent(cards, world_size, limit_s)
            if error is None:
                error = f"The rank that compares all of them fell silent; the first to arrive was {cards[0]}."
            return error, len(cards)
        arrivals.pause()
    error, admitted = json.loads(store.get("judgement"))
    return error, admitted


def _absent(cards: Sequence[RankInfo], world_size: int, limit_s: float) -> str | None:
    ranks = missing(cards, world_size)
    if not ranks:
        return None
    hosts: dict[str, list[int]] = {}
    for card in cards:
        hosts.setdefault(card.host, []).append(card.rank)
    by_host = []
    for host, members in sorted(hosts.items()):
        by_host.append(f"{host}: {_some(sorted(members))}")
    there = "; ".join(by_host)
    verb = "are"
    if len(ranks) == 1:
        verb = "is"
    return (
        f"After init_timeout={limit_s:g} s {len(ranks)} of {world_size} ranks {verb} missing: {_some(ranks)}. There "
        f"are, by host, {there}. Look at the missing ranks' own output and at the launcher's number of nodes and "
        "processes, or raise `init_timeout`."
    )


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join([str(rank) for rank in ranks[:_SHOWN]])
    more = len(ranks) - _SHOWN
    if more <= 0:
        return shown
    return f"{shown} and {more} more"


def _different_worlds(cards: Sequence[RankInfo]) -> str | None:
    others = [card for card in cards if card.world_size != cards[0].world_size]
    if not others:
        return None
    first, other = sorted((cards[0], others[0]), key=lambda card: card.rank)
    return (
        f"The ranks disagree about the world size: {first} was started for {counted(first.world_size, 'rank')}, "
        f"{other} for {other.world_size}. Start all of them with the same number of nodes and devices (WORLD_SIZE)."
    )


def _surplus(cards: Sequence[RankInfo]) -> str | None:
    holders: dict[int, RankInfo] = {}
    for card in cards:
        if not 0 <= card.rank < card.world_size:
            return (
                f"{card} is outside of a world of {card.world_size} ranks, which are 0 to {card.world_size - 1}. "
                "Correct the launcher's node rank, or its number of nodes and devices."
            )
        first = holders.setdefault(card.rank, card)
        if first is not card:
            return (
                f"Two processes are rank {card.rank}: pid {first.pid} on host {first.host} and pid {card.pid} on host "
                f"{card.host}. Give every process a rank of its own (NODE_RANK, RANK), and every job a "
                "port (MASTER_PORT)."
            )
    return None


def _different_versions(cards: Sequence[RankInfo]) -> str | None:
    for card in cards:
        first = cards[0]
        for package in _COMPARED:
            expected = first.versions.get(package, "none")
            found = card.versions.get(package, "none")
            if _public(expected) != _public(found):
                return (
                    f"The ranks run different versions of {package}: {first} has {expected}, {card} has {found}. "
                    "Install the same version on every node."
                )
    return None


def _public(version: str) -> str:
    """Without the local part: 2.13.0+cpu and 2.13.0+cu130 are builds of one version."""
    return version.partition("+")[0]
