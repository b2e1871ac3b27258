"""A second look, once optimizers and hooks have run: the pipeline's step against a plain one, on one micro-batch.

The check at the start compares with a whole module on one rank. By the second step hooks and callbacks have changed
parameters, buffers and attributes, on all ranks together. Within the view of the whole module a plain step shows what
one process would compute with these. Random numbers are constants in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.pipeline.capture.constant_random import ConstantRandom
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.python_random import PythonRandom, seed_torch
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.verify import Finding, VerificationError, compare, gradient_norms, require_equal
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.view.tensor import SharedViewError
from lightning_smddp.wire.gather import gather_json

_FIRST_SEED = 20250131  # unlike seeds of users, from which Python's numbers may go on


@dataclass
class _Run:
    """A loss, where it is known, and the norms of this rank's gradients; ``failed`` says why there are none."""

    loss: float | None = None
    norms: Mapping[str, float] | None = None
    failed: str | None = None


class SecondCheck:
    """Compares once, in the first training step after an optimizer has stepped.

    Args:
        divided: the module.
        inside_view: enters the view of the whole module, as around a hook.
        steps: how many steps optimizers have made.
    """

    def __init__(
        self, divided: PartitionedModule, inside_view: Callable[[], AbstractContextManager[Any]], steps: int
    ) -> None:
        self.divided, self.inside_view, self._steps = divided, inside_view, steps
        self.is_over = not divided.options.partition.check

    def run(self, step: LightningStep, microbatch: MicroBatch, steps: int) -> list[Finding]:
        """Compare if it is time to. Collective over the pipeline.

        Raises:
            VerificationError: on every rank of the pipeline: the losses or gradients are not the same.
        """
        if self.is_over or steps == self._steps:
            return []
        self.is_over = True
        alone = replace(microbatch, weight=1.0)
        plain = self._gathered(self._plain(step, alone, _FIRST_SEED))
        if plain.failed is not None:
            return []  # what cannot run within the view has nothing to be compared with
        pipelined = self._gathered(self._pipelined(step, alone))
        if pipelined.failed is not None:
            return []
        findings = self._compare(plain, pipelined)
        tolerance = self.divided.tolerance
        if any(finding.difference > tolerance for finding in findings):
            again = self._gathered(self._plain(step, alone, _FIRST_SEED + 1))
            by_chance = self._compare(plain, again)
            if not any(finding.difference > tolerance for finding in by_chance):
                self._refuse(findings)
        return findings

    def _refuse(self, findings: list[Finding]) -> None:
        try:
            require_equal(findings, self.divided.tolerance)
        except VerificationError as error:
            raise VerificationError(
                f"After the first optimizer step, and what hooks did then: {error}", findings
            ) from None

    def _plain(self, step: LightningStep, microbatch: MicroBatch, seed: int) -> _Run:
        """The step within the view. A rank on which it fails goes to its end, where it serves the others."""
        trial, run, sources = step.unscaled(), _Run(), PythonRandom(self.divided.module)
        with preserve_state(self.divided.module, self.divided.device):
            seed_torch(seed)
            try:
                with self.inside_view(), ConstantRandom(), sources.put_back():
                    try:
                        with trial.around(0, microbatch, keep=False):
                            if seed != _FIRST_SEED:  # modules draw in Python, too, on the rank that has them alone
                                sources.seed(seed)
                            loss = loss_of(trial(microbatch), step.hook)
                        loss.backward()
                        run.loss = float(loss.detach())
                    except (RankFailedError, SharedViewError):
                        raise
                    except Exception as error:
                        run.failed = repr(error)
            except SharedViewError as error:  # no rank waits for another at the view's end
                run.failed = str(error)
            run.norms = self._norms()
        trial.forget()
        return run

    def _pipelined(self, step: LightningStep, microbatch: MicroBatch) -> _Run:
        divided, trial, run = self.divided, step.unscaled(), _Run()
        with preserve_state(divided.module, divided.device):
            courses = divided.courses_of(trial, [microbatch])
            try:
                with divided.runtime.engine.unrecorded(), ConstantRandom():
                    outputs = divided.runtime.run(courses, trial, [microbatch], True)
            except LeftCourseError as error:  # on every rank: with these numbers it takes another
                trial.forget()
                return _Run(failed=str(error))
            divided.window.tied.sum()
            run.norms = self._norms()
        trial.forget()
        run.loss = float(loss_of(outputs[0], step.hook, detached=True)) if outputs else None
        return run

    def _norms(self) -> dict[str, float]:
        ownership, rank = self.divided.division.ownership, self.divided.groups.pipeline_rank
        norms = gradient_norms(self.divided.window.parameters.items())
        return {name: norm for name, norm in norms.items() if ownership.owner(name) == rank}

    def _gathered(self, mine: _Run) -> _Run:
        parts = gather_json([mine.loss, mine.norms, mine.failed], self.divided.groups.pipeline, self.divided.device)
        loss = next((loss for loss, _, _ in parts if loss is not None), None)
        norms = {name: norm for _, part, _ in parts for name, norm in (part or {}).items()}
        return _Run(loss, norms, next((failed for _, _, failed in parts if failed is not None), None))

    def _compare(self, expected: _Run, actual: _Run) -> list[Finding]:
        division = self.divided.division
        assert expected.loss is not None
        assert actual.loss is not None
        return compare(
            division.graph.nodes,
            division.stage_of_node,
            expected.loss,
            actual.loss,
            expected.norms or {},
            actual.norms or {},
        )
