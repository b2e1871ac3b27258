"""What gradient communication cost, over all ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.stats import Totals
from lightning_smddp.wording import counted


@dataclass(frozen=True)
class CommunicationReport:
    """Gradient communication since the start of fit.

    Attributes:
        steps: backward passes with gradient synchronisation, on one rank.
        gradient_bytes: gradients of one rank, over all steps.
        exposed_s: for each rank, how long backward stood still for communication.
        hidden_s: for each rank, how long communication ran while backward did.
        waited_s: for each rank, how long it waited for others.
        straggler: the rank that others waited for; None when nobody waited much.
        straggler_name: with its host.
    """

    steps: int
    gradient_bytes: int
    exposed_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    straggler: int | None
    straggler_name: str

    @classmethod
    def collect(cls, totals: Totals, communicator: Communicator) -> CommunicationReport:
        """The report of what all ranks have in ``totals``: each has its own numbers in it. Collective."""
        mine = {
            "steps": totals.steps,
            "gradient_bytes": totals.gradient_bytes,
            "exposed": totals.exposed_s,
            "hidden": totals.hidden_s,
            # Without shared memory nobody sees who comes late; then the exposed time is the wait.
            "waited": totals.waited_s or totals.exposed_s,
            "for": sorted(totals.waited_for.items()),
        }
        ranks = gather(mine, communicator.group)
        waited = [rank["waited"] for rank in ranks]
        waited_for = [dict(rank["for"]) for rank in ranks]
        straggler = _straggler(waited, waited_for, totals.steps)
        straggler_name = ""
        if straggler is not None:
            straggler_name = communicator.topology.describe(straggler)
        return cls(
            steps=ranks[0]["steps"],
            gradient_bytes=ranks[0]["gradient_bytes"],
            exposed_s=tuple([rank["exposed"] for rank in ranks]),
            hidden_s=tuple([rank["hidden"] for rank in ranks]),
            waited_s=tuple(waited),
            straggler=straggler,
            straggler_name=straggler_name,
        )

    def __str__(self) -> str:
        steps = max(self.steps, 1)
        lines = [
            f"gradient communication over {counted(self.steps, 'step')}",
            f"  gradients             {_size(self.gradient_bytes / steps)} a step on each rank",
            f"  exposed               {_per_step(self.exposed_s, steps)} ms a step, by rank",
            f"  hidden by backward    {_per_step(self.hidden_s, steps)} ms a step, by rank",
            f"  waited for others     {_per_step(self.waited_s, steps)} ms a step, by rank",
        ]
        if self.straggler is not None:
            lines.append(f"  others waited most for {self.straggler_name}")
        return "\n".join(lines)


def _straggler(waited: list[float], waited_for: list[dict[str, int]], steps: int) -> int | None:
    """The rank that waited least while the others waited for it, if they waited 1 ms a step at least.

    Args:
        waited: seconds of each rank.
        waited_for: of each rank, how often it came on when another one, the key, had arrived.
        steps: that all of this was in.
    """
    most, least = max(waited), min(waited)
    if len(waited) < 2:
        return None
    if most < 1e-3 * max(steps, 1):
        return None
    if least > 0.5 * most:  # all wait, for each other
        return None
    named: Counter[int] = Counter()
    for seconds, counts in zip(waited, waited_for, strict=True):
        if seconds > 0.5 * most:
            for other, count in counts.items():
                named[int(other)] += count
    if not named:  # without shared memory nobody sees for whom it waits
        return waited.index(least)
    ((rank, _),) = named.most_common(1)
    return rank


def _per_step(seconds: tuple[float, ...], steps: int) -> str:
    return ", ".join(f"{1000 * value / steps:.2f}" for value in seconds)


def _size(value: float) -> str:
    if value < 2**20:
        return f"{value / 2**10:.1f} KiB"
    return f"{value / 2**20:.2f} MiB"
