"""``Fabric(strategy="smddp")``: Fabric's DDPStrategy with our communication hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_smddp.communication.groups import world
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.patches import patched
from lightning_smddp.sharding.optimizer_shards import all_parameters
from lightning_smddp.sharding.optimizer_states import load_whole_state_dict
from lightning_smddp.strategies.ddp import ReplicatedFront
from lightning_smddp.strategies.front import Front
from lightning_smddp.strategies.nonfinite import before_step
from lightning_smddp.strategies.options import ReliabilityOptions, StrategyOptions
from lightning_smddp.strategies.process_group import start_process_group
from lightning_smddp.strategies.tables import print_table

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class FabricStrategy(Front, _Base):
    """The start, and what goes between ranks beside gradients."""

    def _hold_parts(self, options: StrategyOptions, close: Callable[[], None] | None = None) -> None:
        _refuse_of_trainer(options)
        super()._hold_parts(options, close)

    @property
    def _looks(self) -> bool:
        """Whether gradients are looked at."""
        return self._guard.watches(self.precision)

    def setup_environment(self) -> None:
        """Start the process group."""
        super().setup_environment()
        self._session.process_group_started()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        start_process_group(self)
        super()._setup_distributed()

    # ---- steps ----

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass, which averages gradients unless it is in ``fabric.no_backward_sync``."""
        if self._looks:
            self._guard.note(tensor)
        with self._averaging(tensor):
            super().backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Look at the gradients as the user's code, or a closure, has left them, then step."""
        with before_step(optimizer, partial(self._look, optimizer)), self._stepping(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def _look(self, optimizer: Any) -> None:
        if self._looks:
            self._guard.check(optimizer, self._find_nonfinite(optimizer), "this step", world())

    def teardown(self) -> None:
        """Free shared memory, threads and sockets."""
        self._session.close()
        super().teardown()

    def _print(self, title: str, rows: list[tuple[str, str]]) -> None:
        if self._communication.verbose and self.is_global_zero:
            print_table(title, rows)


def _refuse_of_trainer(options: StrategyOptions) -> None:
    """Raise ``ValueError`` for what Fabric, whose loop is the user's own, does not do."""
    reliability, communication = options.reliability, options.communication
    if communication.loss_weight is not None or communication.uneven is not None:
        raise ValueError(f"{communication}: loss_weight and uneven are for the Trainer: Fabric sees no batches.")
    own = ReliabilityOptions(init_timeout=reliability.init_timeout, on_nonfinite=reliability.on_nonfinite)
    if reliability != own or options.resume is not None:
        raise ValueError(
            f"resume={options.resume!r}, {reliability}: resume, stop_grace, async_save and sharded are for the "
            "Trainer's strategies. With Fabric stops and checkpoints are the script's own: leave them out."
        )


class FabricDataParallel(ReplicatedFront, FabricStrategy):
    """Data parallelism with optimized all-reduce, for Fabric. Arguments as those of ``SMDDPStrategy``.

    By position those of Fabric's ``DDPStrategy`` can be given, in its order. ``resume``, ``sync``, of ``communication``
    how batches count, and of ``reliability`` what is about stops and checkpoints are the Trainer's, and refused.
    """

    def _hold_parts(self, options: StrategyOptions, close: Callable[[], None] | None = None) -> None:
        if self._scheme.sync is not None:
            raise ValueError(f"sync={self._scheme.sync} is for the Trainer's strategy.")
        super()._hold_parts(options, close)

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What gradient communication cost so far; None before a module is set up. Collective."""
        return self._scheme.report()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Choose the communication and wrap ``module``. Collective; ``ValueError`` on every rank if models differ."""
        model = self._scheme.wrap(module, self.root_device, self._limit, self._ddp_kwargs, self._looks)
        self._print("smddp: data parallelism", self._scheme.describe())
        return model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """With ``shard="optimizer"`` each rank steps a share from here on. Collective then.

        Raises:
            ValueError: on every rank: the optimizer cannot be sharded, or its module was not set up before.
        """
        optimizer = super().setup_optimizer(optimizer)
        if self._scheme.options.shard is None:
            return optimizer
        if self._scheme.communicator is None:
            raise ValueError("With shard='optimizer' the module comes first: call `fabric.setup(module, optimizer)`.")
        self._scheme.shard_optimizers(all_parameters(optimizer), [optimizer])
        self._print("smddp: data parallelism", self._scheme.sharded[-1].describe())
        return optimizer

    # ---- steps ----

    @contextmanager
    def _averaging(self, loss: Tensor) -> Iterator[None]:
        yield
        self._scheme.require_averaged("Unfreeze them before `fabric.setup`.")

    def _find_nonfinite(self, optimizer: Any) -> NonFinite | None:
        # Between the backward pass and the step the script has had the gradients.
        return self._scheme.nonfinite(optimizer, changed=True)

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Clip by norm; with ``shard="optimizer"`` each rank reads its share for it. Collective then."""
        sharded = self._scheme.sharded_of(optimizer)
        if sharded is None:
            return super().clip_gradients_norm(module, optimizer, *args, **kwargs)
        self.precision.unscale_gradients(optimizer)
        return sharded.clip_by_norm(optimizer, *args, **kwargs)

    # ---- states ----

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of a whole optimizer; of a sharded one it is on the first rank alone. Collective then."""
        if self._scheme.sharded_of(optimizer) is None:
            return super().get_optimizer_state(optimizer)
        return self._scheme.optimizer_state(optimizer, self.root_device)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load states of whole optimizers: of a sharded one this rank's share."""
        # Fabric calls `optimizer.load_state_dict` with the whole state: meanwhile that takes this rank's share of it.
        shards = self._scheme.shards
        loads = [(vars(each.optimizer), "load_state_dict", partial(load_whole_state_dict, each)) for each in shards]
        with patched(loads):
            return super().load_checkpoint(*args, **kwargs)
