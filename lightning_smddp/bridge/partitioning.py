"""From a whole module and its first batch to a :class:`PartitionedModule`, on all ranks together.

In this order: trace the step, make it a graph and choose where to cut that (:func:`make_plan` of
``pipeline/partition/plan.py``); run the plain loop while the first rank has the whole module; let go of other ranks'
parameters; compare the pipeline with the loop; leave each optimizer the states of this rank's. Then
``pipelined_module.py`` chooses the loss weights. The batch itself is trained on afterwards, as any other.

Never silently wrong: the comparison is with a plain loop on the first rank, while that has the whole module. The user's
step runs there on two micro-batches, one after the other, with attributes and buffers as the first has left them, and a
backward pass for each. Nothing of ours is in between. The pipeline then runs the same two, through its schedule, the
stash and the sums of tied weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.partitioned_module import (
    PartitionedModule,
    RunSetup,
    State,
    Unpartitioned,
    seed_of_batch,
    units_here,
)
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.objects import broadcast, first, gather
from lightning_smddp.communication.topology import node_identity
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.mesh import held_parameters
from lightning_smddp.pipeline.partition.costs import cluster_of, in_flight, links_between
from lightning_smddp.pipeline.partition.microbatches import MicroBatches
from lightning_smddp.pipeline.partition.plan import PartitionPlan, Trial, make_plan
from lightning_smddp.pipeline.partition.self_check import (
    EXACT,
    MIXED,
    Numbers,
    VerificationError,
    norm_of,
    require_equal,
)
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.runtime.remote_tensor import ReplayError
from lightning_smddp.pipeline.state.gradients import GradientStash, sum_tied, tied_parameters
from lightning_smddp.pipeline.state.meta_parameters import initialize_deferred, release, set_contents
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition
from lightning_smddp.pipeline.state.replicas import ReplicaGradients
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.seeding import Generators, run_seed, seeded_modules
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from lightning_smddp.wording import USE_INSTEAD

_WEIGHTS = (2 / 3, 1 / 3)  # unequal, so that wrong ones show


def partition(
    before: Unpartitioned,
    step: LightningStep,
    microbatches: MicroBatches,
    known: State | None,
) -> PartitionedModule:
    """Plan stages for ``step``, and let go of other ranks' parameters. Collective over all ranks.

    Args:
        before: the module as it is.
        step: to partition by.
        microbatches: of the first batch.
        known: an earlier plan's ``decision``, which is kept if the step is still the same; see :func:`make_plan`.

    Raises:
        SplitError, VerificationError: on every rank: it cannot be done, or would train something else. Every rank has
            the module as it was before.
    """
    setup = before.setup
    seed = broadcast(run_seed() % 2**31)
    step.seed = seed_of_batch(setup, step, seed)
    plan = _plan(before, step, microbatches, known, seed)
    step.recorder.scopes.learn(units_here(plan.graph, plan.stages, setup))
    expected: Numbers | None = None
    trial = step.unscaled()
    # The first two micro-batches, or the only one, with weights that differ; what counts nothing stays so.
    pairs = zip(microbatches, _WEIGHTS, strict=False)
    checked = [replace(part, weight=part.weight and weight) for part, weight in pairs]
    if step.trains and setup.options.partition.check and setup.is_whole():
        expected = first(lambda: _in_a_loop(trial, checked, setup))
    # Up to here every rank has the whole module, and nothing of it has changed.
    stash = _stash(before, plan, _keep_own_parameters(before, plan, seed))
    view = GlobalView(setup.module, plan.ownership, setup.groups.pipeline, setup.device, setup.groups.host)
    runtime = PipelineRuntime(
        setup.module,
        setup.groups,
        setup.device,
        setup.options.schedule,
        setup.num_stages,
        setup.checkpointing,
    )
    partitioned = PartitionedModule(setup, step.recorder, plan, stash, runtime, view, seed)
    # The traced path is the step's first one, and its numbers have to be right.
    try:
        staged = runtime.stage(plan.graph, plan.stages)
        last = len(microbatches) - 1  # which was traced
        partitioned.remember(staged, step, microbatches[last], last)
        if expected is not None:
            _check(partitioned, trial, checked, expected)
    except (SplitError, VerificationError):  # on every rank, which has the whole module again
        partitioned.close()
        unshard(view)
        raise
    _partition_optimizer(before, partitioned)
    return partitioned


# ---- the plan --------------------------------------------------------------------------------------------------------


def _plan(
    before: Unpartitioned,
    step: LightningStep,
    microbatches: MicroBatches,
    known: State | None,
    seed: int,
) -> PartitionPlan:
    """Stages for the step: traced on every rank, decided by the first."""
    setup, options, ranks = before.setup, before.setup.options, before.setup.rank_of_stage
    hosts, limit = gather(node_identity()), options.partition.memory_limit_gb
    with step.precision():  # autocast keeps a copy of weights in 16 bits
        casts = step.trains and torch.is_autocast_enabled(setup.device.type)
    cluster = cluster_of(
        setup.module,
        before.optimizer,
        ranks,
        in_flight(options.schedule, ranks, len(microbatches)),
        links_between(ranks, setup.groups.mesh.pipelines, hosts, setup.device.type),
        limit and limit * 2**30,
        casts,
        1 if options.strategy.shard is None else setup.num_replicas,
    )
    fetch = None if setup.is_whole() else partial(_first_values, before, seed)
    last = len(microbatches) - 1
    with step.alone(microbatches[last], Generators(setup.module, setup.device), last) as run:
        return make_plan(
            Trial(run, partial(step.loss, microbatches[last]), fetch),
            setup.module,
            setup.device,
            world(),
            cluster,
            options.split,
            setup.checkpointing,
            known,
        )


def _first_values(before: Unpartitioned, seed: int, name: str) -> Tensor:
    """A tensor's values before it is known who holds it: its own, a checkpoint's, or its module makes them."""
    module, device = before.setup.module, before.setup.device
    parameter: Tensor = attrgetter(name)(module)
    if not parameter.is_meta:
        return parameter.detach().to(device, copy=True)
    if name in before.weights:
        loaded: Tensor = before.weights[name]
        return loaded.to(device, copy=True)  # its memory may be that of another name, or the caller's
    initialize_deferred(module, [name], device, seed)
    value = parameter.detach()
    set_contents(parameter, torch.empty_like(parameter, device="meta"))
    return value


# ---- this rank's part ------------------------------------------------------------------------------------------------


def _keep_own_parameters(before: Unpartitioned, plan: PartitionPlan, seed: int) -> dict[str, nn.Parameter]:
    """Give this rank's parameters memory on its device, and free that of all others. This rank's, by name."""
    setup, rank = before.setup, before.setup.groups.pipeline_rank
    held = held_parameters(setup.module, plan.ownership, rank)
    missing = [name for name, parameter in held.items() if parameter.is_meta and name not in before.weights]
    initialize_deferred(setup.module, missing, setup.device, seed)
    release(setup.module, plan.ownership, rank)
    for name, tensor in (*held.items(), *setup.module.named_buffers()):
        if tensor.device.type != setup.device.type:
            set_contents(tensor, _first_values(before, seed, name))
    return held


def _stash(before: Unpartitioned, plan: PartitionPlan, held: dict[str, nn.Parameter]) -> GradientStash:
    setup, groups, options = before.setup, before.setup.groups, before.setup.options.strategy
    here = setup.stages_here
    stages = {name: [stage for stage in plan.parameter_stages[name] if stage in here] for name in held}
    pipeline = groups.mesh.pipelines[groups.replica]
    tied = tied_parameters(setup.module, plan.ownership, pipeline, setup.timeout, setup.device)
    replicas = None
    if setup.num_replicas > 1 and before.optimizer is not None:
        replicas = ReplicaGradients(
            held,
            groups.data_parallel_group,
            setup.device,
            setup.timeout,
            options.algorithm,
            options.compression,
            options.bucket_cap_mb,
        )
        replicas.watching = setup.checks.watches_gradients
    return GradientStash(held, stages, tied, replicas)


def _partition_optimizer(before: Unpartitioned, partitioned: PartitionedModule) -> None:
    """The optimizer steps the parameters of this rank, with the states that were loaded for them."""
    if before.optimizer is None:
        return
    ownership, stash, rank = partitioned.plan.ownership, partitioned.stash, before.setup.groups.pipeline_rank
    names = {id(parameter): name for name, parameter in before.setup.module.named_parameters()}
    own_part = partitioned.optimizer = OptimizerPartition(before.optimizer, names, ownership, rank)
    if before.shards is not None and stash.replicas is not None:
        # What several stages hold is stepped by each holder alike, so that it stays bit by bit the same on all.
        own = [parameter for name, parameter in stash.parameters.items() if len(ownership.parameters[name]) == 1]
        partitioned.sharded = ShardedOptimizers(own, [before.shards], stash.replicas.communicator)
        own_part.shards = before.shards
    if before.loaded is not None:
        own_part.load_full_state_dict(before.loaded)


# ---- the check -------------------------------------------------------------------------------------------------------


def _in_a_loop(step: LightningStep, parts: MicroBatches, setup: RunSetup) -> Numbers:
    """The numbers of a plain loop on this rank."""
    module, generators = setup.module, Generators(setup.module, setup.device)
    log = (vars(module), "log", lambda *args, **kwargs: None)
    total = 0.0
    with preserve_state(module, setup.device), _without_own_dropout(module):
        with step.recorder.scopes.within(None, 0), patched([log]), seeded_modules(module, generators):
            for index, part in enumerate(parts):
                generators.seed(step.seed_of(index))
                loss = step.loss(part, step(part))
                if loss is not None:
                    total += float(loss.detach())
                    loss.backward()
        step.forget()
        return total, _norms(module.named_parameters())


def _without_own_dropout(module: nn.Module) -> AbstractContextManager[None]:
    """Within it recurrent layers drop nothing: cuDNN's draw from a state of their own, which no seed resets."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    return patched([(vars(layer), "dropout", 0.0) for layer in layers])


