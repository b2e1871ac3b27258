"""What a running SageMaker job says of its distribution: the environment, as the ``distribution`` dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SIGNS = ("SM_FRAMEWORK_PARAMS", "SM_DISTRIBUTED_CONFIG", "SM_HP_MP_PARAMETERS", "SM_TRAINING_ENV", "SM_CURRENT_HOST")
_FLAGS = {  # of the toolkit, in SM_FRAMEWORK_PARAMS
    "sagemaker_mpi_enabled": "mpi",
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    "sagemaker_torch_distributed_enabled": "torch_distributed",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
    "sagemaker_multi_worker_mirrored_strategy_enabled": "multi_worker_mirrored_strategy",
}


def is_job(environ: Mapping[str, str]) -> bool:
    """Whether this looks like a SageMaker training job."""
    return any(environ.get(name) for name in _SIGNS)


def distribution_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """The ``distribution`` that the job was started with, as far as its environment tells.

    SDK 2's toolkit says it in SM_FRAMEWORK_PARAMS, SDK 3 in SM_DISTRIBUTED_CONFIG; model parallelism is in
    SM_HP_MP_PARAMETERS under both.

    Raises:
        ValueError: this is no SageMaker job, or a variable is not JSON.
    """
    if not is_job(environ):
        raise ValueError(
            "This is no SageMaker job (none of SM_FRAMEWORK_PARAMS, SM_DISTRIBUTED_CONFIG, SM_HP_MP_PARAMETERS is "
            "set), so there is nothing to read. Give the dictionary: from_sagemaker({'smdistributed': ...})."
        )
    model_parallel = _json(environ, "SM_HP_MP_PARAMETERS")
    modern = _json(environ, "SM_DISTRIBUTED_CONFIG")
    if modern:
        return modern if modern.get("smp") or not model_parallel else {**modern, "smp": model_parallel}
    flags = _json(environ, "SM_FRAMEWORK_PARAMS")
    found: dict[str, Any] = {name: {"enabled": True} for flag, name in _FLAGS.items() if flags.get(flag)}
    smdistributed: dict[str, Any] = {}
    if flags.get("sagemaker_distributed_dataparallel_enabled"):
        smdistributed["dataparallel"] = {"enabled": True}
    if model_parallel:
        smdistributed["modelparallel"] = {"enabled": True, "parameters": model_parallel}
    return {**found, "smdistributed": smdistributed} if smdistributed else found


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
