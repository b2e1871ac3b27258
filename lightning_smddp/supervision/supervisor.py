"""A rank's supervisor: watches all ranks of a job, and tells the training thread."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from lightning_smddp.supervision.board import COMMUNICATE, Board, Failure, behind, may_follow, text_of
from lightning_smddp.supervision.processes import name_of
from lightning_smddp.supervision.stop import END, Shutdown, Stops, write_stderr
from lightning_smddp.wording import counted

LOOK_S = 0.5  # between two looks at the store, and at processes
RANKS_PER_LOOK = 128  # with more of them each asks the store less often
STOPPED_S = 3.0  # a process of this host that is stopped for so long has failed
NOTE_HANG_S = 60.0  # all wait for one rank: it is said
STORE_S = (3.0, 30.0)  # the least and the most that the store may take to answer: `timeout` in between
ASK_DEVICE_S = 10.0  # the training thread stands in one call: no graph is captured, so a stream may be asked
_POLL_S = 0.05  # the longest pause while the training thread waits for other ranks
_DOUBT_LOOKS = 4  # who is not heard for as long as these take is silent


class Supervisor:
    """Watches all ranks of a job from one, until :meth:`close`. Collective: make it equally often on every rank.

    When a failure is known, the training thread has time to raise by itself, and to come to :meth:`close` when it has
    called :meth:`explain`. Else the process ends: with code 1, or 128 + the signal's number after a request to stop.

    Args:
        store: shared by the ranks, such as the default group's. It is cloned: a connection of its own.
        rank: this global rank.
        world_size: number of ranks.
        timeout: seconds after which collectives raise.
        grace: how many seconds after a request to stop the process may go on.
        parent: a launcher's process, without which this rank must not go on. None: a user has started this one, say.

    Attributes:
        own: how far this rank is.
        has_work: whether the device has; set it where collectives that time out raise nothing, as NCCL's.
        failure: the first failure of the job, as all ranks agree on it; None if there is none.
        shutdown, stops: see there for what can be set and called.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: float, grace: float, parent: int | None = None
    ) -> None:
        self.rank, self.timeout, self.grace = rank, timeout, grace
        self._parent = parent
        self.has_work: Callable[[], bool] | None = None
        self.failure: Failure | None = None
        self.shutdown = Shutdown()
        self.stops = Stops()
        self._suspect: Failure | None = None  # before all ranks know of it
        self._stopped_s: dict[int, float] = {}  # for how long processes of this host are stopped
        self._call: object = None  # that the training thread was in at the last look; None: it waited for other ranks
        self._stands_s = self._unanswered_s = self._stop_at = 0.0
        self._has_noted_hang = False
        self._lost = False  # the store is not used any more
        self._wake, self._closed = threading.Event(), threading.Event()
        self._period = LOOK_S * max(1.0, world_size / RANKS_PER_LOOK)
        self._doubt_s = _DOUBT_LOOKS * self._period
        self._board = Board(store, rank, world_size)
        self.own = self._board.own
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
                self._wake.wait(self._period)
                self._wake.clear()
            if not self._lost:
                self.own.over = 2
                self._board.tell()
        except dist.DistError:
            self._lost = True

    def _tick(self) -> None:
        """Say how far this rank is, and look at what the others have said."""
        self._board.tell()
        failure = self._board.look()
        self._unanswered_s = 0.0
        suspect = self._suspect
        if suspect is not None and suspect.kind == "died" and self._board.beats[suspect.rank].over:
            self._suspect = None  # it said goodbye before
        elif suspect is not None:
            failure = failure or self._board.set_once("failure", json.dumps(suspect))
        if failure:
            self._record(Failure(*json.loads(failure)))
        elif signum := max(beat.signal for beat in self._board.beats):
            self._agree(signum)
        else:
            self._note_hang()

    def _record(self, failure: Failure) -> None:
        if failure.kind == "fell silent" and failure.rank in self._board.local:
            self._board.who[failure.rank].kill()  # nobody runs its Python
        self.own.over = 2
        self.failure = self.failure or failure

    def _note_hang(self) -> None:
        """Once all others have waited for one rank for long, it is said where that is, by that rank if it can."""
        beats = self._board.beats
        late = behind(beats)
        others_s = [beat.waited_s for rank, beat in enumerate(beats) if rank != late]
        if late is None or self._has_noted_hang or min(others_s) <= NOTE_HANG_S:
            return
        text = f"lightning-smddp: all others have waited for {self._board.name(late)} for {NOTE_HANG_S:g} s. "
        if late == self.rank:
            stack = "".join(traceback.format_stack(sys._current_frames()[self.shutdown.thread]))
            text += f"It is here:\n{stack}"
        elif self.rank == 0 and self.own.waited_s > NOTE_HANG_S + self._doubt_s:
            text += "It says nothing: code in C holds its interpreter.\n"
        else:
            return
        self._has_noted_hang = True
        write_stderr(self._board.set_once("hang", text))

    # ---- the other thread: what is seen without the store, and the end of this process ----

    def _guard(self) -> None:
        while not self._closed.wait(LOOK_S):
            # Time is counted by looks, as this process may have been stopped itself, as the whole machine may.
            if self.failure is None:  # before a look at signals, lest a launcher's be taken for a request to stop
                self._look_around()
                self._look_at_training()
            failure = self.failure
            if failure is not None or self._suspect is None:  # else they wait for what is known of it in a moment
                for signum, again in self.stops.read_signals():
                    if again or failure is None:  # behind one it may be the launcher's
                        self.own.signal = self.own.signal or signum
                    if again:
                        self._force(f"{name_of(signum)} came again")
            if failure is not None:
                if self.shutdown.due():
                    self._force(failure.text)
            elif self.own.signal:
                self._stop_at = self._stop_at or time.monotonic() + self.grace
                if time.monotonic() > self._stop_at:
                    self._force(f"it did not stop within {self.grace:g} s of {name_of(self.own.signal)}")

    def _look_around(self) -> None:
        for rank in self._board.local:
            is_stopped, ended = self._board.who[rank].look()
            self._stopped_s[rank] = is_stopped * (self._stopped_s.get(rank, 0.0) + LOOK_S)
            if ended and not self._board.beats[rank].over:
                self._declare(rank, "died", ended)
            elif self._stopped_s[rank] >= STOPPED_S:
                self._declare(rank, "fell silent", "its process is stopped (by SIGSTOP, or Ctrl+Z)")
        if self._parent not in (None, os.getppid(), *(self._board.who[rank].pid for rank in self._board.local)):
            self._declare(self.rank, "died", f"its launcher (process {self._parent}) ended")
        limit = min(max(self.timeout, STORE_S[0]), STORE_S[1])
        if self._lost or self._stopped_s.get(0, 0.0) >= STOPPED_S:  # by then it is seen how rank 0's process ended
            limit = 2 * LOOK_S
        self._unanswered_s += LOOK_S
        if self._unanswered_s > limit and not self._board.beats[0].over:
            self._lost = True  # so nobody can tell the others any more
            how = "its process or its connection ended, its host is down, or the network between the hosts is cut"
            self._record(self._declare(0, "fell silent", f"the job's store is lost: {how}"))

    def _look_at_training(self) -> None:
        """How long it waits: where ranks communicate, or in one call, while its device has work left."""
        frame = sys._current_frames().get(self.shutdown.thread)
        if frame is None:  # the thread has ended
            return
        waiting, has_work = frame.f_globals.get("__name__", "").startswith(COMMUNICATE), False
        call = None if waiting else (id(frame), frame.f_lasti)
        self._stands_s = self._stands_s + LOOK_S if call == self._call else 0.0
        self._call = call
        if not waiting and self.has_work is not None and self._stands_s >= min(ASK_DEVICE_S, self.timeout / 2):
            with suppress(RuntimeError):  # the device has failed, as the training thread will see
                has_work = self.has_work()
        self.own.has_work = has_work
        self.own.waited_s = self._stands_s if waiting or has_work else 0.0
        if self.has_work is not None and self.own.waited_s > self.timeout:
            self._declare_behind(f"waited {self.own.waited_s:.0f} s for it")

    def _declare(self, rank: int, kind: str, message: str) -> Failure:
        """For any thread: let all ranks know. The first one counts."""
        name = self._board.name(rank, f" {kind}")
        self._suspect = self._suspect or Failure(rank, kind, f"R{name[1:]}: {message}")
        self._wake.set()
        return self._suspect

    def _declare_behind(self, text: str) -> None:
        """Whoever it is that this rank and others wait for."""
        text = f"{self._board.name(self.rank)} {text}"
        late = behind(self._board.beats)
        if late is None:
            hint = "no rank is behind on its host (NCCL's flight recorder says more: TORCH_FR_BUFFER_SIZE=2000)"
            self._declare(self.rank, "failed", f"{text}; {hint}")
        else:
            why = "its device has work left" if self._board.beats[late].has_work else "its host does not go on"
            self._declare(late, "did not come", f"{text}; {why}")

    def _force(self, reason: str) -> None:
        if self.failure is None:  # of a stop: who runs no Python would be left behind
            for rank in self._unheard():
                reason += f"; {self._board.name(rank)} has not said where it can stop"
                if rank in self._board.local:
                    self._board.who[rank].kill()
        code = 128 + self.own.signal if self.own.signal else 1
        self.shutdown.force(code, self._board.name(self.rank), reason)

    # ---- failures ----

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for ``error``, which is about to end training: itself, or the failure that it follows from.

        An error of communication waits for word of the rank that caused it, a few seconds at most. An error of this
        rank's own is told to the others. An exit after an agreed stop is neither.

        Returns:
            ``error``, or a ``RankFailedError`` that names the first cause; raise that ``from error``.
        """
        self.shutdown.take_over(error)
        follows = may_follow(error)
        if follows:
            self._judge(text_of(error))
        elif self.stops.decision is None or isinstance(error, Exception):
            self._declare(self.rank, "failed", text_of(error))
        self._wait(lambda: False, 2 * LOOK_S)
        # The end of the store must not be taken for the cause: others have to know what that is.
        if self.rank == 0:
            self._wait(self._may_leave, 2 * LOOK_S, despite_failure=True)
        failure = self.failure
        if failure is None or not follows or (failure.rank == self.rank and failure.kind == "failed"):
            return error
        return error if str(error) == failure.text else failure.error()

    def _judge(self, text: str) -> None:
        """A collective has failed. If no process of this host has ended: who is silent, has left, or is behind?"""
        if self._wait(lambda: False, 2 * LOOK_S):
            return
        numbers = [beat.number for beat in self._board.beats]

        def silent() -> list[int]:
            return [rank for rank, beat in enumerate(self._board.beats) if beat.number == numbers[rank]]

        self._wait(lambda: not silent(), self._doubt_s)
        text = f"waited for it: {text.removesuffix('.')}"
        if left := [rank for rank, beat in enumerate(self._board.beats) if beat.over]:
            self._declare(left[0], "left", f"it ended its run while {self._board.name(self.rank)} {text}")
        elif quiet := silent():
            why = "nobody of its host is heard: its host is down, or the network between the hosts is cut"
            if quiet[0] in self._board.local:
                why = "its process is there and runs no Python, as where code in C holds the interpreter"
            self._declare(quiet[0], "fell silent", f"{self._board.name(self.rank)} {text}; {why}")
        else:
            self._declare_behind(text)

    def _wait(self, ready: Callable[[], bool], seconds: float, despite_failure: bool = False) -> bool:
        """Let the training thread wait until ``ready()``, or a failure; whether one of them came."""
        start = time.monotonic()
        while (waited := time.monotonic() - start) < seconds:
            if ready() or (self.failure is not None and not despite_failure):
                return True
            self._wake.set()
            time.sleep(min(waited + 0.002, _POLL_S))
        return False

    def raise_failure(self) -> None:
        """For the training thread, where it can end: raise if the job has failed, unless it handles that already."""
        if self.failure is not None and not self.shutdown.is_handled:
            raise self.failure.error()

    # ---- stops ----

    def gate(self, step: int) -> bool:
        """Whether to stop here. Call it where that is possible, with the same rising numbers on every rank.

        Usually this stores a number and looks at others. Once a stop is asked for it waits until the ranks have
        agreed on the step, a few seconds at most.

        Raises:
            RankFailedError: there is a failure.
        """
        self.stops.step = step
        if self.own.signal or self.stops.is_signalled:
            seconds = self.grace if self.own.signal else 2 * LOOK_S  # for the other thread to read the signal
            self._wait(lambda: self._lost or self.stops.decision is not None or step < self.own.answer, seconds)
        self.raise_failure()
        return self.stops.decision is not None and step >= self.stops.decision

    def _unheard(self) -> list[int]:
        """Ranks that have not said where they can stop."""
        return [rank for rank, beat in enumerate(self._board.beats) if beat.answer == 0 and beat.over < 2]

    def _agree(self, signum: int) -> None:
        """Answer, and decide if all have. Who does not is ended when the time is over (``_force``)."""
        self.own.signal = self.own.signal or signum
        # The training thread may have passed the gate of this step already, without a look at the signal.
        self.own.answer = self.own.answer or min(self.stops.step + 1, END)
        if not self._unheard():  # each rank sees the same answers, as nobody changes his
            self.stops.decision = max(beat.answer for beat in self._board.beats)

    # ---- epochs ----

    def begin(self, phase: str) -> None:
        """The training thread does something else from here on."""
        self.own.phase = phase
        self._stands_s = 0.0

    def begin_batch(self, step: int, batches: int) -> None:
        """At optimizer step ``step`` a batch is begun, with which ``batches`` of this epoch are."""
        self.own.step = step
        self.own.begun = self.own.ended + batches
        self.begin("forward")

    def end_of_epoch(self, epoch: int) -> None:
        """Wait until every rank is at the end of its epoch, with as many batches. Collective.

        Again before the next batch it does nothing.

        Raises:
            RankFailedError: a rank failed, had another number of batches, or ended its run.
            torch.distributed.DistError: the others did not come in time; ``explain`` finds out who.
        """
        start, end = self.own.ended, self.own.begun
        self.own.ended = end
        own = f"it ended epoch {epoch} after {counted(end - start, 'batch')}"
        cure = "Give all equally many batches, or `CommunicationOptions(uneven=...)`; set `trainer.should_stop` on all"

        def all_are_here() -> bool:
            beats = self._board.beats
            for rank, beat in enumerate(beats):
                if beat.ended < end and (beat.begun > end or beat.over):  # who has fewer finds out itself
                    text = f"{own}, and rank {rank} has begun {beat.begun - start} ({beat.phase}). {cure}"
                    self._declare(self.rank, "left", text)
            return all(beat.ended >= end for beat in beats)

        if not self._wait(all_are_here, self.timeout):
            raise dist.DistError(f"it waited {self.timeout:g} s at the end of epoch {epoch}")
        self.raise_failure()

    # ---- end ----

    def close(self, patience: float = 5.0) -> Failure | None:
        """Say goodbye and stop watching; threads, connection and signal handlers are gone afterwards.

        It waits up to ``patience`` seconds for the other ranks' goodbyes. Whoever ends without one has failed.

        Returns:
            The failure of the job, if there was one, also one that came while this rank was waiting here.
        """
        self.shutdown.take_over()
        self.stops.restore_signals()
        self.own.over = max(self.own.over, 1)
        self._wait(self._may_leave, patience)
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._doubt_s)
        atexit.unregister(self.close)
        return self.failure

    def _may_leave(self) -> bool:
        """Whether the others have ended their runs, or know of the failure; whose store it is, use it no more."""
        failed = None if self.failure is None else self.failure.rank
        over = 2 if self.rank == 0 else 1
        beats = [beat for rank, beat in enumerate(self._board.beats) if rank not in (self.rank, failed)]
        return self._lost or all(beat.over >= over for beat in beats)
