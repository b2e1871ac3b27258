"""Stopping all ranks at one step, without a message per step.

On a request the hub asks every rank's watching thread. Each answers with the first step at which its training thread
can still stop, and from then on that thread waits in ``gate()`` at this step. The largest answer is the step at which
all stop: nobody is beyond it, and the ones before it go on until they come to it. The answers come from threads that
no collective blocks, so this cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_smddp.supervision.connection import Message
from lightning_smddp.supervision.loop import Loop, Timer
from lightning_smddp.supervision.peer import Peer

AGREE_WITHIN_S = 20.0  # or a quarter of the time there is: a call into C may keep a rank's interpreter for long


@dataclass(frozen=True)
class Stop:
    """Stop now.

    Attributes:
        signum: the signal that asked for it.
        step: the number that ``gate`` was called with.
        agreed: whether all ranks stop at this step. If not, some rank does not answer: a collective would hang.
    """

    signum: int
    step: int
    agreed: bool = True


class StopGate:
    """A rank's side.

    The training thread first writes ``step``, then looks at ``attention``; the watching one first writes
    ``attention``, then reads ``step``. So either the former sees the question, or the latter sees the new step.
    """

    def __init__(self) -> None:
        self.step = -1
        self.signum: int | None = None
        self.first: int | None = None  # this rank's answer: the first step at which it can stop
        self.decision: tuple[int | None] | None = None  # (the step,), or (None,): no agreement

    def answer(self, signum: int) -> int:
        """The watching thread's answer, after it has called for attention; always the same."""
        self.signum = self.signum or signum
        if self.first is None:
            # The training thread may have passed the gate of `step` already, without a look at this.
            self.first = self.step + 1
        return self.first

    def may_pass(self, step: int) -> bool:
        """Whether the training thread need not wait at ``step``."""
        if self.decision is not None:
            return True
        return self.first is not None and step < self.first

    def verdict(self, step: int) -> Stop | None:
        """For a thread that may pass."""
        if self.decision is None:
            return None
        # The largest answer of all ranks, so none is beyond it. Without one every rank stops where it is.
        (at,) = self.decision
        if at is not None and step < at:
            return None
        return Stop(self.signum or 0, step, at is not None)


class StopVote:
    """The hub's side of a stop: it asks all peers for their step and tells them the last one."""

    def __init__(
        self,
        loop: Loop,
        peers: Callable[[], Iterable[Peer]],
        tell: Callable[[Message], None],
        within_s: float,
    ) -> None:
        self._loop = loop
        self._peers = peers
        self._tell = tell
        self._within_s = within_s
        self.signum: int | None = None
        self._answers: dict[int, int] = {}
        self._timer: Timer | None = None  # while the answers are awaited

    def request(self, signum: int) -> None:
        """Some rank was asked to stop; the first one counts."""
        if self.signum is None:
            self.signum = signum
            self._timer = self._loop.later(self._within_s, self._give_up)
            self._tell({"type": "ask", "signum": signum})

    def answer(self, rank: int, step: int) -> None:
        """``rank`` has come to ``step`` and can stop there; with the last answer it is decided."""
        self._answers[rank] = step
        self.look()

    def look(self) -> None:
        """Decide if everyone who is still there has answered."""
        if self._answers and not self._unanswered():
            self._decide(max(self._answers.values()), [])

    def _unanswered(self) -> list[Peer]:
        return [peer for peer in self._peers() if peer.is_in_run and peer.rank not in self._answers]

    def _give_up(self) -> None:
        self._decide(None, self._unanswered())

    def _decide(self, step: int | None, missing: list[Peer]) -> None:
        if self._timer is None:  # nobody has asked, or it is decided
            return
        self._timer.cancel()
        self._timer = None
        processes = [peer.process.to_json() for peer in missing]
        self._tell(
            {
                "type": "stop",
                "signum": self.signum,
                "step": step,
                "missing": processes,
            }
        )
