"""How losses and logs of micro-batches make up a batch's: trials on some rows, on a rank that has the whole module."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.result_trials import Findings, tolerance_of, try_results
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_results import KeptState, Observed
from lightning_smddp.pipeline.capture.constant_random import without_chance
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.gradient_trials import (
    Gradients,
    GradientTrial,
    Verdict,
    noted_gradients,
    tolerances_on,
)
from lightning_smddp.pipeline.partition.loss_weights import Weighting, warning_without_trial
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UncombinableError
from lightning_smddp.pipeline.partition.weight_trials import EXACT, MIXED, amplified, find_weighting
from lightning_smddp.pipeline.runtime.tails import NEW_FUNCTIONS, NEW_OWNERS

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass
class Weighed:
    """What trials have found of a step; it is sent to the other ranks as JSON.

    Attributes:
        weighting: of the micro-batches' losses.
        warnings: for the user.
        findings: of what the step shows besides its loss.
        whole: batches run as one micro-batch, as no cut gives one process's numbers.
    """

    weighting: Weighting = field(default_factory=Weighting)
    warnings: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    whole: bool = False

    def warn(self, warning: str | None) -> None:
        """Keep ``warning`` for the user, if there is one."""
        if warning is not None:
            self.warnings.append(warning)

    def to_json(self) -> Any:
        """All of it, as lists, dicts and numbers."""
        return {**asdict(self), "weighting": self.weighting.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Weighed:
        """What :meth:`to_json` was called on."""
        findings = Findings.from_json(data["findings"])
        return cls(Weighting.from_json(data["weighting"]), data["warnings"], findings, data["whole"])


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
        # In evaluation mode losses are compared without dropout. A model that fails so is compared in training mode.
        failure: Exception | None = None
        for mode in (_evaluating, _training):
            try:
                return self._weighed(mode)
            except Exception as error:  # of user code in a mode that it is not made for
                failure = error
        why = f"the step fails in evaluation mode ({failure!r}), in which micro-batches are compared, so"
        found = Weighed()
        found.warn(warning_without_trial(self.pair, why))
        return self._judged(found, self._moving_buffers(), Findings())

    def _weighed(self, mode: Callable[[nn.Module], None]) -> Weighed:
        runs = _Runs(self, mode)
        tolerance = MIXED
        if self.exact:
            tolerance = EXACT
        # First the loss: which weights of micro-batches make theirs the batch's. Then, with these weights, the rest of
        # what the step shows. `louder` makes values that are nearly alike at the start differ, to tell rules apart.
        louder = functools.partial(amplified, self.module)
        trial = _Differentiated(self, mode)
        weighting, warning = find_weighting(
            runs.loss,
            self.pair,
            self._cut,
            tolerance,
            louder,
            self.may_be_whole,
            trial.fitting,
        )
        found = Weighed(weighting)
        found.warn(warning)
        if self.may_be_whole and not weighting.fits:
            found.whole = True
            return found  # nothing else is done for each micro-batch either
        parts = weighting.apply(self._cut(self.pair.value))

        def tried() -> Findings:
            return try_results(
                runs.seen,
                _same,
                self.pair,
                parts,
                self.step.capture,
                self.step.key,
                tolerance_of(self.exact, self.device),
                by_rows=weighting.kind == "rows",
            )

        findings = tried()
        if findings.doubts and not findings.differences:
            with louder():
                findings = tried().after(findings)
        if warning is not None:  # which is about the loss already
            findings.forget_losses()
        found.findings = findings
        return self._judged(found, self._moving_buffers(), findings)

    def _judged(self, found: Weighed, buffers: Sequence[str], findings: Findings) -> Weighed:
        """With what is to be said about buffers and results that micro-batches make another, or as one micro-batch."""
        more = ""
        if len(buffers) > 4:
            more = f" and {len(buffers) - 4} more"
        reasons = []
        if buffers:
            reasons.append(
                f"it changes the buffers {', '.join(buffers[:4])}{more}, once for each micro-batch and by its rows: "
                "with running statistics, as of a BatchNorm, weights are others too. A GroupNorm or LayerNorm looks "
                "at no other rows"
            )
        if findings.differences:
            reasons.append(
                f"what it shows is no mean, sum, largest or smallest value of micro-batches': {findings.text()}. A "
                "torchmetrics object sees whole batches"
            )
        if not reasons:
            return found
        found.whole = self.may_be_whole
        if self.may_be_whole:
            end = (
                "So each batch runs as one micro-batch: right, but without overlap of stages, and with the memory of "
                "the whole batch. A num_microbatches that you give is used, with these differences."
            )
        else:
            end = "With num_microbatches=1, or 'auto', the numbers are one process's."
        text = f"The training step cannot be run in micro-batches with one process's numbers: {'; '.join(reasons)}. "
        found.warnings.append(text + end)
        return found

    def _cut(self, value: Any) -> list[MicroBatch]:
        return replace(self.pair, value=value).split(2)

    def _moving_buffers(self) -> list[str]:
        """Which buffers are others after the parts of some rows than after the rows at once."""
        parts = self._cut(self.pair.value)
        if not self.changed_buffers or len(parts) < 2:
            return []
        try:
            after_whole = self._buffers_after([self.pair])
            after_parts = self._buffers_after(parts)
        except Exception:  # of user code that was run with fewer rows: then nothing is known but the trace
            return list(self.changed_buffers)
        moving = []
        for name in self.changed_buffers:
            if not torch.allclose(after_whole[name], after_parts[name], 1e-5, 1e-6):
                moving.append(name)
        return moving

    def _buffers_after(self, microbatches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        with preserve_state(self.module, self.device), without_chance(self.device), torch.no_grad():
            for microbatch in microbatches:
                self.step.observed([microbatch])
            named = dict(self.module.named_buffers())
            return {name: named[name].detach().clone() for name in self.changed_buffers}


class _Runs:
    """Runs of the step that know nothing of each other."""

    def __init__(self, weighing: Weighing, mode: Callable[[nn.Module], None]) -> None:
        self.weighing = weighing
        self.mode = mode
        self.count = 0

    def loss(self, microbatch: MicroBatch) -> float:
        """The step's loss when it runs on this micro-batch alone, with constant random numbers."""
        output = self.observed([microbatch]).results.output
        return float(loss_of(output, self.weighing.step.hook, detached=True))

    def seen(self, microbatches: Sequence[MicroBatch], state: KeptState | None) -> Observed | None:
        """What Lightning would see with these attributes; None if the step fails with them."""
        # In a state that a trial has made up the step may fail, as it may never come to that: this says nothing. That
        # results cannot be combined is what a trial wants to know.
        try:
            return self.observed(microbatches, state)
        except UncombinableError:
            raise
        except Exception:
            if state is None:
                raise
            return None

    def observed(self, microbatches: Sequence[MicroBatch], state: KeptState | None = None) -> Observed:
        """What Lightning would see of a step on these micro-batches; the module's state stays as it is."""
        weighing = self.weighing
        self.count += 1
        with preserve_state(weighing.module, weighing.device), without_chance(weighing.device), torch.no_grad():
            self.mode(weighing.module)
            if state is not None:
                state.put(weighing.module)
            return weighing.step.observed(microbatches, self.count)  # so that what stays random shows


