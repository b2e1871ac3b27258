"""What a rank of ``smddp_pipeline`` holds, and how long a step takes: stages are cut and run here, one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.batches import count_for, splitter_for
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.choice.estimates import Estimate, Memory, Sizes, fullest
from lightning_smddp.choice.first_batch import FirstBatch
from lightning_smddp.choice.stage_profile import profile_stages
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.capture.tracer import trace
from lightning_smddp.pipeline.partition.assignment import cut_into_stages, parameter_stages_of
from lightning_smddp.pipeline.partition.costs import LOOPBACK, best_share, cluster_of, in_flight, time_nodes
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UnclearBatchError, rows_of
from lightning_smddp.pipeline.partition.plan import refuse_external_writes
from lightning_smddp.pipeline.partition.split import choose_units, is_within, partition
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.pipeline.runtime.schedules import parse
from lightning_smddp.seeding import Generators
from lightning_smddp.strategies.checks import refusal_of_training
from lightning_smddp.strategies.options import CommunicationOptions, GradientOptions
from lightning_smddp.strategies.pipeline_options import PartitionOptions, PipelineOptions

_CPU = torch.device("cpu")
_CASES = (  # schedule, with checkpointing
    ("1f1b", False),
    ("1f1b", True),
    ("interleaved_1f1b", False),
    ("zbv_zero_bubble", False),
)


@dataclass(frozen=True)
class _Case:
    """A schedule, with or without activation checkpointing."""

    schedule: str
    checkpointing: bool

    @property
    def name(self) -> str:
        """As it is shown."""
        words = f"smddp_pipeline, {self.schedule}"
        if self.checkpointing:
            words += ", checkpointing"
        return words

    def options(self) -> PipelineOptions:
        """As ``PipelineStrategy`` would have them."""
        return PipelineOptions(
            pipeline_parallel_size=None,
            num_microbatches=None,
            schedule=parse(self.schedule),
            split=None,
            activation_checkpointing=self.checkpointing,
            meta_init=False,
            partition=PartitionOptions(),
            gradients=GradientOptions("auto", None, None, CommunicationOptions()),
        )

    def strategy(self, meta_init: bool) -> str:
        """The expression to write."""
        arguments = []
        if self.schedule != "1f1b":
            arguments.append(f'schedule="{self.schedule}"')
        if self.checkpointing:
            arguments.append("activation_checkpointing=True")
        if meta_init:
            arguments.append("meta_init=True")
        listed = ", ".join(arguments)
        return f"PipelineStrategy({listed})"


def estimate_pipelines(
    first: FirstBatch, sizes: Sizes, state: Mapping[int, int], ranks: int, limit: float
) -> list[Estimate]:
    """Pipelines of ``ranks`` stages or more, one estimate for each schedule.

    Args:
        first: the module at its first batch.
        sizes: of the whole module.
        state: bytes that optimizers keep, by parameter's id.
        ranks: of the pipeline.
        limit: bytes of a rank.
    """
    estimates = []
    reason = refusal_of_training(first.module, (), first.optimizers)
    for schedule, checkpointing in _CASES:
        case = _Case(schedule, checkpointing)
        try:
            if reason is not None:
                raise SplitError(reason)
            pipeline = _Pipeline(first, case, ranks)
        except (SplitError, ReplayError) as error:
            estimates.append(Estimate(case.name, case.strategy(meta_init=False), notes=(str(error),)))
        else:
            estimates.append(pipeline.estimate(sizes, state, limit))
    return estimates


class _Pipeline:
    """One case: cut into stages as the strategy would.

    Args:
        first: the module at its first batch.
        case: which.
        ranks: of the pipeline.
    """

    def __init__(self, first: FirstBatch, case: _Case, ranks: int) -> None:
        self.first = first
        self.case = case
        self.ranks = ranks
        self.module = first.module
        self.options = case.options()
        self.num_stages = ranks * self.options.stages_per_rank
        self.rank_of_stage = self.options.schedule.rank_of_stage(self.num_stages, ranks)
        self.splitter = splitter_for(self.module, self.options.partition)
        self.microbatches = self._cut()
        recorder = StepRecorder(first.module)
        self.step = LightningStep(first.module, "training_step", first.arguments, first.precision, recorder)
        self._divide()

    def _cut(self) -> list[MicroBatch]:
        rows = rows_of(self.first.batch)
        count = count_for(self.options.schedule, self.ranks, self.num_stages, rows, self.module)
        try:
            return self.splitter.split(self.first.batch, count, rows)
        except UnclearBatchError:
            return [self.splitter.whole(self.first.batch)]

    def _rows(self) -> int:
        return sum(microbatch.size for microbatch in self.microbatches)

    def _divide(self) -> None:
        """Cut by the times of a run on the first micro-batch, as the strategy's first rank does."""
        checkpointing = self.case.checkpointing
        cluster = cluster_of(
            self.module,
            self.first.optimizers,
            self.rank_of_stage,
            in_flight(self.options.schedule, self.rank_of_stage, len(self.microbatches)),
            links=(LOOPBACK,) * (self.num_stages - 1),
        )
        # As in a run: the step is traced, units are chosen, and its nodes are timed in a run of the whole.
        self.step.seed = 0
        with self.step.alone(self.microbatches[0], Generators(self.module, _CPU)) as run:
            traced = self._traced(run)
            modules = Modules(traced, self.module)
            units = choose_units(traced, modules, cluster, None, checkpointing).units
            self.graph = build_graph(traced, modules, is_within(units))
            with preserve_state(self.module, _CPU):
                times = time_nodes(self.graph, run, self._loss, self.module, _CPU)
            found = partition(self.graph, cluster, times, None, checkpointing)
            self.stages = cut_into_stages(self.graph, found.cuts)
            # What training keeps differs from what the runs for times kept, where units are checkpointed.
            self.timing_profiles = profile_stages(self.graph, self.stages, run, self._loss, self.module, False)
            self.profiles = self.timing_profiles
            if checkpointing:
                self.profiles = profile_stages(self.graph, self.stages, run, self._loss, self.module, checkpointing)

    def _traced(self, run: Callable[[], Any]) -> Trace:
        with preserve_state(self.module, _CPU):
            traced = trace(run, self.module, _CPU)
        refuse_external_writes(traced.external_writes)
        return traced

    def _loss(self, result: Any) -> Tensor:
        return loss_of(result, "training_step")

    def estimate(self, sizes: Sizes, state: Mapping[int, int], limit: float) -> Estimate:
        """Of the rank with most."""
        notes = []
        if len(self.microbatches) == 1:
            notes.append("each batch is one micro-batch: stages do not overlap")
        training = fullest([self._rank(rank, sizes, state) for rank in range(self.ranks)])
        start = self._start(sizes)
        memory = fullest([training, start])
        meta_init = False
        if training.total <= limit < start.total:
            memory = training
            meta_init = True
            notes.append("layers have to be made in `configure_model`: at the start each rank would have all of them")
        return Estimate(
            name=self.case.name,
            strategy=self.case.strategy(meta_init),
            memory=memory,
            step_s=self._seconds(),
            rows=self._rows(),
            fits=memory.total <= limit,
            notes=tuple(notes),
        )

    def _rank(self, rank: int, sizes: Sizes, state: Mapping[int, int]) -> Memory:
        """Its fullest moment in training."""
        here = [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]
        own = self._parameters_of(here)
        gradients = sum(parameter.nbytes for parameter in own if parameter.requires_grad)
        held = Memory(
            parameters=sum(parameter.nbytes for parameter in own) + sizes.buffers,
            gradients=gradients,
            optimizer_state=sum(state.get(id(parameter), 0) for parameter in own),
            activations=sizes.batch,
        )
        profiles = [self.profiles[stage] for stage in here]
        # Each stage keeps the activations of as many micro-batches as its schedule has begun and not finished there.
        flights = in_flight(self.options.schedule, self.rank_of_stage, len(self.microbatches))
        kept = sum(flights[stage] * self.profiles[stage].kept for stage in here)
        for_a_moment = max(profile.temporary for profile in profiles)
        running = replace(
            held,
            activations=sizes.batch + kept,
            communication=self._messages(here),
            temporary=for_a_moment,
        )
        stepping = replace(held, temporary=sizes.optimizer_temporary)
        return fullest([running, stepping])

    def _parameters_of(self, stages: Sequence[int]) -> list[nn.Parameter]:
        """Those that a rank with these stages has; of a tied one there is a copy on each rank that uses it."""
        named = dict(self.module.named_parameters())
        found = []
        for name, users in parameter_stages_of(self.graph, self.stages, list(named)).items():
            if set(users) & set(stages):
                found.append(named[name])
        return found

    def _messages(self, here: Sequence[int]) -> int:
        """Bytes of messages that torch's schedule holds when they have gone, while a rank's backwards run.

        With one stage a rank it holds the last output until it has the next one; with several, all outputs and
        gradients that went to other ranks, for whose sends it waits at the end of the step.
        """
        rank = self.rank_of_stage[here[0]]
        outputs = 0
        gradients = 0
        for stage in here:
            if self._other_rank(stage + 1, rank):
                outputs += self.profiles[stage].sent
            if self._other_rank(stage - 1, rank):
                gradients += self.profiles[stage].received
        if self.options.schedule.several_stages:
            return len(self.microbatches) * (outputs + gradients)
        return outputs

    def _other_rank(self, stage: int, rank: int) -> bool:
        """Whether there is such a stage, and another rank has it."""
        return 0 <= stage < self.num_stages and self.rank_of_stage[stage] != rank

    def _start(self, sizes: Sizes) -> Memory:
        """The first rank's before training: the whole module, for the times of one micro-batch."""
        held = Memory(parameters=sizes.parameters + sizes.buffers, activations=sizes.batch)
        # One stage behind the other, and back: at a stage's fullest moment there is what those before it have kept.
        kept = 0
        peak = 0
        for profile in self.timing_profiles:
            peak = max(peak, kept + profile.peak)
            kept += profile.kept
        return replace(held, activations=sizes.batch + kept, temporary=peak - kept)

    def _seconds(self) -> float:
        """All micro-batches through the slowest rank, their messages there and back, and its waiting for others."""
        count = len(self.microbatches)
        of_rank = [0.0] * self.ranks
        for profile, rank in zip(self.profiles, self.rank_of_stage, strict=True):
            of_rank[rank] += profile.seconds
            if profile.received:
                of_rank[rank] += 2 * LOOPBACK.seconds(profile.received)
        # The rest of a step's time ranks wait for each other.
        return count * max(of_rank) / best_share(self.options.schedule, self.rank_of_stage, count)
