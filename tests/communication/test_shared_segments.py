"""Segments of memory that ranks have in common: who may write to one, and when."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication import shared_segments
from lightning_smddp.communication.node_mesh import NodeMesh
from lightning_smddp.communication.shared_segments import GATHER, REDUCE, SharedSegments
from lightning_smddp.communication.topology import Topology
from tests.communication.errors import message_of
from tests.ranks import run_in_threads


@contextmanager
def segments_of(
    group: dist.ProcessGroup, patience: float = 20.0, hosts: Sequence[str] = ()
) -> Iterator[SharedSegments]:
    topology = Topology.from_identities(hosts or ["host"] * group.size(), group.rank())
    mesh = NodeMesh.connect(topology, group, timedelta(seconds=patience))
    segments = SharedSegments(mesh, ["embedding", "head"])
    try:
        yield segments
    finally:
        segments.close()
        mesh.close()


def write_and_meet(segments: SharedSegments, unit: int, values: list[int]) -> Tensor:
    """A buffer with a byte for each rank, after all have written theirs."""
    buffer = segments.lend(unit, len(values))
    buffer[segments.mesh.rank] = values[segments.mesh.rank]
    segments.begin(GATHER, unit, len(values))
    segments.finish_all()
    return buffer


def total_bytes(segments: SharedSegments) -> int:
    return sum(len(segment.mapping) for segment in segments._segments.values())


def gather_many(group: dist.ProcessGroup, kept: int) -> tuple[list[list[int]], int]:
    """``kept``: how many buffers this rank keeps at a time; rank 0 keeps one more."""
    held: list[Tensor] = []
    seen = []
    with segments_of(group) as segments:
        for turn in range(30):
            held.append(write_and_meet(segments, 0, [turn + rank for rank in range(group.size())]))
            if len(held) > kept + (group.rank() == 0):
                seen.append(held.pop(0).tolist())
        total = total_bytes(segments)
    return seen, total


@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_rank_still_holds_is_not_written_over(size: int, kept: int) -> None:
    results = run_in_threads(gather_many, size, kept)
    for seen, _ in results:
        assert seen == [[turn + rank for rank in range(size)] for turn in range(len(seen))]
    totals = {total for _, total in results}
    # Beside what the slowest rank holds there is the one that is written and the one whose return is not told yet.
    assert len(totals) == 1
    assert totals.pop() <= (kept + 3) * mmap.PAGESIZE


def gather_of_sizes(group: dist.ProcessGroup) -> list[int]:
    totals = []
    with segments_of(group) as segments:
        for size in [100, 5000, 100, 70000, 5000, 100] * 5:
            write_and_meet(segments, 0, [1] * size)
            totals.append(total_bytes(segments))
    return totals


def test_memory_grows_to_what_is_in_flight_and_no_further() -> None:
    first, second = run_in_threads(gather_of_sizes, 2)
    assert first == second
    assert first[-1] == first[len(first) // 2] <= 2 * 70000 + mmap.PAGESIZE


def mapped() -> int:
    """How many segments this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:lightning_smddp")


def free_after_close(group: dist.ProcessGroup) -> bool:
    with segments_of(group) as segments:
        buffer = write_and_meet(segments, 0, [7] * group.size())
    return buffer.tolist() == [7] * group.size() and mapped() > 0


def test_a_tensor_outlives_its_segments_and_nothing_else_does() -> None:
    before = mapped()
    assert run_in_threads(free_after_close, 2) == [True, True]
    gc.collect()
    assert mapped() == before


def do_different_things(group: dist.ProcessGroup, what: str) -> str:
    with segments_of(group) as segments:
        write_and_meet(segments, 0, [1] * group.size())
        other = group.rank() == 1

        def go_on() -> None:
            if what == "kind":
                segments.begin(REDUCE if other else GATHER, 0, 8)
            elif what == "unit":
                segments.begin(GATHER, int(other), 8)
            elif what == "size":
                segments.begin(GATHER, 1, 9 if other else 8)
            elif other:
                segments.lend(1, 10**6)
            else:
                segments.begin(GATHER, 1, 10**6)
            segments.finish_all()

        return message_of(ValueError, go_on)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("kind", "rank 0 (host host, local rank 0) gathers parameters of 'embedding' (unit 0, 8 bytes), "
                 "rank 1 (host host, local rank 1) reduces gradients of 'embedding' (unit 0, 8 bytes)"),
        ("unit", "of 'embedding' (unit 0, 8 bytes), "
                 "rank 1 (host host, local rank 1) gathers parameters of 'head' (unit 1, 8 bytes)"),
        ("size", "of 'head' (unit 1, 8 bytes), "
                 "rank 1 (host host, local rank 1) gathers parameters of 'head' (unit 1, 9 bytes)"),
        ("memory", "gathers parameters of 'head' (unit 1, 1000000 bytes), rank 1 (host host, local rank 1) needs more"),
    ],
)  # fmt: skip
def test_ranks_that_do_different_things_are_told_so(what: str, said: str) -> None:
    messages = run_in_threads(do_different_things, 2, what)
    assert said in messages[0]
    assert all("in the same order" in message for message in messages)


def run_out_of_memory(group: dist.ProcessGroup, hosts: Sequence[str]) -> str:
    with segments_of(group, hosts=hosts) as segments:
        return message_of(MemoryError, lambda: segments.lend(0, 10**6))


def test_every_rank_says_that_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(shared_segments, "create_file", refuse)
    # On host b, whose ranks were called by the names of ranks 0 and 1: their local ranks were taken for ranks.
    messages = run_in_threads(run_out_of_memory, 3, ["a", "b", "b"])
    names = ["rank 0 (host a, local rank 0)", "rank 1 (host b, local rank 0)", "rank 2 (host b, local rank 1)"]
    for message, name in zip(messages, names, strict=True):
        assert message.startswith(f"No 1000000 bytes of memory are left on {name}'s node")
        assert "'embedding'" in message
