"""DDP with our hook trains as stock DDP does, bit by bit where the sums are of two terms."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.hook import _averaged
from lightning_smddp.communication.objects import RankFailedError
from tests.communication.training import Given, Hooked, hooked
from tests.ranks import RanksFailedError, run_ranks

Case = Callable[[Hooked], list[Tensor]]
WIDTH, STEPS = 24, 4


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, WIDTH, generator=generator).to(dtype)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.05, eps=1e-3)


def values(*modules: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def train(ddp: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    optimizer = optimizer_of(ddp)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        ddp(batch(step, dtype)).float().square().sum().backward()
        optimizer.step()
    return values(ddp)


def with_options(**options: Any) -> Case:
    return lambda wrapper: train(wrapper.wrap(network(), **options))


def of_dtype(dtype: torch.dtype) -> Case:
    return lambda wrapper: train(wrapper.wrap(network(dtype), gradient_as_bucket_view=True), dtype)


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double())


def mixed_dtypes(wrapper: Hooked) -> list[Tensor]:
    return train(wrapper.wrap(MixedDtypes(), bucket_cap_mb=0.001))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(network() for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Rank 0 takes the other branch than rank 1 but in each third step, where both take the first."""
        self.calls += 1
        return self.branches[0 if self.calls % 3 == 0 else (self.calls + dist.get_rank()) % 2](x)


def unused_parameters(wrapper: Hooked) -> list[Tensor]:
    return train(wrapper.wrap(Branching(), find_unused_parameters=True, bucket_cap_mb=0.002))


class SparseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words))


def sparse_embedding(wrapper: Hooked) -> list[Tensor]:
    ddp = wrapper.wrap(SparseModel())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = torch.tensor([step, 7, 20 + step + dist.get_rank(), 7])  # some words on one rank only
        ddp(words).square().sum().backward()
        assert ddp.module.words.weight.grad.is_sparse
        optimizer.step()
    return values(ddp)


