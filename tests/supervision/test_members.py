"""What a rank's end or silence is taken for, where it is decided: without processes and connections, but for one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from lightning_smddp.supervision.client import Client, State
from lightning_smddp.supervision.connection import Connection, Message
from lightning_smddp.supervision.hub import Hub
from lightning_smddp.supervision.loop import Loop
from lightning_smddp.supervision.peer import OomWatch, Peer
from lightning_smddp.supervision.processes import Process
from lightning_smddp.supervision.progress import Progress, Reading, RemoteProgress

HERE = Process.of(os.getpid())
ELSEWHERE = replace(HERE, namespace="another boot/another namespace")
AT = Reading(7, "forward", 0, 7).to_json()
ENDED = {"type": "ended", "rank": 2, "how": "its process was killed by SIGKILL", "progress": AT}


class FakeConnection:
    """A connection that keeps what is sent."""

    is_clogged = False

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def test_what_was_let_go_of_meanwhile_is_not_called(loop):
    """Two descriptors can be read; whichever is called first closes the other one."""
    pairs = [socket.socketpair(), socket.socketpair()]
    called = []

    def read(index: int) -> None:
        called.append(index)
        other = pairs[1 - index][0]
        loop.unwatch(other.fileno())
        other.close()
        pairs[index][0].recv(1)
        loop.stop()

    for index, (end, far) in enumerate(pairs):
        far.send(b"x")
        loop.watch(end.fileno(), partial(read, index))
    loop.run()
    assert len(called) == 1
    for end in (*pairs[0], *pairs[1]):
        end.close()


def peer(rank: int, host: str = "b", process: Process = ELSEWHERE, silence_s: float = 0.0) -> Peer:
    made = Peer(rank, host, process, RemoteProgress(None, -1), None)
    made.silence_s = silence_s
    return made


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def hub(loop: Loop) -> Hub:
    """Of a job with rank 0 on host a, ranks 1 and 2 on host b."""
    made = Hub(loop, peer(0, "a", HERE), 3, 1.0, 10.0, lambda message: None, 4.0)
    made.peers |= {rank: peer(rank) for rank in (1, 2)}
    return made


def run_until_failure(loop: Loop, hub: Hub) -> str:
    def look() -> None:
        if hub.failure is None:
            loop.later(0.01, look)
        else:
            loop.stop()

    look()
    loop.run()
    assert hub.failure is not None
    return hub.failure.describe()


STOPPED = ": it is stopped, as other ranks of its host are heard"
CUT = ", nor from any rank of host b: that is down, or the network between the hosts is cut"
BEAT = {"type": "beat", "progress": AT}
TIMEOUT = {"type": "timeout", "message": "it timed out"}


def fall_silent(hub: Hub, rank: int, timed_out: bool = False) -> None:
    """For as long as the limit; or for four heartbeats, and a collective has timed out."""
    hub.peers[rank].silence_s = 4.0 if timed_out else 9.5
    if timed_out:
        hub.receive(hub.peers[0], TIMEOUT)
    else:
        hub.tick(1.0)


@pytest.mark.parametrize(
    ("process", "others", "meaning"),
    [
        (HERE, 1, ": it is stopped, or cut off"),
        (ELSEWHERE, 0, ": its process is stopped, its host is down, or the network between the hosts is cut"),
    ],
)
def test_silence_of_a_rank_on_this_host_and_of_one_alone(process: Process, others: int, meaning: str, hub: Hub) -> None:
    """Nobody need be asked."""
    hub.peers = {rank: hub.peers[rank] for rank in range(2 + others)}
    hub.peers[1].process = process
    fall_silent(hub, 1)
    assert hub.failure is not None
    assert hub.failure.message == f"nothing was heard from it for 10 s{meaning}"


@pytest.mark.parametrize(
    ("answers", "meaning", "last_heard_s", "timed_out"),
    [
        *((True, STOPPED, last_heard_s, timed_out) for last_heard_s in (0.0, 2.0) for timed_out in (False, True)),
        (False, CUT, 0.0, True),
        (False, CUT, 2.0, False),
        pytest.param(False, CUT, 0.0, False, marks=pytest.mark.exhaustive),
        pytest.param(False, CUT, 2.0, True, marks=pytest.mark.exhaustive),
    ],
)
def test_silence_on_another_host(
    answers: bool, meaning: str, last_heard_s: float, timed_out: bool, loop: Loop, hub: Hub
) -> None:
    """What the other ranks there answer now decides, however long ago they were heard last."""
    hub.peers[1].silence_s = last_heard_s
    fall_silent(hub, 2, timed_out)
    assert hub.failure is None
    if answers:
        loop.later(0.05, hub.receive, hub.peers[1], BEAT)
    text = run_until_failure(loop, hub)
    assert text.startswith("rank 2 ")
    assert meaning in text
    assert ("rank 0 (host a) waited for it" in text) == timed_out


def test_the_others_are_asked_and_answer(loop: Loop, hub: Hub) -> None:
    asked, answer = FakeConnection(), FakeConnection()
    hub.peers[1].connection = cast(Connection, asked)
    fall_silent(hub, 2)
    assert asked.messages[-1] == {"type": "ping"}

    progress = Progress()
    own = Peer(1, "b", HERE, progress, None)
    client = Client(loop, own, 10.0, 1.0, State(), lambda failure: None, lambda signum: None)
    client.hub = Peer(0, "a", ELSEWHERE, RemoteProgress(None, -1), cast(Connection, answer))
    client.receive({"type": "ping"})
    progress.close()
    assert [message["type"] for message in answer.messages] == ["beat"]


def test_one_that_is_heard_again_is_not_silent(loop: Loop, hub: Hub) -> None:
    fall_silent(hub, 2)
    hub.receive(hub.peers[2], BEAT)
    loop.later(0.9, loop.stop)  # ranks answer within 0.75 s
    loop.run()
    assert hub.failure is None


def test_a_collective_timed_out_and_the_silent_one_is_heard_again(loop: Loop, hub: Hub) -> None:
    """By what it says then."""
    for rank in (0, 1):
        hub.peers[rank].progress.told = Reading(9, "backward")  # type: ignore[attr-defined]
    fall_silent(hub, 2, timed_out=True)
    loop.later(0.05, hub.receive, hub.peers[2], BEAT)
    text = run_until_failure(loop, hub)
    assert text.startswith("rank 2 ")
    assert "did not come at step 7 (forward)" in text


def test_a_collective_timed_out_and_who_asked_has_ended_meanwhile(loop: Loop, hub: Hub) -> None:
    """A KeyError ended the hub when the silent one was heard again; its own end is the cause."""
    for each in hub.peers.values():
        each.progress.told = Reading(7, "forward", 0, 7)  # type: ignore[attr-defined]
    hub.peers[2].silence_s = 4.0
    hub.receive(hub.peers[1], TIMEOUT)
    hub._ended(hub.peers[1], "it closed the connection")
    hub.receive(hub.peers[2], BEAT)
    loop.later(0.01, hub.receive, hub.peers[2], {**ENDED, "rank": 1})
    text = run_until_failure(loop, hub)
    assert text.startswith("rank 1 ")
    assert text.endswith("died at step 7 (forward): its process was killed by SIGKILL")


def test_all_ranks_leave_between_a_request_to_stop_and_their_answers(loop: Loop, hub: Hub) -> None:
    """The hub ended by ``max()`` of no answers, and nobody was given leave to go."""
    told: list[Message] = []
    hub._tell_own = told.append
    hub.receive(hub.peers[0], {"type": "stop", "signum": int(signal.SIGTERM)})
    for each in hub.peers.values():
        hub.receive(each, {"type": "bye"})
    assert [message["type"] for message in told] == ["ask", "bye"]


def test_a_rank_of_the_same_host_says_how_another_one_ended(loop: Loop, hub: Hub) -> None:
    """At once, or when its connection has ended already; with the step that it saw, which is newer than heartbeats."""
    hub.peers[2].progress.told = Reading(5, "data", 0, 5)  # type: ignore[attr-defined]
    hub._ended(hub.peers[2], "it closed the connection")
    loop.later(0.05, hub.receive, hub.peers[1], ENDED)
    text = run_until_failure(loop, hub)
    assert text.endswith("died at step 7 (forward): its process was killed by SIGKILL")


def test_a_rank_of_another_host_cannot_know(hub: Hub) -> None:
    with pytest.raises(ValueError, match="rank 0 cannot know how rank 2 ended"):
        hub.receive(hub.peers[0], ENDED)
    assert hub.failure is None


def test_the_end_of_one_that_has_left_is_nobodys_concern(loop: Loop, hub: Hub) -> None:
    hub.peers[2].has_left = True
    hub.receive(hub.peers[1], ENDED)
    assert hub.failure is None


def test_all_ranks_of_a_host_end(loop: Loop, hub: Hub) -> None:
    for rank in (1, 2):
        hub._ended(hub.peers[rank], "it closed the connection")
    text = run_until_failure(loop, hub)
    assert text.endswith("ended (it closed the connection), and so did all 2 ranks of host b")


@pytest.mark.parametrize("killed_for_memory", [False, True])
def test_the_kernel_is_suspected(killed_for_memory: bool, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OomWatch, "happened", lambda self: killed_for_memory)
    with subprocess.Popen(["sleep", "30"]) as process:
        watched = peer(1, process=Process.of(process.pid))
        texts: list[str] = []

        def told(text: str) -> None:
            texts.append(text)
            loop.stop()

        def ended(ended: Peer, how: str) -> None:
            ended.settle(loop, how, told)

        watched.watch_process(loop, ended)
        process.send_signal(signal.SIGKILL)
        loop.run()
        watched.close()
    suspicion = ", most likely by the kernel for lack of memory (OOM): it has just killed a process for that"
    assert texts == [f"its process was killed by SIGKILL{suspicion if killed_for_memory else ''}"]


# ---- who is late ----


@pytest.mark.parametrize(
    ("steps", "phases", "asks", "late"),
    [
        ([7, 5, 7], ["backward", "backward", "backward"], 0, 1),
        ([7, 7, 7], ["backward", "backward", "forward"], 1, 2),
        ([7, 7], ["forward", "backward"], 1, 0),
        ([7, 7], ["backward", "backward"], 1, 0),
        ([7, 7, 7], ["backward", "backward", "backward"], 1, None),
    ],
)
def test_who_is_late(hub: Hub, steps: list[int], phases: list[str], asks: int, late: int | None) -> None:
    """Whoever is behind, or elsewhere than the rest; of two ranks the one that does not ask."""
    hub.peers = {rank: hub.peers[rank] for rank in range(len(steps))}
    for rank, (step, phase) in enumerate(zip(steps, phases, strict=True)):
        progress = hub.peers[rank].progress
        assert isinstance(progress, RemoteProgress)
        progress.told = Reading(step, phase)
    hub.receive(hub.peers[asks], {"type": "timeout", "message": "it timed out"})
    assert hub.failure is not None
    if late is None:
        assert "no rank is behind" in hub.failure.message
    else:
        assert (hub.failure.rank, hub.failure.kind) == (late, "timeout")
