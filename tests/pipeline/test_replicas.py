"""Gradients of one stage are averaged over the replicas; several such groups live side by side in one world."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_smddp.communication.compression import Compression
from lightning_smddp.pipeline.state.replicas import ReplicaGradients, assign_buckets
from tests.communication.errors import message_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")
WIDTH, MICROBATCHES = 12, 3
SMALL = 0.0006  # MiB: a bucket for each weight matrix, the biases in between


def stage(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def batch(replica: int, microbatch: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * replica + microbatch))


def backward(model: nn.Module, replica: int, microbatches: int = MICROBATCHES) -> None:
    for microbatch in range(microbatches):
        model(batch(replica, microbatch)).square().mean().backward()


def passes(model: nn.Module, times: int = MICROBATCHES) -> dict[str, int]:
    """Backward passes that reach each parameter."""
    return {name: times for name, _ in model.named_parameters()}


def mean_gradients(replicas: int, **options: Any) -> list[Tensor]:
    """Of :func:`stage`: by one process."""
    model = stage(**options)
    for replica in range(replicas):
        backward(model, replica)
    return [parameter.grad / replicas for parameter in model.parameters()]


@contextmanager
def averaging(model: nn.Module, group: dist.ProcessGroup | None = None, **options: Any) -> Iterator[ReplicaGradients]:
    options = {"algorithm": "native", "bucket_cap_mb": SMALL, **options}
    named = dict(model.named_parameters())
    replicas = ReplicaGradients(named, group or dist.group.WORLD, CPU, timedelta(seconds=20), **options)
    yield replicas
    replicas.close()


def run_step(model: nn.Module, replicas: ReplicaGradients, microbatches: int = MICROBATCHES) -> None:
    replicas.begin(passes(model, microbatches))
    backward(model, dist.get_rank(), microbatches)
    replicas.finish()


def assert_close(model: nn.Module, expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)


def test_buckets_are_filled_in_the_order_of_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    model[0].weight.data = model[0].weight.data.t()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    buckets = assign_buckets(list(model.parameters()), cap_bytes=90)
    contents = [[names[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]
    assert contents == [
        ["2.bias", "2.weight"],
        ["1.bias"],
        ["1.weight"],  # 128 bytes: alone
        ["0.bias", "0.weight"],
    ]
    assert [bucket.index() for bucket in buckets] == [0, 1, 2, 3]
    assert [bucket.is_last() for bucket in buckets] == [False, False, False, True]
    for bucket in buckets:
        bucket.begin(keep=False)
    assert model[0].weight.grad.stride() == model[0].weight.stride() == (1, 4)
    assert sum(bucket.buffer().numel() for bucket in buckets) == 60


def steps() -> None:
    for check in (
        starts_during_backward,
        accumulated,
        unused,
        thawed,
        thawed_as_complex,
        too_many_backwards,
        hooks_of_users_come_first,
    ):
        check()


def starts_during_backward() -> None:
    model, launched = stage(), []
    with averaging(model, algorithm="shared_memory") as replicas:
        average = replicas.synchronizer.average

        def record(bucket: Any) -> Any:
            launched.append((bucket.index(), threading.current_thread() is threading.main_thread()))
            return average(bucket)

        replicas.synchronizer.average = record
        replicas.begin(passes(model))
        backward(model, dist.get_rank(), MICROBATCHES - 1)
        assert launched == []
        model(batch(dist.get_rank(), MICROBATCHES - 1)).square().mean().backward()
        assert len(replicas._pending) == len(replicas.buckets) > 2
        replicas.finish()
        assert launched == [(index, False) for index in range(len(replicas.buckets))]
        assert_close(model, mean_gradients(2))


def accumulated() -> None:
    """Whether the last batch is known before its backward or only then."""
    for known in (True, False):
        model = stage()
        with averaging(model) as replicas:
            for index in range(3):
                replicas.begin(passes(model) if known and index == 2 else {}, keep=index > 0)
                backward(model, dist.get_rank())
                replicas.finish(average=index == 2)
                if index == 0:
                    alone = stage()
                    backward(alone, dist.get_rank())
                    assert_close(model, [parameter.grad for parameter in alone.parameters()])
            assert_close(model, [3 * gradient for gradient in mean_gradients(2)])


def unused() -> None:
    """Layer 0 is used nowhere, layer 1 by replica 0 alone; the other one's buckets are full late."""
    rank = dist.get_rank()
    for cap in (SMALL, 1.0):
        model = stage()
        with averaging(model, algorithm="shared_memory", bucket_cap_mb=cap) as replicas:
            replicas.begin(passes(model))
            for microbatch in range(MICROBATCHES):
                value = model[2](batch(rank, microbatch))
                (model[1](value) if rank == 0 else value).sum().backward()
            replicas.finish()
            assert model[0].weight.grad is None
            torch.testing.assert_close(model[1].bias.grad, torch.full((WIDTH,), 0.5 * 4 * MICROBATCHES))
            assert model[2].bias.grad is not None


def thawed_as_complex() -> None:
    """What cannot be rounded is refused then, too: its imaginary part would be lost."""
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64)})
    model["b"].requires_grad_(False)
    with averaging(model, compression=Compression("bf16", scope="all")) as replicas:
        model["b"].requires_grad_(True)
        assert "'b' is of torch.complex64" in message_of(ValueError, lambda: replicas.begin(passes(model)))


def thawed() -> None:
    model = stage()
    model[0].requires_grad_(False)
    with averaging(model) as replicas:
        run_step(model, replicas)
        assert model[0].weight.grad is None
        torch.testing.assert_close(model[2].weight.grad, mean_gradients(2)[4])
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
        model[1].zero_grad()
        run_step(model, replicas)
        assert model[1].weight.grad is None
        torch.testing.assert_close(model[0].weight.grad, mean_gradients(2)[0])


def too_many_backwards() -> None:
    """A reentrant checkpoint used twice: twice as many backward passes reach its parameters."""
    layer = stage()[:1]

    def twice() -> None:
        value = batch(0, 0).requires_grad_()
        for _ in range(2):
            value = checkpoint(layer, value, use_reentrant=True)
        value.sum().backward()

    with averaging(layer) as replicas:
        replicas.begin(passes(layer, 1))
        message = message_of(RuntimeError, twice)
        assert (
            "More was added to a gradient of shape (12,), whose average over the replicas may be under way" in message
        )
        replicas.begin(passes(layer, 2))  # all is well with the right number
        twice()
        replicas.finish()
        assert layer[0].weight.grad is not None


def hooks_of_users_come_first() -> None:
    """Also those that were registered later, and those that set another tensor: what they make of it is averaged."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    model, alone = stage(), stage()
    for replica in range(2):
        backward(alone, replica, 1)
    expected = [0.5 * 0.5 * parameter.grad for parameter in alone.parameters()]
    with averaging(model, algorithm="shared_memory") as replicas:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        run_step(model, replicas, 1)
        assert_close(model, expected)


def test_steps_of_all_kinds() -> None:
    run_ranks(steps, 2)
