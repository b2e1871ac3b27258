"""A LightningModule after its first batch: divided among the ranks of a pipeline, with all that depends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_smddp.bridge.carried_state import require_no_new_state, require_no_state
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_results import KeptState, Observed
from lightning_smddp.bridge.weighing import Weighed, Weighing, WeightDoubts
from lightning_smddp.communication.nonfinite import agreed, bad_gradients
from lightning_smddp.pipeline.capture.graph import Modules, SplitError, StepGraph
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.python_random import PythonRandom, SharedRandom, from_json, to_json
from lightning_smddp.pipeline.gradients.gradient_stash import GradientStash
from lightning_smddp.pipeline.gradients.parameter_hooks import ParameterHooks
from lightning_smddp.pipeline.gradients.replicas import ReplicaGradients
from lightning_smddp.pipeline.gradients.tied import TiedGradients, create_tied_groups
from lightning_smddp.pipeline.partition.cuts import Resources, StageCuts, follow, is_within
from lightning_smddp.pipeline.partition.kept_numbers import KeptNumbers
from lightning_smddp.pipeline.partition.loss_weights import warning_without_trial
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.ownership import held_parameters
from lightning_smddp.pipeline.partition.plan import (
    CHECK_SEED,
    PartitionPlan,
    Trial,
    build_on_all,
    divide,
    first_decides,
    own_error,
    record,
    require_same,
)
from lightning_smddp.pipeline.partition.reference import Reference, seeding
from lightning_smddp.pipeline.partition.verify import (
    EXACT,
    MIXED,
    Finding,
    VerificationError,
    compare,
    gradient_norms,
    require_equal,
)
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.own_dropout import without_own_dropout
from lightning_smddp.pipeline.runtime.separate_draws import separate_draws
from lightning_smddp.pipeline.runtime.staged_step import StagedStep, TracedPath
from lightning_smddp.pipeline.runtime.step_runtime import PipelineRuntime
from lightning_smddp.pipeline.runtime.tails import NEW_OWNERS, NOTHING_NEW
from lightning_smddp.pipeline.runtime.trace_cache import TraceCache
from lightning_smddp.pipeline.state.full_state import gather_full, release, set_contents
from lightning_smddp.pipeline.state.materialize import materialize
from lightning_smddp.pipeline.state.shared_buffers import SharedBuffers
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.wire.broadcast import Channel, UnsendableError, broadcast_json, broadcast_structure
from lightning_smddp.wire.gather import gather_json

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class PartFailedError(SplitError):
    """A step that was tried on some rows fails on them, on every rank of the pipeline."""


class PartitionedModule:
    """Divides a module by one of its steps. Creation is collective over all ranks.

    Args:
        module: the user's.
        options: the strategy's.
        groups: this rank's place.
        device: of this rank.
        timeout: of collectives.
        step: to divide by, on micro-batches like ``microbatches``.
        microbatches: of the first batch.
        pair: some rows of it, about two micro-batches, to find out how losses of micro-batches make up a batch's.
        resources: what there is to place stages on.
        optimizers: empty if there is no training.
        weights: values for parameters without memory, by name; else their modules initialise them.
        seed: for that, the same on every rank.
        hooks: the users' on parameters, set aside.
        known: an earlier division's ``decision``, see :func:`divide`.

    Raises:
        SplitError: on every rank: it cannot be divided so.
    """

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        groups: Groups,
        device: torch.device,
        timeout: timedelta,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
        pair: MicroBatch | None,
        resources: Resources,
        optimizers: Sequence[Optimizer],
        weights: dict[str, Tensor],
        seed: int,
        hooks: ParameterHooks,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self.module, self.options, self.groups, self.device = module, options, groups, device
        self._weights, self._seed = weights, seed
        self.hooks = hooks
        self.division = self._divide(step, microbatches, resources, known)
        step.capture.left.agree(groups.pipeline, device)
        if step.trains:
            require_no_state(step, microbatches, self.division.graph.once_a_batch, device)
        weighed = self._weigh(step, pair)
        self.weighting, self.warnings, self.trains_whole = weighed.weighting, weighed.warnings, weighed.whole
        weighed.findings.teach(step.capture, step.key)
        self._place()
        ownership, rank = self.division.ownership, groups.pipeline_rank
        held = held_parameters(module, ownership, rank)
        ranks = resources.rank_of_stage
        here = [stage for stage, owner in enumerate(ranks) if owner == rank]
        stages = {name: [stage for stage in self.division.homes[name] if stage in here] for name in held}
        tied_groups = create_tied_groups(ownership, groups.mesh.pipelines, timeout, device)
        self.replicas = self._replicas(held, timeout) if groups.mesh.num_replicas > 1 and optimizers else None
        tied = TiedGradients(module, ownership, rank, tied_groups)
        self.window = GradientStash(held, stages, tied, self.replicas, hooks)
        of_stage: dict[int, list[nn.Parameter]] = {
            stage: [held[name] for name in held if stage in stages[name]] for stage in here
        }
        self.runtime = PipelineRuntime(
            module, groups, device, options.schedule, len(ranks), of_stage, options.activation_checkpointing
        )
        self.runtime.finds_owners = step.capture.left.has_news
        self.view = GlobalView(module, ownership, groups.pipeline, device, groups.host)
        self.buffers = SharedBuffers(self.view, ownership, ranks)
        self._variants: dict[Any, TraceCache] = {}
        self._may_draw_alike = False
        self._count = len(microbatches)  # of the batch that is worked on
        self.learned = weighed.findings
        staged = self._stage(self.division.graph, self.division.stage_cuts)
        self.findings: list[Finding] = []
        try:
            self._add(step, staged).remember(staged, step, microbatches[-1], len(microbatches) - 1)
        except SplitError as error:  # on every rank of a pipeline
            self._undo()
            raise VerificationError(str(error), self.findings) from None
        if step.trains and options.partition.check and self.division.reference is not None:
            self._check_together(step, len(microbatches) - 1 if self.division.reference.of_trace else 0, microbatches)

    # ---- steps ----

    def courses(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The course of ``step`` on each micro-batch. Collective over the pipeline where it is new."""
        if step.trains:
            self.buffers.before_training()
        else:
            self.buffers.share()
        variants = self._variants.get(step.key)
        self._count = len(microbatches)
        draws = variants is None or any(staged.graph.draws for staged in variants.steps)
        torch_too = variants is None or any(staged.graph.shares_draws for staged in variants.steps)
        step.random = self._share_random(self.groups.host, torch_too) if draws else None
        return self.courses_of(step, microbatches)

    def courses_of(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        """The same with the random numbers that ``step`` has."""
        variants = self._variants.get(step.key)
        if variants is None:
            staged = self._trace(step, microbatches[0])
            variants = self._add(step, staged)
            variants.remember(staged, step, microbatches[0])
        return variants.find(step, microbatches)

    def learn(
        self,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
        courses: Sequence[TracedPath],
        failures: Mapping[int, str],
    ) -> None:
        """Find another course for ``step``. Collective. Raises ``SplitError`` on every rank if there is none."""
        self._variants[step.key].learn(step, microbatches, courses, failures)

    def _share_random(self, channel: Channel, torch_too: bool = True) -> SharedRandom:
        """The first rank's random numbers of Python, and of torch, for all. Collective over ``channel``."""
        sources = PythonRandom(self.module, self.device if torch_too else None)
        states = broadcast_json(to_json(sources.get()), *channel)
        return SharedRandom(sources, from_json(states))

    def separate_draws(self) -> None:
        """See :func:`separate_draws`; behind traces of steps in which stages draw. Collective over the pipeline."""
        if self._may_draw_alike:
            self._may_draw_alike = False
            separate_draws(self.groups.pipeline, self.device)

    def go_on(self, step: LightningStep) -> None:
        """What Python draws after ``step`` follows what it drew in it. Collective over the pipeline."""
        if step.random is not None:
            end = broadcast_json(to_json(step.random.end), *self.groups.host, self.runtime.last_rank)
            step.random.sources.set(from_json(end))
            graphs = [staged.graph for staged in self._variants[step.key].steps]
            if step.random.sources.with_torch and not any(graph.shares_draws for graph in graphs):
                self._may_draw_alike |= any(map(_has_draws, graphs))  # it was traced: all ranks go on alike

    def take_unforeseen(self, step: LightningStep) -> bool:
        """Whether ``step`` took a course, since this was asked, that the shapes of its batches do not explain."""
        variants = self._variants[step.key]
        unforeseen, variants.unforeseen = variants.unforeseen, False
        return unforeseen

    def looks(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> KeptNumbers | None:
        """The numbers to look at while these run; None where nothing is weighted, or nobody cares."""
        if len(microbatches) < 2 or not self.options.partition.check or (step.trains and not self.weighting.fits):
            return None
        return self._variants[step.key].kept

    def take_tails(self, step: LightningStep, may_drop: bool) -> bool:
        """Accept what has run behind the last module; False if it was new, and the batch should not count.

        Where ``may_drop`` is False, the batch counts, and the doubt remains.
        """
        news = self.runtime.news
        counts = news <= NEW_OWNERS or not may_drop
        if news != NOTHING_NEW:
            step.capture.left.agree(self.groups.pipeline, self.device)
        if step.trains:
            self.doubts.note_tail(news, counts)
        else:
            self._variants[step.key].unforeseen |= news > NEW_OWNERS
        self.runtime.accept_tails()
        self._variants[step.key].kept.accept()
        return counts

    def try_out(
        self, step: LightningStep, microbatches: Sequence[MicroBatch], state: KeptState | None = None
    ) -> Observed | None:
        """Run an evaluation step for nothing: what Lightning would see, on the rank where it ends. Collective.

        With ``state`` as if that were in the module's attributes.

        Raises:
            PartFailedError: on every rank: it cannot be run on these.
        """
        while True:
            with preserve_state(self.module, self.device):
                if state is not None:
                    state.put(self.module)
                    step = step.on_trial()
                try:
                    courses = self._tried_courses(step, microbatches)
                    outputs = self.runtime.run(courses, step, microbatches, False)
                    return step.capture.observed(outputs, step.key) if self.runtime.ends_here else None
                except LeftCourseError as error:
                    failures = error.failures
                finally:
                    step.forget()
            try:
                step.require_no_failure(failures)
                self.learn(step, microbatches, courses, failures)
            except SplitError as error:  # on every rank
                raise PartFailedError(f"{type(error).__name__}: {error}") from error

    def _tried_courses(self, step: LightningStep, microbatches: Sequence[MicroBatch]) -> list[TracedPath]:
        try:
            return self.courses(step, microbatches)
        except Exception as error:  # on every rank; one of a stage that runs is not, and ends all
            raise PartFailedError(f"{type(error).__name__}: {error}") from error

    def _add(self, step: LightningStep, staged: StagedStep) -> TraceCache:
        retrace: Callable[[LightningStep, MicroBatch, int], StagedStep] = self._trace
        kept = KeptNumbers(module for module in self.module.modules() if not isinstance(module, Metric))
        self._variants[step.key] = variants = TraceCache(self.runtime, [staged], retrace, step.trains, kept)
        return variants

    def _trace(self, step: LightningStep, microbatch: MicroBatch, index: int = 0) -> StagedStep:
        """Another step, or another course of one, that follows the parameters. Collective over the pipeline.

        Raises:
            SplitError: on every rank of the pipeline: it does not fit the stages.
        """
        group = self.groups.pipeline
        self.runtime.writes.put_back()
        self.buffers.share()
        if step.random is None:
            step.random = self._share_random(self.groups.host)
        try:
            with step.random.at(index), torch.set_grad_enabled(step.trains):  # so that the begin is no change
                traced = record(step.alone(microbatch, index), self.module, self.device, group, self._fetch)
        except SplitError as error:
            if step.trains:
                raise own_error(error) from None
            raise  # of the same kind on all ranks, which then go on alike
        graph = build_on_all(traced, Modules(traced, self.module), is_within(self._units()), group, self.device)
        require_same(graph, group, self.device)
        step.capture.left.agree(group, self.device)
        if step.trains:
            require_no_new_state(step, graph.once_a_batch, self._count)
        return self._stage(graph, follow(graph, self.division.homes, self.runtime.num_stages))

    def _stage(self, graph: StepGraph, stage_cuts: StageCuts) -> StagedStep:
        self._may_draw_alike |= _has_draws(graph)
        self.buffers.learn(graph, stage_cuts)
        return self.runtime.stage(graph, stage_cuts)

    def _units(self) -> set[str]:
        """Modules that stay whole in other steps: the units, and modules that the first step did not call."""
        units = set(self.division.graph.units)
        opened = {parent for unit in units for parent in _parents(unit)}
        return units | {name for name, _ in self.module.named_modules() if name and name not in opened}

    def _fetch(self, name: str) -> Tensor:
        """A parameter's values, from the rank that holds it. Collective over the pipeline."""
        parameter = self.module.get_parameter(name)
        mine = not parameter.is_meta  # a copy, so that the trace is the same where the parameter is and elsewhere
        value = parameter.detach().clone() if mine else torch.empty_like(parameter, device=self.device)
        value = value.contiguous()
        dist.broadcast(value, group=self.groups.pipeline, group_src=self.division.ownership.owner(name))
        return value

    # ---- division ----

    def _weigh(self, step: LightningStep, pair: MicroBatch | None) -> Weighed:
        """How micro-batches' losses and logs make up the batch's: found by the first rank. Collective."""
        world = dist.group.WORLD
        assert world is not None
        self.doubts = WeightDoubts()
        if pair is None or not self.options.partition.check:
            self.doubts.next_look = 0  # the next one that is cut
            return Weighed()
        if not is_whole(self.module, self.device):
            self.doubts.next_look = None  # a whole batch may be too large
            why = "with a model that is never whole on a rank"
            warning = warning_without_trial(pair, why)
            return Weighed(warnings=[] if warning is None else [warning])
        buffers = sorted({name for item in self.division.graph.nodes for name in item.buffers})
        is_auto = self.options.num_microbatches is None
        weighing = Weighing(self.module, self.device, step, pair, self.is_exact(), buffers, is_auto)
        return Weighed.from_json(first_decides(lambda: weighing.run().to_json(), world, self.device))

    @property
    def tolerance(self) -> float:
        """Relative differences that rounding explains."""
        return EXACT if self.is_exact() else MIXED

    def is_exact(self) -> bool:
        """Whether all floating-point values of the step have at least 32 bits."""
        values = self.division.graph.values
        return all(value.dtype.itemsize >= 4 for value in values if value.dtype.is_floating_point)

    def _divide(
        self,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
        resources: Resources,
        known: Mapping[str, Any] | None,
    ) -> PartitionPlan:
        world = dist.group.WORLD
        assert world is not None
        first, last = microbatches[0], microbatches[-1]
        step.random = self._share_random(Channel(world, self.device))
        trial = Trial(
            step.alone(last, len(microbatches) - 1),
            step.alone(first),
            lambda result: loss_of(result, step.hook) if step.trains else None,
        )
        whole = is_whole(self.module, self.device)
        with step.random.at(len(microbatches) - 1), torch.set_grad_enabled(step.trains):
            return divide(
                trial,
                self.module,
                self.device,
                world,
                resources,
                self.options.split,
                self.options.activation_checkpointing,
                with_reference=whole,
                fetch=None if whole else self._initial,
                known=known,
            )

    def _initial(self, name: str) -> Tensor:
        """A parameter's first values, before it is known who holds it."""
        parameter = self.module.get_parameter(name)
        if not parameter.is_meta:
            return parameter.detach().to(self.device, copy=True)
        if name in self._weights:
            return self._weights[name].to(self.device)
        materialize(self.module, [name], self.device, self._seed)
        value = parameter.detach()
        set_contents(parameter, torch.empty_like(parameter, device="meta"))
        return value

    def _place(self) -> None:
        """Keep this rank's parameters, with memory on its device, and no others."""
        held = self.division.ownership.held_by(self.groups.pipeline_rank)
        named = dict(self.module.named_parameters())
        missing = [name for name in held if named[name].is_meta and name not in self._weights]
        materialize(self.module, missing, self.device, self._seed)
        for name in held:
            if named[name].is_meta:
                set_contents(named[name], self._weights[name].to(self.device, copy=True))
            elif named[name].device.type != self.device.type:
                set_contents(named[name], named[name].detach().to(self.device))
        release(self.module, self.division.ownership, self.groups.pipeline_rank)
        for buffer in self.module.buffers():
            if buffer.device.type != self.device.type:
                set_contents(buffer, buffer.to(self.device))
        self._weights = {}

    def _replicas(self, held: dict[str, nn.Parameter], timeout: timedelta) -> ReplicaGradients:
        options = self.options.gradients
        return ReplicaGradients(
            held,
            self.groups.data_parallel_group,
            self.device,
            timeout,
            options.algorithm,
            options.compression,
            options.bucket_cap_mb,
            options.communication.cache,
        )

    # ---- the check ----

    def _check_together(self, step: LightningStep, index: int, microbatches: Sequence[MicroBatch]) -> None:
        """The check; if it fails in one pipeline, every rank has the whole module again, and raises."""
        failure: VerificationError | None = None
        try:
            self._check(step, index, microbatches)
        except VerificationError as error:
            failure = error
        except LeftCourseError as error:
            failure = VerificationError(str(error), self.findings)
        world = dist.group.WORLD
        assert world is not None
        texts = gather_json(None if failure is None else str(failure), world, self.device)
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            self._undo()
            raise failure or VerificationError(text, self.findings)

    def _undo(self) -> None:
        """Every rank has the whole module again. Collective."""
        self.close()
        gather_full(self.module, self.division.ownership, self.groups.pipeline, self.device)

    def _check(self, step: LightningStep, index: int, microbatches: Sequence[MicroBatch]) -> None:
        """The pipeline's loss and gradients on one micro-batch against a plain step's. Raises on every rank.

        The two draw other random numbers. So a replay of the whole step on one rank is between them, which drew those
        of the plain step once, and those of the pipeline once.
        """
        division = self.division
        assert division.reference is not None
        reference, tolerance = division.reference, self.tolerance
        self.findings = compare(
            division.graph.nodes,
            division.stage_of_node,
            reference.plain_loss,
            reference.again_loss,
            reference.plain_norms,
            reference.again_norms,
        )
        require_equal(self.findings, tolerance)
        world, first = dist.group.WORLD, microbatches[index]
        assert world is not None
        try:
            self.findings = self._compare(step, index, self._everyones(first), reference)
        except UnsendableError:  # on every rank: only the first pipeline has the micro-batch that made the reference
            found = self._compare(step, index, first, reference) if self.groups.replica == 0 else []
            plain = broadcast_json([asdict(finding) for finding in found], world, self.device)
            self.findings = [Finding(**finding) for finding in plain]
        require_equal(self.findings, tolerance)

    def _compare(self, step: LightningStep, index: int, first: MicroBatch, reference: Reference) -> list[Finding]:
        """One micro-batch through the pipeline. Collective over the pipeline."""
        division = self.division
        alone, trial = replace(first, weight=1.0), step.unscaled()
        trial.offset = index
        with preserve_state(self.module, self.device), without_own_dropout(self.module, self.device):
            outputs = self.runtime.run(self.courses_of(trial, [alone]), trial, [alone], True, seeding(CHECK_SEED))
            self.window.tied.sum()
            norms = gradient_norms(self.window.parameters.items())
        trial.forget()
        mine = {
            name: norm for name, norm in norms.items() if division.ownership.owner(name) == self.groups.pipeline_rank
        }
        loss = float(loss_of(outputs[0], step.hook, detached=True)) if outputs else None
        reports = gather_json({"loss": loss, "norms": mine}, self.groups.pipeline, self.device)
        return compare(
            division.graph.nodes,
            division.stage_of_node,
            reference.loss,
            next(part["loss"] for part in reports if part["loss"] is not None),
            reference.norms,
            {name: norm for part in reports for name, norm in part["norms"].items()},
        )

    def _everyones(self, first: MicroBatch) -> MicroBatch:
        """The micro-batch of the very first rank, which made the reference."""
        if self.groups.mesh.num_replicas == 1:
            return first
        world = dist.group.WORLD
        assert world is not None
        size, value = broadcast_structure((first.size, first.value), world, 0, self.device, like=(0, first.value))
        return MicroBatch(value, size, 1.0)

    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter; None if no replica has anything.

        Before averaging; where hooks on parameters change gradients, also behind it. Collective over the replicas.
        """
        gradients = self.window.parameters.items()
        if self.replicas is None:
            return bad_gradients(gradients)
        found = self.replicas.take_nonfinite()
        if found is not None or not self.hooks.has_any:
            return found
        bad = bad_gradients(gradients)
        return (bad or {}) if agreed(bad is not None, self.groups.data_parallel_group, self.device) else None

    def close(self) -> None:
        """Free what averaging over replicas holds."""
        if self.replicas is not None:
            self.replicas.close()


def is_whole(module: nn.Module, device: torch.device) -> bool:
    """Whether all parameters have memory on ``device``."""
    return all(parameter.device.type == device.type for parameter in module.parameters())


def _has_draws(graph: StepGraph) -> bool:
    """Whether torch draws random numbers in it, on the stages."""
    return any(item.random for item in graph.nodes)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
