"""A rank's supervisor: watches all ranks of a job, and tells the training thread."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from lightning_smddp.supervision.board import Beat, Board
from lightning_smddp.supervision.failure import Failure, Kind, is_of_communication, place, text_of
from lightning_smddp.supervision.hangs import NO_RANK_IS_BEHIND, Stillness, behind, waited_for
from lightning_smddp.supervision.processes import name_of
from lightning_smddp.supervision.shutdown import Shutdown, say
from lightning_smddp.supervision.stop import Stops
from lightning_smddp.wording import counted

LOOK_S = 0.5  # between two looks at the store, and at processes
RANKS_PER_LOOK = 128  # with more of them each asks the store less often
NEIGHBOURS = 8  # processes of this host that a rank looks at, and rank 0's
STOPPED_S = 3.0  # one that is stopped for so long has failed
NOTE_HANG_S = 60.0  # all wait for one rank: it is said
SAYS_NOTHING_S = 2.0  # that rank does not say where it is
STORE_S = (3.0, 30.0)  # the least and the most that the store may take to answer: `collective_timeout` in between
AGREE_WITHIN_S = 20.0  # on a stop, or a quarter of the time: a call into C may keep a rank's interpreter for long
_POLL_S = 0.05  # while the training thread waits for other ranks
_DOUBT_S = 2.0  # who writes no beat meanwhile is silent
_TOLD_S = 1.0  # for a failure to be seen, and told
_LEAVE_S = 2.0  # for the last words
_live: set[Supervisor] = set()


class Supervisor:
    """Watches all ranks of a job from one, until :meth:`close`. Collective: make it equally often on every rank.

    When a failure is known, the training thread has time to raise by itself, and to come to :meth:`close` when it has
    called :meth:`explain`. Else the process ends: with code 1, or 128 + the signal's number after a request to stop.

    Args:
        store: shared by the ranks, such as the default group's. It is cloned: a connection of its own.
        rank: this global rank.
        world_size: number of ranks.
        collective_timeout: seconds after which collectives raise, and a device that waits has hung.
        stop_grace: how many seconds after a request to stop the process may go on.
        parent_pid: a launcher without which this rank must not go on. None: of a process that a user started, say.
        agent_serves: whether torchrun's agent serves the store, and not rank 0.

    Attributes:
        step, phase, batches: set these as training goes on; ``batches`` are those of the epoch that are begun.
        moves: add one where this rank goes on in a way that the rest does not show, such as a batch of a validation.
        failure: the first failure of the job, as all ranks agree on it; None if there is none.
        stop_signal: by which the job was asked to stop; None if it was not.
        shutdown, stops, stillness: see there for what can be set and called.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        collective_timeout: float,
        stop_grace: float = 90.0,
        parent_pid: int | None = None,
        agent_serves: bool = False,
    ) -> None:
        self.rank = rank
        self.collective_timeout = collective_timeout
        self.stop_grace = stop_grace
        self._parent_pid = parent_pid
        self.step, self.phase = -1, "setup"
        self.batches = self.moves = 0
        self.failure: Failure | None = None
        self.stop_signal: int | None = None
        self.shutdown = Shutdown()
        self.stops = Stops()
        self.stillness = Stillness(self.shutdown.thread)
        self._number = self._over = 0
        self._ended = (0, 0)  # how many epochs this rank has ended, and after how many batches the last one
        self._suspects: dict[int, tuple[Kind, str]] = {}  # who has failed, and how, before all ranks know
        self._stopped_s: dict[int, float] = {}  # for how long processes of this host are stopped
        self._unanswered_s = self._stop_at = self._ticked_at = 0.0
        self._is_waiting = self._has_noted_hang = False  # the training thread waits, in here
        self._lost = False  # the store is not used any more
        self._wake, self._closed = threading.Event(), threading.Event()
        self._period = LOOK_S * max(1.0, world_size / RANKS_PER_LOOK)
        self._server = None if agent_serves else 0  # the rank that takes the store with it
        self._board = Board(store, rank, world_size, self._own_beat())
        local = self._board.local
        self._neighbours = {*local[:NEIGHBOURS], 0} & {*local}
        _live.add(self)
        atexit.register(self.close, 0.0)  # a thread that comes out of C++ when the interpreter has ended would abort it
        targets = {"smddp-supervisor": self._watch, "smddp-guard": self._guard}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in targets.items()]
        for thread in self._threads:
            thread.start()

    # ---- the watching thread: all that is asked of the store, which may never answer ----

    def _watch(self) -> None:
        try:
            while not self._lost and not self._closed.is_set():
                self._tick()
                self._wake.wait(_POLL_S if self._is_waiting else self._period)
                self._wake.clear()
            if not self._lost:
                self._over = 2
                self._board.tell(self._own_beat())
        except dist.DistError:
            self._store_ended("died", "its process or its connection ended")

    def _tick(self) -> None:
        """Say how far this rank is, and look at what the others have said."""
        self._board.tell(self._own_beat())
        failure, stop, decision = self._board.look()
        self._unanswered_s = 0.0
        for rank, (kind, message) in list(self._suspects.items()):
            if kind == "died" and rank != self.rank and self._board.beat(rank).over:  # it has said goodbye
                del self._suspects[rank]
            elif not failure:
                failure = self._board.set_once("failure", json.dumps(self._failure_of(rank, kind, message)))
        if failure:
            self._record(Failure(*json.loads(failure)))
        elif stop or self.stop_signal is not None:
            self._agree(int(stop or self._board.set_once("stop", str(self.stop_signal))), decision)
        now = time.monotonic()
        passed = min(now - self._ticked_at, 2 * self._period)  # the whole machine may have been stopped meanwhile
        self._ticked_at = now
        self.stillness.tick((self.step, self.phase, self.batches, self.moves), passed, self._is_waiting)
        if self.failure is None and self.stillness.still_s > 1.0:
            self._look_for_hang(self._board.beats())

    def _own_beat(self) -> Beat:
        self._number += 1
        where = (self._number, self.step, self.phase, self.batches, *self._ended)
        waits = (round(self.stillness.still_s, 2), self.stillness.waits)
        return Beat(*where, *waits, self.stops.answer, self.failure is not None, self._over)

    def _failure_of(self, rank: int, kind: Kind, message: str) -> Failure:
        beat = self._board.beat(rank)
        if rank == self.rank:
            beat = beat._replace(step=self.step, phase=self.phase)
        who = self._board.who[rank]
        return Failure(rank, who.host, who.pid, beat.step, beat.phase, kind, message)

    def _record(self, failure: Failure) -> None:
        if failure.kind == "fell silent" and failure.rank in self._board.local:
            self._board.who[failure.rank].kill()  # nobody runs its Python
        self.stops.attention = True
        self.failure = self.failure or failure

    def _store_ended(self, kind: Kind, how: str) -> None:
        """Nobody can tell the others any more: each names the same rank by itself."""
        self._lost = True
        # How a process of this host has ended, or that it is stopped, is seen meanwhile, by the other ranks, too.
        if self._closed.wait(2 * LOOK_S):
            return
        rank = 0
        if self._server is None:  # torchrun's agent has ended
            rank, kind = self.rank, "lost the job's store"
        elif self._board.beat(0).over:
            return
        self._record(self._failure_of(rank, *self._suspects.get(rank, (kind, how))))

    # ---- the other thread: what is seen without the store, and the end of this process ----

    def _guard(self) -> None:
        period = LOOK_S
        while not self._closed.wait(period):
            # Time is counted by looks, as this process may have been stopped itself, as the whole machine may.
            if self.failure is None:  # before a look at signals, lest a launcher's be taken for a request to stop
                self._look_around(period)
            failure = self.failure
            period = _POLL_S if failure or self.stop_signal else LOOK_S
            if failure is not None or not self._suspects:  # else they wait for what is known of these in a moment
                for signum, again in self.stops.read_signals():
                    self._signalled(signum, again)
            if failure is not None:
                if self.shutdown.due():
                    self._force(failure.describe())
            elif self.stop_signal is not None and time.monotonic() - self._stop_at > self.stop_grace:
                self._force(f"it did not stop within {self.stop_grace:g} s of {name_of(self.stop_signal)}")

    def _look_around(self, passed: float) -> None:
        limit = min(max(self.collective_timeout, STORE_S[0]), STORE_S[1])
        self._unanswered_s += passed
        is_lost = self._unanswered_s > limit
        for rank in self._neighbours:
            is_stopped, ended = self._board.who[rank].look()
            self._stopped_s[rank] = is_stopped * (self._stopped_s.get(rank, 0.0) + passed)
            if ended and not self._board.beat(rank).over:
                self._declare(rank, "died", ended)
            elif self._stopped_s[rank] >= STOPPED_S:
                self._declare(rank, "fell silent", "its process is stopped (by SIGSTOP, or Ctrl+Z)")
            else:
                continue
            is_lost |= rank == self._server
        parent = self._parent_pid
        if parent not in (None, os.getppid(), *(self._board.who[rank].pid for rank in self._board.local)):
            self._declare(self.rank, "died", f"its launcher (process {parent}) ended")
        if is_lost and not self._lost:
            how = f"no answer of the job's store within {limit:g} s: it is stopped, its host is down, or the network "
            self._store_ended("fell silent", f"{how}between the hosts is cut")

    def _declare(self, rank: int, kind: Kind, message: str) -> None:
        """For any thread: let all ranks know. The first one counts."""
        self._suspects.setdefault(rank, (kind, message))
        self._wake.set()

    def _force(self, reason: str) -> None:
        code = 1 if self.stop_signal is None else 128 + self.stop_signal
        self.shutdown.force(code, self._where(self.rank), reason)

    def _where(self, rank: int) -> str:
        beat = self._board.beat(rank)
        return f"rank {rank} (host {self._board.who[rank].host}){place(beat.step, beat.phase)}"

    # ---- failures ----

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for ``error``, which is about to end training: itself, or the failure that it follows from.

        An error of communication waits for word of the rank that caused it, a few seconds at most. An error of this
        rank's own is told to the others. An exit after an agreed stop is neither.

        Returns:
            ``error``, or a ``RankFailedError`` that names the first cause; raise that ``from error``.
        """
        self.shutdown.take_over(error)
        follows = is_of_communication(error)
        if follows:
            self._judge(text_of(error))
        elif self.stops.decision is None or isinstance(error, Exception):
            self._declare(self.rank, "left" if isinstance(error, SystemExit) else "failed", text_of(error))
            self._wait(lambda: False, _TOLD_S)
        # The end of the store must not be taken for the cause: others have to know what that is.
        if self.rank == self._server:
            self._wait(self._may_take_store, _TOLD_S, despite_failure=True)
        failure = self.failure
        if failure is None or not follows or (failure.rank == self.rank and failure.kind == "failed"):
            return error
        return error if str(error) == str(failure.error()) else failure.error()

    def _judge(self, text: str) -> None:
        """A collective has failed. If no process of this host has ended: who is silent, has left, or is behind?"""
        if self._wait(lambda: False, _TOLD_S):
            return
        numbers = {rank: beat.number for rank, beat in enumerate(self._board.beats()) if rank != self.rank}

        def silent() -> list[int]:
            return [rank for rank, number in numbers.items() if self._board.beat(rank).number == number]

        self._wait(lambda: not silent(), _DOUBT_S)
        beats = self._board.beats()
        text = f"{self._where(self.rank)} waited for it: {text}"
        late = behind(beats)
        if left := [rank for rank, beat in enumerate(beats) if beat.over]:
            self._declare(left[0], "left", f"it ended its run while {text}")
        elif quiet := silent():
            why = "nobody of its host is heard: its host is down, or the network between the hosts is cut"
            if quiet[0] in self._board.local:
                why = "its process is there and runs no Python, as where code in C holds the interpreter"
            self._declare(quiet[0], "fell silent", f"{text}; {why}")
        elif late is None or late == self.rank:
            self._declare(self.rank, "failed", f"{text}; {NO_RANK_IS_BEHIND}")
        else:
            self._declare(late, "did not come", text)
        self._wait(lambda: False, _TOLD_S)

    def _wait(self, ready: Callable[[], bool], seconds: float, despite_failure: bool = False) -> bool:
        """Let the training thread wait until ``ready()``, or a failure; whether one of them came."""
        self._is_waiting = True
        self._wake.set()
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                if ready() or (self.failure is not None and not despite_failure):
                    return True
                time.sleep(_POLL_S)
            return False
        finally:
            self._is_waiting = False

    def raise_failure(self) -> None:
        """For the training thread, where it can end: raise if the job has failed, unless it handles that already."""
        if self.failure is not None and not self.shutdown.is_handled:
            raise self.failure.error()

    def _look_for_hang(self, beats: list[Beat]) -> None:
        """A device that hangs ends the job, as NCCL raises nothing; any other hang is said, once."""
        own = self.stillness
        if own.has_work is not None and own.waits and own.still_s > self.collective_timeout and len(beats) > 1:
            cause = behind(beats)
            why = "its host does not go on"
            if cause is None:
                why = NO_RANK_IS_BEHIND
            elif beats[cause].waits == "device":
                why = "its device has work left"
            text = f"{self._where(self.rank)} has waited for {own.still_s:.0f} s; {why}"
            self._declare(self.rank if cause is None else cause, "did not come", text)
        late = waited_for(beats, NOTE_HANG_S)
        if late is None or self._has_noted_hang:
            return
        text = f"lightning-smddp: all others have waited for {self._where(late)} for {NOTE_HANG_S:g} s. "
        if late == self.rank:
            stack = "".join(traceback.format_stack(sys._current_frames()[self.shutdown.thread]))
            text += f"It is here:\n{stack}"
        elif self.rank == 0 and waited_for(beats, NOTE_HANG_S + SAYS_NOTHING_S) == late:
            text += "It says nothing: code in C holds its interpreter.\n"
        else:
            return
        self._has_noted_hang = True
        say(self._board.set_once("hang", text))

    # ---- stops ----

    def gate(self, step: int) -> bool:
        """Whether to stop here. Call it where that is possible, with the same rising numbers on every rank.

        Usually this stores a number and looks at a flag. Once a stop is asked for it waits until the ranks have
        agreed on the step, a few seconds at most.

        Raises:
            RankFailedError: there is a failure, such as a rank that did not answer.
        """
        self.stops.step = step
        if not self.stops.attention:
            return False
        self._wait(lambda: self._lost or self.stops.may_pass(step), self.stop_grace)
        self.raise_failure()
        return self.stops.decision is not None and step >= self.stops.decision

    def _signalled(self, signum: int, again: bool) -> None:
        """The first signal asks for a stop; a second one, or Ctrl+C after a failure, ends this process."""
        failure = self.failure
        if failure is None and not again:
            self._stop_asked(signum)
        elif again or signum != signal.SIGTERM:  # the first one may be a launcher's
            reason = "again" if failure is None else f"after this failure: {failure.describe()}"
            self.stop_signal = self.stop_signal or signum
            self._force(f"{name_of(signum)} came {reason}")

    def _stop_asked(self, signum: int) -> None:
        """Here or on another rank; from now on the time is short."""
        if self.stop_signal is None:
            self._stop_at = time.monotonic()
            self.stop_signal = signum
            self._wake.set()
            if self.rank == 0:  # once for the job: Ctrl+C reaches all ranks of a terminal
                text = f"all ranks stop at one of the next steps, within {self.stop_grace:g} s"
                say(f"lightning-smddp: {name_of(signum)}: {text}. A second signal ends a rank at once.\n")

    def _agree(self, signum: int, decision: str) -> None:
        """Answer, and decide if all have. A rank that does not answer in time has failed."""
        self._stop_asked(signum)
        self.stops.ask()
        running = [(rank, beat.answer) for rank, beat in enumerate(self._board.beats()) if beat.over < 2]
        answers = [answer for _, answer in running if answer is not None]
        limit = min(AGREE_WITHIN_S, self.stop_grace / 4)
        if not decision and len(answers) == len(running):
            decision = self._board.set_once("decision", str(max(answers)))
        if decision:
            self.stops.decision = int(decision)
        elif time.monotonic() - self._stop_at > limit:
            text = f"it did not say within {limit:g} s of {name_of(signum)} where it can stop, and runs no Python"
            silent = [rank for rank, answer in running if answer is None]
            self._declare(silent[0], "fell silent", text)

    # ---- epochs ----

    def end_of_epoch(self, epoch: int) -> None:
        """Wait until every rank is at the end of its epoch, with as many ``batches``. Collective.

        Again before the next batch it does nothing.

        Raises:
            RankFailedError: a rank failed, had another number of batches, or ended its run.
        """
        batches = self.batches
        if batches == 0:
            return
        end = self._ended[0] + 1
        self.batches = 0  # first, lest a beat takes this epoch's batches for the next one's
        self._ended = (end, batches)
        own = f"rank {self.rank} ended epoch {epoch} after {counted(batches, 'batch')}"

        def all_have() -> bool:
            beats = self._board.beats()
            for rank, beat in enumerate(beats):
                begun = {end: beat.ended_batches, end - 1: beat.batches}.get(beat.ended, 0)
                if begun > batches:  # one that has fewer finds out itself
                    text = f"{own}, and rank {rank} has begun {begun} ({beat.phase}). Give all equally many batches"
                    self._declare(self.rank, "left", f"{text}, and set `trainer.should_stop` on all")
                elif beat.over and beat.ended < end:
                    self._declare(rank, "left", f"it ended its run, but {own}")
            return all(beat.ended > end or (beat.ended, beat.ended_batches) == (end, batches) for beat in beats)

        if not self._wait(all_have, self.collective_timeout):
            self._judge(f"it waited {self.collective_timeout:g} s at the end of epoch {epoch}")
        self.raise_failure()

    # ---- end ----

    def close(self, patience: float = 5.0) -> Failure | None:
        """Say goodbye and stop watching; threads, connection and signal handlers are gone afterwards.

        Rank 0 waits up to ``patience`` seconds for the other ranks' goodbyes. Whoever ends without one has failed.

        Returns:
            The failure of the job, if there was one, also one that came while this rank was waiting here.
        """
        if self._closed.is_set():
            return self.failure
        self.shutdown.take_over()
        self.stops.restore_signals()
        self._over = 1
        if self.rank == self._server:
            self._wait(self._may_take_store, patience)
        else:
            self._wait(lambda: self._lost or all(beat.over for beat in self._board.beats()), min(patience, _LEAVE_S))
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(_LEAVE_S)
        _live.discard(self)
        atexit.unregister(self.close)
        return self.failure

    def _may_take_store(self) -> bool:
        """Whether the others use it no more, or know of the failure."""
        failed = None if self.failure is None else self.failure.rank
        beats = [beat for rank, beat in enumerate(self._board.beats()) if rank not in (self.rank, failed)]
        return self._lost or all(beat.knows or beat.over == 2 for beat in beats)


def _forget_all() -> None:
    """In a forked child: copies of the parent's, which must not say goodbye for it. It has its own signals back."""
    for supervisor in list(_live):
        supervisor._closed.set()
        supervisor.stops.restore_signals()
    _live.clear()


os.register_at_fork(after_in_child=_forget_all)
