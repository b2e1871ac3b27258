"""Never silently wrong: before training the pipeline's loss and gradients are compared with a plain step's.

That ran on one rank, while it had the whole module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import CHECK_SEED
from lightning_smddp.pipeline.partition.reference import seeding
from lightning_smddp.pipeline.partition.verify import Finding, VerificationError, compare, gradient_norms, require_equal
from lightning_smddp.pipeline.runtime.draws import without_own_dropout
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.pipeline.runtime.staged_step import TracedPath
from lightning_smddp.wire.broadcast import UnsendableError, broadcast_json, broadcast_structure
from lightning_smddp.wire.gather import gather_json


@dataclass
class _Measured:
    """A loss, where it is known, and the norms of gradients by parameter; ``failed`` says why there are none."""

    loss: float | None = None
    norms: Mapping[str, float] | None = None
    failed: str | None = None


def _run_pipelined(
    partitioned: PartitionedModule,
    step: LightningStep,
    microbatch: MicroBatch,
    paths: Sequence[TracedPath],
    observe: Any = None,
) -> _Measured:
    """One micro-batch through the pipeline; what of its result is on this rank. Collective over the pipeline.

    Raises:
        ReplayError: on every rank: with the random numbers of now the step takes a path that was not traced.
    """
    try:
        run = partitioned.runtime.run(paths, step, [microbatch], True, observe)
        outputs = partitioned.runtime.require_success(run)
        partitioned.stash.tied.sum()
        measured = _Measured(norms=_own_norms(partitioned))
    finally:
        step.forget()
    if outputs:
        measured.loss = float(loss_of(outputs[0], step.hook, detached=True))
    return measured


def _own_norms(partitioned: PartitionedModule) -> dict[str, float]:
    """Norms of the gradients that this rank speaks for: of several ranks with a tied parameter one does."""
    ownership, rank = partitioned.plan.ownership, partitioned.setup.groups.pipeline_rank
    norms = gradient_norms(partitioned.stash.parameters.items())
    return {name: norm for name, norm in norms.items() if ownership.owner(name) == rank}


def _gathered(partitioned: PartitionedModule, local: _Measured) -> _Measured:
    """What all ranks of the pipeline have measured together. Collective over the pipeline."""
    setup = partitioned.setup
    everything = _Measured(norms={})
    norms: dict[str, float] = {}
    for loss, some, failed in gather_json([local.loss, local.norms, local.failed], setup.groups.pipeline, setup.device):
        norms.update(some or {})
        if everything.loss is None:
            everything.loss = loss
        if everything.failed is None:
            everything.failed = failed
    return replace(everything, norms=norms)


def _compared(partitioned: PartitionedModule, expected: _Measured, actual: _Measured) -> list[Finding]:
    plan = partitioned.plan
    assert expected.loss is not None
    assert actual.loss is not None
    return compare(
        plan.graph.nodes,
        plan.stage_of_node,
        expected.loss,
        actual.loss,
        expected.norms or {},
        actual.norms or {},
    )


def check_at_start(partitioned: PartitionedModule, step: LightningStep, microbatches: Sequence[MicroBatch]) -> None:
    """Compare with the reference run that the partition was planned with. Collective over all ranks.

    Fills ``partitioned.findings``.

    Raises:
        VerificationError: on every rank, also of pipelines in which the numbers are the same.
    """
    reference, setup = partitioned.plan.reference, partitioned.setup
    if reference is None:
        return
    index = 0  # of the micro-batch that the reference ran on
    if reference.of_trace:
        index = len(microbatches) - 1
    failure: VerificationError | None = None
    try:
        _compare_with_reference(partitioned, step, index, microbatches[index])
    except VerificationError as error:
        failure = error
    except ReplayError as error:
        failure = VerificationError(str(error), partitioned.findings)
    # Pipelines are compared apart, but all ranks stop together: else those of the others would wait for this one.
    text = None
    if failure is not None:
        text = str(failure)
    found = [text for text in gather_json(text, setup.world, setup.device) if text is not None]
    if found:
        raise failure or VerificationError(found[0], partitioned.findings)


def _compare_with_reference(
    partitioned: PartitionedModule,
    step: LightningStep,
    index: int,
    microbatch: MicroBatch,
) -> None:
    """Raise ``VerificationError`` on every rank of the pipeline if something is not the same.

    The pipeline and a plain step draw other random numbers. So a replay of the whole step on one rank is between them,
    which drew those of the plain step once, and those of the pipeline once.
    """
    reference, setup = partitioned.plan.reference, partitioned.setup
    assert reference is not None
    plain = _Measured(reference.plain_loss, reference.plain_norms)
    replayed = _Measured(reference.again_loss, reference.again_norms)
    partitioned.findings = _compared(partitioned, plain, replayed)
    require_equal(partitioned.findings, partitioned.tolerance)

    expected = _Measured(reference.loss, reference.norms)
    try:
        shared = _of_first_rank(partitioned, microbatch)
    except UnsendableError:  # on every rank: only the first pipeline has the micro-batch that made the reference
        found = []
        if setup.groups.replica == 0:
            found = _compare_one(partitioned, step, index, microbatch, expected)
        sent = broadcast_json([asdict(finding) for finding in found], setup.world, setup.device)
        partitioned.findings = [Finding(**finding) for finding in sent]
    else:
        partitioned.findings = _compare_one(partitioned, step, index, shared, expected)
    require_equal(partitioned.findings, partitioned.tolerance)


def _compare_one(
    partitioned: PartitionedModule,
    step: LightningStep,
    index: int,
    microbatch: MicroBatch,
    expected: _Measured,
) -> list[Finding]:
    setup = partitioned.setup
    trial = step.unscaled()
    trial.offset = index
    with preserve_state(setup.module, setup.device), without_own_dropout(setup.module, setup.device):
        alone = replace(microbatch, weight=1.0)
        paths = partitioned.paths_of(trial, [alone])
        local = _run_pipelined(partitioned, trial, alone, paths, seeding(CHECK_SEED))
    return _compared(partitioned, expected, _gathered(partitioned, local))


def _of_first_rank(partitioned: PartitionedModule, microbatch: MicroBatch) -> MicroBatch:
    """The micro-batch of the very first rank, which made the reference. Collective over all ranks."""
    setup = partitioned.setup
    if setup.num_replicas == 1:
        return microbatch
    pair, pattern = (microbatch.size, microbatch.value), (0, microbatch.value)
    size, value = broadcast_structure(pair, setup.world, 0, setup.device, like=pattern)
    return MicroBatch(value, size, 1.0)
