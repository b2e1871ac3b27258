"""What a running SageMaker job says of its distribution: the environment, as the ``distribution`` dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_smddp.launchers.sagemaker import FLAGS, hyperparameters, is_on, parameters_of, read_job

_SIGNS = ("SM_FRAMEWORK_PARAMS", "SM_DISTRIBUTED_CONFIG", "SM_HP_MP_PARAMETERS", "SM_TRAINING_ENV", "SM_CURRENT_HOST")


def is_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a SageMaker training job, by its files or by its variables."""
    return any(environ.get(name) for name in _SIGNS) or read_job(environ) is not None


def distribution_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """The ``distribution`` that the job was started with, as far as its environment tells.

    SDK 2's toolkit says it in SM_FRAMEWORK_PARAMS, SDK 3 in SM_DISTRIBUTED_CONFIG; model parallelism is in
    SM_HP_MP_PARAMETERS under both. Processes that mpirun gave no variables read the file of hyperparameters.

    Raises:
        ValueError: this is no SageMaker job, or a variable is not JSON.
    """
    if not is_job(environ):
        raise ValueError(
            "This is no SageMaker job (none of SM_FRAMEWORK_PARAMS, SM_DISTRIBUTED_CONFIG, SM_HP_MP_PARAMETERS is "
            "set), so there is nothing to read. Give the dictionary: from_sagemaker({'smdistributed': ...})."
        )
    model_parallel = _json({**_from_file(environ), **environ}, "SM_HP_MP_PARAMETERS")
    modern = _json(environ, "SM_DISTRIBUTED_CONFIG")
    if modern:
        if model_parallel and not modern.get("smp"):
            modern["smp"] = model_parallel
        return modern
    flags = parameters_of(environ)
    found: dict[str, Any] = {name: {"enabled": True} for flag, name in FLAGS.items() if is_on(flags.get(flag))}
    smdistributed: dict[str, Any] = {}
    if found.pop("smdistributed dataparallel", None) is not None:
        smdistributed["dataparallel"] = {"enabled": True}
    if model_parallel:
        smdistributed["modelparallel"] = {"enabled": True, "parameters": model_parallel}
    if smdistributed:
        found["smdistributed"] = smdistributed
    return found


def _from_file(environ: Mapping[str, str]) -> dict[str, str]:
    """``SM_HP_MP_PARAMETERS`` as the toolkit makes it."""
    text = hyperparameters(environ).get("mp_parameters")
    if text is None:
        return {}
    return {"SM_HP_MP_PARAMETERS": text}


def _json(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    """A variable's JSON object; empty if it is not set."""
    text = environ.get(name) or "{}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is not JSON ({error}). SageMaker sets it: do not change it.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name}={text!r} has to be a JSON object. SageMaker sets it: do not change it.")
    return value
