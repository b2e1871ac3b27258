"""The record of the first failure of a job: which rank, where, when, and why."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_smddp.communication.errors import RankFailedError, RankTimeoutError
from lightning_smddp.supervision.progress import Reading, place

Kind = Literal["exception", "died", "silent", "timeout", "left", "stopped"]
RUNS_HOOKS: frozenset[Kind] = frozenset({"exception", "left"})  # the rank's process is there, and may be in one
MAX_MESSAGE_CHARACTERS = 2000
# In the texts of errors of communication that are plain RuntimeErrors.
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
        rank = f"rank {self.rank} (host {self.host}, process {self.pid})"
        cause = " ".join(self.message.split())
        return f"{rank} {_VERBS[self.kind]}{place(self.step, self.phase)}: {cause}"

    def error(self) -> RankFailedError:
        """The error that the other ranks raise."""
        text = self.describe()
        return RankFailedError(self.rank, text[:1].upper() + text[1:])

    def to_json(self) -> dict[str, Any]:
        """All attributes by name, as a message carries them; :meth:`from_json` checks them again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Failure:
        """The reverse; raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything else."""
        kind = values["kind"]
        if kind not in get_args(Kind):
            raise ValueError(f"unknown kind of failure {kind!r}")
        return cls(
            rank=int(values["rank"]),
            host=str(values["host"])[:MAX_MESSAGE_CHARACTERS],
            pid=int(values["pid"]),
            step=int(values["step"]),
            phase=str(values["phase"])[:MAX_MESSAGE_CHARACTERS],
            kind=kind,
            message=str(values["message"])[:MAX_MESSAGE_CHARACTERS],
            time=float(values["time"]),
        )


def failure_of(rank: int, host: str, pid: int, at: Reading, kind: Kind, message: str) -> Failure:
    """A failure that is noticed now."""
    return Failure(
        rank,
        host,
        pid,
        at.step,
        at.phase,
        kind,
        message[:MAX_MESSAGE_CHARACTERS],
        time.time(),
    )


def text_of(error: BaseException) -> str:
    """Type and message of an exception; a lack of memory is called that."""
    name = type(error).__name__
    text = name
    if str(error):
        text = f"{name}: {error}"
    # torch's allocator for CUDA raises `torch.OutOfMemoryError`; an error of CUDA itself says so in its text only.
    if isinstance(error, MemoryError) or "OutOfMemory" in name or "out of memory" in text:
        text = f"out of memory (OOM): {text}"
    return text[:MAX_MESSAGE_CHARACTERS]


def is_timeout(error: BaseException) -> bool:
    """Whether a collective or the store waited too long for a peer."""
    if isinstance(error, RankTimeoutError):
        return True
    if not is_of_communication(error):
        return False
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def is_of_communication(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of another rank's failure.

    Gloo's errors have no type of their own. torch's other ones (NCCL, the store) derive from ``DistError``. Of an
    error in a callback a ``torch.futures.Future`` keeps the text only.
    """
    names = [cls.__name__ for cls in type(error).__mro__]  # `DistError` itself would have to be imported from torch
    if isinstance(error, RankFailedError) or "DistError" in names:
        return True
    if type(error) is not RuntimeError:
        return False
    text = str(error)
    return any(word in text for word in _WORDS)
