"""One line of advice about a pipeline's settings, when a better one is obvious."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_smddp.planner.problem import NodeCost
from lightning_smddp.planner.schedules import auto_num_microbatches, bubble_bound
from lightning_smddp.wording import counted

# Names of ``pipeline/runtime/schedules.py``, again as that imports torch: those that ``bubble_bound`` describes, and
# those with one stage a rank.
WITH_FORMULA = ("gpipe", "simple", "1f1b", "interleaved_1f1b", "looped_bfs")
ONE_STAGE_PER_RANK = ("gpipe", "simple", "1f1b")
UNEVEN = 1.2  # a unit or stage this many times its even share is worth a word
WORTH_IT = 0.03  # so much more of the ranks' time in use is worth a word
IDLE = 0.75  # a bound below this is worth a word about the batch


@dataclass(frozen=True)
class Setting:
    """What advice is given on.

    Attributes:
        nodes: the step; their times are for one micro-batch.
        stage_seconds: of the partition in use, for one micro-batch.
        schedule: its name.
        num_microbatches, num_ranks, stages_per_rank: of one pipeline.
        batch_rows: rows in the batch of one replica.
        is_split_given: the cuts are the user's own.
        stays_whole: the batch has to be one micro-batch for the numbers to be right.
        rule: which numbers of micro-batches the schedule can do with; None for all.
        bound: micro-batches -> share of time in which ranks compute at best. By default ``bubble_bound``, for
            schedules that it describes; for others there is no advice about micro-batches without it.
    """

    nodes: Sequence[NodeCost]
    stage_seconds: Sequence[float]
    schedule: str
    num_microbatches: int
    num_ranks: int
    batch_rows: int
    stages_per_rank: int = 1
    is_split_given: bool = False
    stays_whole: bool = False
    rule: Callable[[int], bool] | None = None
    bound: Callable[[int], float] | None = None

    def bound_at(self, num_microbatches: int) -> float | None:
        """The bound with this many micro-batches, if known."""
        if self.bound is not None:
            return self.bound(num_microbatches)
        if self.schedule in WITH_FORMULA:
            return bubble_bound(self.num_ranks, num_microbatches, self.stages_per_rank)
        return None


def advice(setting: Setting) -> str | None:
    """The first of these that applies, or None.

    A unit that no cut can balance; the user's own uneven cuts; more micro-batches; interleaved stages; a bigger
    batch; units too coarse for the stages; 1f1b for its memory.
    """
    if setting.num_ranks == 1:
        return None
    # The order matters: `_coarse_units` blames the units, as `_uneven_split` has spoken before where the cuts are the
    # user's own.
    rules = (_big_unit, _uneven_split, _more_microbatches, _interleaved, _bigger_batch, _coarse_units, _less_memory)
    for rule in rules:
        line = rule(setting)
        if line is not None:
            return line
    return None


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
    fewer = ""
    if ranks > 1:
        fewer = f", or use pipeline_parallel_size={ranks}"
    return (
        f"unit {biggest.name!r} takes {share:.0%} of the step alone, where an even share of {setting.num_ranks} ranks"
        f" is {even:.0%}: no cut can balance it. Split it into smaller modules{fewer}"
    )


def _uneven_split(setting: Setting) -> str | None:
    found = _slowest(setting)
    if found is None or not setting.is_split_given:
        return None
    return f"{found} with the given split: leave out split to have the cuts chosen"


def _more_microbatches(setting: Setting) -> str | None:
    if setting.stays_whole:
        return None
    now = setting.bound_at(setting.num_microbatches)
    try:
        more = auto_num_microbatches(setting.batch_rows, setting.num_ranks, setting.rule)
    except ValueError:  # the batch is too small for the schedule: nothing to advise
        return None
    then = setting.bound_at(more)
    if now is None or then is None:
        return None
    if more <= setting.num_microbatches or then - now < WORTH_IT:
        return None
    return f"more micro-batches: num_microbatches={more} raises the bound from {now:.0%} to {then:.0%}"


def _interleaved(setting: Setting) -> str | None:
    count = setting.num_microbatches
    ranks = setting.num_ranks
    if setting.stays_whole or setting.schedule not in ONE_STAGE_PER_RANK:
        return None
    units = sum(node.is_unit for node in setting.nodes)
    if units < 2 * ranks:
        return None
    rounds = max(1, count // ranks)  # torch's interleaved schedules do their micro-batches in equal rounds
    if count % rounds:
        return None
    now = bubble_bound(ranks, count)
    then = bubble_bound(ranks, count, stages_per_rank=2)
    if then - now < WORTH_IT:
        return None
    return (
        f"several stages on each rank: schedule='interleaved_1f1b' with stages_per_rank=2 raises the bound from"
        f" {now:.0%} to {then:.0%}"
    )


def _bigger_batch(setting: Setting) -> str | None:
    if setting.stays_whole or setting.num_microbatches < setting.batch_rows:
        return None
    now = setting.bound_at(setting.num_microbatches)
    if now is None or now >= IDLE:
        return None
    rows = counted(setting.batch_rows, "row")
    return (
        f"a batch of {rows} keeps {setting.num_ranks} ranks busy for at most {now:.0%} of the time: use a bigger batch,"
        " or fewer ranks"
    )


def _coarse_units(setting: Setting) -> str | None:
    found = _slowest(setting)
    if found is None:
        return None
    stages = len(setting.stage_seconds)
    return (
        f"{found}, as the units are too coarse for {stages} stages: another number of stages, or smaller modules, would"
        " balance better"
    )


def _less_memory(setting: Setting) -> str | None:
    if setting.schedule not in ("gpipe", "simple") or setting.num_microbatches <= setting.num_ranks:
        return None
    return (
        f"schedule='1f1b' is as fast and keeps the activations of at most {setting.num_ranks} micro-batches on a rank"
        f" instead of {setting.num_microbatches}"
    )


def _slowest(setting: Setting) -> str | None:
    """The slowest stage in words, if it is slower than others by so much that it is worth them."""
    seconds = list(setting.stage_seconds)
    mean = sum(seconds) / len(seconds)
    slowest = max(seconds)
    if slowest < UNEVEN * mean or not mean:
        return None
    stage = seconds.index(slowest)
    return f"stage {stage} takes {slowest / mean:.1f} times the mean stage"


def _seconds(node: NodeCost) -> float:
    return node.forward_s + node.backward_s
