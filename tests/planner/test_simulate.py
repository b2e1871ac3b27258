"""Simulated steps against figures worked out by hand."""

from __future__ import annotations

import pytest

from lightning_smddp.planner.actions import Action, OrderError
from lightning_smddp.planner.schedules import bubble_bound, gpipe_order, one_f_one_b_order, simulated_bound
from lightning_smddp.planner.simulate import simulate
from lightning_smddp.planner.spans import Span, bubble_fraction, busy_share, stage_position, step_seconds


def times(spans: list[Span], kind: str, rank: int) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in spans if (span.kind, span.rank) == (kind, rank)]


def test_two_ranks_by_hand() -> None:
    """F is 1, B is 2, a message 0.5: 0F0 0-1, there at 1.5, 1F0 -2.5, 1B0 -4.5, back at 5, 0B0 -7."""
    found = simulate(gpipe_order(2, 1), [1, 1], [2, 2], [0.5])
    assert found.spans == [
        Span(0, 0, "forward", 0, 0, 1),
        Span(1, 1, "wait", 0, 0, 1.5),
        Span(0, 0, "send", 0, 1, 1.5),
        Span(0, 0, "wait", 0, 1, 5),
        Span(1, 1, "forward", 0, 1.5, 2.5),
        Span(1, 1, "backward", 0, 2.5, 4.5),
        Span(1, 1, "send", 0, 4.5, 5),
        Span(0, 0, "backward", 0, 5, 7),
    ]
    assert found.step_s == 7
    assert found.busy_share == {0: 3 / 7, 1: 3 / 7}
    assert found.bubble_fraction == pytest.approx(4 / 7)


def test_computing_goes_on_while_a_message_is_sent() -> None:
    found = simulate(gpipe_order(2, 3), [1, 1], [1, 1], [1])
    assert times(found.spans, "forward", 0) == [(0, 1), (1, 2), (2, 3)]
    assert times(found.spans, "send", 0) == [(1, 2), (2, 3), (3, 4)]
    assert times(found.spans, "forward", 1) == [(2, 3), (3, 4), (4, 5)]


def test_messages_over_one_link_queue_up() -> None:
    found = simulate(gpipe_order(2, 3), [1, 1], [1, 1], [2])
    assert times(found.spans, "send", 0) == [(1, 3), (3, 5), (5, 7)]
    assert times(found.spans, "forward", 1) == [(3, 4), (5, 6), (7, 8)]


def test_stages_of_one_rank_send_nothing() -> None:
    order = {0: [Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)]}
    found = simulate(order, [1, 2], [3, 4], [5])
    assert found.step_s == 10
    assert {span.kind for span in found.spans} == {"forward", "backward"}


def test_halves_of_a_backward() -> None:
    order = {
        0: [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)],
        1: [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    }
    found = simulate(order, [1, 1], [4, 4], input_share=0.25)
    assert times(found.spans, "backward_input", 1) == [(2, 3)]
    assert times(found.spans, "backward_weight", 1) == [(3, 6)]
    assert times(found.spans, "backward_input", 0) == [(3, 4)]  # does not wait for the weights of stage 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 4, 9])
def test_equal_stages_reach_the_bound(num_ranks: int, num_microbatches: int) -> None:
    bound = bubble_bound(num_ranks, num_microbatches)
    assert bound == num_microbatches / (num_microbatches + num_ranks - 1)
    for order in (gpipe_order, one_f_one_b_order):
        assert simulated_bound(order(num_ranks, num_microbatches)) == pytest.approx(bound)


def test_bound_with_several_stages_on_each_rank() -> None:
    assert bubble_bound(4, 8, 2) == 16 / 19


def test_the_slowest_stage_sets_the_pace() -> None:
    step = [simulate(one_f_one_b_order(3, count), [1, 2, 1], [2, 4, 2]).step_s for count in (20, 30)]
    assert step[1] - step[0] == pytest.approx(10 * 6)


def test_every_second_of_a_rank_is_computing_or_waiting_until_it_is_done() -> None:
    spans = simulate(one_f_one_b_order(3, 5), [1, 2, 1.5], [2, 3, 2.5], [0.3, 0.7]).spans
    for rank in range(3):
        own = [span for span in spans if span.rank == rank and span.kind != "send"]
        assert own[0].start_s == 0
        assert all(a.end_s == b.start_s for a, b in zip(own, own[1:], strict=False))


def test_orders_that_wait_for_ever() -> None:
    with pytest.raises(OrderError, match="rank 0 with 0B0"):
        simulate({0: [Action(0, "B", 0), Action(0, "F", 0)]}, [1], [1])


def test_costs_for_other_stages() -> None:
    with pytest.raises(ValueError, match="2 stages need as many forward_s"):
        simulate(gpipe_order(2, 1), [1], [1, 1])
    with pytest.raises(ValueError, match="one send_s less; got 2, 2 and 0"):
        simulate(gpipe_order(2, 1), [1, 1], [1, 1], [])


def test_figures_of_measured_spans() -> None:
    spans = [Span(0, 0, "forward", 0, 10, 11), Span(0, 2, "send", 0, 11, 14), Span(3, 1, "backward", 0, 12, 14)]
    assert step_seconds(spans) == 4
    assert busy_share(spans) == {0: 0.25, 3: 0.5}
    assert bubble_fraction(spans) == 1 - 0.375
    assert stage_position(spans) == {0: 0, 2: 1, 1: 0}


def test_no_spans() -> None:
    found = simulate({0: []}, [], [])
    assert (found.spans, found.step_s, found.busy_share, found.bubble_fraction) == ([], 0.0, {}, 0.0)