def _norms(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    return {name: norm_of(parameter.grad) for name, parameter in parameters if parameter.grad is not None}


def _check(partitioned: PartitionedModule, step: LightningStep, parts: MicroBatches, expected: Numbers) -> None:
    """Compare the first pipeline with the loop. Collective over all ranks.

    Raises:
        VerificationError: on every rank.
    """
    setup, plan = partitioned.setup, partitioned.plan
    text = None
    if setup.groups.replica == 0:
        try:
            actual = _in_the_pipeline(partitioned, step, parts)
            require_equal(plan.graph.nodes, expected, actual, EXACT if plan.is_exact else MIXED)
        except (ReplayError, VerificationError) as error:
            text = str(error)
            changed = ", ".join(step.recorder.scopes.changed)
            if changed:
                text += (
                    f" The step also leaves something in {changed}. If the next micro-batch reads it, that is it: in a "
                    f"pipeline the first stage begins that one before the last stage has ended this. {USE_INSTEAD}"
                )
    text = broadcast(text)
    if text is not None:
        raise VerificationError(text)


def _in_the_pipeline(partitioned: PartitionedModule, step: LightningStep, parts: MicroBatches) -> Numbers:
    """The numbers of the first pipeline, on all of its ranks. Collective over it."""
    setup, stash = partitioned.setup, partitioned.stash
    with preserve_state(setup.module, setup.device), _without_own_dropout(setup.module):
        # Replicas are not averaged: compression would be a difference.
        stash.begin(continues=False, may_drop=True, accumulates=True, num_microbatches=len(parts))
        outputs = partitioned.trial(step, parts)
        stash.stash()
        stash.restore(1.0)
        sum_tied(stash.tied)
        norms = _norms(stash.parameters.items())
    ended = zip(parts, outputs, strict=False)  # none where the step does not end
    counting = [(part.weight, output) for part, output in ended if part.weight and output is not None]
    loss = sum(weight * float(loss_of(output, step.hook, detached=True)) for weight, output in counting)
    everyones = gather((loss, norms), setup.groups.pipeline)
    return everyones[setup.last_rank][0], {name: norm for _, of_rank in everyones for name, norm in of_rank.items()}
