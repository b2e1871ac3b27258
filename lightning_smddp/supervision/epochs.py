"""The end of an epoch: all ranks at once, after equally many batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_smddp.supervision.connection import Message
from lightning_smddp.supervision.failure import Failure
from lightning_smddp.supervision.peer import Peer
from lightning_smddp.wording import counted

_CURE = (
    "Give every rank the same number of batches: equally many samples, or `drop_last=True`. If code of yours sets "
    "`trainer.should_stop`, all ranks have to: `trainer.strategy.reduce_boolean_decision(stop, all=False)`."
)


class EpochEnds:
    """Kept by the hub: which ranks have come to the end of an epoch, each with how many batches.

    A rank that begins a batch beyond those that another has had is enough to know that they differ; nobody has to
    wait for a timeout.
    """

    def __init__(
        self,
        peers: Callable[[], Iterable[Peer]],
        tell: Callable[[Message], None],
        declare: Callable[[Failure], None],
    ) -> None:
        self._peers = peers
        self._tell = tell
        self._declare = declare
        self._came: dict[int, tuple[int, int]] = {}  # rank -> epoch, batches
        self._validating: set[int] = set()

    def came(self, rank: int, epoch: int, batches: int, validates: bool = False) -> None:
        """A rank is at the end of ``epoch``; ``validates``: it is about to, so nobody can be at it yet."""
        self._came[rank] = (epoch, batches)
        if validates:
            self._validating.add(rank)
        self.look()

    def look(self) -> None:
        """Let everyone go on, or fail. Called when a rank comes or leaves, and once a period while some wait."""
        if not self._came:
            return
        peers = {peer.rank: peer for peer in self._peers()}
        # All are compared with the rank that came first.
        rank = next(iter(self._came))
        first = peers[rank]
        epoch, batches = self._came[rank]
        for peer in peers.values():
            problem = self._problem(peer, epoch, batches, rank in self._validating)
            if problem is not None:
                text = f"{first.name} ended epoch {epoch} after {counted(batches, 'batch')}, {problem}. {_CURE}"
                blamed = self._blamed(first, peer)
                self._declare(blamed.failure("left", text))
                return
            if peer.has_left:
                text = f"it ended its run while {first.name} waited for it at the end of epoch {epoch}"
                self._declare(peer.failure("left", text))
                return
        if len(self._came) == len(peers):
            self._came.clear()
            self._validating.clear()
            self._tell({"type": "epoch", "epoch": epoch})

    def _problem(self, peer: Peer, epoch: int, batches: int, validates: bool) -> str | None:
        """How ``peer`` differs from a rank that has ended ``epoch`` after ``batches``; None if it may still come."""
        came = self._came.get(peer.rank)
        if came == (epoch, batches):
            return None
        if came is not None:
            return f"{peer.name} ended epoch {came[0]} after {came[1]}"
        reading = peer.progress.read()
        if reading.epoch != epoch:
            return None
        if reading.batches > batches:
            return f"{peer.name} is in batch {reading.batches} of it"
        if validates and reading.batches == batches and reading.phase == "validation":
            return f"{peer.name} validates after as many, and goes on"
        return None

    def _blamed(self, first: Peer, other: Peer) -> Peer:
        """The one with fewer batches: it left the others alone."""
        came = self._came.get(other.rank)
        if came is not None and came < self._came[first.rank]:
            return other
        return first
