"""The pipeline schedules by name: what each asks for, where it places stages, in which order a rank works.

A schedule is plain data here; ``engine.py`` runs torch's class of that name, a simulation reads :func:`orders`. A stage
is one part of the model, a rank holds one or several. One *action* is what a stage does with one micro-batch, ``"1F0"``
to torch: stage 1, forward, micro-batch 0. ``B`` is the backward, which some schedules split into ``I`` (gradients of
the stage's inputs, which the stage before waits for) and ``W`` (gradients of its parameters, which fill idle time).

Sources: GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503), interleaved 1F1B (arXiv:2104.04473), looped
BFS (arXiv:2211.05953), zero bubble and ZB-V (arXiv:2401.10241), DualPipeV (arXiv:2412.19437).

To add one: see CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from lightning_smddp._compat.torch import pipeline_order, pipeline_schedule_class
from lightning_smddp.planner.simulator import Action
from lightning_smddp.wording import counted

MicrobatchRule = Literal["any", "at least the stages", "whole rounds"]


@dataclass(frozen=True)
class Schedule:
    """One schedule of ``torch.distributed.pipelining``.

    Attributes:
        name: What users write.
        torch_class: The class of ``torch.distributed.pipelining`` that runs it.
        several_stages: Whether a rank may hold several stages.
        v_shaped: Exactly two stages per rank, placed in a V: rank 0 holds the first and the last.
        microbatch_rule: What torch's class asks of the number of micro-batches. "whole rounds": a multiple of
            the number of rounds, which is ``max(1, num_microbatches // pipeline_parallel_size)``.
        substitute: The schedule for a step whose number of micro-batches the rule forbids: one with the same
            placement that takes any number. It computes the same.
    """

    name: str
    torch_class: str
    several_stages: bool = False
    v_shaped: bool = False
    microbatch_rule: MicrobatchRule = "any"
    substitute: str | None = None

    @property
    def default_stages_per_rank(self) -> int:
        """What ``stages_per_rank="auto"`` means: two for interleaved schedules, else one."""
        return 2 if self.several_stages else 1

    def rank_of_stage(self, num_stages: int, pipeline_parallel_size: int) -> list[int]:
        """The rank that holds each stage: in turn (0 1 0 1), or there and back (0 1 1 0) for a V."""
        if self.v_shaped:
            there = list(range(pipeline_parallel_size))
            return there + there[::-1]
        return [stage % pipeline_parallel_size for stage in range(num_stages)]

    def stages_per_rank_ok(self, stages_per_rank: int) -> bool:
        """Whether a rank may hold so many stages."""
        if self.several_stages and not self.v_shaped:
            return stages_per_rank >= 1
        return stages_per_rank == self.default_stages_per_rank

    def microbatches_ok(self, num_microbatches: int, pipeline_parallel_size: int, num_stages: int) -> bool:
        """Whether the schedule itself, not its substitute, runs this number of micro-batches."""
        if self.microbatch_rule == "at least the stages":
            return num_microbatches >= num_stages
        if self.microbatch_rule == "whole rounds":
            rounds = max(1, num_microbatches // pipeline_parallel_size)
            return num_microbatches % rounds == 0
        return True


_ALL = (
    Schedule("gpipe", "ScheduleGPipe"),
    Schedule("1f1b", "Schedule1F1B", microbatch_rule="at least the stages", substitute="gpipe"),
    Schedule(
        "interleaved_1f1b",
        "ScheduleInterleaved1F1B",
        several_stages=True,
        microbatch_rule="whole rounds",
        substitute="looped_bfs",
    ),
    Schedule("looped_bfs", "ScheduleLoopedBFS", several_stages=True),
    Schedule(
        "interleaved_zero_bubble",
        "ScheduleInterleavedZeroBubble",
        several_stages=True,
        microbatch_rule="whole rounds",
        substitute="looped_bfs",
    ),
    Schedule("zbv_zero_bubble", "ScheduleZBVZeroBubble", several_stages=True, v_shaped=True),
    Schedule(
        "dualpipev",
        "ScheduleDualPipeV",
        several_stages=True,
        v_shaped=True,
        microbatch_rule="at least the stages",
        substitute="zbv_zero_bubble",
    ),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
_OTHER_NAMES = {"simple": "gpipe", "interleaved": "interleaved_1f1b"}


def parse(name: str) -> Schedule:
    """The schedule called ``name``, in any case.

    Raises:
        ValueError: listing all names, when there is none.
    """
    lower = str(name).lower()
    schedule = SCHEDULES.get(_OTHER_NAMES.get(lower, lower))
    if schedule is None:
        raise ValueError(f"schedule={name!r} is unknown; use one of {', '.join(SCHEDULES)}")
    return schedule


def check(schedule: Schedule, pipeline_parallel_size: int, stages_per_rank: int, num_microbatches: int | None) -> None:
    """Refuse settings that the schedule cannot run.

    ``num_microbatches`` may be None, if it will be chosen, and 1, for batches that cannot be cut.

    Raises:
        ValueError: with the values and what to write instead.
    """
    if not schedule.stages_per_rank_ok(stages_per_rank):
        number = schedule.default_stages_per_rank
        raise ValueError(
            f"schedule={schedule.name!r} places exactly {counted(number, 'stage')} on each rank, but stages_per_rank="
            f"{stages_per_rank}; use stages_per_rank={number} or schedule='interleaved_1f1b'"
        )
    num_stages = pipeline_parallel_size * stages_per_rank
    if num_microbatches in (None, 1) or schedule.microbatches_ok(num_microbatches, pipeline_parallel_size, num_stages):
        return
    raise ValueError(
        f"schedule={schedule.name!r} with {counted(num_stages, 'stage')} cannot run num_microbatches="
        f"{num_microbatches}: it takes {schedule.microbatch_rule}. Use num_microbatches={num_stages}, or a multiple."
    )


def for_microbatches(
    schedule: Schedule,
    pipeline_parallel_size: int,
    num_stages: int,
    num_microbatches: int,
) -> Schedule:
    """The schedule that runs a step of ``num_microbatches``: ``schedule``, or its substitute where its rule forbids it.

    The substitute keeps every stage on its rank and gives the same gradients; it only idles more (1F1B with fewer
    micro-batches than stages has no steady state anyway) or holds more micro-batches at once (looped BFS).
    """
    if schedule.microbatches_ok(num_microbatches, pipeline_parallel_size, num_stages):
        return schedule
    assert schedule.substitute is not None, f"{num_microbatches} micro-batches"
    return SCHEDULES[schedule.substitute]


def orders(
    schedule: Schedule,
    pipeline_parallel_size: int,
    num_stages: int,
    num_microbatches: int,
) -> dict[int, list[Action]]:
    """Rank -> the compute actions of one training step in the order in which that rank performs them.

    Idle time is not written down: a rank performs its next action as soon as what that needs has arrived. Where two
    actions are to overlap (DualPipeV), they stand one after the other, as torch runs them.
    """
    schedule = for_microbatches(schedule, pipeline_parallel_size, num_stages, num_microbatches)
    if not schedule.several_stages:
        return {rank: _single_stage_order(schedule, rank, num_stages, num_microbatches) for rank in range(num_stages)}
    # torch's class works out the orders of all ranks in its constructor, from a few numbers of one rank's stages: so
    # it is made with placeholders for the stages of rank 0, and never run.
    common = {"num_stages": num_stages, "group_size": pipeline_parallel_size, "group_rank": 0, "submod": None}
    ranks = schedule.rank_of_stage(num_stages, pipeline_parallel_size)
    placeholders = [SimpleNamespace(stage_index=stage, **common) for stage, rank in enumerate(ranks) if rank == 0]
    torch_schedule = pipeline_schedule_class(schedule.torch_class)(placeholders, num_microbatches)
    return {rank: [Action(*part) for part in parts] for rank, parts in pipeline_order(torch_schedule).items()}


def _single_stage_order(schedule: Schedule, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """As torch executes GPipe and 1F1B, the only two with one stage a rank.

    The ``pipeline_order`` that torch shows for 1F1B numbers some forwards wrongly.
    """
    # Forwards before the first backward. GPipe does all of them. In 1F1B the last stage does one, each stage before it
    # one more, as many as are on their way to the last stage and back:
    #   stage 0 of 3: F0 F1 F2 B0 F3 B1 F4 B2 ...      stage 2 of 3: F0 B0 F1 B1 F2 B2 ...
    if schedule.name == "gpipe":
        ahead = num_microbatches
    else:
        assert schedule.name == "1f1b"
        ahead = min(num_microbatches, num_stages - stage)
    order = [Action(stage, "F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        order.append(Action(stage, "B", microbatch))
        forward = ahead + microbatch
        if forward < num_microbatches:
            order.append(Action(stage, "F", forward))
    return order
