"""How ranks find together: with real processes, each of which reports what it was told."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp.communication.errors import StartError
from lightning_smddp.communication.network import addresses, holder_of, interface_problem
from lightning_smddp.communication.rank_info import RankInfo, contradiction, leave, meet, versions
from lightning_smddp.communication.rendezvous import RendezvousConfig, join
from tests.ranks import run_ranks

VERSIONS = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "lightning_smddp": "0.1.0", "python": "3.11.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def come(port: int, limit: float, rank: int, world: int, **changes: Any) -> tuple[str, float]:
    """Join as ``rank``; returns what was said, and after how many seconds."""
    begin = time.monotonic()
    meeting = RendezvousConfig(
        **{
            **{"rank": rank, "world_size": world, "spans_nodes": False},
            **{"address": "127.0.0.1", "port": port, "versions": VERSIONS, **changes},
        }
    )
    try:
        served = join(meeting, "gloo", None, timedelta(seconds=60), timedelta(seconds=limit))
    except StartError as error:
        return str(error), time.monotonic() - begin
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == world
    dist.barrier()
    dist.destroy_process_group()
    return f"joined {served}".strip(), time.monotonic() - begin


def come_as(port: int, limit: float, ranks: list[dict[str, Any]]) -> tuple[str, float]:
    """The body of process i: it comes as ``ranks[i]`` says."""
    mine = dict(ranks[int(os.environ["RANK"])])
    os.environ.update(mine.pop("env", {}))
    return come(port, limit, **mine)


def start(ranks: list[dict[str, Any]], limit: float = 20.0) -> list[tuple[str, float]]:
    return run_ranks(come_as, len(ranks), free_port(), limit, ranks, init=False)


def test_ranks_find_together_and_listen_on_one_address() -> None:
    (first, _), (second, _) = start([{"rank": 0, "world": 2}, {"rank": 1, "world": 2}])
    assert first.startswith("joined 127.0.0.1 port ")
    assert second == "joined"


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        (
            [{"rank": 0, "world": 3}, {"rank": 1, "world": 3}, {"rank": 1, "world": 3}],
            ["Two processes are rank 1: pid ", " on host ", "MASTER_PORT"],
        ),
        ([{"rank": 0, "world": 2}, {"rank": 2, "world": 2}], ["rank 2 (host ", "outside of a world of 2 ranks"]),
        (
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 4}],
            ["disagree about the world size", "started for 2 ranks", "for 4", "WORLD_SIZE"],
        ),
        (
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "versions": {**VERSIONS, "torch": "2.12.0+cpu"}}],
            ["different versions of torch", "has 2.13.0+cpu", "has 2.12.0+cpu"],
        ),
        (
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "env": {"GLOO_SOCKET_IFNAME": "eth99"}}],
            ["rank 1 (host ", "GLOO_SOCKET_IFNAME=eth99", "no interface 'eth99'", "lo (127.0.0.1"],
        ),
    ],
    ids=["rank twice", "rank outside", "world sizes", "versions", "interface"],
)
def test_contradictions_are_said_at_once_on_every_rank(ranks: list[dict[str, Any]], parts: list[str]) -> None:
    said = start(ranks)
    assert len({message for message, _ in said}) == 1
    message = said[0][0]
    for part in parts:
        assert part in message
    assert "\n" not in message
    assert max(seconds for _, seconds in said) < 5


@pytest.mark.slow
def test_who_is_missing() -> None:
    said = start([{"rank": 0, "world": 4}, {"rank": 2, "world": 4}], limit=1.0)
    assert said[0][0] == said[1][0]
    assert f"2 of 4 ranks are missing: 1, 3. There are, by host, {socket.gethostname()}: 0, 2." in said[0][0]
    assert "init_timeout=1 s" in said[0][0]
    assert max(seconds for _, seconds in said) < 1.0 + 2


@pytest.mark.slow
def test_rank_0_is_missing() -> None:
    ((message, seconds),) = start([{"rank": 1, "world": 2}], limit=1.0)
    assert "Rank 0 is missing: after init_timeout=1 s rank 1 (host" in message
    assert "Connection refused" in message
    assert seconds < 3


@pytest.mark.slow
def test_a_name_that_nobody_knows() -> None:
    ((message, seconds),) = start([{"rank": 1, "world": 2, "address": "no-such-host.invalid"}], limit=1.0)
    assert "MASTER_ADDR=no-such-host.invalid cannot be resolved on host" in message
    assert seconds < 5


@pytest.mark.slow
@pytest.mark.parametrize("spans_nodes", [False, True])
def test_rank_0_is_started_twice(spans_nodes: bool) -> None:
    """Both hear of it at once: the second finds the first one's store. With ``spans_nodes`` it could serve another."""
    ranks = [{"rank": 0, "world": 3, "spans_nodes": spans_nodes}] * 2
    said = start([*ranks, {"rank": 1, "world": 3, "spans_nodes": spans_nodes}])
    assert sum("Two processes are rank 0: pid " in message for message, _ in said) == 2
    assert sum("ank 0 was started twice" in message for message, _ in said) == 1
    assert max(seconds for _, seconds in said) < 5


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_port_belongs_to_another_program(rank: int) -> None:
    """It accepts connections and says nothing, which holds torch's own client for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ((message, seconds),) = run_ranks(come_as, 1, port, 1.0, [{"rank": rank, "world": 2}], init=False)
    assert str(port) in message
    assert "MASTER_PORT to a free port on all ranks" in message
    assert seconds < 4
    if rank == 0:
        assert f"process {os.getpid()} (" in message
        assert "EADDRINUSE" in message


def pester(port: int, limit: float, ranks: list[dict[str, Any]], flag: str) -> str:
    """Strays send garbage to the store's port, before the start and while it goes on, and stay connected."""
    rank = int(os.environ["RANK"])
    strays = []
    if rank == 0:
        said = join_only(port, limit, ranks[0])
        proper_start = b"\x00\xce\xf7\x85\x3c"  # as torch's own clients begin
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), bytes(4096), proper_start + b"\xff" * 999):
            stray = socket.create_connection(("127.0.0.1", port), 5)
            stray.sendall(garbage)
            strays.append(stray)
        Path(flag).touch()
    else:
        said = join_only(port, limit, ranks[1])
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
    return said


