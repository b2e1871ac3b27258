"""Codecs, the exchanges that use them, and the memory of what they lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.compression import CastCodec, Codec, Compression, ErrorFeedback, Int8Codec
from lightning_smddp.communication.inter_node import BalancedExchange, InterNodeReduce, RingExchange
from tests.ranks import run_in_threads

LARGEST_HALF = 65504.0


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, tensor: Tensor) -> Tensor:
    before = tensor.clone()
    result = codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype)
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())  # the input is not changed
    return result


# ---- options ----


def test_a_name_a_mapping_an_object_or_nothing_is_parsed() -> None:
    assert Compression.parse(None) is None
    assert Compression.parse("int8") == Compression("int8")
    assert Compression.parse({"method": "powersgd", "rank": 2}) == Compression("powersgd", rank=2)
    assert Compression.parse(Compression("bf16")) == Compression("bf16")


def test_python_names_an_argument_that_is_wrong_or_missing() -> None:
    with pytest.raises(TypeError, match="'block'"):
        Compression.parse({"method": "int8", "block": 2})
    with pytest.raises(TypeError, match="'method'"):
        Compression.parse({"rank": 2})


# ---- codecs ----


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_int8_is_within_half_a_step_of_each_block(scale: float) -> None:
    blocks = normal(10, 64) * scale * torch.logspace(-3, 3, 10)[:, None]
    error = (round_trip(Int8Codec(64), blocks.flatten()).view(10, 64) - blocks).abs().amax(1)
    half_step = blocks.abs().amax(1) / 127 / 2
    assert torch.all(error <= half_step * (1 + 1e-5))
    assert torch.all(error >= half_step * 0.8)  # nor is it better than it can be


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_int8_spoils_only_the_block_that_is_not_finite(bad: float) -> None:
    tensor = torch.ones(12)
    tensor[5] = bad
    result = round_trip(Int8Codec(4), tensor)
    assert not result[4:8].isfinite().any()
    torch.testing.assert_close(torch.cat([result[:4], result[8:]]), torch.ones(8))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_casts_are_within_half_a_unit_in_the_last_place(dtype: torch.dtype, bits: int) -> None:
    values = normal(10000)
    values = values[values.abs() > 1e-3]
    error = ((round_trip(CastCodec(dtype), values) - values) / values).abs().max().item()
    assert 2.0 ** -(bits + 1) < error <= 2.0**-bits


def test_fp16_keeps_what_is_finite_finite_and_what_is_not_visible() -> None:
    values = torch.tensor([1e6, -1e6, 65519.9, float("inf"), float("-inf"), float("nan"), 1.0])
    result = round_trip(CastCodec(torch.float16), values)
    assert result[:3].tolist() == [LARGEST_HALF, -LARGEST_HALF, LARGEST_HALF]
    assert result[3:5].tolist() == [float("inf"), float("-inf")]
    assert result[5].isnan()
    assert result[6] == 1.0


# ---- exchanges ----

Make = Callable[[dist.ProcessGroup, ErrorFeedback | None], InterNodeReduce]
EXCHANGES: dict[str, Make] = {
    "ring bf16": lambda group, feedback: RingExchange(group, CastCodec(torch.bfloat16), feedback),
    "ring fp16": lambda group, feedback: RingExchange(group, CastCodec(torch.float16), feedback),
    "balanced bf16": lambda group, feedback: BalancedExchange(group, group, CastCodec(torch.bfloat16), feedback),
    "balanced fp16": lambda group, feedback: BalancedExchange(group, group, CastCodec(torch.float16), feedback),
    "balanced int8": lambda group, feedback: BalancedExchange(group, group, Int8Codec(16), feedback),
}
NUMEL = 487


def exchange_steps(group: dist.ProcessGroup, name: str, inputs: list[list[Tensor]]) -> tuple[list[Tensor], Tensor]:
    """What arrived in each step of ``inputs[step][rank]``, and what this rank remembers."""
    feedback = ErrorFeedback()
    exchange = EXCHANGES[name](group, feedback)
    arrived = []
    for step in inputs:
        shard = step[group.rank()].clone()
        feedback.begin(0, [1])
        exchange.start(shard, 0)()
        arrived.append(shard)
    return arrived, feedback._residuals[0]


def random_inputs(members: int, steps: int) -> list[list[Tensor]]:
    return [[normal(NUMEL, seed=10 * step + rank) for rank in range(members)] for step in range(steps)]


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
def test_members_receive_the_same_sum_and_nothing_is_lost_over_steps(name: str, members: int) -> None:
    inputs = random_inputs(members, 6)
    results = run_in_threads(exchange_steps, members, name, inputs)
    for arrived, _ in results:
        assert all(torch.equal(step, first) for step, first in zip(arrived, results[0][0], strict=True))
    torch.testing.assert_close(results[0][0][0], sum(inputs[0]), rtol=0, atol=0.1)
    if name.startswith("balanced"):  # a ring rounds on its way, too
        sent, arrived, left = sum(sum(step) for step in inputs), sum(results[0][0]), sum(kept for _, kept in results)
        assert (arrived - sent).abs().max() > 1e-3  # something was held back
        torch.testing.assert_close(arrived + left, sent, rtol=1e-5, atol=2e-5)


def encode_nothing(group: dist.ProcessGroup, dtype: torch.dtype) -> list[Tensor]:
    found = []
    for name in ("ring bf16", "balanced bf16"):
        feedback = ErrorFeedback()
        exchange = EXCHANGES[name](group, feedback)
        shard = normal(100, seed=group.rank()).to(dtype)
        exchange.start(shard, 0)()
        assert feedback._residuals == {}
        found.append(shard)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_not_encoded_in_16_bits(dtype: torch.dtype) -> None:
    first, second = (normal(100, seed=rank).to(dtype) for rank in range(2))
    for results in run_in_threads(encode_nothing, 2, dtype):
        for result in results:
            assert torch.equal(result, first + second)


INFINITE_AT = 33


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_inf_is_seen_by_all_and_gone_in_the_next_step(name: str) -> None:
    inputs = random_inputs(2, 4)
    inputs[1][1][INFINITE_AT] = float("inf")
    for (_, spoiled, *after), residual in run_in_threads(exchange_steps, 2, name, inputs):
        assert not spoiled[INFINITE_AT].isfinite()
        assert all(step.isfinite().all() for step in after)
        assert residual.isfinite().all()


# ---- the memory itself ----


def test_what_is_remembered_belongs_to_the_parameters_of_a_bucket() -> None:
    feedback, lost = ErrorFeedback(), torch.tensor([2.0, float("inf"), 3.0])
    for parameters, expected in (([1, 2], [0, 0, 0]), ([1, 2], [2, 0, 3]), ([2, 1], [0, 0, 0]), ([2, 1], [2, 0, 3])):
        shard = torch.zeros(3)
        feedback.begin(0, parameters)
        feedback.add_to(shard, 0)
        assert shard.tolist() == expected, parameters
        feedback.remember(lost, torch.zeros(3), 0)
