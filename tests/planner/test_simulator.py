"""A step on paper: by hand, and beside the tables of the zero-bubble paper."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_smddp.pipeline.runtime.schedules import SCHEDULES, orders
from lightning_smddp.planner.simulator import Action, Kind, simulate


def orders_of(*rows: str) -> dict[int, list[Action]]:
    kinds: list[list[Any]] = [row.split() for row in rows]
    return {rank: [Action(int(one[0]), one[1], int(one[2])) for one in row] for rank, row in enumerate(kinds)}


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
    assert simulate(orders_of(*rows)).busy_share == pytest.approx(share)


def test_orders_that_wait_for_ever() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(orders_of("0B0 0F0"))


@pytest.mark.parametrize(("message_s", "seconds"), [(0.0, 6.0), (0.25, 6.5)])
def test_messages_take_time_between_ranks_alone(message_s: float, seconds: float) -> None:
    assert simulate(orders_of("0F0 1F0 1B0 0B0"), message_s=message_s).seconds == 6.0
    assert simulate(orders_of("0F0 0B0", "1F0 1B0"), message_s=message_s).seconds == seconds


@pytest.mark.parametrize(("name", "bubble"), [("1f1b", 0.2431), ("interleaved_zero_bubble", 0.1585)])
def test_bubbles_of_the_zero_bubble_paper(name: str, bubble: float) -> None:
    # arXiv:2401.10241, the 1.5B model with 24 micro-batches on 8 ranks: columns 1F1B and ZB-H1.
    actions = orders(SCHEDULES[name], 8, 8, 24)
    seconds: dict[Kind, float] = {"F": 18522e-6, "B": (18086 + 9337) * 1e-6, "I": 18086e-6, "W": 9337e-6}
    assert 1 - simulate(actions, seconds, 601e-6).busy_share == pytest.approx(bubble, abs=5e-5)
