"""A LightningModule on the ranks of a pipeline, divided or whole: from its first batch to the end of a run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.bridge.attempts import Attempt, run_batch, run_rounds
from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.count_trials import combined, settle_counts
from lightning_smddp.bridge.deferred_backward import scale_of
from lightning_smddp.bridge.evaluation import EvaluationTrials, Lockstep
from lightning_smddp.bridge.metrics import PipelineMetrics, patched
from lightning_smddp.bridge.partition_table import print_partition, print_replicated, resources_for
from lightning_smddp.bridge.partitioned_module import PartitionedModule, is_whole
from lightning_smddp.bridge.path_trials import find_courses, look_behind
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.bridge.replicated_module import ReplicatedModule
from lightning_smddp.bridge.second_check import SecondCheck
from lightning_smddp.bridge.step import LightningStep, Scale, loss_of
from lightning_smddp.bridge.step_results import StepResults, broadcast_results
from lightning_smddp.bridge.whole_again import (
    BY_EXCEPTION,
    leave_in_parts,
    made_whole,
    make_whole,
    require_whole_possible,
)
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.gradients.clipping import (
    clip_by_norm,
    give_back_clipping,
    share_overflow,
    take_over_clipping,
)
from lightning_smddp.pipeline.gradients.parameter_hooks import ParameterHooks
from lightning_smddp.pipeline.partition.agreement import BatchAgreement
from lightning_smddp.pipeline.partition.links import find_links
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UncombinableError
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.partition.room import fits_on_devices
from lightning_smddp.pipeline.partition.verify import VerificationError
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.host_values import HostValues
from lightning_smddp.pipeline.state.full_state import (
    full_state_dict,
    load_full_state_dict,
    partial_state_dict,
)
from lightning_smddp.pipeline.state.optimizer_state import OptimizerPartition, require_divisible
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.pipeline.view.shown_state import real_state, shown_state
from lightning_smddp.wire.broadcast import HeaderCache, broadcast_json

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class PipelinedModule:
    """See the module's docstring.

    Args:
        module: the user's.
        options: the strategy's.
        groups: this rank's place.
        device: of this rank.
        context: for a step's name, what Lightning enters around it.
        timeout: of collectives.
    """

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        groups: Groups,
        device: torch.device,
        context: Callable[[str], AbstractContextManager[Any]],
        timeout: timedelta,
    ) -> None:
        self.module, self.options, self.groups, self.device = module, options, groups, device
        self.context, self.timeout = context, timeout
        self.num_stages = groups.pipeline.size() * options.stages_per_rank
        self.rank_of_stage = options.schedule.rank_of_stage(self.num_stages, groups.pipeline.size())
        self.last_rank = self.rank_of_stage[-1]
        replicas = groups.data_parallel_group if groups.mesh.num_replicas > 1 else None
        self.host_values = HostValues()
        self.agreement = BatchAgreement(groups.pipeline, device, groups.host, self.host_values)
        self.cutter = BatchCutter(module, options, groups, device, self.num_stages, self.host_values)
        self.metrics = PipelineMetrics(module, groups.pipeline, self.last_rank, device, replicas)
        self.capture = StepCapture(module, metrics=self.metrics)
        self.divided: PartitionedModule | None = None
        self.replicated: ReplicatedModule | None = None  # one of the two, from the first training step on
        self.known_division: Mapping[str, Any] | None = None  # of the run that is resumed
        self._caches: dict[Any, HeaderCache] = {}
        self._traced: set[Any] = set()  # evaluation steps that ran as pipelines
        self.trials = EvaluationTrials(self.capture, self.cutter, groups, self.last_rank, device)
        self._optimizers: list[Optimizer] = []
        self._partitions: list[OptimizerPartition] = []
        self._states: Sequence[Mapping[str, Any]] | None = None
        self._weights: dict[str, Tensor] = {}
        self._plugin: Any = None
        self.lockstep = Lockstep()
        self.second: SecondCheck | None = None  # look at what training does, once
        self.watching = False  # for NaN and inf in gradients
        self.shown: set[str] = set()  # steps whose table the strategy has printed
        self.marking = True  # see `NonFiniteWatch.marks`

    def to_device(self) -> None:
        """Move the module to the device if it has memory and fits as a whole; else its parts go when it is divided.

        Collective over all ranks: what they do at the first batch depends on it, so they all do the same.
        """
        if any(p.is_meta for p in self.module.parameters()):
            return
        assert dist.group.WORLD is not None
        if fits_on_devices(self.module, dist.group.WORLD, self.device):
            self.module.to(self.device)

    # ---- hooks ----

    @property
    def view(self) -> GlobalView | None:
        """The module as a whole, once it is divided."""
        return None if self.divided is None else self.divided.view

    @contextmanager
    def inside_view(self) -> Iterator[Callable[..., Any]]:
        """Around a hook: parameters, their gradients, buffers and optimizers are those of all ranks. Collective.

        Gives what to call with the hook's result and arguments: it returns the result, and leaves no tensor of another
        rank in it, nor in a checkpoint among the arguments.
        """
        view = self.view
        assert view is not None
        with ExitStack() as stack:
            if not view.is_entered:
                for partition in self._partitions:
                    stack.enter_context(partition.shown_whole())
                    stack.enter_context(shown_state(partition.optimizer, view))
            stack.enter_context(patched([(self.module, "log", view.plain_log(self.module.log))]))
            stack.enter_context(view.entered())
            stack.enter_context(self.capture.left.shown())
            yield view.plain_result

    @contextmanager
    def outside_view(self) -> Iterator[None]:
        """Around our own code that a hook calls; nothing where no hook does."""
        view = self.view
        if view is None or not view.is_entered:
            yield
            return
        with view.left(), ExitStack() as stack:
            for partition in self._partitions:
                stack.enter_context(real_state(partition.optimizer))
                stack.enter_context(partition.shown_own())
            yield

    # ---- steps ----

    def train(
        self, batch: Any, arguments: Sequence[Any], scale: Scale, continues: bool, may_drop: bool, accumulates: bool
    ) -> Any:
        """Forward and backward of a batch; what the step returns for the whole of it, on every rank.

        Where the step is :attr:`replicated` forward only, or what the step itself does besides.
        """
        batch = self.agreement.agree(batch, "training_step")
        step = self._step("training_step", arguments, scale)
        if is_first := self.divided is None and self.replicated is None:
            self._choose(step, batch)
        if self.replicated is not None:
            return self.replicated.train(step.whole(batch), f"{step.hook} of {step.place()}", accumulates)
        divided = self.divided
        assert divided is not None
        find = functools.partial(find_courses, divided, self.cutter, step, batch, self.options.partition.check)
        try:
            found = find(is_first)
            if self.second is not None and not continues:
                self.second.run(step, found[0][0], self.module.trainer.global_step)
            divided.separate_draws()
            outputs = run_batch(
                divided,
                step,
                found,
                find=functools.partial(find, False),
                run=functools.partial(run_rounds, divided, step, self.options, self.context),
                begin=functools.partial(divided.window.begin, continues, may_drop, accumulates),
                drop=None if continues or divided.replicas is not None else divided.window.drop,
            )
        except SplitError as error:
            self._become_whole(divided, error)
            return self.train(batch, arguments, scale, continues, may_drop, accumulates)
        divided.window.set_aside()
        divided.buffers.trained = True
        look_behind(divided, self.cutter, step, batch, found[0])
        settle = functools.partial(settle_counts, divided, self.cutter, step, batch, found[0])
        output = self._share(step, outputs, settle)
        loss_of(output, step.hook, detached=True)  # of one row each, losses of rows look like those of micro-batches
        return output

    def _choose(self, step: LightningStep, batch: Any) -> None:
        """Divide the module by its training step, or leave it whole if that is not possible. Collective."""
        try:
            for optimizer in self._optimizers:
                require_divisible(optimizer)
            microbatches = self._microbatches(batch, step)
            try:
                self._divide(step, microbatches, self.cutter.pair(batch, microbatches))
            except StepFailedError as error:
                if len(microbatches) == 1:
                    raise
                self.cutter.parts_fail = True
                self._divide(step, self._microbatches(batch, step), None)
                self.trials.keep_whole(step, f"it fails on a part ({own_error(error)!r})")
        except (SplitError, VerificationError) as error:
            self.divided = None
            if self.options.partition.fallback == "error" or not is_whole(self.module, self.device):
                raise own_error(error) from None
            self.replicate(str(error))

    def replicate(self, reason: str) -> None:
        """Run training steps as a whole on every rank from here on.

        Raises:
            SplitError: the model is not whole here.
        """
        if not is_whole(self.module, self.device):
            raise SplitError(f"{reason} It cannot run as a whole on every rank either, as the model is not whole here.")
        self.replicated = ReplicatedModule(self.module, self.groups, self.device, reason)
        if self.replicated.gradients is not None:
            self.replicated.gradients.watching = self.watching
        give_back_clipping(self._plugin)
        if self._states is not None:
            states, self._states = self._states, None
            self.load_optimizer_states(states)
        if dist.get_rank() == 0:
            if self.options.gradients.communication.verbose:
                print_replicated(reason, self.module)
            warnings.warn(self.replicated.warning(), stacklevel=2)

    def _become_whole(self, divided: PartitionedModule, error: SplitError) -> None:
        """Go on with the whole module on every rank, or raise on every rank. Collective."""
        require_whole_possible(error, divided, self.groups, self.device, self.options)
        self.capture.left.settle()
        make_whole(divided, self._partitions, self.metrics, self.device)
        self.divided, self._partitions = None, []
        self.replicate(str(error))

    def deliver(self, factor: float, accumulates: bool) -> None:
        """Set ``.grad`` to what the last :meth:`train` made, times ``factor``. Collective."""
        assert self.divided is not None
        self.divided.window.deliver(factor)
        for partition in self._partitions:
            partition.refresh()
            if self._scaler() is not None and not accumulates:
                placeholder = partition.add_placeholder(self.device)
                share_overflow(partition.parameters, placeholder, self.groups.pipeline)

    def evaluate(self, hook: str, batch: Any, arguments: Sequence[Any], may_wait: bool) -> Any:
        """One batch forward; what the step returns for the whole of it, on every rank.

        Args:
            hook: name of the step.
            batch: as Lightning gives it.
            arguments: the step's others.
            may_wait: training follows, so there is no need to divide the module by this step.
        """
        batch = self.agreement.agree(batch, hook)
        step = self._step(hook, arguments)
        if self.replicated is not None:
            return self.replicated.evaluate(step.whole(batch))
        if self.divided is None and may_wait and is_whole(self.module, self.device):
            return self._by_itself(step, batch)
        return self._evaluate(step, batch)

    def _evaluate(self, step: LightningStep, batch: Any) -> Any:
        """An evaluation step of the divided module: in the way that its first batch has shown to be right."""
        if self.lockstep.has(step):
            return self._in_lockstep(step, batch)
        microbatches = self._microbatches(batch, step)
        try:
            divided = self.divided or self._divide(step, microbatches, None)
        except SplitError as error:
            if not is_whole(self.module, self.device):
                raise own_error(error) from None
            self.lockstep.take(step, own_error(error))
            return self._in_lockstep(step, batch)
        # A first trace fails on all ranks alike, also by an error of the user's own, which then comes again.
        # Later an error of one stage alone has to end the run: the others wait for it.
        is_new = step.key not in self._traced
        if (whole := self.cutter.doubtful(batch, step)) is not None:
            self.trials.find_rows(divided, step, whole)
            microbatches = self._microbatches(batch, step)
        try:
            courses = divided.courses(step, microbatches)
        except Exception as error:
            failed = isinstance(error, StepFailedError) or not isinstance(error, SplitError)
            if failed and not is_new:
                raise own_error(error) from None
            if failed and len(microbatches) > 1:
                self.trials.keep_whole(step, f"it fails on a part ({own_error(error)!r})")
                return self._evaluate(step, batch)
            self.lockstep.take(step, own_error(error))
            return self._in_lockstep(step, batch)
        self._traced.add(step.key)
        tries = self.options.partition.check and not self.trials.has(step)
        if tries and (rows := self.cutter.pair(batch, microbatches)):
            self.trials.run(divided, step, rows)
            divided.take_unforeseen(step)
            return self._evaluate(step, batch)
        self.trials.run_again(divided, step, batch, microbatches)
        if self.cutter.is_whole(step) and len(microbatches) > 1:
            return self._evaluate(step, batch)
        try:
            outputs = self._attempt(divided, step, batch, (microbatches, courses))
            if self.trials.is_told_more(step):
                step.forget()
                self.trials.run(divided, step, self.cutter.together(batch, microbatches))
                microbatches = [self.cutter.splitter.whole(batch)]  # which is right in any case
                outputs = self._attempt(divided, step, batch, (microbatches, divided.courses(step, microbatches)))
        except (SplitError, LeftCourseError) as error:  # on every rank
            self.lockstep.take(step, error)
            return self._in_lockstep(step, batch)
        settle = functools.partial(settle_counts, divided, self.cutter, step, batch, microbatches)
        results = combined(functools.partial(self._results, step, outputs), settle)
        if isinstance(results, str):
            self.trials.keep_whole(step, results)
            return self._evaluate(step, batch)
        return self._applied(results)

    def _attempt(self, divided: PartitionedModule, step: LightningStep, batch: Any, found: Attempt) -> list[Any]:
        def find_again() -> Attempt:
            """What it does now, it has never done: other parts of the batch may be right."""
            self.trials.run_again(divided, step, batch, found[0])
            microbatches = self._microbatches(batch, step)
            return microbatches, divided.courses(step, microbatches)

        divided.separate_draws()
        return run_batch(
            divided,
            step,
            found,
            find=find_again,
            run=functools.partial(run_rounds, divided, step, self.options, self.context),
        )

    def _by_itself(self, step: LightningStep, batch: Any) -> Any:
        """The step on the whole batch, by each rank with the whole module."""
        with self.context(step.hook):
            return getattr(self.module, step.hook)(batch, *step.arguments)

    def _in_lockstep(self, step: LightningStep, batch: Any) -> Any:
        """An evaluation step that cannot be cut, on the whole batch, by all ranks together."""
        view = self.view
        if view is None:
            return self._by_itself(step, batch)
        whole = self.cutter.splitter.whole(batch)
        with self.inside_view():
            results = self.lockstep.run(step, whole.value, whole.size, view)
        return results.apply(self.module, self.metrics)

    def scale(self) -> Scale:
        """What a gradient scaler multiplies losses by."""
        scaler = self._scaler()
        return 1.0 if scaler is None else scale_of(scaler, self.device)

    def _scaler(self) -> Any:
        scaler = getattr(self._plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _step(self, hook: str, arguments: Sequence[Any], scale: Scale = 1.0) -> LightningStep:
        """A batch begins."""
        self.capture.left.begin()
        return LightningStep(self.module, hook, arguments, lambda: self.context(hook), self.capture, scale)

    def _microbatches(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        parts = self.cutter.cut(batch, step, can_try=self.divided is None and is_whole(self.module, self.device))
        return parts if self.divided is None else self.cutter.weighted(self.divided.weighting, parts)

    def _casts_weights(self) -> bool:
        with self.context("training_step"):
            return torch.is_autocast_enabled(self.device.type)

    def _share(self, step: LightningStep, outputs: list[Any], settle: Callable[[], None]) -> Any:
        """Combine what the micro-batches gave where the step ends, and apply it on every rank."""
        results = combined(functools.partial(self._results, step, outputs), settle)
        if isinstance(results, str):
            raise ValueError(
                f"What `{step.hook}` gives for micro-batches cannot be put together: {results}. Use num_microbatches=1."
            )
        return self._applied(results)

    def _results(self, step: LightningStep, outputs: list[Any]) -> StepResults | str:
        """What the step shows for the batch, on every rank; or why the micro-batches' results do not make it up."""
        if (doubt := self.capture.left.find_out(self.num_stages - 1, *self.groups.host)) is not None:
            return doubt
        results: StepResults | str | None = None
        if self.groups.pipeline_rank == self.last_rank:
            try:
                self.capture.require_known_counts(step.key)
                with self.context(step.hook):  # metrics that see the whole batch compute as they would in the step
                    results = self.capture.results(outputs, key=step.key)
            except UncombinableError as error:
                results = str(error)
        cache, groups = self._caches.setdefault(step.key, HeaderCache()), self.groups
        like = self.capture.examples.get(step.key)
        return broadcast_results(results, groups.pipeline, self.last_rank, self.device, cache, like, groups.host)

    def _applied(self, results: StepResults) -> Any:
        """Let ranks and hooks have what the step shows, and return what it returns. Collective."""
        output = results.apply(self.module, self.metrics)
        assert self.view is not None
        self.capture.left.share(self.view)
        return output

    def _divide(self, step: LightningStep, parts: Sequence[MicroBatch], pair: MicroBatch | None) -> PartitionedModule:
        """Find stages, and let go of other ranks' parameters. Collective over all ranks."""
        assert dist.group.WORLD is not None
        links = find_links(self.groups.neighbours, self.rank_of_stage, self.device, dist.group.WORLD)
        resources = resources_for(
            self.module,
            self.options,
            self._optimizers,
            self.rank_of_stage,
            len(parts),
            links,
            step.trains and self._casts_weights(),
        )
        hooks = ParameterHooks(self.module)
        try:
            self.divided = PartitionedModule(
                self.module,
                self.options,
                self.groups,
                self.device,
                self.timeout,
                step,
                parts,
                pair,
                resources,
                self._optimizers,
                self._weights,
                broadcast_json(torch.initial_seed() % 2**31, dist.group.WORLD, self.device),
                hooks,
                self.known_division,
            )
        except (SplitError, VerificationError):
            hooks.give_back()
            raise
        self._weights = {}
        self.cutter.looks_across_rows = not self.divided.weighting.fits
        if self.divided.trains_whole:
            self.cutter.keep_whole(step)
        self.cutter.may_try = False
        if self.divided.replicas is not None:
            self.divided.replicas.watching, self.divided.replicas.marking = self.watching, self.marking
        self._partition_optimizers(self.divided)
        if step.trains:
            self.second = SecondCheck(self.divided, self.inside_view, self.module.trainer.global_step)
        is_shown = step.trains or not self.shown
        self.shown.add(step.hook)
        if is_shown and self.options.gradients.communication.verbose and dist.get_rank() == 0:
            weighting = None if step.trains and self.cutter.is_whole(step) else self.divided.weighting
            print_partition(step.hook, self.divided, resources, parts, weighting)
        for warning in self.divided.warnings if dist.get_rank() == 0 else ():
            warnings.warn(warning, stacklevel=2)
        return self.divided

    # ---- optimizers and precision ----

    def take_optimizers(self, optimizers: Sequence[Any], plugin: Any) -> None:
        """The optimizers that the user built, and the precision plugin; before the first batch."""
        self._optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self._plugin = plugin
        take_over_clipping(plugin, self._clip_by_norm)

    def optimized(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters of all ranks in ``optimizer``."""
        partition = next((p for p in self._partitions if p.optimizer is optimizer), None)
        if partition is not None:
            return partition.everyones
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _partition_optimizers(self, divided: PartitionedModule) -> None:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._partitions = [
            OptimizerPartition(optimizer, names, divided.division.ownership, self.groups.pipeline_rank)
            for optimizer in self._optimizers
        ]
        if self._states is not None:
            for partition, state in zip(self._partitions, self._states, strict=False):
                partition.load_full_state_dict(state)
            self._states = None

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.divided is not None
        inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
        chosen = {name: p for name, p in self.divided.window.parameters.items() if id(p) in inside}
        ownership = self.divided.division.ownership
        with self.outside_view():
            clip_by_norm(chosen, ownership, self.groups.pipeline, clip_val, device=self.device)

    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter, before averaging; None if there is none."""
        if self.replicated is not None:
            return self.replicated.nonfinite()
        return None if self.divided is None else self.divided.nonfinite()

    # ---- state ----

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """The whole module's, on the first rank of the first pipeline; or of each rank what it holds. Collective."""
        self.metrics.share()
        if self.divided is None:
            return self.module.state_dict() if gather or self._speaks() else {}
        if self.groups.replica != 0:
            return {}
        ownership = self.divided.division.ownership
        if not gather:
            return partial_state_dict(self.module, ownership, self.groups.pipeline_rank)
        return full_state_dict(self.module, ownership, self.groups.pipeline, False, self.device)

    def _speaks(self) -> bool:
        """Whether this rank alone gives a checkpoint what all ranks have."""
        return self.replicated is None or (self.groups.replica == 0 and self.groups.pipeline_rank == 0)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a whole module's state."""
        if self.divided is None:
            named = dict(self.module.named_parameters())
            self._weights = {name: state[name] for name, p in named.items() if p.is_meta and name in state}
        load_full_state_dict(self.module, state, strict)

    def optimizer_state(self, optimizer: Any, gather: bool = True) -> dict[str, Any]:
        """The whole optimizer's, on the first rank of the first pipeline; or of each rank its part. Collective."""
        plain = getattr(optimizer, "optimizer", optimizer)
        partition = next((p for p in self._partitions if p.optimizer is plain), None)
        if partition is None:
            state: dict[str, Any] = plain.state_dict()
            if not gather and not self._speaks():
                return {**state, "state": {}}
            if self._states is not None:  # loaded, but not divided yet
                state["state"] = self._states[self._optimizers.index(plain)]["state"]
            return state
        if self.groups.replica != 0:
            return {}
        if not gather:
            return partition.partial_state_dict()
        return partition.full_state_dict(self.groups.pipeline, False, self.device)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load states of whole optimizers; before the module is divided only what is not large."""
        if self._partitions:
            for partition, state in zip(self._partitions, states, strict=True):
                partition.load_full_state_dict(state)
            return
        if self.replicated is not None:
            for optimizer, state in zip(self._optimizers, states, strict=True):
                optimizer.load_state_dict(dict(state))
            return
        self._states = states
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict({**state, "state": {}})

    def report(self) -> CommunicationReport | None:
        """What averaging over replicas cost. Collective over the replicas."""
        replicas = None if self.divided is None else self.divided.replicas
        return None if replicas is None else replicas.report()

    def division_decision(self) -> Mapping[str, Any] | None:
        """What a resumed run has to know in order to divide the module alike."""
        return self.known_division if self.divided is None else self.divided.division.decision

    def close(self, gather: bool) -> None:
        """Give back a whole module (unless it never was), and free what this object holds. Collective if ``gather``."""
        if self.divided is not None:
            self.divided.close()
            if gather and not self.options.meta_init:
                self.metrics.share()
                self.capture.left.settle()
                if made_whole(self.divided, self.device):
                    self.divided = None
            elif not gather:
                leave_in_parts(self.module, BY_EXCEPTION)
        self.host_values.forget()
        self.metrics.close()
        if self._plugin is not None:
            give_back_clipping(self._plugin)
