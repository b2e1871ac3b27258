"""Actions as torch spells them, and how busy schedules keep the ranks."""

from __future__ import annotations

import re

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_smddp.planner.schedules import Action, parse_action, simulated_bound

Orders = dict[int, list[Action]]


def orders_of(*rows: str) -> Orders:
    return {rank: [parse_action(text) for text in row.split()] for rank, row in enumerate(rows)}


def torch_orders(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    """A cell of torch's has no action, one, or two that overlap: "(0F1;2B0)OVERLAP_F_B"."""
    rows = get_schedule_ops(name, num_ranks, num_microbatches, stages_per_rank)
    cells = [[str(cell) for cell in row if cell is not None] for row in rows]
    return orders_of(*(" ".join(text for cell in row for text in re.findall(r"\d+[FBIW]\d+", cell)) for row in cells))


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


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [
        ("GPipe", 1),
        ("Interleaved1F1B", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_orders_of_torch(name: str, num_ranks: int, stages_per_rank: int) -> None:
    work = 8 * stages_per_rank
    formula = work / (work + num_ranks - 1)  # Narayanan et al. 2021, arXiv:2104.04473
    share = simulated_bound(torch_orders(name, num_ranks, 8, stages_per_rank))
    if name in ("GPipe", "Interleaved1F1B"):
        assert share == pytest.approx(formula)
    else:
        assert formula < share < 1
