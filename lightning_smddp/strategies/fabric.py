"""``Fabric(strategy="smddp")``: Fabric's DDPStrategy with our communication hook."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication.algorithms import AlgorithmName
from lightning_smddp.communication.compression import Compression, Method
from lightning_smddp.communication.nonfinite import bad_gradients
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.strategies.nonfinite import NonFiniteGuard, after_changes
from lightning_smddp.strategies.option_checks import require_arguments_of_ddp, require_known
from lightning_smddp.strategies.reductions import mean_by_sum
from lightning_smddp.strategies.reliability import OnNonfinite, ReliabilityOptions
from lightning_smddp.strategies.session import GradientCommunication, Options, check_devices, finish_wrapping
from lightning_smddp.strategies.start import start_process_group
from lightning_smddp.strategies.tables import print_table
from lightning_smddp.wire.values import broadcast_value

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricDataParallel(_Base):
    """Data parallelism with optimized all-reduce, for Fabric. Arguments as those of ``SMDDPStrategy``.

    By position only those of Fabric's ``DDPStrategy`` can be given, in its order.

    Compression's memory is not in the checkpoint by itself: save ``strategy.communication_state()`` beside the
    model and give it back to ``strategy.load_communication_state(...)``.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = "auto",
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        algorithm: AlgorithmName = "auto",
        compression: Method | Compression | None = None,
        bucket_cap_mb: float | None = None,
        collective_timeout: timedelta | float | None = None,
        tuning_cache: str | Path | bool = True,
        verbose: bool = True,
        init_timeout: timedelta | float | None = None,
        on_nonfinite: OnNonfinite = "error",
        **kwargs: Any,
    ) -> None:
        options = Options.parse(
            algorithm,
            compression,
            bucket_cap_mb,
            process_group_backend,
            collective_timeout,
            tuning_cache,
            verbose,
        )
        require_known(self, kwargs)
        require_arguments_of_ddp(accelerator, timeout)
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision=precision, timeout=timeout, start_method=start_method,
            process_group_backend=options.process_group_backend, **kwargs,
        )  # fmt: skip
        self._session = GradientCommunication(options)
        reliability = ReliabilityOptions.parse(init_timeout, 90.0, None, on_nonfinite, False, False)
        self._guard, self._init_timeout = NonFiniteGuard(reliability.on_nonfinite), reliability.init_timeout
        self._user_ddp_kwargs = dict(self._ddp_kwargs)

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What gradient communication cost so far; None before a module is set up. Collective."""
        return self._session.report()

    def communication_state(self) -> dict[str, dict[str, Tensor]]:
        """What compression remembers of the module set up last. Collective."""
        return self._session.state_dict()

    def load_communication_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue from a saved :meth:`communication_state`."""
        self._session.load_state_dict(state)

    def setup_environment(self) -> None:
        """Start the process group, after a look at what the launcher started."""
        environment = self.cluster_environment
        check_devices(self.num_processes, environment is not None and environment.creates_processes_externally)
        super().setup_environment()
        self._session.process_group_started()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        start_process_group(self, self._get_process_group_backend(), self._timeout, self._init_timeout)
        super()._setup_distributed()

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Look at the gradients as the user's code has left them, then step."""
        watches = [synchronizer.watch for synchronizer in self._session.synchronizers if synchronizer.watch.on]
        brought = {name: text for watch in watches for name, text in watch.take_findings().items()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        now = bad_gradients((self._name_of(parameter), parameter) for parameter in parameters) if watches else None
        if now is not None and dist.group.WORLD is not None:  # as on all ranks: gradients are averages
            found = after_changes(brought, now, dist.group.WORLD, self.root_device)
            self._guard.check(optimizer, found, "this step", self.root_device)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def _name_of(self, parameter: nn.Parameter) -> str:
        watches = [synchronizer.watch for synchronizer in self._session.synchronizers]
        return next((w.names[id(parameter)] for w in watches if id(parameter) in w.names), "an unnamed parameter")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src`` on every rank, without pickle. Raises ``ValueError`` for objects that need it."""
        if not dist.is_initialized() or dist.group.WORLD is None:
            return obj
        return broadcast_value(obj, src, dist.group.WORLD, self.root_device)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Choose the communication and wrap ``module``."""
        self._ddp_kwargs = self._session.prepare(module, self.root_device, self._user_ddp_kwargs, self._timeout)
        scaler = getattr(self.precision, "scaler", None)  # one makes inf on purpose
        watch = self._session.synchronizers[-1].watch
        watch.on, watch.marks = self._guard.mode != "ignore" and scaler is None, False
        model = super().setup_module(module)
        finish_wrapping(self.root_device)
        self._session.attach(model)
        if self._session.options.verbose and self.global_rank == 0:
            print_table("smddp: data parallelism", self._session.summary())
        return model

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor over ranks; a mean is SUM, then division, as not every backend knows AVG."""
        return mean_by_sum(super().all_reduce, tensor, group, reduce_op)

    def teardown(self) -> None:
        """Free shared memory, threads and sockets."""
        self._session.close()
        super().teardown()
