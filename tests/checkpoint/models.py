"""Checkpoints and a model for the tests of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.checkpoint.contents import bytes_needed, dump_of
from lightning_smddp.checkpoint.locations import write_checkpoint


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


def save(path: Path | str, step: int = 1, **options: Any) -> dict[str, Any]:
    checkpoint = example(step)
    write_checkpoint(dump_of(checkpoint), path, bytes_needed(checkpoint), **options)
    return checkpoint


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected
