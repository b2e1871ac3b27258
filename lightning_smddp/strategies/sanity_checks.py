"""What the Trainer strategies do at the start and around each step, so that no error stays silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_smddp.communication.consistency import check_same_lengths, check_same_optimizers
from lightning_smddp.communication.nonfinite import agreed, bad_gradients
from lightning_smddp.strategies.nonfinite import (
    NonFiniteGuard,
    after_changes,
    before_step,
    changes_gradients,
    let_watchers_judge,
    loss_watchers,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

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
    def _module(self) -> LightningModule:
        assert self.strategy.lightning_module is not None
        return self.strategy.lightning_module

    @property
    def watches_gradients(self) -> bool:
        """Whether to look for NaN and inf. A gradient scaler makes inf on purpose, and skips such steps itself."""
        scaler = getattr(self.strategy.precision_plugin, "scaler", None)
        return self.strategy._reliability.on_nonfinite != "ignore" and scaler is None

    def require_same_optimizers(self) -> None:
        """Raise ``ValueError`` on every rank if their optimizers or schedules differ. Collective."""
        schedulers = []
        for config in self.strategy.lr_scheduler_configs:
            name = type(config.scheduler).__name__
            schedulers.append(f"{name} every {config.frequency} {config.interval}, monitor={config.monitor}")
        check_same_optimizers(self._module, self.strategy.optimizers, schedulers)

    def training_starts(self) -> None:
        """The first epoch's batches are compared, whichever it is."""
        self._compared_epoch = None

    def training_batch_starts(self, batch: Any) -> None:
        """At the first batch of an epoch, compare how many there are on each rank."""
        trainer = self._module.trainer
        # Kept for callbacks that want it only: it takes memory.
        self._watched_batch = batch if loss_watchers(trainer) else None
        if trainer.current_epoch != self._compared_epoch:
            self._compared_epoch = trainer.current_epoch
            check_same_lengths(_batches(trainer), trainer.current_epoch)

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
            found = self._find_changed() if self.changes_gradients else self.strategy._find_nonfinite()
            if not looks_behind_hooks:
                self._judge(optimizer, found, loss)
            return loss

        def look() -> None:
            if found is not None and agreed(self._bad_now() is not None, self._agreeing_group, device):
                self._judge(optimizer, found, loss)

        device = self.strategy.root_device
        with before_step(optimizer, look) if looks_behind_hooks else nullcontext():
            return step(watched)

    @property
    def _changes_before_step(self) -> bool:
        """Whether the user's code gets the gradients behind Lightning's closure, which ends with the backward pass."""
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
        return changes_gradients(self._module.trainer, *hooks)

    @property
    def _changes_after_backward(self) -> bool:
        """Whether it gets them inside of it, or in a step that optimizes by hand."""
        module = self._module
        return not module.automatic_optimization or changes_gradients(module.trainer, "on_after_backward", "backward")

    @property
    def changes_gradients(self) -> bool:
        """Whether the user's code gets the gradients before the step."""
        return self._changes_before_step or self._changes_after_backward

    def _find_changed(self) -> Mapping[str, str] | None:
        """As the strategy's own, by what the gradients are now. Maybe collective."""
        brought, now = self.strategy._bad_before_averaging(), self._bad_now()
        # Where averages are the same on all ranks, and nobody has changed them, the others see that they are fine too.
        if now is None and self.strategy._has_equal_gradients and not self._changes_after_backward:
            return None
        return after_changes(brought, now, self._agreeing_group, self.strategy.root_device)

    def _bad_now(self) -> dict[str, str] | None:
        named = self._module.named_parameters()
        return bad_gradients((name, parameter) for name, parameter in named if not parameter.is_meta)  # others' parts

    @property
    def _agreeing_group(self) -> dist.ProcessGroup:
        group = self.strategy._nonfinite_group or dist.group.WORLD
        assert group is not None
        return group

    def _judge(self, optimizer: Any, found: Mapping[str, str] | None, loss: Any) -> None:
        """Go on, leave the step out, or raise; but callbacks that watch the loss come before us."""
        if found is not None and self.guard.mode == "error":
            let_watchers_judge(self._module.trainer, loss, self._watched_batch)
        self.guard.check(optimizer, found, self.where(), self.strategy._nonfinite_group)

    def where(self) -> str:
        """The step that runs, in words."""
        trainer = self._module.trainer
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
