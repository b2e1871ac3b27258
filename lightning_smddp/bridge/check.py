"""Never silently wrong: before training the pipeline is compared with a plain loop over the same micro-batches.

The loop runs on the first rank while that has the whole module: the user's step on two micro-batches, one after the
other, with attributes and buffers as the first has left them, and a backward pass for each. Nothing of ours is in
between. The pipeline then runs the same two, through its schedule, the stash and the sums of tied weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch_steps import hooks_of
from lightning_smddp.bridge.metrics import patched
from lightning_smddp.bridge.partitioned_module import PartitionedModule, RunSetup
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.objects import with_same_memory
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.partition.costs import explained_shortage
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import decided_by_first
from lightning_smddp.pipeline.partition.self_check import (
    EXACT,
    MIXED,
    Finding,
    VerificationError,
    compare,
    norm_of,
    require_equal,
)
from lightning_smddp.pipeline.runtime.remote import ReplayError, Shapes
from lightning_smddp.pipeline.runtime.stage_program import StagePlan, StageProgram
from lightning_smddp.pipeline.runtime.step_run import run_stage
from lightning_smddp.pipeline.runtime.wrappers import Wrappers
from lightning_smddp.seeding import seeded_modules
from lightning_smddp.wire.objects import broadcast, gather
from lightning_smddp.wire.pytree import copied, map_leaves
from lightning_smddp.wording import USE_INSTEAD

_WEIGHTS = (2 / 3, 1 / 3)  # unequal, so that wrong ones show
_CPU = torch.device("cpu")


class Baseline(NamedTuple):
    """What the loop gave: the weighted sum of the losses, and norms of the gradients, by parameter."""

    loss: float
    norms: dict[str, float]


def checked(microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The first and the last one, with weights that differ; what counts nothing stays so."""
    if len(microbatches) == 1:
        return [replace(microbatches[0], weight=1.0)]
    chosen = (microbatches[0], microbatches[-1])
    return [replace(part, weight=part.weight and weight) for part, weight in zip(chosen, _WEIGHTS, strict=True)]


# ---- the loop --------------------------------------------------------------------------------------------------------


def run_baseline(
    step: LightningStep, microbatches: Sequence[MicroBatch], setup: RunSetup, graph: StepGraph
) -> Baseline:
    """The loop's numbers, on all ranks. Collective over all ranks.

    Raises:
        StepFailedError: on every rank: the step fails.
    """
    parts = checked(microbatches)
    return Baseline(*decided_by_first(lambda: tuple(_loop(step, parts, setup, graph)), setup.world))


def _loop(step: LightningStep, parts: Sequence[MicroBatch], setup: RunSetup, graph: StepGraph) -> Baseline:
    module, total = setup.module, 0.0
    wrappers = Wrappers(module, setup.device)
    everything = StagePlan(0, 0, len(graph.nodes), frozenset(), (), ())
    program = StageProgram(graph, everything, wrappers)
    made: dict[str, Tensor] = {}  # gradients, on the host: the whole model's may be too much for one device
    with ExitStack() as stack:
        stack.enter_context(explained_shortage())
        stack.enter_context(preserve_state(module, setup.device))
        stack.enter_context(kept_parameters(module))
        stack.callback(step.forget)
        stack.enter_context(step.recorder.scopes.within(None, 0))
        stack.enter_context(_without_own_dropout(module))
        stack.enter_context(patched([(module, "log", _ignored)]))
        if graph.mixes_draws:  # these are seeded one by one, in one stage as in several
            stack.enter_context(wrappers.active([graph]))
        else:
            stack.enter_context(seeded_modules(module, wrappers.generators))
        stack.enter_context(_taken_gradients(module, made))
        for index, part in enumerate(parts):
            value = map_leaves(with_same_memory, copied(part.value))  # objects too, as steps assign to them
            call = partial(getattr(module, step.hook), value, *step.arguments)
            wrappers.generators.seed(step.seed_of(index))
            with step.precision():
                if graph.mixes_draws:
                    _, result = run_stage(program, call, (), Shapes.of(graph), seed=step.seed_of(index))
                else:
                    result = call()
            if part.weight and result is not None:
                loss = loss_of(result, step.hook) * part.weight
                total += float(loss.detach())
                loss.backward()
    return Baseline(total, {name: norm_of(gradient) for name, gradient in made.items()})


