"""From a whole module and its first batch to a :class:`PartitionedModule`, on all ranks together.

In this order: trace the step, make it a graph and choose where to cut that (:func:`divide` of
``pipeline/partition/plan.py``); let go of other ranks' parameters; compare the pipeline with the same in one process
(:func:`check_at_start`); leave each optimizer this rank's parameters. The batch itself is trained on afterwards, as any
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.check import check_at_start, run_baseline
from lightning_smddp.bridge.partitioned_module import (
    PartitionedModule,
    RunSetup,
    Unpartitioned,
    seed_of_batch,
    units_here,
)
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.communication.topology import node_identity
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.mesh import held_parameters
from lightning_smddp.pipeline.partition.costs import Resources, in_flight, links_between, resources_for
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import PartitionPlan, Trial, divide
from lightning_smddp.pipeline.partition.self_check import VerificationError
from lightning_smddp.pipeline.runtime.engine import PipelineRuntime
from lightning_smddp.pipeline.state.gradients import GradientStash, TiedGradients, create_tied_groups
from lightning_smddp.pipeline.state.meta_parameters import initialize_deferred, release, set_contents
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition
from lightning_smddp.pipeline.state.replicas import ReplicaGradients
from lightning_smddp.pipeline.state.state_dict import SharedBuffers, unshard
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.seeding import Generators, run_seed
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from lightning_smddp.wire.objects import broadcast, gather


class Partitioning:
    """One attempt to partition a module by one of its steps.

    Args:
        before: the module as it is.
        step: to partition by.
        microbatches: of the first batch.
        known: an earlier plan's ``decision``, which is kept if the step is still the same; see :func:`divide`.
    """

    def __init__(
        self,
        before: Unpartitioned,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
        known: Mapping[str, Any] | None,
    ) -> None:
        self.before = before
        self.setup = before.setup
        self.step = step
        self.microbatches = microbatches
        self.known = known
        self._seed = 0  # of values for parameters without memory, the same on every rank

    def run(self) -> PartitionedModule:
        """Plan stages, and let go of other ranks' parameters. Collective over all ranks.

        Raises:
            SplitError, VerificationError: on every rank: it cannot be done, or would train something else. Every rank
                has the module as it was before.
        """
        setup, step = self.setup, self.step
        hosts = gather(node_identity(), setup.world)
        links = links_between(setup.rank_of_stage, setup.groups.mesh.pipelines, hosts, setup.device.type)
        casts = step.trains and _casts_weights(setup)
        num_shares = 1 if setup.options.shard is None else setup.num_replicas
        resources = resources_for(
            setup.module,
            self.before.optimizers,
            setup.rank_of_stage,
            in_flight(setup.options.schedule, setup.rank_of_stage, len(self.microbatches)),
            links,
            setup.options.partition.memory_limit,
            casts,
            num_shares,
        )
        self._seed = broadcast(run_seed() % 2**31, setup.world)
        plan = self._plan(resources)
        step.recorder.scopes.learn(units_here(plan.graph, plan.stages, setup))
        baseline = None
        if step.trains and setup.options.partition.check and setup.is_whole():
            baseline = run_baseline(step, self.microbatches, setup, plan.graph)
        # Up to here every rank has the whole module, and nothing of it has changed.
        self._keep_own_parameters(plan)
        stash = self._stash(plan)
        view = GlobalView(setup.module, plan.ownership, setup.groups.pipeline, setup.device, setup.groups.host)
        partitioned = PartitionedModule(
            setup=setup,
            recorder=step.recorder,
            plan=plan,
            resources=resources,
            stash=stash,
            runtime=self._runtime(),
            view=view,
            buffers=SharedBuffers(view),
            run_seed=self._seed,
        )
        # The traced path is the step's first one, and its numbers have to be right.
        try:
            partitioned.remember_first(step, self.microbatches)
            if baseline is not None:
                check_at_start(partitioned, step, self.microbatches, baseline)
        except (SplitError, VerificationError):  # on every rank, which has the whole module again
            partitioned.close()
            unshard(setup.module, plan.ownership, setup.groups.pipeline, setup.device)
            raise
        self._partition_optimizers(partitioned)
        return partitioned

    # ---- the plan ----

    def _plan(self, resources: Resources) -> PartitionPlan:
        """Stages for the step: traced on every rank, decided by the first. Nothing of the module changes."""
        setup, step = self.setup, self.step
        last = len(self.microbatches) - 1

        def find_loss(result: Any) -> Tensor | None:
            return loss_of(result, step.hook) if step.trains and result is not None else None

        step.seed = seed_of_batch(setup, step, self._seed)
        generators = Generators(setup.module, setup.device)
        fetch = None if setup.is_whole() else self._first_values
        trial = Trial(step.alone(self.microbatches[last], generators, last), find_loss, fetch)
        with generators.preserved(), torch.set_grad_enabled(step.trains):
            generators.seed(step.seed_of(last))  # as the run does: that is no draw of the step's
            return divide(
                trial,
                setup.module,
                setup.device,
                setup.world,
                resources,
                setup.options.split,
                setup.options.activation_checkpointing,
                self.known,
            )

    def _first_values(self, name: str) -> Tensor:
        """A parameter's values before it is known who holds it: its own, a checkpoint's, or its module makes them."""
        setup = self.setup
        parameter = setup.module.get_parameter(name)
        if not parameter.is_meta:
            return parameter.detach().to(setup.device, copy=True)
        if name in self.before.weights:
            return self.before.weights[name].to(setup.device)
        initialize_deferred(setup.module, [name], setup.device, self._seed)
        value = parameter.detach()
        set_contents(parameter, torch.empty_like(parameter, device="meta"))
        return value

    # ---- this rank's part ----

    def _keep_own_parameters(self, plan: PartitionPlan) -> None:
        """Give this rank's parameters memory on its device, and free that of all others."""
        module, device, rank = self.setup.module, self.setup.device, self.setup.groups.pipeline_rank
        held = plan.ownership.held_by(rank)
        named = dict(module.named_parameters())
        weights = self.before.weights
        missing = [name for name in held if named[name].is_meta and name not in weights]
        initialize_deferred(module, missing, device, self._seed)
        for name in held:
            parameter = named[name]
            if parameter.is_meta:
                set_contents(parameter, weights[name].to(device, copy=True))
            elif parameter.device.type != device.type:
                set_contents(parameter, parameter.detach().to(device))
        release(module, plan.ownership, rank)
        for buffer in module.buffers():
            if buffer.device.type != device.type:
                set_contents(buffer, buffer.to(device))

    def _stash(self, plan: PartitionPlan) -> GradientStash:
        setup, groups = self.setup, self.setup.groups
        held = held_parameters(setup.module, plan.ownership, groups.pipeline_rank)
        here = self._stages_here()
        stages = {name: [stage for stage in plan.parameter_stages[name] if stage in here] for name in held}
        tied_groups = create_tied_groups(plan.ownership, groups.mesh.pipelines, setup.timeout, setup.device)
        replicas = self._replicas(held) if setup.num_replicas > 1 and self.before.optimizers else None
        tied = TiedGradients(setup.module, plan.ownership, groups.pipeline_rank, tied_groups)
        return GradientStash(held, stages, tied, replicas)

    def _stages_here(self) -> list[int]:
        rank = self.setup.groups.pipeline_rank
        return [stage for stage, owner in enumerate(self.setup.rank_of_stage) if owner == rank]

    def _replicas(self, held: dict[str, nn.Parameter]) -> ReplicaGradients:
        setup, options = self.setup, self.setup.options.gradients
        replicas = ReplicaGradients(
            held,
            setup.groups.data_parallel_group,
            setup.device,
            setup.timeout,
            options.algorithm,
            options.compression,
            options.bucket_cap_mb,
            options.communication.cache,
        )
        if options.compression is not None and self.before.remembered:
            replicas.load_state_dict(self.before.remembered)
        return replicas

    def _runtime(self) -> PipelineRuntime:
        setup = self.setup
        return PipelineRuntime(
            setup.module,
            setup.groups,
            setup.device,
            setup.options.schedule,
            setup.num_stages,
            setup.options.activation_checkpointing,
        )

    def _partition_optimizers(self, partitioned: PartitionedModule) -> None:
        """Leave each optimizer the parameters of this rank, with the states that were loaded for them."""
        setup = self.setup
        names = {id(parameter): name for name, parameter in setup.module.named_parameters()}
        ownership = partitioned.plan.ownership
        for optimizer in self.before.optimizers:
            part = OptimizerPartition(optimizer, names, ownership, setup.groups.pipeline_rank)
            partitioned.optimizers.append(part)
        if self.before.shards and partitioned.replicas is not None:
            # What several stages hold is stepped by each holder alike, so that it stays bit by bit the same on all.
            held = partitioned.stash.parameters.items()
            own = [(name, parameter) for name, parameter in held if len(ownership.parameters[name]) == 1]
            partitioned.sharded = ShardedOptimizers(own, self.before.shards, partitioned.replicas.communicator)
        if self.before.optimizer_states is not None:
            partitioned.load_optimizer_states(self.before.optimizer_states)


def _casts_weights(setup: RunSetup) -> bool:
    """Whether training steps run under autocast, which keeps a copy of weights in 16 bits."""
    with setup.step_context("training_step"):
        return torch.is_autocast_enabled(setup.device.type)
