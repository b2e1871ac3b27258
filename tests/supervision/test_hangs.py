"""What a hang of devices is taken for, and what is none: without devices."""

from __future__ import annotations

import os

import pytest

from lightning_smddp.supervision.hangs import LENIENCY_S, DeviceStillness, HangRule
from lightning_smddp.supervision.peer import Peer
from lightning_smddp.supervision.processes import Process
from lightning_smddp.supervision.progress import DevicePoint, Progress, Reading, RemoteProgress

LIMIT_S = 10.0


class FakeDevice:
    """``number``: at which point it is; None: done."""

    number: int | None = None

    def look(self) -> int | None:
        return self.number

    def where(self) -> DevicePoint | None:
        return DevicePoint(3, "backward", 5, False)


@pytest.fixture
def progress() -> Progress:
    made = Progress()
    made.step = 3
    return made


def test_a_rank_waits_where_neither_host_nor_device_move(progress: Progress) -> None:
    device = FakeDevice()
    stillness = DeviceStillness(progress, device, 1.0)
    device.number = 1
    for _ in range(8):
        stillness.tick(1.0)
    reading = progress.read()
    assert 4.0 <= reading.waited_s <= 6.0
    assert reading.device == DevicePoint(3, "backward", 5, False)
    assert Reading.from_json(reading.to_json()) == reading
    progress.close()


def test_a_host_in_a_collective_waits_too(progress: Progress) -> None:
    stillness = DeviceStillness(progress, FakeDevice(), 1.0, lambda: True)
    for _ in range(8):
        stillness.tick(1.0)
    reading = progress.read()
    assert 4.0 <= reading.waited_s <= 6.0
    assert reading.device is not None
    assert reading.device.communicates
    progress.close()


@pytest.mark.parametrize("what", ["the host moves", "the device moves", "the device is done"])
def test_other_ranks_do_not(progress: Progress, what: str) -> None:
    """Long phases are none: an evaluation's batches, slow kernels, and everything that the host does alone."""
    device = FakeDevice()
    stillness = DeviceStillness(progress, device, 1.0)
    device.number = None if what == "the device is done" else 1
    for second in range(40):
        if what == "the host moves" and second % 5 == 0:
            progress.moved()
        if what == "the device moves" and device.number is not None and second % 4 == 0:
            device.number += 1
        stillness.tick(1.0)
        assert progress.read().waited_s < 5.0
    progress.close()


Rank = tuple[Reading, bool]  # and whether it moves


def waits(step: int, phase: str, at: DevicePoint | None = None, seconds: float = LIMIT_S) -> Rank:
    return Reading(step, phase, waited_s=seconds, device=at), False


def elsewhere(step: int, phase: str, moves: bool = False) -> Rank:
    return Reading(step, phase), moves


def at(step: int, phase: str, count: int = 0, communicates: bool = False) -> DevicePoint:
    return DevicePoint(step, phase, count, communicates)


def judged(ranks: list[Rank], seconds: float = 2 * LIMIT_S) -> tuple[int, Reading, str] | None:
    rule = HangRule(LIMIT_S)
    peers = [Peer(rank, "a", Process.of(os.getpid()), RemoteProgress(None, -1), None) for rank in range(len(ranks))]
    for second in range(int(seconds)):
        for peer, (reading, moves) in zip(peers, ranks, strict=True):
            assert isinstance(peer.progress, RemoteProgress)
            peer.progress.told = Reading(
                reading.step, reading.phase, -1, 0, second if moves else 0, reading.waited_s, reading.device
            )
        found = rule.tick(peers, 1.0)
        if found is not None:
            late, place, text = found
            return late.rank, place, text
    return None


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        ([waits(7, "backward"), elsewhere(7, "forward"), waits(7, "backward")], 1),
        ([elsewhere(7, "optimizer"), elsewhere(6, "data"), waits(7, "backward")], 1),
        ([waits(7, "backward", at(7, "backward", 9)), waits(8, "forward", at(6, "optimizer", 8))], 1),
        ([waits(7, "backward", at(7, "forward", 9)), waits(7, "backward", at(7, "backward", 10))], 0),
        ([waits(7, "backward", at(7, "backward", 12)), waits(7, "backward", at(7, "backward", 11))], 1),
        ([waits(7, "forward", at(7, "forward", 3, True)), waits(7, "forward", at(7, "forward", 8))], 1),
        ([waits(7, "backward"), waits(7, "backward", at(7, "backward", 11))], 0),
        ([waits(7, "data", at(7, "data", 0, True)), waits(7, "data", at(7, "forward", 3, False))], 1),
    ],
)
def test_who_is_behind(ranks: list[Rank], late: int) -> None:
    found = judged(ranks)
    assert found is not None
    assert found[0] == late
    assert "waited for it for 10 s" in found[2]


def test_its_place_is_its_devices_if_that_computes() -> None:
    found = judged([waits(7, "backward", at(7, "backward")), waits(8, "data", at(7, "forward"))])
    assert found is not None
    assert (found[0], found[1].step, found[1].phase) == (1, 7, "forward")


def test_nobody_is_behind() -> None:
    found = judged([waits(7, "backward", at(7, "backward", 4)), waits(7, "backward", at(7, "backward", 4))])
    assert found is not None
    assert "no rank is behind" in found[2]


@pytest.mark.parametrize(
    "ranks",
    [
        [elsewhere(7, "checkpoint"), elsewhere(7, "checkpoint")],
        [waits(7, "data", seconds=LIMIT_S - 1), elsewhere(7, "checkpoint")],
        [waits(7, "data", seconds=LIMIT_S + LENIENCY_S - 1), elsewhere(7, "validation", moves=True)],
        [waits(7, "forward")],  # alone, and slow
    ],
)
def test_what_is_no_hang(ranks: list[Rank]) -> None:
    assert judged(ranks, 100.0) is None


def test_a_rank_that_moves_is_waited_for_a_little_longer_than_others() -> None:
    found = judged([waits(7, "data", seconds=LIMIT_S + LENIENCY_S), elsewhere(7, "validation", moves=True)])
    assert found is not None
    assert found[0] == 1
