"""How ranks find together: with real processes, each of which reports what it was told."""

from __future__ import annotations

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp._compat.torch import set_group_timeout
from lightning_smddp.communication.rendezvous import JOB, RankInfo, StartError, join, read, versions, wait_for_ranks
from tests.programs import free_port
from tests.ranks import run_ranks

VERSIONS = {"torch": "2.13.0", "lightning": "2.6.6", "lightning_smddp": "0.1.0"}


def come(port: int, limit: float, rank: int, world: int, **changes: Any) -> tuple[str, float]:
    """Join as ``rank``; returns what was said, and after how many seconds."""
    begin = time.monotonic()
    time.sleep(changes.get("late", 0.0))
    card = RankInfo(rank, world, changes.get("versions", VERSIONS))
    limit = changes.get("patience", limit)
    address = (changes.get("address", "127.0.0.1"), port)
    try:
        join(card, address, "gloo", None, timedelta(seconds=60), timedelta(seconds=limit))
    except StartError as error:
        return str(error), time.monotonic() - begin
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == world
    dist.barrier()
    dist.destroy_process_group()
    return "joined", time.monotonic() - begin


def come_as(port: int, limit: float, ranks: list[dict[str, Any]]) -> tuple[str, float]:
    """The body of process i: it comes as ``ranks[i]`` says."""
    mine = dict(ranks[int(os.environ["RANK"])])
    os.environ.update(mine.pop("env", {}))
    return come(mine.pop("port", port), limit, **mine)


def start(ranks: list[dict[str, Any]], limit: float = 20.0, port: int = 0) -> tuple[list[str], float]:
    """What each process was told, and the seconds that the slowest one took."""
    said = run_ranks(come_as, len(ranks), port or free_port(), limit, ranks, init=False)
    return [text for text, _ in said], max(seconds for _, seconds in said)


def test_a_contradiction_is_said_at_once_on_every_rank() -> None:
    ranks = [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "versions": {**VERSIONS, "torch": "2.12.0"}}]
    said, seconds = start(ranks, limit=60.0)
    assert len(set(said)) == 1
    assert all(part in said[0] for part in ("disagree about the torch", "has 2.13.0", "has 2.12.0"))
    assert "\n" not in said[0]
    assert seconds < 30


@pytest.mark.slow
def test_who_is_missing() -> None:
    said, seconds = start([{"rank": 0, "world": 4}, {"rank": 2, "world": 4, "late": 0.5}], limit=4.0)
    assert said[0] == said[1]
    assert f"2 of 4 ranks are missing: [1, 3]. There are, by host, {socket.gethostname()}: [0, 2]." in said[0]
    assert "init_timeout=4 s" in said[0]
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "not known")]
)
def test_rank_0_is_missing(address: str, reason: str) -> None:
    said, seconds = start([{"rank": 1, "world": 2, "address": address}], limit=1.0)
    assert "rank 1 (host" in said[0]
    assert f"MASTER_ADDR={address} " in said[0]
    assert reason in said[0]
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "reason"), [(0, "EADDRINUSE"), (1, "does not answer as rank 0 does")])
def test_the_port_belongs_to_a_program_that_accepts_and_is_silent(rank: int, reason: str) -> None:
    """Which holds torch's own client without limit."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said, seconds = start([{"rank": rank, "world": 2}], 1.0, port)
    assert str(port) in said[0]
    assert reason in said[0]
    assert "\n" not in said[0]
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [("", ""), ("a", "b")], ids=["by hand", "by a launcher"])
def test_a_second_job_on_the_same_port_leaves_the_first_alone(jobs: tuple[str, str]) -> None:
    """The second one comes while the first still waits for its last rank."""
    first = [{"rank": rank, "world": 3, "env": {JOB: jobs[0]}, "late": late} for rank, late in ((0, 0), (1, 0), (2, 4))]
    second = [{"rank": rank, "world": 3, "env": {JOB: jobs[1]}, "late": 1.0, "patience": 1} for rank in (0, 1)]
    said, _ = start([*first, *second])
    assert said[:3] == ["joined"] * 3
    assert "EADDRINUSE" in said[3]
    assert ("missing: [0, 2]" if jobs[0] else "Two processes are the same rank: rank 1 (host ") in said[4]


def pester(port: int, limit: float, flag: str) -> None:
    """Strays send garbage to the store's port while training goes on, and stay connected."""
    rank = int(os.environ["RANK"])
    strays = []
    join(
        RankInfo(rank, 2, VERSIONS), ("127.0.0.1", port), "gloo", None, timedelta(seconds=20), timedelta(seconds=limit)
    )
    if rank == 0:
        proper_start = b"\x00\xce\xf7\x85\x3c"  # as torch's own clients begin
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), bytes(4096), proper_start + b"\xff" * 999):
            stray = socket.create_connection(("127.0.0.1", port), 5)
            stray.sendall(garbage)
            strays.append(stray)
        Path(flag).touch()
    while not Path(flag).exists():
        time.sleep(0.01)
    for step in range(20):
        total = torch.full((1000,), float(step))
        dist.all_reduce(total)
        assert bool((total == 2 * step).all())
    dist.new_group([0, 1])  # by the store
    dist.barrier()
    for stray in strays:
        stray.close()
    dist.destroy_process_group()


