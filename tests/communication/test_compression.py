"""Codecs, the exchanges that use them, and the memory of what they lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.buckets import Layout
from lightning_smddp.communication.compression import (
    CastCodec,
    Codec,
    Compression,
    ErrorFeedback,
    Int8Codec,
    check_compressible,
)
from lightning_smddp.communication.inter_node import BalancedExchange, InterNodeReduce, RingExchange
from lightning_smddp.communication.powersgd import PowerSGDExchange
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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("zip", r"compression='zip' is unknown. Valid: None, 'bf16', 'fp16', 'int8', 'powersgd'"),
        ({"method": "bf16", "scope": "moon"}, r"scope 'moon' is unknown. Valid: 'inter_node', 'all'"),
        ({"method": "int8", "block_size": 0}, r"block_size=0 and rank=4 have to be at least 1"),
        ({"method": "powersgd", "rank": 0}, r"block_size=256 and rank=0 have to be at least 1"),
    ],
)
def test_wrong_options_are_refused_with_the_valid_ones(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Compression.parse(value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64])
@pytest.mark.parametrize("codec", [CastCodec(torch.bfloat16), Int8Codec(4)], ids=["cast", "int8"])
def test_what_cannot_be_rounded_is_refused_with_the_cure(codec: Codec, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"cannot be compressed.*Set `compression=None`"):
        codec.encode(torch.ones(4, dtype=dtype))
    with pytest.raises(ValueError, match=r"^The gradient of 'w' is of torch"):
        check_compressible(dtype, "The gradient of 'w'")


# ---- codecs ----


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_int8_is_within_half_a_step_of_each_block(scale: float) -> None:
    blocks = normal(10, 64) * scale * torch.logspace(-3, 3, 10)[:, None]
    error = (round_trip(Int8Codec(64), blocks.flatten()).view(10, 64) - blocks).abs().amax(1)
    half_step = blocks.abs().amax(1) / 127 / 2
    assert torch.all(error <= half_step * (1 + 1e-5))
    assert torch.all(error >= half_step * 0.8)  # nor is it better than it can be


def test_int8_keeps_zeros_and_the_largest_values() -> None:
    assert torch.equal(round_trip(Int8Codec(4), torch.zeros(8)), torch.zeros(8))
    block = torch.tensor([127.0, -127.0, 1.0, 0.0])
    assert torch.equal(round_trip(Int8Codec(4), block), block)


def test_int8_does_not_turn_tiny_values_round() -> None:
    block = torch.tensor([2.5e-43, -2.5e-43, 1e-43, 0.0])  # their scale is rounded to the least number there is
    result = round_trip(Int8Codec(4), block)
    assert torch.all(result * block >= 0)
    assert torch.all((result - block).abs() < 1e-43)


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
    "powersgd": lambda group, feedback: PowerSGDExchange(group, group, 2, feedback),
}
BALANCED = [name for name in EXCHANGES if name.startswith("balanced")]
ROWS, COLUMNS = 24, 20


def layout_of_matrix(slot: int = 0) -> Layout:
    return Layout.of_parameters(slot, [("w", torch.empty(ROWS, COLUMNS)), ("b", torch.empty(7))])


def exchange_steps(
    group: dist.ProcessGroup, name: str, inputs: list[list[Tensor]], with_feedback: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What arrived in each step of ``inputs[step][rank]``, and what this rank remembers."""
    feedback = ErrorFeedback() if with_feedback else None
    exchange = EXCHANGES[name](group, feedback)
    layout = layout_of_matrix()
    arrived = []
    for step in inputs:
        shard = step[group.rank()].clone()
        exchange.start(shard, layout)()
        arrived.append(shard)
    numels = {"w": ROWS * COLUMNS, "b": 7}
    return arrived, {} if feedback is None else feedback.totals(numels)


def random_inputs(members: int, steps: int) -> list[list[Tensor]]:
    return [[normal(ROWS * COLUMNS + 7, seed=10 * step + rank) for rank in range(members)] for step in range(steps)]


def total(residuals: list[dict[str, Tensor]]) -> Tensor:
    return sum(torch.cat([one["w"], one["b"]]) for one in residuals)  # type: ignore[return-value]


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
def test_members_receive_the_same_sum_up_to_rounding(name: str, members: int) -> None:
    inputs = random_inputs(members, 1)
    results = run_in_threads(exchange_steps, members, name, inputs, False)
    assert all(torch.equal(results[0][0][0], other[0][0]) for other in results[1:])
    if name != "powersgd":
        torch.testing.assert_close(results[0][0][0], sum(inputs[0]), rtol=0, atol=0.1)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("name", [*BALANCED, "powersgd"])
