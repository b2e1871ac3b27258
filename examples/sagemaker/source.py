"""The folder that a job gets: train.py, requirements.txt and, as it is here, the package."""

import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker"


def stage(folder: str | Path) -> str:
    """Fill ``folder``; returns it."""
    for name in ("train.py", "requirements.txt"):
        shutil.copy(HERE / name, folder)
    shutil.copytree(
        HERE.parent.parent / "lightning_smddp",
        Path(folder, "lightning_smddp"),
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return str(folder)