class _Differentiated:
    """Gradients of the step: in the modes that its modules are in, else in the one in which losses were compared."""

    def __init__(self, weighing: Weighing, mode: Callable[[nn.Module], None]) -> None:
        self.weighing = weighing
        # Whether the Trainer's precision casts what is in fp32; parameters in 16 bits would stay so without it.
        are_float32 = all(parameter.dtype == torch.float32 for parameter in weighing.module.parameters())
        self.precisions: tuple[bool, ...] = (True,)
        if are_float32 and not weighing.exact:
            self.precisions = (False, True)  # in fp32 less is lost in rounding
        self.modes = (as_trained, mode)

    def fitting(self, candidates: Sequence[Weighting], conceivable: Sequence[Weighting]) -> Verdict:
        """See ``GradientTrial``; all candidates where the step cannot be differentiated on these rows."""
        # First in fp32, and with rows in another order where the batch was cut by rows: these tell most. What fails is
        # tried in the Trainer's precision, and with the rows as they are.
        pair = self.weighing.pair
        orders = (pair.cuts is None, False)
        for mode in self.modes:
            for precision, may_reorder in itertools.product(self.precisions, orders):
                run = functools.partial(self._run, mode, precision)
                trial = GradientTrial(run, pair, may_reorder, tolerances_on(self.weighing.device))
                try:
                    found = trial.fitting(candidates, conceivable)
                except Exception:  # of user code in a mode, a precision or an order of rows that it is not made for
                    continue
                if found is not None:
                    return found
                break
        return list(candidates)

    def _run(self, mode: Callable[[nn.Module], None], precision: bool, rows: MicroBatch, seed: int) -> Gradients:
        weighing = self.weighing
        with preserve_state(weighing.module, weighing.device), without_chance(weighing.device):
            mode(weighing.module)
            with noted_gradients(dict(weighing.module.named_parameters())) as found:
                weighing.step.differentiate(rows, seed, precision)
        return found