def join_only(port: int, limit: float, mine: dict[str, Any]) -> str:
    meeting = RendezvousConfig(mine["rank"], mine["world"], False, "127.0.0.1", port, VERSIONS)
    return join(meeting, "gloo", None, timedelta(seconds=20), timedelta(seconds=limit))


def test_strangers_on_the_port_do_no_harm(tmp_path: Path) -> None:
    ranks = [{"rank": 0, "world": 2}, {"rank": 1, "world": 2}]
    run_ranks(pester, 2, free_port(), 20.0, ranks, str(tmp_path / "sent"), init=False)


def is_unreachable_from_elsewhere(port: int) -> list[str]:
    """Which of this machine's other addresses accept connections to the store's port."""
    join_only(port, 20.0, {"rank": 0, "world": 1})
    others = [a for found in addresses().values() for a in found if a != "127.0.0.1" and not a.startswith("fe80")]
    reached = []
    for address in others:
        try:
            socket.create_connection((address, port), 2).close()
        except OSError:
            continue
        reached.append(address)
    socket.create_connection(("127.0.0.1", port), 2).close()
    dist.destroy_process_group()
    return reached


def test_the_store_is_not_reachable_by_another_address() -> None:
    others = [a for name, found in addresses().items() if name != "lo" for a in found if not a.startswith("fe80")]
    if not others:
        pytest.skip("this machine has no address but the loopback's")
    assert run_ranks(is_unreachable_from_elsewhere, 1, free_port(), init=False) == [[]]


