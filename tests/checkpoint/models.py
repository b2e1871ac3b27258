"""Checkpoints for the tests of files and directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.checkpoint import files


def example(step: int = 1) -> dict[str, Any]:
    """What a Trainer saves, in short; two names share memory."""
    weight = torch.arange(600.0).view(20, 30) + step
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {"weight": weight, "tied": weight, "bias": torch.full((3,), float(step))},
        "hyper_parameters": {"width": 30, "name": "example"},
    }


def save(path: Path | str, step: int = 1) -> dict[str, Any]:
    checkpoint = example(step)
    files.save(checkpoint, path)
    return checkpoint


def flip(path: Path, place: int | None = None) -> None:
    """One bit, in the middle of a file if not told where."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit; what is read when it is asked for is as good as a dict."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_equal(actual[key], expected[key])
        return
    assert type(actual) is (Tensor if isinstance(expected, Tensor) else type(expected))
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected
