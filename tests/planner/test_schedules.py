"""Actions as torch spells them, and how busy schedules keep the ranks."""

from __future__ import annotations

import pytest

from lightning_smddp.planner.schedules import Action, parse_action, simulated_bound

Orders = dict[int, list[Action]]


def orders_of(*rows: str) -> Orders:
    return {rank: [parse_action(text) for text in row.split()] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("text", ["", "2X0", "2SEND_F0", "-1F0", "2F0 0B3"])
def test_no_actions(text: str) -> None:
    with pytest.raises(ValueError, match="is no action: expected .* like '2F0'"):
        parse_action(text)


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        (("0F0 0B0",), 1.0),
        (("0F0 0B0", "1F0 1B0"), 6 / (2 * 6)),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), 12 / (2 * 9)),
        (("0F0 1F0 1B0 0B0",), 1.0),  # two stages on a rank
        (("0F0 0I0 0W0", "1F0 1I0 1W0"), 6 / (2 * 5)),  # 0I0 does not wait for the weights of stage 1
    ],
)
def test_shares_by_hand(rows: tuple[str, ...], share: float) -> None:
    assert simulated_bound(orders_of(*rows)) == pytest.approx(share)


def test_orders_that_wait_for_ever() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        simulated_bound(orders_of("0B0 0F0"))