def as_trained(module: nn.Module) -> None:
    """Put modules with running statistics (BatchNorm) in evaluation mode, where rows do not depend on each other."""
    for child in module.modules():
        if "running_mean" in dict(child.named_buffers(recurse=False)):
            child.eval()


def _same(state: KeptState | None) -> KeptState | None:
    return state


def _evaluating(module: nn.Module) -> None:
    module.eval()


def _training(module: nn.Module) -> None:
    """For models that return something else in evaluation mode: only what keeps statistics is in it."""
    module.train()
    as_trained(module)


# Weights are compared before this batch, and then at numbers of batches that double: log n trials for n batches.
_FIRST_LOOK, _GROWTH = 4, 2


@dataclass
class WeightDoubts:
    """What makes it doubtful, in the course of training, that weights of micro-batches still are right.

    Attributes:
        of_tail: something new has run behind the last module since weights were compared.
        new_tails: in how many batches that were functions.
        weighs_unevenly: a batch had micro-batches whose weights are not their shares of its rows.
        batches: that were trained.
        next_look: so many of them, and weights are compared whatever was seen; None is never.
        is_suspicion: they did not fit the last time that this was done.
    """

    of_tail: bool = False
    new_tails: int = 0
    weighs_unevenly: bool = False
    batches: int = 0
    next_look: int | None = _FIRST_LOOK
    is_suspicion: bool = False

    def note_tail(self, news: int, counts: bool) -> None:
        """What has run behind the last module, see ``tails.py``, and whether the batch ``counts``."""
        self.of_tail = self.of_tail or news > NEW_OWNERS
        self.new_tails += news == NEW_FUNCTIONS
        self.batches += counts

    def take_look(self) -> bool:
        """Whether it is time to compare, whatever was seen: at distances that grow, so that it costs little."""
        if self.next_look is None or self.batches < self.next_look:
            return False
        self.next_look = max(_FIRST_LOOK, _GROWTH * self.batches)
        return True

    def suspect(self, doubtful: bool) -> bool:
        """Whether what does not fit now did not fit the batch before either; else the next one is looked at."""
        confirmed = doubtful and self.is_suspicion
        self.is_suspicion = doubtful and not confirmed
        if self.is_suspicion:
            self.next_look = self.batches + 1
        return confirmed

    def of_weights(self, microbatches: Sequence[MicroBatch]) -> bool:
        """Whether these are the first whose weights are not their shares of the rows: no trial has seen such ones."""
        if self.weighs_unevenly:
            return False
        rows = sum(microbatch.size for microbatch in microbatches)
        shares = [(microbatch.weight, microbatch.size / rows) for microbatch in microbatches]
        self.weighs_unevenly = any(not math.isclose(weight, share) for weight, share in shares)
        return self.weighs_unevenly
