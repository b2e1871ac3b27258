"""Never silently wrong: before training the pipeline is compared with a plain loop over the same micro-batches.

The loop runs on the first rank while that has the whole module: the user's step on two micro-batches, one after the
other, with attributes and buffers as the first has left them, and a backward pass for each. Nothing of ours is in
between. The pipeline then runs the same two, through its schedule, the stash and the sums of tied weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_smddp._compat.torch_steps import hooks_of
from lightning_smddp.bridge.metrics import patched
from lightning_smddp.bridge.module_states import RunSetup
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.objects import with_same_memory
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.partition.hardware import explained_shortage
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.on_all_ranks import decided_by_first
from lightning_smddp.pipeline.partition.self_check import Finding, VerificationError, compare, norm_of, require_equal
from lightning_smddp.pipeline.runtime.draws import without_own_dropout
from lightning_smddp.pipeline.runtime.remote import ReplayError, Shapes
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan
from lightning_smddp.pipeline.runtime.stage_program import StageProgram
from lightning_smddp.pipeline.runtime.step_run import run_stage
from lightning_smddp.pipeline.runtime.wrappers import Wrappers
from lightning_smddp.seeding import seeded_modules
from lightning_smddp.wire.objects import UnsendableError, broadcast, gather
from lightning_smddp.wire.pytree import copied, leaves, map_leaves
from lightning_smddp.wire.stream import broadcast_object
from lightning_smddp.wording import USE_INSTEAD

_WEIGHTS = (2 / 3, 1 / 3)  # unequal, so that wrong ones show
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Baseline:
    """What the loop gave.

    Attributes:
        loss: the weighted sum of the micro-batches' losses.
        norms: of the gradients, by parameter.
        carried: attributes that the first micro-batch has left something in, which the next one may have read.
    """

    loss: float
    norms: Mapping[str, float]
    carried: Sequence[str]


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
    found = decided_by_first(lambda: asdict(_loop(step, parts, setup, graph)), setup.world)
    return Baseline(**found)


def _loop(step: LightningStep, parts: Sequence[MicroBatch], setup: RunSetup, graph: StepGraph) -> Baseline:
    module, total = setup.module, 0.0
    wrappers = Wrappers(module, setup.device)
    everything = StagePlan(0, 0, len(graph.nodes), frozenset(), (), ())
    program = StageProgram(graph, everything, wrappers)
    made: dict[str, Tensor] = {}  # gradients, on the host: the whole model's may be too much for one device
    before = _attributes(module)
    with ExitStack() as stack:
        stack.enter_context(explained_shortage(is_whole=True))
        stack.enter_context(preserve_state(module, setup.device))
        stack.enter_context(kept_parameters(module))
        stack.callback(step.forget)
        stack.enter_context(step.recorder.scopes.within(None, 0))
        stack.enter_context(without_own_dropout(module, setup.device))
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
        carried = [name for name, value in _attributes(module).items() if not _same(before.get(name), value)]
    return Baseline(total, {name: norm_of(gradient) for name, gradient in made.items()}, carried)


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


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """By name what a step may leave for the next one: tensors and numbers in attributes of modules, but metrics."""
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        for name, value in vars(part).items():
            if not name.startswith("_") and isinstance(value, (Tensor, int, float, list, tuple, dict)):
                found[f"self.{path}.{name}" if path else f"self.{name}"] = leaves(value)
    return found


def _same(before: list[Any] | None, now: list[Any]) -> bool:
    if before is None or len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return all(one is other or (type(one) in (int, float) and one == other) for one, other in pairs)


def _ignored(*args: Any, **kwargs: Any) -> None:
    pass


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def check_at_start(
    partitioned: PartitionedModule,
    step: LightningStep,
    microbatches: Sequence[MicroBatch],
    baseline: Baseline,
) -> None:
    """Compare with the loop. Collective over all ranks. Fills ``partitioned.findings``.

    Raises:
        VerificationError: on every rank, also of pipelines in which the numbers are the same.
    """
    setup = partitioned.setup
    failure: VerificationError | None = None
    try:
        partitioned.findings = _findings(partitioned, step, checked(microbatches), baseline)
        _require_equal(partitioned, baseline)
    except VerificationError as error:
        failure = error
    except ReplayError as error:
        failure = VerificationError(str(error), partitioned.findings)
    # Pipelines are compared apart, but all ranks stop together: else those of the others would wait for this one.
    texts = gather(None if failure is None else str(failure), setup.world)
    found = [text for text in texts if text is not None]
    if found:
        raise failure or VerificationError(found[0], partitioned.findings)


def _require_equal(partitioned: PartitionedModule, baseline: Baseline) -> None:
    try:
        require_equal(partitioned.findings, partitioned.tolerance)
    except VerificationError as error:
        if not baseline.carried:
            raise
        text = (
            f"{error} The step also leaves something in {', '.join(baseline.carried[:4])}. If the next micro-batch "
            "reads it, that is it: in a pipeline the first stage begins that one before the last stage has ended this. "
            f"{USE_INSTEAD}"
        )
        raise VerificationError(text, error.findings) from None


def _findings(
    partitioned: PartitionedModule,
    step: LightningStep,
    parts: Sequence[MicroBatch],
    baseline: Baseline,
) -> list[Finding]:
    """Of all pipelines, which run the micro-batches of the first rank; of the first one where they cannot be sent."""
    setup = partitioned.setup
    if setup.num_replicas > 1:
        pairs = [(part.size, part.weight, part.value) for part in parts]
        try:
            sent = broadcast_object(pairs, setup.world, 0, setup.device)
        except UnsendableError:  # on every rank
            found = []
            if setup.groups.replica == 0:
                found = [asdict(finding) for finding in _compared(partitioned, step, parts, baseline)]
            found = broadcast(found, setup.world)
            return [Finding(**finding) for finding in found]
        parts = [MicroBatch(value, size, weight) for size, weight, value in sent]
    return _compared(partitioned, step, parts, baseline)


def _compared(
    partitioned: PartitionedModule,
    step: LightningStep,
    parts: Sequence[MicroBatch],
    baseline: Baseline,
) -> list[Finding]:
    setup, stash, runtime = partitioned.setup, partitioned.stash, partitioned.runtime
    trial = step.unscaled()
    local: list[Any] = [None, {}]  # the loss, and norms of the gradients that this rank speaks for
    with preserve_state(setup.module, setup.device), without_own_dropout(setup.module, setup.device):
        try:
            paths = partitioned.paths_of(trial, parts)
            # Replicas are not averaged: compression would be a difference.
            stash.begin(continues=False, may_drop=True, accumulates=True, num_microbatches=len(parts))
            outputs = runtime.require_success(runtime.run(paths, trial, parts, True))
        finally:
            trial.forget()
        stash.stash()
        stash.restore(1.0)
        stash.tied.sum()
        ownership, rank = partitioned.plan.ownership, setup.groups.pipeline_rank
        for name, parameter in stash.parameters.items():
            if parameter.grad is not None and ownership.owner(name) == rank:
                local[1][name] = norm_of(parameter.grad)
    if outputs:
        local[0] = 0.0
        for part, output in zip(parts, outputs, strict=True):
            if part.weight and output is not None:
                local[0] += part.weight * float(loss_of(output, trial.hook, detached=True))
    norms: dict[str, float] = {}
    losses = []
    for loss, some in gather(local, setup.groups.pipeline):
        norms.update(some)
        losses.append(loss)
    (actual,) = [loss for loss in losses if loss is not None]
    plan = partitioned.plan
    return compare(plan.graph.nodes, plan.stage_of_node, baseline.loss, actual, baseline.norms, norms)
