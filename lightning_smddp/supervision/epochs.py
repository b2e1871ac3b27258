"""The end of an epoch: all ranks at once, after equally many batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_smddp.supervision.failure import Failure
from lightning_smddp.supervision.member import Member
from lightning_smddp.supervision.wire import Message
from lightning_smddp.wording import counted

_CURE = (
    "Give every rank the same number of batches: equally many samples, or `drop_last=True`. If code of yours sets "
    "`trainer.should_stop`, all ranks have to: `trainer.strategy.reduce_boolean_decision(stop, all=False)`."
)


class Rendezvous:
    """The hub's side: who has come with how many batches.

    A rank that begins a batch beyond those that another has had is enough to know that they differ; nobody has to
    wait for a timeout.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        tell: Callable[[Message], None],
        declare: Callable[[Failure], None],
    ) -> None:
        self._members, self._tell, self._declare = members, tell, declare
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
        members = {member.rank: member for member in self._members()}
        first, (epoch, batches) = next(iter(self._came.items()))
        for rank, member in members.items():
            problem = self._problem(member, epoch, batches, first in self._validating)
            if problem is not None:
                mine = (
                    f"{members[first].name} ended epoch {epoch} after {counted(batches, 'batch')}, {problem}. {_CURE}"
                )
                self._declare(self._blamed(members[first], member).failure("left", mine))
                return
            if member.has_left:
                waits = f"it ended its run while {members[first].name} waited for it at the end of epoch {epoch}"
                self._declare(members[rank].failure("left", waits))
                return
        if len(self._came) == len(members):
            self._came.clear()
            self._validating.clear()
            self._tell({"type": "epoch", "epoch": epoch})

    def _problem(self, member: Member, epoch: int, batches: int, validates: bool) -> str | None:
        if member.rank in self._came:
            their_epoch, theirs = self._came[member.rank]
            if (their_epoch, theirs) != (epoch, batches):
                return f"{member.name} ended epoch {their_epoch} after {theirs}"
            return None
        reading = member.progress.read()
        if reading.epoch == epoch and reading.batches > batches:
            return f"{member.name} is in batch {reading.batches} of it"
        if validates and (reading.epoch, reading.batches, reading.phase) == (epoch, batches, "validation"):
            return f"{member.name} validates after as many, and goes on"
        return None

    def _blamed(self, first: Member, other: Member) -> Member:
        """The one with fewer batches: it left the others alone."""
        mine, theirs = self._came[first.rank], self._came.get(other.rank)
        return other if theirs is not None and theirs < mine else first
