"""What the scripts that start a job share: its options, and its folder, with the package as it is here."""

import argparse
import shutil
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker"


def parse(description: str | None, modes: Iterable[str]) -> tuple[argparse.Namespace, str]:
    """The options of the command line, and the bucket of ``--train``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mode", choices=list(modes), default="dp")
    parser.add_argument("--role", required=True)
    parser.add_argument("--train", required=True, help="s3://bucket/folder with text files")
    options = parser.parse_args()
    return options, options.train.removeprefix("s3://").partition("/")[0]


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