@contextmanager
def _taken_gradients(module: nn.Module, made: dict[str, Tensor]) -> Iterator[None]:
    """Sum them up in ``made`` as they come."""

    def take(name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = parameter.grad.detach().to(_CPU)
        made[name] = made[name] + gradient if name in made else gradient.clone()
        parameter.grad = None

    with ExitStack() as handles:
        for name, parameter in module.named_parameters():
            if hooks_of(parameter)[1]:  # a user's, which sees what has accumulated so far
                handles.callback(take, name, parameter)
            elif parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(lambda p, name=name: take(name, p))
                handles.callback(handle.remove)
        yield


def _without_own_dropout(module: nn.Module) -> AbstractContextManager[None]:
    """Within it recurrent layers drop nothing: cuDNN's draw from a state of their own, which no seed resets."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    return patched([(layer, "dropout", 0.0) for layer in layers])


def _ignored(*args: Any, **kwargs: Any) -> None:
    pass


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def check_at_start(
    partitioned: PartitionedModule,
    step: LightningStep,
    microbatches: Sequence[MicroBatch],
    baseline: Baseline,
) -> None:
    """Compare the first pipeline with the loop. Collective over all ranks. Fills ``partitioned.findings``.

    Raises:
        VerificationError: on every rank.
    """
    setup = partitioned.setup
    found: Any = None
    if setup.groups.replica == 0:
        found = _outcome(partitioned, step, checked(microbatches), baseline)
    text, findings = broadcast(found, setup.world)
    partitioned.findings = [Finding(*finding) for finding in findings]
    if text is not None:
        raise VerificationError(text, partitioned.findings)


def _outcome(
    partitioned: PartitionedModule,
    step: LightningStep,
    parts: Sequence[MicroBatch],
    baseline: Baseline,
) -> tuple[str | None, list[tuple[Any, ...]]]:
    """Of the first pipeline: what is wrong, if anything, and all comparisons. Collective over it."""
    findings: list[Finding] = []
    text = None
    try:
        findings = _compared(partitioned, step, parts, baseline)
        require_equal(findings, EXACT if partitioned.plan.is_exact else MIXED)
    except ReplayError as error:
        text = str(error)
    except VerificationError as error:
        text = str(error)
        changed = list(step.recorder.scopes.changed)
        if changed:
            text += (
                f" The step also leaves something in {', '.join(changed[:4])}. If the next micro-batch reads it, that "
                "is it: in a pipeline the first stage begins that one before the last stage has ended this. "
                f"{USE_INSTEAD}"
            )
    return text, [astuple(finding) for finding in findings]


def _compared(
    partitioned: PartitionedModule,
    step: LightningStep,
    parts: Sequence[MicroBatch],
    baseline: Baseline,
) -> list[Finding]:
    setup, stash, runtime = partitioned.setup, partitioned.stash, partitioned.runtime
    trial = step.unscaled()
    norms: dict[str, float] = {}
    with preserve_state(setup.module, setup.device), _without_own_dropout(setup.module):
        try:
            paths = partitioned.paths(trial, parts)
            # Replicas are not averaged: compression would be a difference.
            stash.begin(continues=False, may_drop=True, accumulates=True, num_microbatches=len(parts))
            outputs = runtime.require_success(runtime.run(paths, trial, parts, True))
        finally:
            trial.forget()
        stash.stash()
        stash.restore(1.0)
        stash.tied.sum()
        for name, parameter in stash.parameters.items():
            if parameter.grad is not None:
                norms[name] = norm_of(parameter.grad)
    loss = 0.0
    for part, output in zip(parts, outputs, strict=False):  # none where the step does not end
        if part.weight and output is not None:
            loss += part.weight * float(loss_of(output, trial.hook, detached=True))
    losses, norms_by_rank = zip(*gather((loss, norms), setup.groups.pipeline), strict=True)
    plan = partitioned.plan
    actual = {name: norm for of_rank in norms_by_rank for name, norm in of_rank.items()}
    return compare(plan.graph.nodes, plan.stage_of_node, baseline.loss, losses[setup.last_rank], baseline.norms, actual)
