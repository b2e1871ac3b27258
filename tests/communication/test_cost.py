"""The cost model's formulas, by hand and in their limits."""

from __future__ import annotations

import math

import pytest

from lightning_smddp.communication.cost import Cluster, Link, crossing_flows, predict_s, synchronisation_s

NETWORK, MEMORY = Link(1e-4, 1e8), Link(1e-5, 1e10)
SIZE = 8_000_000  # 0.08 s on the network, 0.8 ms in memory


def cluster(nodes: int, local: int, flows: int = 1, ratio: float = 1.0) -> Cluster:
    return Cluster(nodes, local, flows, NETWORK, MEMORY, ratio)


@pytest.mark.parametrize(
    ("algorithm", "shape", "seconds"),
    [
        ("native", cluster(1, 2), 2 * 1e-4 + 0.08),
        ("native", cluster(2, 2), 6 * 1e-4 + 1.5 * 0.08),
        ("native", cluster(2, 2, flows=2), 6 * 1e-4 + 1.5 * 0.08 * 2),
        ("native", cluster(2, 2, ratio=0.5), 6 * 1e-4 + 1.5 * 0.04),
        ("shared_memory", cluster(1, 2), 2 * 1e-5 + 2 * 0.0008),
        ("hierarchical", cluster(2, 1), 2 * 1e-4 + 0.08),
        ("hierarchical", cluster(2, 2), 2e-5 + 0.0016 + 2 * 1e-4 + 0.08),
        ("hierarchical", cluster(4, 2, ratio=0.25), 2e-5 + 0.0016 + 6 * 1e-4 + 1.5 * 0.02),
        ("balanced", cluster(4, 2), 2e-5 + 0.0016 + 2 * 1e-4 + 1.5 * 0.08),
        ("balanced", cluster(1, 4), 2 * 1e-4 + 1.5 * 0.08),
    ],
)
def test_seconds_by_hand(algorithm: str, shape: Cluster, seconds: float) -> None:
    assert predict_s(algorithm, SIZE, shape) == pytest.approx(seconds)


def test_an_unknown_algorithm_has_no_model() -> None:
    with pytest.raises(ValueError, match="no cost model for algorithm='tree'"):
        predict_s("tree", 1, cluster(2, 2))


@pytest.mark.parametrize("algorithm", ["native", "shared_memory", "hierarchical", "balanced"])
def test_more_bytes_take_longer(algorithm: str) -> None:
    times = [predict_s(algorithm, 4**power, cluster(2, 2)) for power in range(16)]
    assert times == sorted(times)
    assert times[-1] > times[0] > 0


@pytest.mark.parametrize("size", [10**3, 10**6, 10**9])
def test_two_levels_beat_one_ring_on_two_nodes_of_two(size: int) -> None:
    assert predict_s("hierarchical", size, cluster(2, 2)) < predict_s("native", size, cluster(2, 2))


def test_with_many_nodes_two_messages_beat_a_ring_for_small_buckets() -> None:
    assert predict_s("balanced", 1000, cluster(16, 1)) < predict_s("hierarchical", 1000, cluster(16, 1)) / 10
    assert predict_s("balanced", 10**9, cluster(16, 1)) == pytest.approx(
        predict_s("hierarchical", 10**9, cluster(16, 1)), rel=0.001
    )


def test_interleaved_ranks_slow_the_native_ring_alone() -> None:
    together, mixed = (crossing_flows(nodes) for nodes in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    assert (together, mixed) == (1, 2)
    for algorithm, ratio in (("native", 2.0), ("hierarchical", 1.0), ("balanced", 1.0)):
        slow, fast = (predict_s(algorithm, 10**9, cluster(2, 2, flows)) for flows in (mixed, together))
        assert slow / fast == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize(
    ("nodes", "flows"), [(((0, 1, 2),), 1), (((0,), (1,)), 1), (((0, 2, 4), (1, 3, 5)), 3), (((0, 1, 3), (2, 4)), 2)]
)
def test_flows_that_leave_the_busiest_node(nodes: tuple[tuple[int, ...], ...], flows: int) -> None:
    assert crossing_flows(nodes) == flows


def test_a_line_is_fitted_through_the_ends() -> None:
    link = Link.fit([1000, 5000, 11000], [0.002, 0.1, 0.012])
    assert link.bytes_per_s == pytest.approx(1e6)
    assert link.latency_s == pytest.approx(0.001)


def test_a_line_that_falls_is_taken_as_flat() -> None:
    link = Link.fit([1000, 2000], [0.002, 0.001])
    assert link.latency_s == pytest.approx(0.002, rel=1e-3)
    assert link.bytes_per_s >= 1e12


def test_the_best_bucket_balances_latency_and_the_last_one() -> None:
    gradients, link = 400_000_000, Link(1e-3, 1e9)
    best = min(range(10**6, 10**8, 10**5), key=lambda size: synchronisation_s(gradients, size, link, True))
    assert best == pytest.approx(math.sqrt(gradients * link.latency_s * link.bytes_per_s), rel=0.05)


def test_without_overlap_one_bucket_is_best() -> None:
    link = Link(1e-3, 1e9)
    assert synchronisation_s(10**8, 10**8, link, False) == pytest.approx(0.101)
    assert synchronisation_s(10**8, 10**7, link, False) == pytest.approx(0.110)
    assert synchronisation_s(10**8, 10**7, link, True) == pytest.approx(0.020)
    assert synchronisation_s(10**6, 10**7, link, True) == pytest.approx(0.002)
