"""Schedules are known by name, refuse what they cannot run, and their orders can be carried out."""

from __future__ import annotations

import pytest
import torch.distributed.pipelining  # noqa: F401  (sets an environment variable when first imported, not in a test)

from lightning_smddp.pipeline.runtime.schedules import SCHEDULES, Schedule, check, for_microbatches, orders, parse
from lightning_smddp.planner.simulator import Action


def stages_per_rank_of(schedule: Schedule) -> list[int]:
    return [count for count in (1, 2, 3) if schedule.stages_per_rank_ok(count)]


def carried_out(orders_of_ranks: dict[int, list[Action]], num_stages: int) -> list[tuple[int, str, int]]:
    """The actions in an order in which they can happen, each after what it needs; raises where ranks are stuck."""
    waiting = {rank: [tuple(action) for action in order] for rank, order in orders_of_ranks.items()}
    done: list[tuple[int, str, int]] = []
    while any(waiting.values()):
        ready = [rank for rank, rest in waiting.items() if rest and _needs(rest[0], num_stages) <= set(done)]
        assert ready, f"no rank can go on: {waiting}"
        for rank in ready:
            done.append(waiting[rank].pop(0))
            stage, kind, microbatch = done[-1]
            if kind in "BI":
                done.append((stage, "gradients of inputs", microbatch))
    return done


def _needs(action: tuple[int, str, int], num_stages: int) -> set[tuple[int, str, int]]:
    stage, kind, microbatch = action
    if kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    if kind == "W":
        return {(stage, "I", microbatch)}
    own = {(stage, "F", microbatch)}
    return own if stage == num_stages - 1 else own | {(stage + 1, "gradients of inputs", microbatch)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_orders_are_complete_and_can_be_carried_out(name: str, ranks: int) -> None:
    schedule = parse(name)
    for stages_per_rank in stages_per_rank_of(schedule):
        num_stages = ranks * stages_per_rank
        placement = schedule.rank_of_stage(num_stages, ranks)
        for microbatches in (1, 2, 3, 4, 5, 8, 9):
            found = orders(schedule, ranks, num_stages, microbatches)
            assert sorted(found) == list(range(ranks))
            assert all(placement[action.stage] == rank for rank, order in found.items() for action in order)
            done = carried_out(found, num_stages)
            assert len(done) == len(set(done))
            for stage in range(num_stages):
                for microbatch in range(microbatches):
                    kinds = {kind for s, kind, m in done if (s, m) == (stage, microbatch) and len(kind) == 1}
                    assert kinds in ({"F", "B"}, {"F", "I", "W"})


def test_names() -> None:
    assert list(SCHEDULES) == [
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ]
    assert parse("simple") is parse("GPipe") is SCHEDULES["gpipe"]
    assert parse("interleaved") is SCHEDULES["interleaved_1f1b"]
    with pytest.raises(ValueError, match=r"schedule='2f2b' is unknown; use one of gpipe, 1f1b, .*dualp"):
        parse("2f2b")


@pytest.mark.parametrize(
    ("name", "ranks", "stages_per_rank", "microbatches", "text"),
    [
        ("1f1b", 4, 1, 3, "with 4 stages .*num_microbatches=3: .*the stages. Use num_microbatches=4, or a multiple"),
        ("dualpipev", 2, 2, 3, "Use num_microbatches=4"),
        ("interleaved_1f1b", 4, 2, 9, "=9: it takes whole rounds. Use num_microbatches=8, or a multiple"),
        ("interleaved_zero_bubble", 2, 2, 7, "Use num_microbatches=4"),
        ("gpipe", 4, 2, 8, "1 stage on each rank, but stages_per_rank=2; use stages_per_rank=1 or"),
        ("zbv_zero_bubble", 4, 1, 8, "exactly 2 stages on each rank, but stages_per_rank=1; use stages_per_rank=2"),
    ],
)
def test_refusals_name_the_cure(name: str, ranks: int, stages_per_rank: int, microbatches: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(parse(name), ranks, stages_per_rank, microbatches)
    if "num_microbatches" in text:
        for times in (1, 2, 3):
            check(parse(name), ranks, stages_per_rank, times * ranks * stages_per_rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_number_of_microbatches_has_a_schedule_with_the_same_placement(name: str) -> None:
    schedule = parse(name)
    for ranks in (1, 2, 3, 4):
        num_stages = ranks * schedule.default_stages_per_rank
        for microbatches in range(1, 20):
            used = for_microbatches(schedule, ranks, num_stages, microbatches)
            assert used.microbatches_ok(microbatches, ranks, num_stages)
            assert used.rank_of_stage(num_stages, ranks) == schedule.rank_of_stage(num_stages, ranks)