def test_nothing_is_lost_with_error_feedback(name: str, members: int) -> None:
    inputs = random_inputs(members, 6)
    results = run_in_threads(exchange_steps, members, name, inputs, True)
    sent = sum(sum(step) for step in inputs)
    arrived = sum(results[0][0])
    left = total([residual for _, residual in results])
    assert (arrived - sent).abs().max() > 1e-3  # something was held back
    torch.testing.assert_close(arrived + left, sent, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["ring bf16", "ring fp16"])
def test_nothing_that_the_encoding_loses_is_lost_on_a_ring(name: str) -> None:
    # equal members: the sum of two equal halves is exact, so that the encoding is all that rounds
    inputs = [[normal(ROWS * COLUMNS + 7, seed=step)] * 2 for step in range(6)]
    results = run_in_threads(exchange_steps, 2, name, inputs, True)
    sent = 2 * sum(step[0] for step in inputs)
    left = total([residual for _, residual in results])
    assert (sum(results[0][0]) - sent).abs().max() > 1e-4
    torch.testing.assert_close(sum(results[0][0]) + left, sent, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("ring bf16", 2.0**-9),
        ("ring fp16", 2.0**-12),
        ("balanced bf16", 2.0**-9),
        ("balanced fp16", 2.0**-12),
        ("balanced int8", 0.25),
    ],
)
def test_a_bias_grows_without_error_feedback_and_not_with_it(name: str, offset: float) -> None:
    steps, probe = 64, 5
    tensor = torch.full((ROWS * COLUMNS + 7,), 1 + offset)  # rounded to 1 on the wire
    tensor[::16] = 127.0  # gives the blocks of int8 steps of 1
    inputs = [[tensor] * 2] * steps
    errors = [
        2 * steps * (1 + offset) - sum(run_in_threads(exchange_steps, 2, name, inputs, feedback)[0][0])[probe].item()
        for feedback in (False, True)
    ]
    bias = 2 * steps * offset
    assert errors[0] == pytest.approx(bias)
    assert abs(errors[1]) <= bias / 8


