"""What both Trainer strategies do at the start and around each step, so that no error stays silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from lightning_smddp.communication.models import check_same_lengths, check_same_model, check_same_optimizers
from lightning_smddp.communication.nonfinite import agreed, bad_gradients
from lightning_smddp.communication.topology import discover
from lightning_smddp.communication.values import broadcast_value
from lightning_smddp.strategies.joining import start_process_group
from lightning_smddp.strategies.nonfinite import (
    NonFiniteGuard,
    after_changes,
    before_step,
    changes_gradients,
    let_watchers_judge,
    loss_watchers,
)
from lightning_smddp.strategies.reliability import ReliabilityOptions
from lightning_smddp.strategies.tables import say

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class Guarded(_Base):
    """Start-up with a deadline, and comparisons between ranks."""

    _reliability: ReliabilityOptions
    _compared_epoch: int | None = None
    _watched_batch: Any = None  # for callbacks that watch the loss

    @cached_property
    def _guard(self) -> NonFiniteGuard:
        return NonFiniteGuard(self._reliability.on_nonfinite)

    @property
    def _watches_gradients(self) -> bool:
        """Whether to look for NaN and inf. A gradient scaler makes inf on purpose, and skips such steps itself."""
        return self._reliability.on_nonfinite != "ignore" and getattr(self.precision_plugin, "scaler", None) is None

    def setup_distributed(self) -> None:
        """Start the process group, which Lightning then finds."""
        self.set_world_ranks()
        start_process_group(self, self._get_process_group_backend(), self._timeout, self._reliability.init_timeout)
        super().setup_distributed()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers, which have to be the same on all ranks."""
        super().setup_optimizers(trainer)
        if self.world_size > 1 and dist.group.WORLD is not None:
            module = cast(Any, self.lightning_module)
            schedulers = [_describe_schedule(config) for config in self.lr_scheduler_configs]
            check_same_optimizers(module, self.optimizers, schedulers, dist.group.WORLD, self.root_device)

    def _require_same_model(self) -> None:
        """Raise ``ValueError`` on every rank if their modules differ. Collective."""
        assert self.lightning_module is not None
        assert dist.group.WORLD is not None
        topology = discover(dist.group.WORLD, self.root_device)
        check_same_model(self.lightning_module, dist.group.WORLD, self.root_device, topology)

    def on_train_start(self) -> None:
        """The first epoch's batches are compared, whichever it is."""
        super().on_train_start()
        self._compared_epoch = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the first batch of an epoch, compare how many there are on each rank."""
        super().on_train_batch_start(batch, batch_idx)
        trainer = cast(Any, self.lightning_module).trainer
        self._watched_batch = batch if loss_watchers(trainer) else None
        if self.world_size > 1 and trainer.current_epoch != self._compared_epoch and dist.group.WORLD is not None:
            self._compared_epoch = trainer.current_epoch
            check_same_lengths(_batches(trainer), trainer.current_epoch, dist.group.WORLD, self.root_device)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Look at the gradients between the backward pass and the step, behind the hooks that may change them."""
        if not (self._watches_gradients and dist.is_initialized()):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        looks_behind_hooks = self._changes_before_step
        loss: Any = None
        found: Mapping[str, str] | None = None

        def watched() -> Any:
            nonlocal loss, found
            loss = closure()
            found = self._find_changed() if self._changes_gradients else self._find_nonfinite()
            if not looks_behind_hooks:
                self._judge(optimizer, found, loss)
            return loss

        def look() -> None:
            if found is not None and self._is_still_bad():
                self._judge(optimizer, found, loss)

        with before_step(optimizer, look) if looks_behind_hooks else nullcontext():
            return super().optimizer_step(optimizer, watched, model, **kwargs)

    @property
    def _changes_before_step(self) -> bool:
        """Whether the user's code gets the gradients behind Lightning's closure, which ends with the backward pass."""
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
        return changes_gradients(cast(Any, self.lightning_module).trainer, *hooks)

    @property
    def _changes_after_backward(self) -> bool:
        """Whether it gets them inside of it, or in a step that optimizes by hand."""
        module = cast(Any, self.lightning_module)
        return not module.automatic_optimization or changes_gradients(module.trainer, "on_after_backward", "backward")

    @property
    def _changes_gradients(self) -> bool:
        return self._changes_before_step or self._changes_after_backward

    def _find_changed(self) -> Mapping[str, str] | None:
        """As :meth:`_find_nonfinite`, by what the gradients are now. Maybe collective."""
        brought, now = self._brought(), self._bad_now()
        if now is None and self._has_equal_gradients and not self._changes_after_backward:
            return None
        return after_changes(brought, now, self._group_of_finders, self.root_device)

    def _is_still_bad(self) -> bool:
        return agreed(self._bad_now() is not None, self._group_of_finders, self.root_device)

    def _bad_now(self) -> dict[str, str] | None:
        named = cast(Any, self.lightning_module).named_parameters()
        return bad_gradients((name, p) for name, p in named if not p.is_meta)

    @property
    def _group_of_finders(self) -> dist.ProcessGroup:
        group = self._finders or dist.group.WORLD
        assert group is not None
        return group

    def _judge(self, optimizer: Any, found: Mapping[str, str] | None, loss: Any) -> None:
        """Go on, leave the step out, or raise; but callbacks that watch the loss come before us."""
        if found is not None and self._guard.mode == "error":
            let_watchers_judge(cast(Any, self.lightning_module).trainer, loss, self._watched_batch)
        self._guard.check(optimizer, found, self._where(), self.root_device, self._finders)

    def on_train_end(self) -> None:
        """Say how many steps were left out."""
        super().on_train_end()
        text = self._guard.report()
        if text is not None and self.is_global_zero:
            say(text, cast(Any, self.lightning_module).trainer)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src`` on every rank, without pickle. Raises ``ValueError`` for objects that need it."""
        if not dist.is_initialized() or dist.group.WORLD is None:
            return obj
        return broadcast_value(obj, src, dist.group.WORLD, self.root_device)

    def _find_nonfinite(self) -> Mapping[str, str] | None:
        """What is wrong with this rank's gradients; None if no rank has found anything. Maybe collective."""
        raise NotImplementedError

    @property
    def _has_equal_gradients(self) -> bool:
        """Whether all ranks have the same ones after the backward pass."""
        return False

    def _brought(self) -> Mapping[str, str]:
        """What was wrong with this rank's own gradients before averaging."""
        raise NotImplementedError

    @property
    def _finders(self) -> dist.ProcessGroup | None:
        """The ranks that find the same at once; None is all."""
        return None

    def _where(self) -> str:
        trainer = cast(Any, self.lightning_module).trainer
        batch = trainer.fit_loop.epoch_loop.batch_idx
        return f"step {trainer.global_step} (epoch {trainer.current_epoch}, batch {batch})"


def _batches(trainer: Any) -> float:
    """Training batches of this rank in an epoch, as far as is known; inf if it is not."""
    try:
        length = float(len(trainer.train_dataloader))
    except (TypeError, NotImplementedError):  # several loaders, or a stream
        length = float("inf")
    single = hasattr(trainer.train_dataloader, "batch_sampler")
    return min(float(trainer.num_training_batches), length if single else float("inf"))


def _describe_schedule(config: Any) -> str:
    scheduler = type(config.scheduler).__name__
    return f"{scheduler} every {config.frequency} {config.interval}, monitor={config.monitor}"