def joined(wrapper: Hooked) -> list[Tensor]:
    ddp = wrapper.wrap(network(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join():
        for step in range(2 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            ddp(batch(step)).square().sum().backward()
            optimizer.step()
    return values(ddp)


CASES: dict[str, Case] = {  # tests/strategies/test_transparency.py has others, with a Trainer
    "small buckets as views": with_options(bucket_cap_mb=0.001, gradient_as_bucket_view=True),
    "unused parameters": unused_parameters,
    "sparse embedding": sparse_embedding,
    "static graph": with_options(static_graph=True, gradient_as_bucket_view=True),
    "bf16": of_dtype(torch.bfloat16),
    "mixed dtypes": mixed_dtypes,
    "join": joined,
}


def compare_all(names: list[str], algorithms: list[str], exact: bool) -> None:
    for name in names:
        try:
            compare(CASES[name], algorithms, exact)
        except Exception as error:
            raise AssertionError(name) from error


def compare(case: Case, algorithms: list[str], exact: bool) -> None:
    with hooked(None) as wrapper:
        expected = case(wrapper)
    assert all(tensor.isfinite().all() for tensor in expected)
    for algorithm in algorithms:
        with hooked(algorithm) as wrapper:
            found = case(wrapper)
        for tensor, other in zip(found, expected, strict=True):
            if exact:
                torch.testing.assert_close(tensor, other, rtol=0, atol=0, msg=lambda text, a=algorithm: f"{a}: {text}")
            else:
                tolerance = 0.03 if tensor.dtype.itemsize == 2 else 1e-4
                torch.testing.assert_close(tensor, other, rtol=tolerance, atol=tolerance)


NAMES, SLOW = [*CASES], pytest.mark.slow
TWO_LEVELS = ["hierarchical", "balanced"]


@pytest.mark.parametrize(
    ("nodes", "names", "algorithms"),
    [
        pytest.param("aa", NAMES[:3], ["native", "shared_memory", "hierarchical"], id="everyday"),
        pytest.param("aa", NAMES[3:], ["shared_memory"], marks=SLOW, id="others"),
        pytest.param("abab", NAMES[:1], TWO_LEVELS, id="two nodes"),
        pytest.param("abab", ["unused parameters", "join"], TWO_LEVELS[:1], marks=SLOW, id="two nodes, others"),
    ],
)
def test_training_is_that_of_stock_ddp(nodes: str, names: list[str], algorithms: list[str]) -> None:
    """Bit by bit with two ranks. Without shared memory: `test_algorithms.py`."""
    run_ranks(compare_all, len(nodes), names, algorithms, len(nodes) == 2, node_ids=list(nodes))


# ---- what DDP is told to ignore ----


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.first = self.second = nn.Linear(2, 2, bias=False)


def compare_ignored() -> None:
    for ignored in ("own", ".own", "first.weight", "second.weight"):
        module = Shared()
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [ignored])
        parameters, _ = nn.parallel.DistributedDataParallel(module)._build_params_for_reducer()
        assert set(_averaged(module)) == set(map(id, parameters)), ignored


def test_a_gradient_is_looked_at_where_ddp_averages_it() -> None:
    run_ranks(compare_ignored, 1)


# ---- a rank fails ----


def train_until_a_rank_fails(algorithm: str) -> None:
    with hooked(algorithm) as wrapper:
        ddp = wrapper.wrap(network(), bucket_cap_mb=0.001)
        for step in range(10):
            if step == 3 and dist.get_rank() == 1:
                raise ValueError("bad batch")
            start = time.monotonic()
            try:
                ddp(batch(step)).square().sum().backward()
            except Exception as error:
                seconds = time.monotonic() - start
                raise RuntimeError(f"{type(error).__name__} after {seconds:.0f} s: {error}") from None


@pytest.mark.parametrize("algorithm", ["shared_memory", "hierarchical"])
def test_the_rank_that_failed_is_named_by_its_neighbour_within_seconds(algorithm: str) -> None:
    nodes = "aa" if algorithm == "shared_memory" else "aab"
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(train_until_a_rank_fails, len(nodes), algorithm, node_ids=list(nodes))
    assert "bad batch" in caught.value.tracebacks[1]
    assert caught.value.hung == {}
    neighbour = caught.value.tracebacks[0]
    assert " after 0 s: rank 1 (host a, local rank 1) is gone" in neighbour
    if algorithm == "shared_memory":
        assert RankFailedError.__name__ in neighbour


# ---- compression ----

SHAPES = [(24, 20), (7,), (30, 20), (40,)]
METHODS = {
    "int8": Compression("int8", block_size=16),
    "powersgd": Compression("powersgd", rank=2),
}


def given_gradients(numel: int, step: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_gradients(numel: int, step: int) -> Tensor:
    return sum(given_gradients(numel, step, rank) for rank in range(dist.get_world_size())) / dist.get_world_size()


def arriving(ddp: nn.Module, module: Given, gradients: Tensor) -> Tensor:
    ddp.zero_grad()
    ddp(gradients).backward()
    return module.gradient()


def compress_steps(method: str, algorithm: str, scope: str) -> tuple[float, float]:
    """How much of some steps has not arrived then; and behind steps of zeros."""
    options = METHODS[method]
    compression = Compression(options.method, scope=scope, block_size=options.block_size, rank=options.rank)
    module = Given(*SHAPES)
    missing = torch.zeros(module.numel)
    lost = []
    with hooked(algorithm, compression) as wrapper:
        ddp = wrapper.wrap(module, bucket_cap_mb=0.002)
        for step in range(24):
            has_gradients = step < 6
            given = given_gradients(module.numel, step, dist.get_rank()) * has_gradients
            arrived = arriving(ddp, module, given)
            if step:  # behind the first step DDP cuts the buckets anew
                missing = missing + mean_gradients(module.numel, step) * has_gradients - arrived
            lost.append(missing.abs().max().item())
    return lost[5], lost[-1]


@pytest.mark.parametrize(
    ("method", "algorithm", "scope", "nodes"),
    [
        ("int8", "hierarchical", "inter_node", "abab"),
        pytest.param("int8", "native", "all", "aa", marks=pytest.mark.slow),
        ("powersgd", "native", "inter_node", "ab"),
    ],
)
def test_nothing_is_lost_over_steps(method: str, algorithm: str, scope: str, nodes: str) -> None:
    """Of other exchanges: `test_compression.py`."""
    for before, after in run_ranks(compress_steps, len(nodes), method, algorithm, scope, node_ids=list(nodes)):
        assert before > 1e-4
        assert after < min(1e-3, before)


def average_odd_shapes() -> tuple[list[bool], bool]:
    """PowerSGD of zeros, scalars, empty parameters and an inf; and beside a sparse bucket, the last in each step."""
    module = Given((), (0, 3), (24, 20), (2, 3, 4))
    with hooked("native", Compression("powersgd", scope="all", rank=2)) as wrapper:
        ddp = wrapper.wrap(module)
        finite = []
        for step in range(7):
            given = torch.zeros(module.numel) if step == 2 else given_gradients(module.numel, step, dist.get_rank())
            if step == 4 and dist.get_rank() == 1:
                given[33] = float("inf")
            finite.append(bool(arriving(ddp, module, given).isfinite().all()))
    words = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, 16))
    with hooked("native", Compression("powersgd", scope="all")) as wrapper:
        ddp = wrapper.wrap(words, find_unused_parameters=True)
        for step in range(4):
            ddp(torch.tensor([step, 7])).square().sum().backward()
        return finite, bool(wrapper.synchronizers[0]._powersgd._state.q_memory_dict)


def test_powersgd_takes_any_parameter_and_forgets_an_inf() -> None:
    """What arrives is finite again two steps later."""
    finite = [True, True, True, True, False, True, True]
    assert run_ranks(average_odd_shapes, 2) == [(finite, True)] * 2
