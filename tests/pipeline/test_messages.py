"""What one stage sends to the next: small tensors share a message, and arrive as tensors of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.runtime.messages import layout_of

CPU = torch.device("cpu")


def arrived(tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """What a receiver has of ``tensors``, and in how many messages they came."""
    layout = layout_of(tuple(TensorSpec.of(tensor) for tensor in tensors))
    sent = layout.send(tensors)
    messages, received = layout.receive(CPU)
    for message, data in zip(messages, sent, strict=True):
        message.copy_(data)
    return received, len(sent)


def test_tensors_arrive_as_they_were_sent() -> None:
    tensors = [
        torch.randn(3, 5).t(),
        torch.tensor([True, False, True]),
        torch.randn(200, 200),  # 160 KB: a message of its own
        torch.empty(0, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.arange(4, dtype=torch.int8),
    ]
    received, messages = arrived(tensors)
    assert messages == 2
    for tensor, copy in zip(tensors, received, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor.resolve_conj())


def test_a_single_small_tensor_is_its_own_message() -> None:
    tensor = torch.randn(4)
    layout = layout_of((TensorSpec.of(tensor),))
    assert layout.send([tensor]) == [tensor]
    assert layout_of(()).send([]) == []
    assert arrived([torch.empty(0), torch.empty(0)])[1] == 0


def test_a_received_tensor_is_changed_in_place_apart_from_those_beside_it() -> None:
    (first, second), messages = arrived([torch.ones(3), torch.ones(3)])
    assert messages == 1
    product = first.requires_grad_() * second  # keeps `second` for its backward
    first.detach().add_(1)
    product.sum().backward()
    assert first.grad is not None
    assert first.grad.tolist() == [1, 1, 1]
    assert second.tolist() == [1, 1, 1]
