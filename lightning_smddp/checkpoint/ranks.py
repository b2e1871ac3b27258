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
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.group is None else self.group.size()

    def gather(self, act: Callable[[], Any]) -> list[Any]:
        """Call ``act`` on every rank; its results (anything that JSON carries) in rank order. Collective.

        Raises:
            Exception: on every rank, if ``act`` failed on any: its own error there. On the others the same
                ``OSError``, ``ValueError`` or ``CheckpointError``, or a ``RankFailedError`` with its message.
        """
        if self.group is None:
            return [act()]
        result, error = None, None
        try:
            result = act()
        except Exception as caught:
            error = caught
        everyones = gather_json([result, _to_json(error)], self.group, self.device)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # which this frame would keep alive, and it this frame
        for rank, (_, told) in enumerate(everyones):
            if told is not None:
                raise _from_json(told, rank)
        return [theirs for theirs, _ in everyones]

    def first(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on the first rank; its result on all. Collective, and fails as :meth:`gather`."""
        return self.gather(act if self.rank == 0 else lambda: None)[0]


def _to_json(error: Exception | None) -> list[Any] | None:
    if isinstance(error, OSError):
        if error.errno is None:
            return ["OSError", str(error)]
        return ["OSError", error.errno, error.strerror, None if error.filename is None else str(error.filename)]
    if isinstance(error, CheckpointError):
        return ["CheckpointError", error.path, error.reason, error.fix]
    return None if error is None else [type(error).__name__, str(error)]


def _from_json(told: list[Any], rank: int) -> Exception:
    kind, *details = told
    errors: dict[str, type[Exception]] = {
        "OSError": OSError,
        "CheckpointError": CheckpointError,
        "ValueError": ValueError,
    }
    if kind in errors:
        return errors[kind](*details)
    return RankFailedError(rank, f"Rank {rank} failed: {kind}: {details[0]}")
