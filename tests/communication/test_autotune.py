"""``algorithm="auto"``: what is measured, chosen, cached and found again."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication import autotune
from lightning_smddp.communication.autotune import Plan, choose_plan, default_cache, given_plan, plan_key
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.topology import Topology
from tests.ranks import run_ranks

MIB = 2**20
NO_LIMIT = 2**62
SLOW_THEN_FAST = {"native": [1e-4, 1e-2, 1e-1], "hierarchical": [2e-4, 5e-3, 5e-2], "balanced": [3e-4, 4e-3, 6e-2]}


def model(width: int = 1000) -> nn.Module:
    return nn.Linear(width, width, bias=False)


# ---- tables ----


@pytest.mark.parametrize(
    ("times", "table"),
    [
        ({"native": [1, 2, 3]}, [(NO_LIMIT, "native")]),
        ({"native": [1, 5, 9], "x": [2, 4, 8]}, [(4, "native"), (NO_LIMIT, "x")]),
        ({"native": [1, 5, 3], "x": [2, 4, 8]}, [(4, "native"), (16, "x"), (NO_LIMIT, "native")]),
        ({"native": [2, 4, 9], "x": [1, 3, 10]}, [(16, "x"), (NO_LIMIT, "native")]),
    ],
)
def test_each_size_goes_to_the_fastest_with_limits_halfway(
    times: dict[str, list[float]], table: list[tuple[int, str]]
) -> None:
    assert autotune._table([2, 8, 32], times) == table


def test_a_plan_describes_itself() -> None:
    assert given_plan("balanced", 4.0) == Plan([(NO_LIMIT, "balanced")], 4.0)
    assert given_plan("balanced", 4.0).describe() == "balanced (all sizes); given"
    measured = Plan(
        [(256 * 1024, "native"), (NO_LIMIT, "hierarchical")],
        25.0,
        {"native": [0.1, 0.6], "hierarchical": [0.2, 0.2]},
        [65536, MIB],
        "measured",
    )
    assert measured.describe() == (
        "native (up to 256 KiB), hierarchical (above 256 KiB), 3.0x native at 1 MiB; measured"
    )


@pytest.mark.parametrize(
    ("latency", "name", "best"),
    [
        (1e-6, "hierarchical", 1.0),
        (1e-4, "hierarchical", 8.0),  # near sqrt(400 MB * 0.1 ms * 1 GB/s)
        (1e-3, "hierarchical", 25.0),  # 16 would be best by 4 %, which is less than the timing's error
        (1e-3, "shared_memory", 25.0),
        (1e-2, "shared_memory", 100.0),  # no overlap: few buckets
    ],
)
def test_the_bucket_size_follows_the_measured_line(latency: float, name: str, best: float) -> None:
    sizes = [65536, 8 * MIB]
    seconds = [latency + size / 1e9 for size in sizes]
    assert autotune._bucket_size(400_000_000, sizes, seconds, name) == best


def test_one_timed_size_says_nothing_about_buckets() -> None:
    assert autotune._bucket_size(1000, [65536], [0.1], "native") == 25.0


# ---- choosing together ----


def choose(
    cache: Path | None, cap: float | None = None, times: dict[str, list[float]] | None = None, may_time: bool = True
) -> tuple[Plan, list[str], list[str]]:
    """The plan, the algorithms that were timed, and the warnings."""
    timed: list[str] = []

    def time(name: str, _communicator: Any, _compression: Any, sizes: list[int]) -> list[float]:
        if not may_time:
            raise AssertionError("timed again")
        timed.append(name)
        return SLOW_THEN_FAST[name][: len(sizes)]

    if times is not None:
        autotune.time_algorithm = time
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = choose_plan(communicator, model(), None, cap, cache)
    communicator.close()
    return plan, timed, [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_all_ranks_measure_and_choose_the_same() -> None:
    plans = [plan for plan, _, _ in run_ranks(choose, 4, None, node_ids=list("abab"))]
    assert all(plan == plans[0] for plan in plans)
    plan = plans[0]
    assert plan.source == "measured"
    assert plan.sizes == [65536, MIB]  # no larger than twice the gradients
    assert list(plan.seconds)[0] == "native"
    assert set(plan.seconds) == {"native", "hierarchical", "balanced"}
    assert all(len(times) == 2 and min(times) > 0 for times in plan.seconds.values())
    assert plan.table == autotune._table(plan.sizes, plan.seconds)


def test_a_plan_is_made_from_the_times() -> None:
    for plan, timed, _ in run_ranks(choose, 2, None, None, SLOW_THEN_FAST, node_ids=["a", "b"]):
        assert timed[0] == "native"
        assert sorted(timed[1:]) == ["balanced", "hierarchical"]
        assert plan.table == [(256 * 1024, "native"), (NO_LIMIT, "balanced")]
        assert plan.bucket_cap_mb in autotune._BUCKET_CHOICES_MB


def test_the_users_bucket_size_is_kept() -> None:
    for plan, _, _ in run_ranks(choose, 2, None, 3.5, SLOW_THEN_FAST, node_ids=["a", "b"]):
        assert plan.bucket_cap_mb == 3.5


def test_one_rank_has_nothing_to_choose(tmp_path: Path) -> None:
    ((plan, timed, _),) = run_ranks(choose, 1, tmp_path / "plans.json", 7.0, SLOW_THEN_FAST)
    assert (plan, timed) == (given_plan("native", 7.0), [])


# ---- the cache ----


def test_a_cached_plan_is_found_without_timing(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "plans.json"
    measured = run_ranks(choose, 2, cache, None, SLOW_THEN_FAST, node_ids=["a", "b"])[0][0]
    assert list(tmp_path.rglob("*.*")) == [cache]  # no temporary file is left
    for plan, timed, _ in run_ranks(choose, 2, cache, None, SLOW_THEN_FAST, False, node_ids=["a", "b"]):
        assert timed == []
        assert plan.source == "cached"
        assert (plan.table, plan.bucket_cap_mb, plan.seconds) == (
            measured.table,
            measured.bucket_cap_mb,
            measured.seconds,
        )


@pytest.mark.parametrize(
    "content",
    [
        '{"torn',
        *(
            pytest.param(content, marks=pytest.mark.slow)
            for content in (
                "[1, 2]",
                "\xff\xfe",
                '{"KEY": 3}',
                '{"KEY": {"table": 5}}',
                '{"KEY": {"unknown": 1, "table": []}}',
                '{"KEY": {"table": [[1, "tree"]], "bucket_cap_mb": 1}}',
            )
        ),
    ],
)
def test_a_corrupt_cache_is_ignored_and_replaced(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "plans.json"
    run_ranks(choose, 2, cache, None, SLOW_THEN_FAST, node_ids=["a", "b"])
    ((key, good),) = json.loads(cache.read_text()).items()
    cache.write_text(content.replace("KEY", key), encoding="latin-1")
    for plan, _, messages in run_ranks(choose, 2, cache, None, SLOW_THEN_FAST, node_ids=["a", "b"]):
        assert plan.source == "measured"
        assert messages == []
    assert json.loads(cache.read_text())[key] == good


@pytest.mark.parametrize("obstacle", ["a file in place of the folder", "a folder in place of the file"])
def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path: Path, obstacle: str) -> None:
    cache = tmp_path / "folder" / "plans.json"
    if obstacle.startswith("a file"):
        cache.parent.write_text("")
    else:
        cache.mkdir(parents=True)
    first, second = run_ranks(choose, 2, cache, None, SLOW_THEN_FAST, node_ids=["a", "b"])
    assert first[0] == second[0]
    assert len(first[2]) == 1
    assert "could not be cached" in first[2][0]
    assert second[2] == []
    assert {path.name for path in tmp_path.rglob("*")} <= {"folder", "plans.json"}  # nothing temporary stays


def test_the_cache_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "lightning_smddp" / "plans.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "lightning_smddp" / "plans.json"


def stand_in(nodes: str = "aabb", **facts: Any) -> Any:
    """What a key is made of, without ranks."""
    topology = Topology.from_identities(list(nodes), 0)
    values = {"device": torch.device("cpu"), "zero_copy": True, "shared_memory_refusal": None, **facts}
    return SimpleNamespace(topology=topology, **values)


def test_a_key_changes_with_all_that_a_plan_depends_on() -> None:
    frozen = model().requires_grad_(False)
    keys = [
        plan_key(stand_in(), model(), None, None),
        plan_key(stand_in("abab"), model(), None, None),
        plan_key(stand_in(zero_copy=False), model(), None, None),
        plan_key(stand_in(shared_memory_refusal="no"), model(), None, None),
        plan_key(stand_in(), model(1001), None, None),
        plan_key(stand_in(), model().half(), None, None),
        plan_key(stand_in(), frozen, None, None),
        plan_key(stand_in(), model(), Compression("bf16"), None),
        plan_key(stand_in(), model(), Compression("fp16"), None),
        plan_key(stand_in(), model(), None, 25.0),
    ]
    assert len(set(keys)) == len(keys)
    assert plan_key(stand_in(), model(), None, None) == keys[0]  # values and names of parameters do not matter


def time_all(compression: str | None) -> None:
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=20))
    for name in communicator.available():
        times = autotune.time_algorithm(name, communicator, Compression.parse(compression), [65536])
        assert communicator.maximum(times) == times  # the slowest rank's, on all ranks
        assert 0 < times[0] < 5
    communicator.close()


@pytest.mark.parametrize("compression", [None, "bf16", "int8", "powersgd"])
def test_every_algorithm_can_be_timed(compression: str | None) -> None:
    run_ranks(time_all, 2, compression, node_ids=["a", "b"])
