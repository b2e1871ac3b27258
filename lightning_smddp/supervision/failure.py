"""The record of the first failure of a job: which rank, where, when, and why."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lightning_smddp.communication.objects import RankFailedError

Kind = Literal["failed", "died", "fell silent", "did not come", "left", "lost the job's store"]
MAX_MESSAGE_CHARACTERS = 2000
# In errors of communication that are plain RuntimeErrors: gloo's and NCCL's have its name in a path; the last two come
# from the callback of a future.
_WORDS = ("gloo", "NCCL", "RankFailedError: ", "RankTimeoutError: ")


class Failure(NamedTuple):
    """The first failure of a job. Travels as JSON: a list of the attributes.

    Attributes:
        rank: the global rank that failed.
        host: its host's name.
        pid: its process.
        step: the optimizer step it was in, as last heard; -1: before the first.
        phase: what it was doing; may be empty.
        kind: ``"failed"`` (it raised), ``"died"`` (its process ended), ``"fell silent"`` (stopped, or cut off the
            network), ``"did not come"`` (the others' collective timed out waiting for it), ``"left"`` (it ended its run
            while others were in the middle of theirs), ``"lost the job's store"`` (torchrun's agent, which served it).
        message: the cause.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    kind: Kind
    message: str

    def describe(self) -> str:
        """One line: ``rank 1 (host a, process 12) failed at step 7 (backward): ValueError: bad``."""
        where = place(self.step, self.phase)
        return f"rank {self.rank} (host {self.host}, process {self.pid}) {self.kind}{where}: {self.message}"

    def error(self) -> RankFailedError:
        """The error that the other ranks raise."""
        text = self.describe()
        return RankFailedError(self.rank, text[:1].upper() + text[1:])


def place(step: int, phase: str) -> str:
    """`` at step 7 (backward)``, as far as either is known: -1 and an empty phase are left out."""
    where = f" at step {step}" if step >= 0 else ""
    return f"{where} ({phase})" if phase else where


def text_of(error: BaseException) -> str:
    """Type and message of an exception, in one line."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r}) in the middle of the run"
    return " ".join(text[:MAX_MESSAGE_CHARACTERS].split())


def is_of_communication(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of another rank's failure.

    Gloo's errors have no type of their own. torch's other ones (NCCL, the store) derive from ``DistError``. Of an
    error in a callback a ``torch.futures.Future`` keeps the text only.
    """
    names = [cls.__name__ for cls in type(error).__mro__]  # `DistError` itself would have to be imported from torch
    if isinstance(error, RankFailedError) or "DistError" in names:
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _WORDS)