def two_starts(port: int, flag: str) -> list[str]:
    """A second group in one process, on the same port, once rank 0 has closed the first one's store."""
    rank = int(os.environ["RANK"])
    first, _ = come(port, 20.0, rank, 2)
    if rank == 0:
        Path(flag).touch()
    while not Path(flag).exists():
        time.sleep(0.01)
    second, _ = come(port, 20.0, rank, 2)
    return [said.partition(" port")[0] for said in (first, second)]


def test_a_second_start_in_the_same_processes(tmp_path: Path) -> None:
    said = run_ranks(two_starts, 2, free_port(), str(tmp_path / "closed"), init=False)
    assert said == [["joined 127.0.0.1"] * 2, ["joined"] * 2]


def test_two_jobs_at_the_same_time() -> None:
    first, second = free_port(), free_port()
    ranks = [{"rank": rank, "world": 2, "port": port} for port in (first, second) for rank in (0, 1)]
    said = run_ranks(come_to, 4, ranks, init=False)
    assert [text.partition(" port")[0] for text in said] == ["joined 127.0.0.1", "joined"] * 2


def come_to(ranks: list[dict[str, Any]]) -> str:
    mine = dict(ranks[int(os.environ["RANK"])])
    return come(mine.pop("port"), 20.0, **mine)[0]


# ---- the parts ----


def card(**changes: Any) -> RankInfo:
    return RankInfo(**{"rank": 0, "world_size": 2, "versions": VERSIONS, **changes})


def test_what_does_not_contradict() -> None:
    other_python = {**VERSIONS, "python": "3.11.9", "torch": "2.13.0+cu130"}
    assert contradiction([card(), card(rank=1, versions=other_python)]) is None
    assert contradiction([]) is None
    assert set(versions("2.6.6")) == {"torch", "lightning", "lightning_smddp", "python"}


def test_whoever_comes_first_the_ranks_are_named_in_order() -> None:
    cards = [card(), card(rank=1, world_size=4)]
    message = contradiction(cards)
    assert message is not None
    assert message == contradiction(cards[::-1])
    assert "started for 2 ranks, rank 1" in message


def test_a_second_rank_0_that_arrives_first_and_ends() -> None:
    """It is arrival 1 and judges nothing: the ranks that wait judge without it, at once."""
    store = dist.HashStore()
    leave(store, card(world_size=3, host="elsewhere"))
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as ranks:
        waits = [ranks.submit(meet, store, card(world_size=3, rank=rank), begin + 20, 20.0, False) for rank in (0, 1)]
        errors = [str(wait.exception()) for wait in waits]
    assert "Two processes are rank 0: pid " in errors[0]
    assert errors[0] == errors[1]
    assert time.monotonic() - begin < 10


def test_a_card_that_is_none() -> None:
    with pytest.raises(StartError, match="not a rank's card"):
        RankInfo.parse(b'{"rank": 1}')


def no_address() -> str:
    return next((name for name, found in addresses().items() if not found), "")


@pytest.mark.parametrize(
    ("backend", "environment", "problem"),
    [
        ("gloo", {"GLOO_SOCKET_IFNAME": "lo"}, None),
        ("gloo", {"GLOO_SOCKET_IFNAME": "eth98,lo"}, "no interface 'eth98'"),
        ("gloo", {"NCCL_SOCKET_IFNAME": "eth98"}, None),
        ("nccl", {"NCCL_SOCKET_IFNAME": "l"}, None),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^docker"}, None),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=l"}, "no interface 'l'"),
        ("cpu:gloo,cuda:nccl", {"NCCL_SOCKET_IFNAME": "eth98"}, "no interface 'eth98'"),
    ],
)
def test_interfaces(backend: str, environment: dict[str, str], problem: str | None) -> None:
    found = interface_problem(backend, environment)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


def test_an_interface_without_address() -> None:
    if not no_address():
        pytest.skip("all interfaces of this machine have addresses")
    assert "has no address" in str(interface_problem("gloo", {"GLOO_SOCKET_IFNAME": no_address()}))


def test_who_holds_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        holder = holder_of(server.getsockname()[1])
    assert holder is not None
    assert holder[0] == os.getpid()
    assert holder_of(free_port()) is None
