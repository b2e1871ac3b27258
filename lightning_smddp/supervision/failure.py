"""The record of the first failure of a job: which rank, where, when, and why."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.supervision.progress import Reading

Kind = Literal["exception", "died", "silent", "timeout", "left", "stopped"]
RUNS_HOOKS: frozenset[Kind] = frozenset({"exception", "left"})  # the rank's process is there, and may be in one
MAX_MESSAGE_CHARACTERS = 2000
_WORDS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Application timeout caused pair closure",
    "Timed out waiting",
    "RankFailedError: ",  # in the callback of a future
    "RankTimeoutError: ",
)
_VERBS = {
    "exception": "failed",
    "died": "died",
    "silent": "fell silent",
    "timeout": "did not come",
    "left": "left",
    "stopped": "was stopped",
}


@dataclass(frozen=True)
class Failure:
    """The first failure of a job.

    Attributes:
        rank: the global rank that failed.
        host: its host's name.
        pid: its process.
        step: the optimizer step it was in, as last known; -1: before the first.
        phase: what it was doing, see :data:`~lightning_smddp.supervision.progress.PHASES`; may be empty.
        kind: ``"exception"`` (it raised), ``"died"`` (its process or its connection ended), ``"silent"`` (stopped,
            or cut off the network), ``"timeout"`` (the others' collective timed out waiting for it), ``"left"`` (it
            ended its run while others were in the middle of theirs), ``"stopped"`` (a second signal ended it).
        message: the cause.
        time: seconds since 1970, by the clock of the rank that noticed.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    kind: Kind
    message: str
    time: float

    def describe(self) -> str:
        """One line: ``rank 1 (host a, process 12) failed at step 7 (backward): ValueError: bad``."""
        where = "" if self.step < 0 else f" at step {self.step}"
        phase = f" ({self.phase})" if self.phase else ""
        text = " ".join(self.message.split())
        return f"rank {self.rank} (host {self.host}, process {self.pid}) {_VERBS[self.kind]}{where}{phase}: {text}"

    def error(self) -> RankFailedError:
        """The error that the other ranks raise."""
        return RankFailedError(self.rank, _capital(self.describe()))

    def to_json(self) -> dict[str, Any]:
        """All attributes by name, as a message carries them; :meth:`from_json` checks them again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Failure:
        """The reverse; raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything else."""
        if values["kind"] not in get_args(Kind):
            raise ValueError(f"unknown kind of failure {values['kind']!r}")
        texts = {name: str(values[name])[:MAX_MESSAGE_CHARACTERS] for name in ("host", "phase", "kind", "message")}
        numbers = {name: int(values[name]) for name in ("rank", "pid", "step")}
        return cls(**numbers, **texts, time=float(values["time"]))  # type: ignore[arg-type]


def failure_of(rank: int, host: str, pid: int, at: Reading, kind: Kind, message: str) -> Failure:
    """A failure that is noticed now."""
    return Failure(rank, host, pid, at.step, at.phase, kind, message[:MAX_MESSAGE_CHARACTERS], time.time())


def text_of(error: BaseException) -> str:
    """Type and message of an exception; a lack of memory is called that."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    is_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "out of memory" in text
    return f"{'out of memory (OOM): ' if is_memory else ''}{text}"[:MAX_MESSAGE_CHARACTERS]


def is_timeout(error: BaseException) -> bool:
    """Whether a collective or the store waited too long for a peer."""
    text = str(error).lower()
    names = {cls.__name__ for cls in type(error).__mro__}
    return "RankTimeoutError" in names or (is_of_communication(error) and ("timed out" in text or "timeout" in text))


def is_of_communication(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of another rank's failure.

    Gloo's errors have no type of their own. torch's other ones (NCCL, the store) derive from ``DistError``. Of an
    error in a callback a ``torch.futures.Future`` keeps the text only.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, RankFailedError) or "DistError" in names:
        return True
    text = str(error)
    return type(error) is RuntimeError and any(word in text for word in _WORDS)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
