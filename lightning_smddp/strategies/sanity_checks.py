"""What the Trainer strategies do at the start and around each step, so that no error stays silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_smddp.communication.consistency import check_same_lengths, check_same_model, check_same_optimizers
from lightning_smddp.communication.nonfinite import agreed, bad_gradients
from lightning_smddp.communication.topology import discover
from lightning_smddp.strategies.nonfinite import (
    NonFiniteGuard,
    after_changes,
    before_step,
    changes_gradients,
    let_watchers_judge,
    loss_watchers,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_smddp.strategies.base import TrainerStrategy


class SanityChecks:
    """Comparisons between ranks, and a look at the gradients before each step."""

    def __init__(self, strategy: TrainerStrategy) -> None:
        self.strategy = strategy
        self._compared_epoch: int | None = None
        self._watched_batch: Any = None  # for callbacks that watch the loss

    @cached_property
    def guard(self) -> NonFiniteGuard:
        """What is done about gradients that are no numbers; it counts the steps that were left out."""
        return NonFiniteGuard(self.strategy._reliability.on_nonfinite)

    @property
    def _trainer(self) -> Trainer:
        assert self.strategy.lightning_module is not None
        return self.strategy.lightning_module.trainer

    @property
    def watches_gradients(self) -> bool:
        """Whether to look for NaN and inf. A gradient scaler makes inf on purpose, and skips such steps itself."""
        scaler = getattr(self.strategy.precision_plugin, "scaler", None)
        return self.strategy._reliability.on_nonfinite != "ignore" and scaler is None

    def require_same_optimizers(self) -> None:
        """Raise ``ValueError`` on every rank if their optimizers or schedules differ. Collective."""
        strategy = self.strategy
        if strategy.world_size > 1 and dist.group.WORLD is not None:
            assert strategy.lightning_module is not None
            schedulers = [_describe_schedule(config) for config in strategy.lr_scheduler_configs]
            check_same_optimizers(
                strategy.lightning_module,
                strategy.optimizers,
                schedulers,
                dist.group.WORLD,
                strategy.root_device,
            )

    def require_same_model(self) -> None:
        """Raise ``ValueError`` on every rank if their modules differ. Collective."""
        module = self.strategy.lightning_module
        device = self.strategy.root_device
        world = dist.group.WORLD
        assert module is not None
        assert world is not None
        topology = discover(world)
        check_same_model(module, world, device, topology)

    def training_starts(self) -> None:
        """The first epoch's batches are compared, whichever it is."""
        self._compared_epoch = None

    def training_batch_starts(self, batch: Any) -> None:
        """At the first batch of an epoch, compare how many there are on each rank."""
        trainer = self._trainer
        self._watched_batch = None  # kept for callbacks that want it only: it takes memory
        if loss_watchers(trainer):
            self._watched_batch = batch
        world = dist.group.WORLD
        if self.strategy.world_size == 1 or world is None:
            return
        if trainer.current_epoch != self._compared_epoch:
            self._compared_epoch = trainer.current_epoch
            check_same_lengths(_batches(trainer), trainer.current_epoch, world, self.strategy.root_device)

    def around_step(self, optimizer: Any, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Look at the gradients between the backward pass and the step, behind the hooks that may change them.

        Args:
            optimizer: about to step.
            closure: Lightning's, of the training step and the backward pass.
            step: takes a closure, and steps.
        """
        if not self.watches_gradients or not dist.is_initialized():
            return step(closure)
        # Lightning's closure is: training step, backward, the hooks behind it. Where the user's code has none of these
        # hooks, what the averaging noted on its way says it all, and nothing is read twice:
        #   closure() -> found -> judge -> optimizer
        # A hook may clip or zero what was bad, so there the verdict waits until optimizer.step() has run the closure:
        #   optimizer.step: closure() -> found -> hooks -> look again -> judge -> update
        looks_behind_hooks = self._changes_before_step
        loss: Any = None
        found: Mapping[str, str] | None = None

        def watched() -> Any:
            nonlocal loss, found
            loss = closure()
            if self.changes_gradients:
                found = self._find_changed()
            else:
                found = self.strategy._find_nonfinite()
            if not looks_behind_hooks:
                self._judge(optimizer, found, loss)
            return loss

        def look() -> None:
            if found is not None and self._is_still_bad():
                self._judge(optimizer, found, loss)

        if not looks_behind_hooks:
            return step(watched)
        with before_step(optimizer, look):
            return step(watched)

    @property
    def _changes_before_step(self) -> bool:
        """Whether the user's code gets the gradients behind Lightning's closure, which ends with the backward pass."""
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
        return changes_gradients(self._trainer, *hooks)

    @property
    def _changes_after_backward(self) -> bool:
        """Whether it gets them inside of it, or in a step that optimizes by hand."""
        module = self.strategy.lightning_module
        assert module is not None
        return not module.automatic_optimization or changes_gradients(module.trainer, "on_after_backward", "backward")

    @property
    def changes_gradients(self) -> bool:
        """Whether the user's code gets the gradients before the step."""
        return self._changes_before_step or self._changes_after_backward

    def _find_changed(self) -> Mapping[str, str] | None:
        """As :meth:`_find_nonfinite`, by what the gradients are now. Maybe collective."""
        brought = self.strategy._bad_before_averaging()
        now = self._bad_now()
        # Where averages are the same on all ranks, and nobody has changed them, the others see that they are fine too.
        if now is None and self.strategy._has_equal_gradients and not self._changes_after_backward:
            return None
        return after_changes(brought, now, self._agreeing_group, self.strategy.root_device)

    def _is_still_bad(self) -> bool:
        return agreed(self._bad_now() is not None, self._agreeing_group, self.strategy.root_device)

    def _bad_now(self) -> dict[str, str] | None:
        assert self.strategy.lightning_module is not None
        named = self.strategy.lightning_module.named_parameters()
        held = [(name, parameter) for name, parameter in named if not parameter.is_meta]  # others are on other ranks
        return bad_gradients(held)

    @property
    def _agreeing_group(self) -> dist.ProcessGroup:
        group = self.strategy._nonfinite_group or dist.group.WORLD
        assert group is not None
        return group

    def _judge(self, optimizer: Any, found: Mapping[str, str] | None, loss: Any) -> None:
        """Go on, leave the step out, or raise; but callbacks that watch the loss come before us."""
        if found is not None and self.guard.mode == "error":
            let_watchers_judge(self._trainer, loss, self._watched_batch)
        self.guard.check(optimizer, found, self.where(), self.strategy._nonfinite_group)

    def where(self) -> str:
        """The step that runs, in words."""
        trainer = self._trainer
        batch = trainer.fit_loop.epoch_loop.batch_idx
        return f"step {trainer.global_step} (epoch {trainer.current_epoch}, batch {batch})"


def _batches(trainer: Any) -> float:
    """Training batches of this rank in an epoch, as far as is known; inf if it is not."""
    try:
        length = float(len(trainer.train_dataloader))
    except (TypeError, NotImplementedError):  # several loaders, or a stream
        length = float("inf")
    if not hasattr(trainer.train_dataloader, "batch_sampler"):
        length = float("inf")
    return min(float(trainer.num_training_batches), length)


def _describe_schedule(config: Any) -> str:
    scheduler = type(config.scheduler).__name__
    return f"{scheduler} every {config.frequency} {config.interval}, monitor={config.monitor}"
