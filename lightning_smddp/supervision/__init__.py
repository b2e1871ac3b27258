"""Watching the ranks of a job: who failed first, stopping together, nothing left behind. No torch, no Lightning."""

from lightning_smddp.supervision.failure import Failure
from lightning_smddp.supervision.progress import Progress
from lightning_smddp.supervision.stop import Stop
from lightning_smddp.supervision.supervisor import Supervisor

__all__ = ["Failure", "Progress", "Stop", "Supervisor"]
