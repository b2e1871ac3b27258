"""Checkpoints for the tests of files and directories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_smddp.checkpoint import files
from tests.pipeline.models import assert_same

DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.float8_e5m2]


def example(step: int = 1) -> dict[str, Any]:
    """What a Trainer saves, with every kind of tensor; two names share memory."""
    weight = torch.arange(600.0).view(20, 30) + step
    kinds = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES}
    adam = {"step": torch.tensor(3.0), "exp_avg": weight / 2, "exp_avg_sq": weight / 3}
    other = {"list": [1, torch.ones(2), (2.5, None)], "dict": {"text": "a", 7: torch.zeros(3)}}
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {
            "weight": weight,
            "tied": weight,
            **kinds,
            "module._extra_state": {"any": "thing"},
            "transposed": weight.t(),
            "part": weight[2:4, 3:5],
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(5),
            "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
            "bias": torch.full((3,), float(step)),
        },
        "loops": {"fit_loop": {"state": [1, 2]}},
        "callbacks": {"ema": {"values": torch.ones(3)}},
        "optimizer_states": [
            {
                "state": {0: adam, 1: other, "not a parameter": 1},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}, {"lr": 0.2, "params": [1]}],
            }
        ],
        "lr_schedulers": [],
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


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit; what is read when it is asked for is as good as a dict."""
    assert_same(_in_dicts(actual), expected)


def _in_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_dicts(item) for key, item in value.items()}
    return [_in_dicts(item) for item in value] if type(value) is list else value
