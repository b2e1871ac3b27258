"""Directories that ``DeepSpeedEngine.save_checkpoint`` writes, as Lightning's ``DeepSpeedStrategy`` has it."""

from __future__ import annotations

import os
from pathlib import Path

_TAG = "checkpoint"  # Lightning's


def is_deepspeeds(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a directory at a local path; what else there may be is for others."""
    return any((Path(path) / _TAG).glob("*_model_states.pt"))
