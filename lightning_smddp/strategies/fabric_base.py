"""What Fabric's strategies have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lightning_smddp.strategies.options import GradientOptions, ReliabilityOptions
from lightning_smddp.strategies.reductions import mean_by_sum
from lightning_smddp.strategies.session import GradientCommunication, check_devices
from lightning_smddp.strategies.start import start_process_group
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wire.values import broadcast_value

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricStrategy(_Base):
    """The start, and what goes between ranks beside gradients."""

    def _hold_options(self, gradients: GradientOptions, reliability: ReliabilityOptions) -> None:
        """At the end of a constructor."""
        _refuse_of_trainer(reliability)
        self._reliability = reliability
        self._session = GradientCommunication(gradients)

    def setup_environment(self) -> None:
        """Start the process group, after a look at what the launcher started."""
        environment = self.cluster_environment
        check_devices(self.num_processes, environment is not None and environment.creates_processes_externally)
        super().setup_environment()
        self._session.process_group_started()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        start_process_group(self, self._get_process_group_backend(), self._timeout, self._reliability.start_limit)
        super()._setup_distributed()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src`` on every rank, without pickle. Raises ``ValueError`` for objects that need it."""
        if not dist.is_initialized() or dist.group.WORLD is None:
            return obj
        return broadcast_value(obj, src, dist.group.WORLD, self.root_device)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor over ranks; a mean is SUM, then division, as not every backend knows AVG."""
        return mean_by_sum(super().all_reduce, tensor, group, reduce_op)

    def _print(self, title: str, rows: list[tuple[str, str]]) -> None:
        if self._session.options.communication.verbose and self.global_rank == 0:
            print_table(title, rows)


def _refuse_of_trainer(reliability: ReliabilityOptions) -> None:
    """Raise ``ValueError`` for what Fabric, whose loop is the user's own, does not do."""
    for name in ("stop_grace", "async_save", "sharded"):
        value = getattr(reliability, name)
        if value != getattr(ReliabilityOptions, name):
            raise ValueError(
                f"reliability={reliability!r}: {name}={value!r} is for the Trainer's strategies. With Fabric stops and "
                f"checkpoints are the script's own: leave {name} out."
            )
