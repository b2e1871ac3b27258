"""What a rank of ``smddp_pipeline`` holds: the step is cut here as there, and run once on a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smddp.bridge.batches import count_for, splitter_for
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.choice.estimates import Estimate, Memory, Sizes, fullest
from lightning_smddp.choice.first_batch import FirstBatch
from lightning_smddp.choice.step_profile import (
    BACKWARD,
    MemoryRecord,
    StepProfile,
    dropped_gradients,
    profile_of,
    recorded_memory,
)
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.boundaries import boundary_bytes
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.tracer import StepCall, trace
from lightning_smddp.pipeline.partition.assignment import cut_into_stages, parameter_stages_of
from lightning_smddp.pipeline.partition.costs import LOOPBACK, cluster_of, in_flight, time_nodes
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UnclearBatchError, rows_of
from lightning_smddp.pipeline.partition.plan import refuse_external_writes
from lightning_smddp.pipeline.partition.split import choose_units, partition
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.pipeline.runtime.schedules import parse
from lightning_smddp.pytree import tensors
from lightning_smddp.seeding import Generators
from lightning_smddp.strategies.checks import refusal_of_training
from lightning_smddp.strategies.options import PartitionOptions

_CPU = torch.device("cpu")
_SCHEDULE = parse("1f1b")


def estimate_pipelines(
    first: FirstBatch, sizes: Sizes, state: Mapping[int, int], ranks: int, limit: float
) -> list[Estimate]:
    """Pipelines of ``ranks`` stages under 1f1b, without activation checkpointing and with it.

    Args:
        first: the module at its first batch.
        sizes: of the whole module.
        state: bytes that optimizers keep, by parameter's id.
        ranks: of the pipeline.
        limit: bytes of a rank.
    """
    estimates = []
    reason = refusal_of_training(first.module, (), first.optimizers)
    for checkpointing in (False, True):
        name = "smddp_pipeline, checkpointing" if checkpointing else "smddp_pipeline"
        options = ["activation_checkpointing=True"] if checkpointing else []
        notes = []
        memory = None
        try:
            if reason is not None:
                raise SplitError(reason)
            pipeline = _divided(first, ranks, checkpointing)
        except (SplitError, ReplayError) as error:
            notes.append(str(error))
        else:
            memory = fullest([_rank(pipeline, first.module, sizes, state, stage) for stage in range(ranks)])
            # Before training the first rank runs a micro-batch through the whole module, for the times of its nodes.
            start = Memory(
                parameters=sizes.parameters + sizes.buffers,
                activations=sizes.batch + pipeline.whole.kept,
                temporary=pipeline.whole.temporary,
            )
            if memory.total <= limit < start.total:
                options.append("meta_init=True")
                notes.append("make layers in `configure_model`: at the start each rank would have all of them")
            else:
                memory = fullest([memory, start])
            if pipeline.num_microbatches == 1:
                notes.append("each batch is one micro-batch: stages do not overlap")
        strategy = f"PipelineStrategy({', '.join(options)})" if options else '"smddp_pipeline"'
        fits = memory is not None and memory.total <= limit
        estimates.append(Estimate(name, strategy, memory, fits, tuple(notes)))
    return estimates


@dataclass(frozen=True)
class _Pipeline:
    """A step that is cut, one stage on each rank.

    Attributes:
        graph, cuts: of the step; first nodes of all stages but the first.
        num_microbatches: of a batch.
        stages: the memory of each on one micro-batch.
        whole: that of the whole step, without checkpointing.
    """

    graph: StepGraph
    cuts: tuple[int, ...]
    num_microbatches: int
    stages: tuple[StepProfile, ...]
    whole: StepProfile


def _divided(first: FirstBatch, ranks: int, checkpointing: bool) -> _Pipeline:
    """Cut by the times of a run on the first micro-batch, as the strategy's first rank does."""
    module = first.module
    microbatches = _microbatches(first, ranks)
    flights = in_flight(_SCHEDULE, range(ranks), len(microbatches))
    cluster = cluster_of(module, first.optimizers, range(ranks), flights, (LOOPBACK,) * (ranks - 1))
    step = LightningStep(module, "training_step", first.arguments, first.precision, StepRecorder(module), seed=0)
    with step.alone(microbatches[0], Generators(module, _CPU)) as run:
        with preserve_state(module, _CPU):
            traced = trace(run, module, _CPU)
        refuse_external_writes(traced.external_writes)
        modules = Modules(traced, module)
        units = choose_units(traced, modules, cluster, None, checkpointing).units
        graph = build_graph(traced, modules, units)
        with preserve_state(module, _CPU):
            times = time_nodes(graph, run, loss_of, module, _CPU)
        cuts = partition(graph, cluster, times, None, checkpointing).cuts
        whole, *stages = _profile(graph, cuts, run, module)
        if checkpointing:
            # Units keep their inputs alone, and run again in the backward, as in training.
            replaced = []
            for name in graph.units:
                unit = module.get_submodule(name)
                replaced.append((vars(unit), "forward", partial(checkpoint, unit.forward, use_reentrant=False)))
            with patched(replaced):
                _, *stages = _profile(graph, cuts, run, module)
    return _Pipeline(graph, cuts, len(microbatches), tuple(stages), whole)