def test_strangers_on_the_port_do_no_harm(tmp_path: Path) -> None:
    run_ranks(pester, 2, free_port(), 20.0, str(tmp_path / "sent"), init=False)


def two_starts(port: int, flag: str) -> list[str]:
    """A second group in one process, on the same port, once rank 0 has closed the first one's store."""
    rank = int(os.environ["RANK"])
    first, _ = come(port, 20.0, rank, 2)
    if rank == 0:
        Path(flag).touch()
    while not Path(flag).exists():
        time.sleep(0.01)
    second, _ = come(port, 20.0, rank, 2)
    return [first, second]


def test_a_second_start_in_the_same_processes(tmp_path: Path) -> None:
    said = run_ranks(two_starts, 2, free_port(), str(tmp_path / "closed"), init=False)
    assert said == [["joined"] * 2] * 2


# ---- the list ----


def test_the_first_line_that_decides_is_the_same_for_all() -> None:
    store = dist.HashStore()
    begin = time.monotonic()
    cards = [RankInfo(rank, 3, VERSIONS, host=f"node{rank}") for rank in (0, 1)]
    with ThreadPoolExecutor(2) as ranks:
        limits = [(begin + 2, timedelta(seconds=2)), (begin + 20, timedelta(seconds=20))]
        waits = [ranks.submit(wait_for_ranks, store, card, *limit) for card, limit in zip(cards, limits, strict=True)]
        said = {wait.result() for wait in waits}
    late = wait_for_ranks(store, RankInfo(2, 3, VERSIONS), begin + 20, timedelta(seconds=20))
    assert said == {late}
    assert "1 of 3 ranks are missing: [2]. There are, by host, node0: [0], node1: [1]." in str(late)


def told_together(*cards: RankInfo) -> str:
    """What ranks are told that come to one store."""
    store, end = dist.HashStore(), time.monotonic() + 5
    with ThreadPoolExecutor(len(cards)) as ranks:
        waits = [ranks.submit(wait_for_ranks, store, card, end, timedelta(seconds=5)) for card in cards]
        (said,) = {str(wait.result()) for wait in waits}
    return said


def test_ranks_that_cannot_be_of_one_job() -> None:
    said = told_together(RankInfo(0, 2, VERSIONS), RankInfo(2, 2, VERSIONS))
    assert re.search(r"rank 2 \(host .* outside of a world of 2 ranks", said)
    said = told_together(RankInfo(0, 2, VERSIONS), RankInfo(1, 4, VERSIONS))
    parts = ("disagree about the world size", "rank 0 (host ", " has 2", "rank 1 (host", " has 4", "WORLD_SIZE")
    assert all(part in said for part in parts)


def test_what_comes_behind_the_last_rank_counts_for_nothing() -> None:
    store = dist.HashStore()
    begin = time.monotonic()
    limit = (begin + 5, timedelta(seconds=5))
    with ThreadPoolExecutor(2) as ranks:
        waits = [ranks.submit(wait_for_ranks, store, RankInfo(rank, 2, VERSIONS), *limit) for rank in (0, 1)]
        assert [wait.result() for wait in waits] == [None, None]
    assert "world size" in str(wait_for_ranks(store, RankInfo(2, 3, VERSIONS), *limit))
    assert "same rank" in str(wait_for_ranks(store, RankInfo(1, 2, VERSIONS, host="b"), *limit))
    cards, error = read(store.get("ranks").decode().splitlines())
    assert (sorted(cards), error) == ([0, 1], None)


def test_versions_name_no_build() -> None:
    assert versions("2.6.6")["torch"] == torch.__version__.partition("+")[0]


def test_the_public_way_to_set_a_timeout_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.14 on, which warns of the private one."""
    given: list[timedelta] = []
    monkeypatch.setattr(dist, "set_timeout", given.append, raising=False)
    set_group_timeout(timedelta(seconds=7))
    assert given == [timedelta(seconds=7)]
