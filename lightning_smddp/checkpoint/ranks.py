"""Acting together on a checkpoint: results and errors travel between ranks as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.wire.gather import gather_json


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load a checkpoint together, or this process alone.

    Attributes:
        group: None for this process alone.
        device: where the group's messages are.
    """

    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")

    @property
    def rank(self) -> int:
        """This one, in the group."""
        if self.group is None:
            return 0
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks that save together."""
        if self.group is None:
            return 1
        return self.group.size()

    def gather(self, act: Callable[[], Any]) -> list[Any]:
        """Call ``act`` on every rank; its results (anything that JSON carries) in rank order. Collective.

        Raises:
            Exception: on every rank, if ``act`` failed on any: its own error there. On the others the same
                ``OSError``, ``ValueError`` or ``CheckpointError``, or a ``RankFailedError`` with its message.
        """
        if self.group is None:
            return [act()]
        # Whoever fails still takes part in the exchange: the others wait in it, and hear why.
        result = None
        error = None
        try:
            result = act()
        except Exception as caught:
            error = caught
        gathered = gather_json([result, _to_json(error)], self.group, self.device)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # which this frame would keep alive, and it this frame
        for rank, (_, told) in enumerate(gathered):
            if told is not None:
                raise _from_json(told, rank)
        return [remote for remote, _ in gathered]

    def first(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on the first rank; its result on all. Collective, and fails as :meth:`gather`."""
        if self.rank != 0:
            return self.gather(lambda: None)[0]
        return self.gather(act)[0]


# Errors that arrive as what they were. Of others the name and the message arrive.
_ERRORS: dict[str, type[Exception]] = {
    "OSError": OSError,
    "CheckpointError": CheckpointError,
    "ValueError": ValueError,
}


def _to_json(error: Exception | None) -> list[Any] | None:
    """The type's name, and the arguments with which another rank makes an equal one."""
    if error is None:
        return None
    if isinstance(error, CheckpointError):
        return ["CheckpointError", error.path, error.reason, error.fix]
    if not isinstance(error, OSError):
        return [type(error).__name__, str(error)]
    if error.errno is None:
        return ["OSError", str(error)]
    filename = error.filename
    if filename is not None:
        filename = str(filename)
    return ["OSError", error.errno, error.strerror, filename]


def _from_json(told: list[Any], rank: int) -> Exception:
    kind, *arguments = told
    if kind in _ERRORS:
        return _ERRORS[kind](*arguments)
    return RankFailedError(rank, f"Rank {rank} failed: {kind}: {arguments[0]}")
