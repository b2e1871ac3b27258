"""A LightningModule on the ranks of a pipeline, in whatever state: from its first batch to the end of a run.

The first training batch partitions it (``partitioning.py``); ``partitioned_module.py`` is what it is then. A training
step runs forward and backward, any other step forward. The first batch of an evaluation step shows how it can be run:
as a pipeline of micro-batches, as one micro-batch where those of parts cannot be put together, or in *lockstep* where
it cannot be cut into stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_smddp.bridge.batches import MicroBatcher
from lightning_smddp.bridge.loss_weights import LossWeight, find_loss_weight
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.partitioned_module import (
    PartitionedModule,
    RunSetup,
    State,
    Unpartitioned,
    seed_of_batch,
)
from lightning_smddp.bridge.partitioning import partition
from lightning_smddp.bridge.step import LightningStep, Scale, loss_of, may_keep_casts
from lightning_smddp.bridge.step_record import StepRecorder, StepResults
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.objects import RankFailedError
from lightning_smddp.communication.tensors import CPU
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.batch_sync import BatchSync
from lightning_smddp.pipeline.partition.costs import fits_on_devices, fits_on_hosts
from lightning_smddp.pipeline.partition.microbatches import MicroBatches, UncombinableError
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.runtime.remote_tensor import ReplayError
from lightning_smddp.pipeline.runtime.stage_program import TracedPath
from lightning_smddp.pipeline.state.gradients import clip_by_norm, clipping_by, overflow_shared
from lightning_smddp.pipeline.state.meta_parameters import AbsentParameter
from lightning_smddp.pipeline.state.optimizer import OwnSteps
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.seeding import seeded_modules
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, StepsParts
from lightning_smddp.wording import USE_INSTEAD

FROM_CHECKPOINT = (
    "When the step was traced it took another path. Give `fit` the last checkpoint as `ckpt_path`: the step is "
    "traced again then, as it is at that time."
)
_BY_MEMORY = "a host of the run that had divided it had too little memory for the whole of it on each of its ranks"


class PipelinedModule:
    """Runs a LightningModule's steps, and holds what is the same in all its states.

    Args:
        setup: of the run.
        show: called with what the module was partitioned by: a step's name, the partitioned module, the micro-batches
            of the first batch, and how they count.

    Attributes:
        state: what the module is now.
        known_plan: the decision of the run that is resumed, which has the same stages then.
        steps: of the optimizers, each of this rank's part.
    """

    def __init__(self, setup: RunSetup, show: Callable[..., None]) -> None:
        self.setup = setup
        self.module = module = setup.module
        self._show = show
        self.state: Unpartitioned | PartitionedModule = Unpartitioned(setup)
        self.known_plan: State | None = None
        self.sync = BatchSync(setup.groups.host, Channel(setup.groups.pipeline, setup.device))
        replicas = setup.groups.data_parallel_group if setup.num_replicas > 1 else None
        self.metrics = PipelineMetrics(module, setup.groups.pipeline, setup.last_rank, setup.device, replicas)
        self.recorder = StepRecorder(module, self.metrics)
        self.batcher = MicroBatcher(setup, self.sync)
        self.steps: list[StepsParts] = []
        self._in_lockstep: set[Any] = set()  # keys of steps
        self._has_trained = False
        self._share = 1.0  # of the last training batch, see `StepResults`
        self._changes = ExitStack()  # of the precision plugin
        self._scaler: Any = None  # of losses, where the plugin has one

    @property
    def partitioned(self) -> PartitionedModule | None:
        """The module with its stages, while it has some."""
        return self.state if isinstance(self.state, PartitionedModule) else None

    def to_device(self) -> None:
        """Move the module to the device if it has memory and fits as a whole; else its parts go when there are some.

        Collective over all ranks: what they do at the first batch depends on it, so they all do the same.
        """
        is_real = not any(parameter.is_meta for parameter in self.module.parameters())
        if is_real and fits_on_devices(self.module, world(), self.setup.device):
            self.module.to(self.setup.device)

    # ---- training ----

    def train(
        self,
        batch: Any,
        arguments: Sequence[Any],
        scale: Scale,
        continues: bool,
        may_drop: bool,
        accumulates: bool,
    ) -> Any:
        """Forward and backward of a batch; what the step returns for the whole of it, on every rank. Collective.

        None where it returned None for all micro-batches: then nothing follows. If it did so for some, they do not
        count. Gradients wait for :meth:`deliver`.

        Args:
            batch: as Lightning gives it.
            arguments: the step's others.
            scale: the loss is multiplied by it before backward.
            continues: gradients are added to those of the batch before.
            may_drop: what is in ``.grad`` now will be zeroed before anybody reads it.
            accumulates: no optimizer step follows.

        Raises:
            SplitError: on every rank: no stages fit what the step does now.
            ReplayError: on every rank: it did something else on a stage than a dry run had shown.
            ValueError: on every rank: the step returned None where that cannot be made up for, or what it returns for
                micro-batches cannot be put together.
        """
        batch = self.sync.same(batch, "training_step")
        step = self._step("training_step", arguments, scale)
        try:
            partitioned = self._partition_by(step, batch)
        except SplitError as error:
            cause = own_error(error)
            raise (SplitError(f"{error} {USE_INSTEAD}") if cause is error else cause) from None
        if not self._has_trained:
            self._has_trained = True
            self._choose_loss_weight(partitioned, step, batch)
            self._show_partition(partitioned, step, batch)
        microbatches = self.batcher.split(batch, step)
        paths = partitioned.paths(step, microbatches)
        partitioned.stash.begin(continues, may_drop, accumulates, len(microbatches))
        try:
            results = self._run(partitioned, step, microbatches, paths)
        except ReplayError as error:
            raise ReplayError(f"{error} {FROM_CHECKPOINT}") from error
        partitioned.stash.stash()
        partitioned.view.has_trained = True
        output = self.recorder.apply(results)
        if output is not None:  # of one row each, losses of rows look like those of micro-batches
            loss_of(output, step.hook, detached=True)
        self._share = results.share
        if results.share < 1.0 and (partitioned.stash.replicas is not None or (continues and output is not None)):
            raise ValueError(
                f"`training_step` returned None for micro-batches in step {self.module.global_step}. Where gradients "
                "are averaged over replicas, or added to those of the batch before (accumulate_grad_batches), that "
                "cannot be made up for: return a loss of zero that depends on the output, such as `0.0 * output.sum()`."
            )
        return output

    def deliver(self, factor: float) -> None:
        """Set ``.grad`` to what the last :meth:`train` made, times ``factor``. Collective."""
        partitioned = self.partitioned
        assert partitioned is not None
        partitioned.stash.restore(factor / self._share)  # of a mean over those micro-batches that count
        assert partitioned.optimizer is not None
        partitioned.optimizer.check_groups()

    def scale(self) -> Scale:
        """What a gradient scaler multiplies losses by; on a device it stays there, as reading it waits."""
        if self._scaler is None:
            return 1.0
        return self._scaler.scale(torch.ones((), device=self.setup.device))  # type: ignore[no-any-return]

    def _choose_loss_weight(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> None:
        """With ``loss_weight="auto"``: as in the run that is resumed, else by the trial. Collective over all ranks."""
        batcher = self.batcher
        if self.setup.options.loss_weight != "auto" or batcher.chosen is not None:
            return
        kept = partitioned.plan.decision.get("loss_weight")
        microbatches = batcher.split(batch, step)
        if kept is not None:
            batcher.chosen = LossWeight.from_json(kept)
        elif len(microbatches) > 1:
            whole = batcher.splitter.whole(batch)
            batcher.chosen, note = find_loss_weight(partitioned, step, whole, microbatches)
            partitioned.notes += [note] if note is not None else []

    # ---- evaluation ----

    def evaluate(self, hook: str, batch: Any, arguments: Sequence[Any], may_wait: bool) -> Any:
        """One batch forward; what the step returns for the whole of it, on every rank.

        Args:
            hook: name of the step.
            batch: as Lightning gives it.
            arguments: the step's others.
            may_wait: training follows, so there is no need to partition the module by this step.
        """
        batch = self.sync.same(batch, hook)
        step = self._step(hook, arguments)
        if isinstance(self.state, Unpartitioned):
            is_whole = self.setup.is_whole()
            if step.key not in self._in_lockstep and not (may_wait and is_whole):
                try:
                    self._show_partition(self._partition_by(step, batch), step, batch)
                except SplitError as error:
                    if not is_whole:
                        raise own_error(error) from None
                    self._keep_in_lockstep(step, own_error(error))
        if isinstance(self.state, Unpartitioned):
            with step.precision():  # Lightning sees all that it does
                return getattr(self.module, hook)(batch, *step.arguments)
        partitioned = self.state
        while step.key not in self._in_lockstep:
            microbatches = self.batcher.split(batch, step)
            is_new = step.key not in partitioned.traces
            try:
                paths = partitioned.paths(step, microbatches)
            except Exception as error:
                # A first trace fails on all ranks alike, also by an error of the user's own, which then comes again.
                # Later an error of one stage alone has to end the run: the others wait for it.
                is_of_user = isinstance(error, StepFailedError) or not isinstance(error, SplitError)
                if is_of_user and not is_new:
                    raise own_error(error) from None
                self._keep_in_lockstep(step, own_error(error))
                break
            try:
                return self.recorder.apply(self._run(partitioned, step, microbatches, paths))
            except ReplayError as error:  # on every rank
                self._keep_in_lockstep(step, error)
            except UncombinableError as error:
                step.forget()
                self.batcher.keep_whole(step, error)
        return self._run_in_lockstep(partitioned, step, batch)

    def _keep_in_lockstep(self, step: LightningStep, error: BaseException) -> None:
        """From now on ``step`` runs so, as it fails as a pipeline with ``error`` on every rank of it.

        Raises:
            BaseException: ``error``, if it is about another rank.
        """
        if isinstance(error, RankFailedError):
            raise error
        self._in_lockstep.add(step.key)
        rank_zero_warn(
            f"`{step.hook}` runs in lockstep: all ranks run it on the whole batch, and each operation is done by "
            "the rank that has the parameters. That is right, but slower than one process. It cannot be pipelined: "
            f"{error}"
        )

    def _run_in_lockstep(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> Any:
        """The step as it is, on the whole batch, within the view of the whole module. Collective.

        A step that generates text calls its modules as often as the text is long: there are no stages of it.
        """
        whole = self.batcher.whole(batch)
        plain = partitioned.view.plain
        generators = partitioned.runtime.wrappers.generators
        with (
            generators.preserved(),
            seeded_modules(self.module, generators),
            partitioned.inside_view(waits=False),
            torch.compiler.set_stance("force_eager"),  # dynamo would follow compiled code into the view
        ):
            generators.seed(step.seed_of(0))
            try:
                with self.recorder.microbatch(0, 0, whole.size, whole.weight, keep=True, plain=plain):
                    output = step(whole)
                results = self.recorder.results([output], plain=plain)
            except BaseException:
                step.forget()
                raise
        return self.recorder.apply(results)

    # ---- both ----

    def _step(self, hook: str, arguments: Sequence[Any], scale: Scale = 1.0) -> LightningStep:
        context = functools.partial(self.setup.step_context, hook)
        step = LightningStep(self.module, hook, arguments, context, self.recorder, scale)
        if self.partitioned is not None:
            step.seed = seed_of_batch(self.setup, step, self.partitioned.run_seed)
        return step

    def _partition_by(self, step: LightningStep, batch: Any) -> PartitionedModule:
        """The module with its stages, which it gets by ``step`` if it has none. Collective over all ranks then.

        Raises:
            SplitError, VerificationError: on every rank: the step cannot be pipelined.
        """
        if isinstance(self.state, Unpartitioned):
            if self.setup.num_stages > 1:
                rank_zero_info(f"Cutting {step.hook} into {self.setup.num_stages} stages: traces and checks one batch.")
            self.state = partition(self.state, step, self.batcher.split(batch, step), self.known_plan)
        return self.state

    def _show_partition(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> None:
        microbatches = self.batcher.split(batch, step)
        self._show(step.hook, partitioned, microbatches, self.batcher.loss_weight(batch, step))

    def _run(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        microbatches: MicroBatches,
        paths: Sequence[TracedPath],
    ) -> StepResults:
        """Run all micro-batches under the schedule; what they make up, on every rank. Collective.

        It is combined on the rank where the step ends, and sent to the others.

        Raises:
            UncombinableError: on every rank: it cannot be put together.
            Exception: on every rank, where the step has failed on one; see ``StepExchange.run``.
        """
        setup, runtime = self.setup, partitioned.runtime
        # Mixed precision casts each weight once for all micro-batches, where that makes no difference.
        kinds = {path.staged.graph.cast_type for path in paths}
        casts: AbstractContextManager[Any] = nullcontext()
        if step.trains and None not in kinds and not setup.checkpointing:
            with step.precision():
                step.keeps_casts = may_keep_casts(kinds, setup.device)
            if step.keeps_casts:  # autocast forgets its copies where the outermost of its contexts ends: this one
                casts = torch.autocast(setup.device.type, enabled=False)
        with casts:
            run = runtime.run(paths, step, microbatches, step.trains)
        results: Any = None
        if runtime.ends_here and not run.failures:
            try:
                results = self.recorder.results(run.outputs, step.trains)
            except UncombinableError as error:
                results = f"what `{step.hook}` gives for micro-batches cannot be put together: {error}"
        try:
            shared: StepResults | str = runtime.exchange.run(results, self.sync.digest, run.failures)
        except Exception:
            step.forget()
            raise
        if isinstance(shared, str):
            raise UncombinableError(f"{shared}. Give num_microbatches=1, or return something else.")
        return shared

    # ---- start and end of a run ----

    def take_optimizer(self, optimizer: Any, plugin: Any) -> None:
        """The optimizer that the user built, and the precision plugin; before the first batch."""
        assert isinstance(self.state, Unpartitioned)
        self.state.optimizer = optimizer
        if self.setup.options.strategy.shard is not None:
            self.state.shards = OptimizerShards(optimizer)
            self.steps.append(self.state.shards)  # an error in a step undoes them in this order
        self.steps.append(OwnSteps(optimizer))
        self._scaler = getattr(plugin, "scaler", None)
        if self._scaler is not None:
            group = self.setup.groups.pipeline
            self._changes.enter_context(overflow_shared(self._scaler, self.setup.device, group))
        self._changes.enter_context(clipping_by(plugin, self._clip_by_norm))

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale the gradients of all ranks' parameters in the optimizer to this norm at the most. Collective."""
        partitioned, setup = self.partitioned, self.setup
        assert partitioned is not None
        assert partitioned.optimizer is not None
        with partitioned.outside_view():
            own = partitioned.optimizer
            clip_by_norm(own.parameters, own.owned, setup.groups.pipeline, clip_val, setup.device)

    def close(self, gather: bool) -> None:
        """Give back a whole module (unless it never was), and free what this object holds. Collective if ``gather``.

        If a host lacks memory for that the parts stay on their ranks, with a warning.
        """
        setup, module, partitioned = self.setup, self.module, self.partitioned
        for steps in self.steps:
            steps.close()
        if partitioned is not None:
            partitioned.close()
            if gather and not setup.options.meta_init:
                self.metrics.share()
                # Each rank gets the whole module on its host, where it goes after a run in any case.
                if fits_on_hosts(module, world()):
                    partitioned.view.close()
                    unshard(partitioned.view, to=CPU)
                    partitioned.is_gathered = True
                else:
                    rank_zero_warn(f"{type(module).__name__} stays in parts, each on its rank: {_BY_MEMORY}.")
        self.sync.on_host = None
        self.metrics.close()
        self._changes.close()

    # ---- state: the rest is `state`'s ----

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """The whole module's, on the first rank of the first pipeline; or of each rank what it holds. Collective."""
        self.metrics.share()
        return self.state.state_dict(gather)

    def plan_decision(self) -> State | None:
        """What a resumed run has to know in order to have the same stages."""
        if self.partitioned is None:
            return self.known_plan
        decision = dict(self.partitioned.plan.decision)
        if self.batcher.chosen is not None:
            decision["loss_weight"] = self.batcher.chosen.to_json()
        return decision


def require_whole(module: nn.Module) -> None:
    """Raise ``ValueError`` if an earlier run has left ``module`` in parts, of which this rank has its own."""
    if any(isinstance(parameter, AbsentParameter) for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} is in parts: an exception ended the run that had divided it, it had `meta_init`, "
            f"or {_BY_MEMORY}. So this rank has its own stages only. Make a new module, and give `fit` the last "
            "checkpoint as `ckpt_path`."
        )
