"""How losses and logs of micro-batches make up a batch's: trials on some rows, on a rank that has the whole module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.constant_random import ConstantRandom
from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.pipeline.untouched import untouched
from lightning_smddp.pipeline.weight_trials import EXACT, MIXED, amplified, find_weighting
from lightning_smddp.pipeline.weighting import Weighting, warning_without_trial
from lightning_smddp.strategies.log_rules import Learned, learn_rules
from lightning_smddp.strategies.pipeline_step import LightningStep, loss_of
from lightning_smddp.strategies.step_results import StepResults
from lightning_smddp.strategies.step_values import is_loss

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass
class Weighed:
    """What was found: plain data, to be sent."""

    weighting: Weighting = field(default_factory=Weighting)
    warnings: list[str] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> Any:
        """Plain data."""
        return {**asdict(self), "weighting": self.weighting.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Weighed:
        """The inverse."""
        return cls(Weighting.from_json(data["weighting"]), data["warnings"], data["rules"])


@dataclass(frozen=True)
class Weighing:
    """Trials of a step, each of which leaves nothing behind.

    Attributes:
        module: the user's, whole.
        device: where it is.
        step: the training step.
        pair: some rows of the first batch, about two micro-batches.
        exact: whether losses are computed with at least 32 bits.
        changed_buffers: names of buffers that the step changes.
        may_be_whole: whether batches run as one micro-batch if no weighting is right.
    """

    module: LightningModule
    device: torch.device
    step: LightningStep
    pair: MicroBatch
    exact: bool
    changed_buffers: Sequence[str]
    may_be_whole: bool = False

    def run(self) -> Weighed:
        """All trials: without dropout; random numbers that are not the same for all rows are not compared."""
        buffers = self._moving_buffers()
        failure: Exception | None = None
        for mode in (_evaluating, _training):
            try:
                found = self._weighed(mode)
            except Exception as error:  # of user code in a mode that it is not made for
                failure = error
                continue
            if self.may_be_whole and not found.weighting.fits:
                return found  # nothing else is done for each micro-batch either
            return Weighed(found.weighting, found.warnings + buffers, found.rules)
        why = f"the step fails in evaluation mode ({failure!r}), in which micro-batches are compared, so"
        warning = warning_without_trial(self.pair, why)
        return Weighed(warnings=buffers + ([] if warning is None else [warning]))

    def _weighed(self, mode: Callable[[nn.Module], None]) -> Weighed:
        runs = _Runs(self, mode)
        tolerance = EXACT if self.exact else MIXED
        louder = functools.partial(amplified, self.module)
        weighting, warning = find_weighting(runs.loss, self.pair, self._cut, tolerance, louder, self.may_be_whole)
        if self.may_be_whole and not weighting.fits:
            return Weighed(weighting, [] if warning is None else [warning])
        parts = weighting.apply(self._cut(self.pair.value))
        whole, again = runs.observed(self.pair), runs.observed(self.pair)
        learned = learn_rules(whole, [runs.observed(part) for part in parts], parts, again)
        return Weighed(weighting, _warnings(warning, learned), dict(learned.rules))

    def _cut(self, value: Any) -> list[MicroBatch]:
        return replace(self.pair, value=value).split(2)

    def _moving_buffers(self) -> list[str]:
        """Which buffers are others after the parts of some rows than after the rows at once."""
        parts = self._cut(self.pair.value)
        if not self.changed_buffers or len(parts) < 2:
            return []
        try:
            after_whole, after_parts = self._buffers_after([self.pair]), self._buffers_after(parts)
        except Exception:  # of user code that was run with fewer rows: then nothing is known but the trace
            after_whole, after_parts = {}, {}
        moved = [
            name
            for name in self.changed_buffers
            if name not in after_whole or not torch.allclose(after_whole[name], after_parts[name], 1e-5, 1e-6)
        ]
        if not moved:
            return []
        more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
        return [
            f"The training step changes the buffers {', '.join(moved[:4])}{more}, once for each micro-batch and by its "
            "rows (running statistics of a BatchNorm, say): they will differ from one process's. Use "
            "num_microbatches=1 if it matters; instead of BatchNorm a GroupNorm or LayerNorm looks at no other rows."
        ]

    def _buffers_after(self, microbatches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        with untouched(self.module, self.device), ConstantRandom(), torch.no_grad():
            for microbatch in microbatches:
                self.step.observed(microbatch)
            named = dict(self.module.named_buffers())
            return {name: named[name].detach().clone() for name in self.changed_buffers}


class _Runs:
    """Runs of the step that know nothing of each other."""

    def __init__(self, weighing: Weighing, mode: Callable[[nn.Module], None]) -> None:
        self.weighing, self.mode = weighing, mode
        self.count = 0

    def loss(self, microbatch: MicroBatch) -> float:
        """The step's loss."""
        return float(loss_of(self.observed(microbatch).output, self.weighing.step.hook, detached=True))

    def observed(self, microbatch: MicroBatch) -> StepResults:
        """What Lightning would see."""
        weighing = self.weighing
        self.count += 1
        with untouched(weighing.module, weighing.device), ConstantRandom(), torch.no_grad():
            torch.manual_seed(self.count)  # so that what stays random shows
            self.mode(weighing.module)
            return weighing.step.observed(microbatch)


def _evaluating(module: nn.Module) -> None:
    module.eval()


def _training(module: nn.Module) -> None:
    """For models that return something else in evaluation mode: only what keeps statistics is in it."""
    module.train()
    for child in module.modules():
        if "running_mean" in dict(child.named_buffers(recurse=False)):
            child.eval()


def _warnings(warning: str | None, learned: Learned) -> list[str]:
    if warning is not None:  # which is about the loss already
        learned.unfit = {name: values for name, values in learned.unfit.items() if not is_loss(name)}
    return [text for text in (warning, learned.warning()) if text is not None]
