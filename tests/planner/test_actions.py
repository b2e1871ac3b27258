"""Actions as torch spells them, and orders that cannot run."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_smddp.planner.actions import Action, OrderError, check_order, parse_action, parse_actions
from lightning_smddp.planner.schedules import bubble_bound, gpipe_order, one_f_one_b_order, simulated_bound

Orders = dict[int, list[Action]]


def orders_of(*rows: str) -> Orders:
    return {rank: [parse_action(text) for text in row.split()] for rank, row in enumerate(rows)}


def torch_orders(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    rows = get_schedule_ops(name, num_ranks, num_microbatches, stages_per_rank)
    return {
        rank: [action for cell in row if cell is not None for action in parse_actions(str(cell))]
        for rank, row in enumerate(rows)
    }


@pytest.mark.parametrize("text", ["2F0", "0B3", "11I12", "1W0"])
def test_text_there_and_back(text: str) -> None:
    assert str(parse_action(text)) == text
    assert parse_action(f" {text} ") == parse_action(text)


def test_parts_of_an_action() -> None:
    assert parse_action("12I34") == Action(stage=12, kind="I", microbatch=34)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2SEND_F0", "1UNSHARD", "-1F0", "2f0", "2F0 0B3"])
def test_no_actions(text: str) -> None:
    with pytest.raises(OrderError, match="is no action: expected .* like '2F0'"):
        parse_action(text)


def test_cells_of_torch() -> None:
    assert parse_actions("(0F1;3B0)OVERLAP_F_B") == [Action(0, "F", 1), Action(3, "B", 0)]
    assert parse_actions("3B0") == [Action(3, "B", 0)]
    assert parse_actions("") == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_our_orders_are_whole(num_ranks: int, num_microbatches: int) -> None:
    for order in (gpipe_order, one_f_one_b_order):
        check_order(order(num_ranks, num_microbatches), num_ranks, num_microbatches)


def test_one_f_one_b_by_hand() -> None:
    assert one_f_one_b_order(2, 3) == orders_of("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    assert gpipe_order(2, 2) == orders_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def test_one_f_one_b_bounds_the_micro_batches_in_flight() -> None:
    for rank, order in one_f_one_b_order(4, 10).items():
        in_flight = [sum({"F": 1, "B": -1}[action.kind] for action in order[: i + 1]) for i in range(len(order))]
        assert max(in_flight) == 4 - rank


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_orders_of_torch(name: str, num_ranks: int, stages_per_rank: int) -> None:
    orders = torch_orders(name, num_ranks, 8, stages_per_rank)
    check_order(orders, num_ranks * stages_per_rank, 8)
    formula = bubble_bound(num_ranks, 8, stages_per_rank)
    if name in ("Interleaved1F1B", "LoopedBFS"):
        assert simulated_bound(orders) == pytest.approx(formula)
    else:
        assert formula < simulated_bound(orders) < 1


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1")


def test_halves_of_a_backward() -> None:
    check_order(orders_of(*GOOD), 2, 2)
    check_order(orders_of("0F0 0F1", "1F1 1F0"), 2, 2, forward_only=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F1 0B0 0B1", GOOD[1] + " 1W1"), "more than once: 1W1"),
        (("0F0 0B0 0B1", GOOD[1]), "2 micro-batches also need 0F1"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1"), "also need 1W1"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "also need 1B1"),
        (("0F0 0F1 0B0 0B1 0W1", GOOD[1]), "no place for 0W1"),
        ((GOOD[0] + " 0F2", GOOD[1]), "no place for 0F2"),
        ((GOOD[0] + " 2F0", GOOD[1]), "no place for 2F0"),
        (("0F0 0F1 0B0 1F1", "1F0 1B0 1B1 0B1"), "stage [01] is on rank [01] and on rank [01]"),
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 0 waits with 0B0 for 1B0; rank 1 waits with 1F1 for 0F1"),
        (("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"), "rank 0 waits with 0B0 for 0F0 and 1B0; rank 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1"), "rank 1 waits with 1W0 for 1I0"),
    ],
)
def test_orders_that_cannot_run(rows: tuple[str, str], message: str) -> None:
    with pytest.raises(OrderError, match=message):
        check_order(orders_of(*rows), 2, 2)


def test_backward_in_a_forward_only_order() -> None:
    with pytest.raises(OrderError, match="no place for 0B0"):
        check_order(orders_of("0F0 0B0"), 1, 1, forward_only=True)


def test_only_the_first_of_many_missing_actions_are_listed() -> None:
    with pytest.raises(OrderError, match="0B2, 0B3 and 8 more$|and 8 more$"):
        check_order({0: []}, 1, 8)
