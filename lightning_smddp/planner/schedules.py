"""Our own orders for one stage on each rank, and how busy a schedule can keep the ranks at best."""

from __future__ import annotations

from lightning_smddp.planner.actions import Action, Orders
from lightning_smddp.planner.simulate import simulate


def gpipe_order(num_ranks: int, num_microbatches: int) -> dict[int, list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965); stage r on rank r."""
    return {
        rank: [Action(rank, "F", i) for i in range(num_microbatches)]
        + [Action(rank, "B", i) for i in range(num_microbatches)]
        for rank in range(num_ranks)
    }


def one_f_one_b_order(num_ranks: int, num_microbatches: int) -> dict[int, list[Action]]:
    """Backwards as early as possible: PipeDream-flush (Narayanan et al. 2021, arXiv:2006.09503); stage r on rank r.

    Rank r of p has at most p - r micro-batches in flight.
    """
    orders = {}
    for rank in range(num_ranks):
        warmup = min(num_microbatches, num_ranks - rank - 1)
        order = [Action(rank, "F", i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            order += [Action(rank, "F", warmup + i), Action(rank, "B", i)]
        order += [Action(rank, "B", i) for i in range(num_microbatches - warmup, num_microbatches)]
        orders[rank] = order
    return orders


def bubble_bound(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """The share of time in which ranks compute at best, with equal stages and free messages.

    M v / (M v + p - 1) for M micro-batches, p ranks and v stages on each (Narayanan et al. 2021, arXiv:2104.04473).
    It is reached by gpipe and 1f1b (v = 1), looped BFS and interleaved 1f1b. Zero-bubble and V schedules do better:
    see ``simulated_bound``.
    """
    work = num_microbatches * stages_per_rank
    return work / (work + num_ranks - 1)


def simulated_bound(orders: Orders) -> float:
    """The same share for any schedule: its orders played through with equal stages and free messages.

    A backward takes twice a forward, I and W each as long as a forward.
    """
    num_stages = 1 + max(action.stage for order in orders.values() for action in order)
    return 1 - simulate(orders, [1.0] * num_stages, [2.0] * num_stages).bubble_fraction
