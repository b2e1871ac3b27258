"""A LightningCLI's configuration file: the module, the datamodule and the precision that it describes."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_smddp.choice.first_batch import QUIET, UnplannableError

SUFFIXES = (".yaml", ".yml", ".json")
_OF_RUNS = ("ckpt_path", "weights_only")  # arguments of `fit`, which saved configurations have, too
_OPTIONS: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}


def from_config(path: str, model_class: Any = None, datamodule_class: Any = None) -> tuple[Any, Any, Any]:
    """What LightningCLI makes of a file: the module, the datamodule or None, and the Trainer's precision or None.

    The rest of the section ``trainer`` counts for nothing: the batch is looked at on one CPU.

    Args:
        path: of the file, as ``--config`` has it.
        model_class: of a CLI that is made for one class; None for files that have ``class_path``.
        datamodule_class: the same of the data.

    Raises:
        UnplannableError: there is no such file, or it describes no module.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UnplannableError(f"{path} cannot be read as a LightningCLI configuration: {error}") from None
    if model_class is None and "model" not in settings:
        raise UnplannableError(
            f"{path} has no section `model`. Give a file that your LightningCLI takes as --config; if that is made for "
            "one class, name it, too: `lightning-smddp plan package.module:Class --config FILE`, with --datamodule if "
            "it is made for one LightningDataModule."
        )
    # The CLI makes the objects as it would for a run, with a Trainer of ours in place of the file's.
    settings = {key: value for key, value in settings.items() if key not in _OF_RUNS}
    trainer = settings.pop("trainer", None) or {}
    precision = trainer.get("precision")
    package = "lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning"
    cli = import_module(f"{package}.cli").LightningCLI
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # of the command line, which is ours
            made = cli(model_class, datamodule_class, args={**settings, "trainer": QUIET}, **_OPTIONS)
    except SystemExit:
        raise UnplannableError(f"LightningCLI refuses {path}: see above.") from None
    return made.model, made.datamodule, precision
