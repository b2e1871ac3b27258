"""Messages of stages that have left their course."""

from __future__ import annotations

import pytest
import torch

from lightning_smddp.pipeline.runtime.departures import has_no_meaning, without_meaning
from lightning_smddp.pipeline.runtime.remote import TensorSpec

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_messages_without_meaning_are_known_and_are_nan(dtype: torch.dtype) -> None:
    specs = (TensorSpec.of(torch.zeros(3, 2, dtype=dtype)), TensorSpec.of(torch.ones(4, dtype=torch.int64)))
    sent = without_meaning(specs, CPU)
    assert sent[0].isnan().all()
    assert sent[0].dtype == dtype
    assert not sent[1].any()
    assert has_no_meaning(sent)
    assert has_no_meaning([tensor.clone() for tensor in sent])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_a_step_computes_is_not_taken_for_it(dtype: torch.dtype) -> None:
    """An error that meets zeros, or NaN of a diverged model, is the user's own."""
    zeros = torch.zeros(3, 2, dtype=dtype)
    made = zeros / zeros
    assert made.isnan().all()
    for found in ([zeros], [made], [-made], [zeros.log() * 0], [zeros.bool()], [zeros[:0]], []):
        assert not has_no_meaning(found)
    (sent,) = without_meaning((TensorSpec.of(zeros),), CPU)
    assert not has_no_meaning([sent, made])
