"""What the host knows of tensors that it has copied to a (simulated) device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_smddp.pipeline.partition.loss_weights import LossWeight
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.same_batch import UnknownValuesError, fingerprint
from lightning_smddp.pipeline.runtime.host_values import HostValues
from tests.ranks import run_ranks
from tests.simulated_cuda.synchronisations import counted

pytestmark = pytest.mark.simulated_cuda

DEVICE = "cuda:0"


def moved(values: HostValues, *tensors: Tensor) -> list[Tensor]:
    with values.noted():
        return [tensor.to(DEVICE) for tensor in tensors]


def views(there: Tensor) -> dict[str, Tensor]:
    return {
        "all": there,
        "some rows": there[1:3],
        "one column": there[:, 1],
        "every second": there[::2, 1:],
        "turned": there.t(),
        "detached": there.detach(),
        "no rows": there[2:2],
    }


def find_views() -> None:
    values = HostValues()
    whole = torch.arange(24.0).view(6, 4)
    for here in (whole, whole.t(), whole[1:5, :]):
        (there,) = moved(values, here)
        for name, view in views(there).items():
            with counted() as counts:
                known = values.of(view)
            assert known is not None, name
            assert known.device.type == "cpu"
            assert torch.equal(known, view.cpu()), name
            assert counts.total() == 0, name


def lose_what_changes() -> None:
    values = HostValues()
    changes: dict[str, Callable[[Tensor, Tensor], object]] = {
        "there": lambda here, there: there.add_(1),
        "a view there": lambda here, there: there[0].zero_(),
        "here": lambda here, there: here.add_(1),
    }
    for name, change in changes.items():
        here = torch.ones(4, 3)
        (there,) = moved(values, here)
        change(here, there)
        assert values.of(there[1:]) is None, name
    (there,) = moved(values, torch.ones(4, 3))
    assert values.of(there + 1) is None
    assert values.of(there.view(torch.int32)) is None
    assert values.of(there.double()) is None
    with values.noted():
        changed = torch.ones(4).to(DEVICE)
        changed.data.mul_(2)  # which no counter sees
        other_type = torch.ones(4).to(DEVICE, torch.float16)
    assert values.of(changed) is None
    assert values.of(other_type) is None
    assert values.of(there) is None  # of an earlier batch
    with torch.inference_mode():
        (uncounted,) = moved(values, torch.ones(4))
    assert values.of(uncounted) is None


def compare_batches() -> None:
    values = HostValues()
    here = {"inputs": torch.rand(5, 3), "labels": torch.tensor([1, -100, 2, 0, -100])}
    there = dict(zip(here, moved(values, *here.values()), strict=True))
    with counted() as counts:
        assert fingerprint(there, values.of) == fingerprint(here)
        parts = [MicroBatch({k: v[rows] for k, v in there.items()}, 2, 0.5) for rows in (slice(0, 3), slice(3, 5))]
        weighted = LossWeight("labels", ("labels",)).apply(parts, values.of)
    assert counts.total() == 0
    assert [part.weight for part in weighted] == [2 / 3, 1 / 3]
    there["inputs"] = there["inputs"] + 0
    with pytest.raises(UnknownValuesError):
        fingerprint(there, values.of)


@pytest.mark.parametrize("body", [find_views, lose_what_changes, compare_batches])
def test_on_a_device(body: Callable[[], None]) -> None:
    run_ranks(body, 1, backend="nccl")
