"""One line of advice about a pipeline's settings, when a better one is obvious."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_smddp.planner.problem import NodeCost
from lightning_smddp.planner.schedules import auto_num_microbatches

UNEVEN = 1.2  # a unit or stage this many times its even share is worth a word
WORTH_IT = 0.03  # so much more of the ranks' time in use is worth a word


@dataclass(frozen=True)
class Setting:
    """What advice is given on.

    Attributes:
        nodes: the step; their times are for one micro-batch.
        stage_seconds: of the partition in use, for one micro-batch.
        num_microbatches, num_ranks: of one pipeline.
        batch_rows: rows in the batch of one replica.
        is_split_given: the cuts are the user's own.
        rule: which numbers of micro-batches the schedule can do with.
        bound: micro-batches -> share of time in which ranks compute at best.
    """

    nodes: Sequence[NodeCost]
    stage_seconds: Sequence[float]
    num_microbatches: int
    num_ranks: int
    batch_rows: int
    is_split_given: bool
    rule: Callable[[int], bool]
    bound: Callable[[int], float]


def advice(setting: Setting) -> str | None:
    """The first that applies: a unit that no cut can balance; the user's own uneven cuts; more micro-batches."""
    if setting.num_ranks == 1:
        return None
    return _big_unit(setting) or _uneven_split(setting) or _more_microbatches(setting)


def _big_unit(setting: Setting) -> str | None:
    total = sum(_seconds(node) for node in setting.nodes)
    biggest = max(setting.nodes, key=_seconds, default=None)
    if biggest is None or not total:
        return None
    share = _seconds(biggest) / total
    if share < UNEVEN / setting.num_ranks:
        return None
    even = 1 / setting.num_ranks
    ranks = int(1 / share)
    fewer = f", or use pipeline_parallel_size={ranks}" if ranks > 1 else ""
    return (
        f"unit {biggest.name!r} takes {share:.0%} of the step alone, where an even share of {setting.num_ranks} ranks"
        f" is {even:.0%}: no cut can balance it. Split it into smaller modules{fewer}"
    )


def _uneven_split(setting: Setting) -> str | None:
    seconds = list(setting.stage_seconds)
    mean = sum(seconds) / len(seconds)
    slowest = max(seconds)
    if not setting.is_split_given or not mean or slowest < UNEVEN * mean:
        return None
    return (
        f"stage {seconds.index(slowest)} takes {slowest / mean:.1f} times the mean stage with the given split: leave"
        " out split to have the cuts chosen"
    )


def _more_microbatches(setting: Setting) -> str | None:
    try:
        more = auto_num_microbatches(setting.batch_rows, setting.num_ranks, setting.rule)
    except ValueError:  # the batch is too small for the schedule: nothing to advise
        return None
    now = setting.bound(setting.num_microbatches)
    then = setting.bound(more)
    if more <= setting.num_microbatches or then - now < WORTH_IT:
        return None
    return f"more micro-batches: num_microbatches={more} raises the bound from {now:.0%} to {then:.0%}"


def _seconds(node: NodeCost) -> float:
    return node.forward_s + node.backward_s
