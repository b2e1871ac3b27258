"""DDP with our hook trains as stock DDP does, bit by bit where the sums are of two terms."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication import node_mesh
from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.errors import RankFailedError
from tests.communication.errors import message_of
from tests.communication.training import Given, Hooked, hooked
from tests.ranks import RanksFailedError, run_ranks

Case = Callable[[Hooked], list[Tensor]]
WIDTH, STEPS = 24, 4
HAS_BATCHED_COPY = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters


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


def train(ddp: nn.Module, dtype: torch.dtype = torch.float32, clip: bool = False) -> list[Tensor]:
    optimizer = optimizer_of(ddp)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        ddp(batch(step, dtype)).float().square().sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
    return values(ddp)


def with_options(**options: Any) -> Case:
    return lambda wrapper: train(wrapper.wrap(network(), **options))


def of_dtype(dtype: torch.dtype) -> Case:
    return lambda wrapper: train(wrapper.wrap(network(dtype), gradient_as_bucket_view=True), dtype)


def clipped(wrapper: Hooked) -> list[Tensor]:
    return train(wrapper.wrap(network(), gradient_as_bucket_view=True), clip=True)


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


def accumulated(wrapper: Hooked) -> list[Tensor]:
    ddp = wrapper.wrap(network(), gradient_as_bucket_view=True)
    optimizer = optimizer_of(ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            for part in range(2):
                ddp(batch(10 * step + part)).square().sum().backward()
        ddp(batch(10 * step + 2)).square().sum().backward()
        optimizer.step()
    return values(ddp)


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


def frozen(wrapper: Hooked) -> list[Tensor]:
    module = network()
    module[2].requires_grad_(False)
    return train(wrapper.wrap(module))


def joined(wrapper: Hooked) -> list[Tensor]:
    ddp = wrapper.wrap(network(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join():
        for step in range(2 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            ddp(batch(step)).square().sum().backward()
            optimizer.step()
    return values(ddp)


def two_modules(wrapper: Hooked) -> list[Tensor]:
    modules = [wrapper.wrap(network(), bucket_cap_mb=cap) for cap in (0.002, 25)]
    optimizers = [optimizer_of(module) for module in modules]
    for step in range(STEPS):
        sum(module(batch(step)).square().sum() for module in modules).backward()  # in one backward
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        modules[step % 2](batch(step)).square().sum().backward()  # and in one each
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()
    return values(*modules)


CASES: dict[str, Case] = {
    "plain": with_options(),
    "gradients as bucket views": with_options(gradient_as_bucket_view=True),
    "small buckets": with_options(bucket_cap_mb=0.001),
    "small buckets as views": with_options(bucket_cap_mb=0.001, gradient_as_bucket_view=True),
    "static graph": with_options(static_graph=True, gradient_as_bucket_view=True),
    "unused parameters": unused_parameters,
    "accumulated": accumulated,
    "bf16": of_dtype(torch.bfloat16),
    "fp16": of_dtype(torch.float16),
    "fp64": of_dtype(torch.float64),
    "mixed dtypes": mixed_dtypes,
    "sparse embedding": sparse_embedding,
    "frozen": frozen,
    "clipped in place": clipped,
    "join": joined,
    "two modules": two_modules,
}
if HAS_BATCHED_COPY:
    CASES["batched copy"] = with_options(batched_grad_copy=True)
    CASES["batched copy to views"] = with_options(batched_grad_copy=True, gradient_as_bucket_view=True)


def compare_all(names: list[str], algorithms: list[str], exact: bool, shared: bool) -> None:
    if not shared:
        node_mesh.supported = lambda: "refused for a test"
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


EVERYDAY = ["plain", "small buckets as views", "unused parameters", "accumulated", "sparse embedding"]


OTHERS = [name for name in CASES if name not in EVERYDAY]


@pytest.mark.parametrize(
    ("names", "algorithms"),
    [
        pytest.param(EVERYDAY, ["native", "shared_memory", "hierarchical"], id="everyday"),
        pytest.param(OTHERS, ["shared_memory"], marks=pytest.mark.slow, id="others"),
        pytest.param(OTHERS, ["native", "hierarchical"], marks=pytest.mark.exhaustive, id="others, other algorithms"),
    ],
)
def test_two_ranks_train_bit_by_bit_as_with_stock_ddp(names: list[str], algorithms: list[str]) -> None:
    run_ranks(compare_all, 2, names, algorithms, True, True)


@pytest.mark.slow
def test_two_nodes_of_one_rank_train_bit_by_bit_as_with_stock_ddp() -> None:
    names = ["gradients as bucket views", "small buckets", "join", "mixed dtypes"]
    run_ranks(compare_all, 2, names, ["hierarchical", "balanced"], True, True, node_ids=["a", "b"])


ON_TWO_NODES = ["small buckets as views", "unused parameters", "accumulated", "join", "two modules"]


EACH = ["hierarchical", "balanced"]


@pytest.mark.parametrize(
    ("names", "algorithms", "shared"),
    [
        pytest.param(ON_TWO_NODES[:1], EACH, True, id="everyday"),
        pytest.param(ON_TWO_NODES[1:], ["hierarchical"], True, marks=pytest.mark.slow, id="others"),
        pytest.param(ON_TWO_NODES[:1], EACH, False, marks=pytest.mark.slow, id="without shared memory"),
        pytest.param(ON_TWO_NODES[1:], EACH, True, marks=pytest.mark.exhaustive, id="others, each alone"),
        pytest.param(ON_TWO_NODES[1:], EACH, False, marks=pytest.mark.exhaustive, id="others without shared memory"),
    ],
)
def test_two_nodes_of_two_ranks_train_as_with_stock_ddp(names: list[str], algorithms: list[str], shared: bool) -> None:
    run_ranks(compare_all, 4, names, algorithms, False, shared, node_ids=list("abab"))


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


@pytest.mark.parametrize("algorithm", ["shared_memory", "hierarchical", "balanced"])
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


class Lost:
    """An algorithm whose exchange fails, before it returns or after."""

    name = "lost"

    def __init__(self, late: bool) -> None:
        self.late = late

    def all_reduce(self, tensor: Tensor, layout: object) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        error = RankFailedError(1, "rank 1 is gone")
        if self.late:
            threading.Timer(0.05, future.set_exception, [error]).start()
        else:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


def lose(late: bool) -> str:
    with hooked("native") as wrapper:
        ddp = wrapper.wrap(network())
        wrapper.synchronizers[0]._algorithm = Lost(late)
        try:
            ddp(batch(0)).square().sum().backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("late", [False, True])
def test_an_exchange_that_fails_makes_backward_fail(late: bool) -> None:
    (message,) = run_ranks(lose, 1, late)
    assert "RankFailedError: rank 1 is gone" in message
    if not late:
        assert message == "RankFailedError: rank 1 is gone"


# ---- compression ----

SHAPES = [(24, 20), (7,), (30, 20), (40,)]
METHODS = {
    "bf16": Compression("bf16"),
    "int8": Compression("int8", block_size=16),
    "powersgd": Compression("powersgd", rank=2),
}


def given_gradients(numel: int, step: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_gradients(numel: int, step: int) -> Tensor:
    return sum(given_gradients(numel, step, rank) for rank in range(dist.get_world_size())) / dist.get_world_size()


def flat(state: dict[str, Tensor], module: Given) -> Tensor:
    return torch.cat([state[name] for name, _ in module.named_parameters()])


def compress_steps(method: str, algorithm: str, scope: str, shared: bool = True) -> dict[str, dict[str, Tensor]]:
    """Take steps with known gradients; nothing is lost, also where DDP cuts the buckets anew after the first."""
    if not shared:
        node_mesh.supported = lambda: "refused for a test"
    options = METHODS[method]
    compression = Compression(options.method, scope=scope, block_size=options.block_size, rank=options.rank)
    module = Given(*SHAPES)
    with hooked(algorithm, compression) as wrapper:
        ddp = wrapper.wrap(module, bucket_cap_mb=0.002)
        sent = arrived = torch.zeros(module.numel)
        for step in range(5):
            ddp.zero_grad()
            ddp(given_gradients(module.numel, step, dist.get_rank())).backward()
            sent = sent + mean_gradients(module.numel, step)
            arrived = arrived + module.gradient()
        state = wrapper.synchronizers[0].state_dict()
        left = flat(state["error_feedback"], module)
        exact = algorithm == "balanced" or method != "bf16"
        assert (arrived - sent).abs().max() > 1e-4
        torch.testing.assert_close(arrived + left, sent, rtol=0, atol=1e-5 if exact else 0.05)
        return state


@pytest.mark.parametrize(
    ("method", "algorithm", "scope", "nodes"),
    [
        ("bf16", "hierarchical", "inter_node", "ab"),
        pytest.param("bf16", "balanced", "inter_node", "aabb", marks=pytest.mark.exhaustive),
        ("int8", "hierarchical", "inter_node", "abab"),
        ("int8", "native", "all", "aa"),
        ("int8", "balanced", "inter_node", "abb"),
        ("powersgd", "hierarchical", "inter_node", "aabb"),
        ("powersgd", "native", "all", "aaa"),
    ],
)
def test_nothing_is_lost_over_steps_and_new_buckets(method: str, algorithm: str, scope: str, nodes: str) -> None:
    first, *others = run_ranks(compress_steps, len(nodes), method, algorithm, scope, node_ids=list(nodes))
    for other in others:  # the state is the same on all ranks
        for key in first:
            assert list(first[key]) == list(other[key])
            assert all(torch.equal(first[key][name], other[key][name]) for name in first[key])


def continue_from(state: dict[str, dict[str, Tensor]], method: str, algorithm: str, shared: bool) -> None:
    """Send zeros: what arrives, and what is still left, is what was restored."""
    if not shared:
        node_mesh.supported = lambda: "refused for a test"
    module = Given(*SHAPES)
    with hooked(algorithm, METHODS[method]) as wrapper:
        ddp = wrapper.wrap(module, bucket_cap_mb=0.002)
        synchronizer = wrapper.synchronizers[0]
        synchronizer.load_state_dict(state)
        restored = flat(state["error_feedback"], module)
        assert torch.equal(flat(synchronizer.state_dict()["error_feedback"], module), restored)
        arrived = torch.zeros(module.numel)
        for _ in range(4):
            ddp.zero_grad()
            ddp(torch.zeros(module.numel)).backward()
            arrived += module.gradient()
            left = flat(synchronizer.state_dict()["error_feedback"], module)
            torch.testing.assert_close(arrived + left, restored, rtol=0, atol=1e-5)
        assert arrived.abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "before", "after", "shared"),
    [
        pytest.param("int8", "ab", "aabb", True, marks=pytest.mark.exhaustive),
        pytest.param("int8", "aabb", "ab", True, marks=pytest.mark.exhaustive),
        ("int8", "ab", "abb", False),
        ("int8", "aabb", "abcd", True),
        pytest.param("powersgd", "ab", "aabb", True, marks=pytest.mark.exhaustive),
        ("powersgd", "aabb", "ab", True),
    ],
)
def test_what_is_remembered_survives_another_number_of_ranks(
    method: str, before: str, after: str, shared: bool
) -> None:
    state = run_ranks(compress_steps, len(before), method, "balanced", "inter_node", node_ids=list(before))[0]
    run_ranks(continue_from, len(after), state, method, "balanced", shared, node_ids=list(after))


def load_foreign() -> tuple[str, dict[str, Any]]:
    with hooked("balanced", METHODS["int8"]) as wrapper:
        wrapper.wrap(Given(*SHAPES))
        synchronizer = wrapper.synchronizers[0]
        foreign = {"error_feedback": {"parameters_list.1": torch.zeros(8)}}
        message = message_of(ValueError, lambda: synchronizer.load_state_dict(foreign))
        synchronizer.load_state_dict({})
        unknown = {"error_feedback": {"other": torch.zeros(8)}}
        assert "'other'" in message_of(ValueError, lambda: synchronizer.load_state_dict(unknown))
        return message, synchronizer.state_dict()


def test_the_state_of_another_model_is_refused() -> None:
    for message, state in run_ranks(load_foreign, 2, node_ids=["a", "b"]):
        assert "compression state for 'parameters_list.1' has 8 elements, the parameter has 7" in message
        assert all(value.abs().max() == 0 for value in state["error_feedback"].values())


def state_without_compression() -> dict[str, Any]:
    with hooked("native") as wrapper:
        wrapper.wrap(network())
        return wrapper.synchronizers[0].state_dict()


def test_without_compression_there_is_nothing_to_save() -> None:
    assert run_ranks(state_without_compression, 2) == [{}, {}]