def _microbatches(first: FirstBatch, ranks: int) -> list[MicroBatch]:
    splitter = splitter_for(first.module, PartitionOptions())
    rows = rows_of(first.batch)
    count = count_for(_SCHEDULE, ranks, ranks, rows, first.module)
    try:
        return splitter.split(first.batch, count, rows)
    except UnclearBatchError:
        return [splitter.whole(first.batch)]


def _profile(graph: StepGraph, cuts: tuple[int, ...], step: StepCall, module: nn.Module) -> list[StepProfile]:
    """Of the whole step, and of each stage: one run, in which each stage begins with its first unit."""
    entered = {0}

    def enter(stage: int, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if stage in entered:  # another call of the same unit
            return
        entered.add(stage)
        record.mark(f"forward {stage}")
        # When the backward comes to what a stage begins with, the stage before goes on.
        for tensor in tensors((args, kwargs)):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: record.mark(f"backward {stage - 1}"))

    with ExitStack() as stack:
        stack.enter_context(preserve_state(module, _CPU))
        stack.enter_context(dropped_gradients(module))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for stage, cut in enumerate(cuts, start=1):
            name = next(node.module for node in graph.nodes[cut:] if node.module is not None)
            hook = partial(enter, stage)
            stack.callback(module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove)
        record = stack.enter_context(recorded_memory())
        loss = loss_of(step())
        record.settle()
        record.mark(BACKWARD)
        loss.backward()
        del loss
    received = [0, *[boundary_bytes(graph, cut) for cut in cuts]]
    return [profile_of(record), *_of_stages(record, received)]


def _of_stages(record: MemoryRecord, received: list[int]) -> list[StepProfile]:
    """What each stage keeps, with what it has received, and its peak without what others keep."""
    held = [0]  # bytes that all stages before each one keep
    peaks = [0] * len(received)
    now = 0
    stage = 0
    for entry in record.entries:
        if isinstance(entry, int):
            now += entry
            peaks[stage] = max(peaks[stage], now)
            continue
        kind, _, number = entry.partition(" ")
        if kind == "forward" or entry == BACKWARD:
            held.append(now)
        if number:
            stage = int(number)
    profiles = []
    for stage, peak in enumerate(peaks):
        kept = held[stage + 1] - held[stage] + received[stage]
        profiles.append(StepProfile(kept, max(kept, peak - held[stage] + received[stage])))
    return profiles


def _rank(pipeline: _Pipeline, module: nn.Module, sizes: Sizes, state: Mapping[int, int], stage: int) -> Memory:
    """The fullest moment in training of the rank that has ``stage``."""
    named = dict(module.named_parameters())
    stages = cut_into_stages(pipeline.graph, pipeline.cuts)
    users = parameter_stages_of(pipeline.graph, stages, list(named))
    own = [named[name] for name in named if stage in users[name]]  # a tied one is on each rank that uses it
    held = Memory(
        parameters=sum(parameter.nbytes for parameter in own) + sizes.buffers,
        gradients=sum(parameter.nbytes for parameter in own if parameter.requires_grad),
        optimizer_state=sum(state.get(id(parameter), 0) for parameter in own),
        activations=sizes.batch,
    )
    ranks = len(pipeline.stages)
    flights = in_flight(_SCHEDULE, range(ranks), pipeline.num_microbatches)
    profile = pipeline.stages[stage]
    sent = boundary_bytes(pipeline.graph, pipeline.cuts[stage]) if stage < ranks - 1 else 0
    running = replace(
        held,
        activations=sizes.batch + flights[stage] * profile.kept,
        communication=sent,  # torch's schedule holds the last output until it has the next one
        temporary=profile.temporary,
    )
    stepping = replace(held, temporary=sizes.optimizer_temporary)
    return fullest([running, stepping])
