"""What a rank of ``smddp_pipeline`` holds: the step is cut here as there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_smddp.bridge.batches import count_for, splitter_for
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_record import StepRecorder
from lightning_smddp.choice.estimates import Estimate, Memory, Sizes, fullest
from lightning_smddp.choice.first_batch import FirstBatch
from lightning_smddp.choice.profiles import StepProfile, profile_step
from lightning_smddp.communication.tensors import CPU
from lightning_smddp.pipeline.capture.boundaries import cut_into_stages
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.tracer import trace
from lightning_smddp.pipeline.partition.assignment import parameter_stages_of
from lightning_smddp.pipeline.partition.costs import LOOPBACK, cluster_of, in_flight, time_nodes
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UnclearBatchError, rows_of
from lightning_smddp.pipeline.partition.plan import refuse_external_writes
from lightning_smddp.pipeline.partition.split import choose_cuts, choose_units
from lightning_smddp.pipeline.runtime.schedules import parse
from lightning_smddp.planner.problem import Cluster
from lightning_smddp.seeding import Generators
from lightning_smddp.strategies.checks import refusal_of_training
from lightning_smddp.strategies.options import PartitionOptions

_SCHEDULE = parse("1f1b")


def estimate_pipelines(
    first: FirstBatch, sizes: Sizes, state: Mapping[int, int], ranks: int, limit: float
) -> list[Estimate]:
    """Pipelines of ``ranks`` stages under 1f1b, without activation checkpointing and with it.

    Args:
        first: the module at its first batch.
        sizes: of the whole module.
        state: bytes that the optimizer keeps, by parameter's id.
        ranks: of the pipeline.
        limit: bytes of a rank.
    """
    estimates = []
    for checkpointing in (False, True):
        name = "smddp_pipeline, checkpointing" if checkpointing else "smddp_pipeline"
        options = ["activation_checkpointing=True"] if checkpointing else []
        notes = []
        memory = None
        microbatches = _microbatches(first, ranks)
        try:
            memory, whole = _training(first, microbatches, sizes, state, ranks, checkpointing)
        except SplitError as error:
            notes.append(str(error))
        else:
            # Before training the first rank runs two micro-batches through the whole module, forward and backward, to
            # compare the pipeline with them: in the second backward it has all gradients.
            start = Memory(
                parameters=sizes.parameters + sizes.buffers,
                gradients=sizes.gradients,
                activations=sizes.batch + whole.kept,
                temporary=whole.temporary,
            )
            if memory.total <= limit < start.total:
                options.append("meta_init=True")
                notes.append("make layers in `configure_model`: at the start each rank would have all of them")
            else:
                memory = fullest([memory, start])
        strategy = f"PipelineStrategy({', '.join(options)})" if options else '"smddp_pipeline"'
        estimates.append(Estimate(name, strategy, memory, notes=tuple(notes)))
    return estimates


def _microbatches(first: FirstBatch, ranks: int) -> list[MicroBatch]:
    splitter = splitter_for(first.module, PartitionOptions())
    rows = rows_of(first.batch)
    count = count_for(_SCHEDULE, ranks, ranks, rows, first.module)
    try:
        return splitter.split(first.batch, count, rows)
    except UnclearBatchError:
        return [splitter.whole(first.batch)]


def _training(
    first: FirstBatch,
    microbatches: list[MicroBatch],
    sizes: Sizes,
    state: Mapping[int, int],
    ranks: int,
    checkpointing: bool,
) -> tuple[Memory, StepProfile]:
    """What the fullest rank holds in training, and the profile of one micro-batch through the whole module.

    Of what the whole module keeps a stage has as large a part as of what is made; with checkpointing it keeps the
    inputs of its modules alone, and for a moment what is made in one of them.

    Raises:
        SplitError: a pipeline cannot train the module.
    """
    reason = refusal_of_training(first.module, (), first.optimizers)
    if reason is not None:
        raise SplitError(reason)
    flights = in_flight(_SCHEDULE, range(ranks), len(microbatches))
    cluster = cluster_of(first.module, first.optimizers[0], range(ranks), flights, (LOOPBACK,) * (ranks - 1))
    graph, cuts, whole = _cut(first, microbatches[0], cluster, checkpointing)
    stages = cut_into_stages(graph, cuts)
    named = dict(first.module.named_parameters())
    users = parameter_stages_of(graph, stages, list(named))
    made = sum(node.activation_bytes for node in graph.nodes)
    moments = []
    for plan in stages:
        own = [named[name] for name in named if plan.stage in users[name]]  # a tied one is on each rank that uses it
        held = Memory(
            parameters=sum(parameter.nbytes for parameter in own) + sizes.buffers,
            gradients=sum(parameter.nbytes for parameter in own if parameter.requires_grad),
            optimizer_state=sum(state.get(id(parameter), 0) for parameter in own),
            activations=sizes.batch,
        )
        received, sent = graph.nbytes(plan.receives), graph.nbytes(plan.sends)
        kept, again, passing = received, 0, 0
        for node in graph.nodes[plan.begin : plan.end]:
            # The backward of a node has the gradient of what the node made, and makes that of what it used.
            passing = max(passing, graph.nbytes(node.inputs) + graph.nbytes(node.outputs))
            if checkpointing and node.module is not None:
                kept += graph.nbytes(node.inputs)
                again = max(again, node.activation_bytes)
            else:
                kept += whole.kept * node.activation_bytes // made
        running = replace(
            held,
            activations=sizes.batch + flights[plan.stage] * kept,
            # Of each neighbour: what was sent to it last, which torch's schedule holds until there is the next one,
            # and what comes from it for the next micro-batch, for which there is memory already.
            communication=2 * (received + sent),
            temporary=max(whole.temporary, passing) + again,
        )
        moments += [running, replace(held, temporary=sizes.optimizer_temporary)]
    return fullest(moments), whole


def _cut(
    first: FirstBatch, microbatch: MicroBatch, cluster: Cluster, checkpointing: bool
) -> tuple[StepGraph, Sequence[int], StepProfile]:
    """The graph of the step, where it is cut, and the profile of the whole step.

    It is cut by the times of a run on one micro-batch, as by the strategy's first rank.
    """
    module = first.module
    step = LightningStep(module, "training_step", first.arguments, first.precision, StepRecorder(module), seed=0)
    with step.alone(microbatch, Generators(module, CPU)) as run:
        with preserve_state(module, CPU):
            traced = trace(run, module, CPU)
        refuse_external_writes(traced.external_writes)
        graph = choose_units(traced, Modules(traced, module), cluster, None, checkpointing)
        with preserve_state(module, CPU):
            times = time_nodes(graph, run, loss_of, module, CPU)
        cuts = choose_cuts(graph, cluster, times, None, checkpointing).cuts
        return graph, cuts, profile_step(lambda: loss_of(run()), module)