def encode_nothing(group: dist.ProcessGroup, dtype: torch.dtype) -> list[tuple[Tensor, int]]:
    found = []
    for name in ("ring bf16", "balanced bf16"):
        feedback = ErrorFeedback()
        exchange = EXCHANGES[name](group, feedback)
        shard = normal(100, seed=group.rank()).to(dtype)
        exchange.start(shard, Layout.flat(100, 0))()
        assert feedback.totals({"": 100})[""].abs().max() == 0
        found.append((shard, exchange.wire_bytes(100, dtype)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_not_encoded_in_16_bits(dtype: torch.dtype) -> None:
    first, second = (normal(100, seed=rank).to(dtype) for rank in range(2))
    for results in run_in_threads(encode_nothing, 2, dtype):
        for result, size in results:
            assert torch.equal(result, first + second)
            assert size == 200


INFINITE_AT = 33


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_inf_is_seen_by_all_and_gone_in_the_next_step(name: str) -> None:
    inputs = random_inputs(2, 4)
    inputs[1][1][INFINITE_AT] = float("inf")
    for (_, spoiled, *after), residual in run_in_threads(exchange_steps, 2, name, inputs, True):
        assert not spoiled[INFINITE_AT].isfinite()
        assert all(step.isfinite().all() for step in after)
        assert all(part.isfinite().all() for part in residual.values())


def test_powersgd_recovers_fully_from_an_inf() -> None:
    matrix = (normal(ROWS, 2, seed=1) @ normal(2, COLUMNS, seed=2)).flatten()
    good = torch.cat([matrix, normal(7)])
    bad = good.clone()
    bad[INFINITE_AT] = float("inf")
    inputs = [[good, good], [bad, good], [good, good], [good, good]]
    for arrived, _ in run_in_threads(exchange_steps, 2, "powersgd", inputs, False):
        torch.testing.assert_close(arrived[-1], 2 * good, rtol=1e-4, atol=1e-4)


def wire_sizes(group: dist.ProcessGroup) -> dict[str, int]:
    numel = ROWS * COLUMNS + 7
    return {
        **{
            name: make(group, None).wire_bytes(numel, torch.float32, layout_of_matrix())
            for name, make in EXCHANGES.items()
        },
        "ring": RingExchange(group).wire_bytes(numel, torch.float32),
        "balanced": BalancedExchange(group, group).wire_bytes(numel, torch.float64),
    }


def test_bytes_on_the_wire() -> None:
    # 487 elements over 3 members: parts of 163, of 11 blocks of 16 for int8
    assert run_in_threads(wire_sizes, 3)[0] == {
        "ring": int(2 * 487 * 4 * 2 / 3),
        "ring bf16": int(2 * 487 * 2 * 2 / 3),
        "ring fp16": int(2 * 487 * 2 * 2 / 3),
        "balanced": 2 * 163 * 8 * 2,
        "balanced bf16": 2 * 163 * 2 * 2,
        "balanced fp16": 2 * 163 * 2 * 2,
        "balanced int8": 2 * 11 * 20 * 2,
        "powersgd": int(2 * 4 * (2 * (24 + 20) + 7) * 2 / 3),
    }


def exchange_exactly(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> list[Tensor]:
    results = []
    for exchange in (RingExchange(group), BalancedExchange(group, group)):
        shard = (normal(numel, seed=group.rank()) * 10).round().to(dtype)
        exchange.start(shard, Layout.flat(numel, 0))()
        results.append(shard)
    return results


@pytest.mark.parametrize("numel", [1, 2, 3, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_sums_without_a_codec_are_exact(numel: int, dtype: torch.dtype) -> None:
    expected = sum((normal(numel, seed=rank) * 10).round() for rank in range(3)).to(dtype)
    for results in run_in_threads(exchange_exactly, 3, numel, dtype):
        assert all(torch.equal(result, expected) for result in results)


# ---- the memory itself ----


def test_what_is_remembered_is_found_by_parameter_and_restored_in_shares() -> None:
    feedback = ErrorFeedback()
    layout = Layout.of_parameters(0, [("w", torch.empty(3, 4)), ("b", torch.empty(3))])
    shard = layout.cut(6, 14)  # the second half of w and two elements of b
    feedback.add_to(torch.zeros(8), shard)
    feedback.remember(torch.arange(8.0), torch.zeros(8), shard)
    totals = feedback.totals({"w": 12, "b": 3, "unused": 2})
    assert totals["w"].tolist() == [0.0] * 6 + [0, 1, 2, 3, 4, 5]
    assert totals["b"].tolist() == [6, 7, 0]
    assert totals["unused"].tolist() == [0, 0]

    for members in (1, 2, 4):
        parts = [ErrorFeedback() for _ in range(members)]
        for part in parts:
            part.restore(totals, members)
            for low, high in ((0, 5), (5, 15)):  # other shards than before
                piece = layout.cut(low, high)
                zeros = torch.zeros(high - low)
                part.add_to(zeros, Layout(low, piece.pieces))
                assert torch.equal(zeros * members, torch.cat([totals["w"], totals["b"]])[low:high])
        together = [part.totals({"w": 12, "b": 3}) for part in parts]
        assert torch.equal(sum(one["w"] for one in together), totals["w"])


def test_what_was_restored_is_handed_out_once() -> None:
    feedback = ErrorFeedback()
    feedback.restore({"w": torch.ones(4)}, 1)
    feedback.forget_restored()
    shard = torch.zeros(4)
    feedback.add_to(shard, Layout.of_parameters(0, [("w", torch.empty(4))]))
    assert shard.tolist() == [0, 0, 0, 0]


# ---- PowerSGD ----


@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_is_exact_for_vectors_and_for_matrices_of_low_rank(rank: int) -> None:
    left, right = normal(ROWS, rank, seed=1), normal(rank, COLUMNS, seed=2)
    members = [torch.cat([(left @ (right * scale)).flatten(), normal(7, seed=3) * scale]) for scale in (1.0, -3.0)]
    for arrived, residual in run_in_threads(exchange_steps, 2, "powersgd", [members], True):
        torch.testing.assert_close(arrived[0], sum(members), rtol=1e-4, atol=1e-4)
        assert torch.equal(arrived[0][-7:], members[0][-7:] + members[1][-7:])
        assert residual["b"].abs().max() == 0


def test_powersgd_improves_when_it_sees_a_matrix_again() -> None:
    spectrum = torch.diag(0.7 ** torch.arange(COLUMNS))
    matrix = torch.linalg.qr(normal(ROWS, COLUMNS, seed=1))[0] @ spectrum @ torch.linalg.qr(normal(COLUMNS, COLUMNS))[0]
    member = torch.cat([matrix.flatten(), torch.zeros(7)])
    best = torch.linalg.matrix_norm(torch.diag(0.7 ** torch.arange(2, COLUMNS)))
    for arrived, _ in run_in_threads(exchange_steps, 2, "powersgd", [[member / 2] * 2] * 8, False):
        errors = [(step - member).norm().item() for step in arrived]
        assert errors[0] > 1.05 * best
        assert errors[-1] == pytest.approx(best.item(), rel=1e-3)


def which_shrink(group: dist.ProcessGroup) -> list[bool]:
    exchange = PowerSGDExchange(group, group, 2, None)
    layout = Layout.of_parameters(
        0, [("big", torch.empty(24, 20)), ("thin", torch.empty(24, 3)), ("v", torch.empty(9))]
    )
    whole = [exchange._shrinks(piece) for piece in layout.pieces]
    return [*whole, exchange._shrinks(layout.cut(10, 470).pieces[0])]


def test_powersgd_leaves_alone_what_would_hardly_shrink_or_was_cut_within_rows() -> None:
    assert run_in_threads(which_shrink, 1) == [[True, False, False, False]]
