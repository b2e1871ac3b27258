"""Prints the requests that the example scripts make the installed SageMaker SDK build, without a network.

``python tests/sagemaker/sdk_requests.py sdk2`` (or ``sdk3``), in an environment that has the SDK; neither torch nor the
package is needed. ``--write`` replaces the recorded ones, in ``fixtures``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

HERE = Path(__file__).resolve().parent
ROLE, BUCKET, REGION = "arn:aws:iam::111122223333:role/Training", "my-bucket", "us-east-1"
JOB = "lightning-smddp-job"


def offline_session() -> Any:
    """A boto session that knows its region, and answers everything else with nothing."""
    import boto3

    session = boto3.Session(region_name=REGION, aws_access_key_id="none", aws_secret_access_key="none")
    session.client = MagicMock(name="client")  # type: ignore[method-assign]
    session.resource = MagicMock(name="resource")  # type: ignore[method-assign]
    return session


def of_sdk2(mode: str, folder: str) -> dict[str, Any]:
    import sagemaker
    import sdk2

    client = MagicMock(name="sagemaker")
    session = sagemaker.Session(offline_session(), sagemaker_client=client, default_bucket=BUCKET)
    job = sdk2.estimator(mode, folder, ROLE, BUCKET, sagemaker_session=session)
    job.fit({"train": sdk2.TrainingInput(f"s3://{BUCKET}/text")}, wait=False, job_name=JOB)
    return dict(client.create_training_job.call_args.kwargs)


def of_sdk3(mode: str, folder: str) -> dict[str, Any]:
    import sdk3
    from sagemaker.core.helper.session_helper import Session

    session = Session(offline_session(), sagemaker_client=MagicMock(), default_bucket=BUCKET)
    job = sdk3.trainer(mode, folder, ROLE, BUCKET, sagemaker_session=session)
    with patch.object(Session, "upload_data", lambda self, *args, **kwargs: f"s3://{BUCKET}/uploaded"):
        request = job._create_training_job_args(
            input_data_config=[sdk3.InputData(channel_name="train", data_source=f"s3://{BUCKET}/text")], boto3=True
        )
    files = Path(job._temp_code_dir.name)
    request["distributed.json"] = json.loads((files / "distributed.json").read_text())
    request["TrainingJobName"] = JOB
    return dict(request)


def without_chance(request: dict[str, Any]) -> dict[str, Any]:
    """What of a request says how the job runs: no time stamps, no defaults that vary."""
    kept = (
        "TrainingJobName", "AlgorithmSpecification", "HyperParameters", "ResourceConfig", "StoppingCondition",
        "CheckpointConfig", "EnableManagedSpotTraining", "distributed.json", "InputDataConfig",
    )  # fmt: skip
    return json.loads(json.dumps({name: request[name] for name in kept if name in request}, default=str))


def main() -> None:
    os.environ |= {"AWS_DEFAULT_REGION": REGION, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    os.environ["SAGEMAKER_VALIDATE_ROLE"] = "false"
    import requests

    requests.Session.request = MagicMock()  # type: ignore[method-assign]  # of the SDKs' telemetry
    sys.path.insert(0, str(HERE.parent.parent / "examples" / "sagemaker"))
    from source import stage

    sdk = sys.argv[1]
    modes, make = {"sdk2": (("dp", "pipeline", "smp"), of_sdk2), "sdk3": (("dp", "pipeline"), of_sdk3)}[sdk]
    found = {}
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:
            found[mode] = without_chance(make(mode, stage(folder)))
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if "--write" in sys.argv:
        (HERE / "fixtures" / f"{sdk}.json").write_text(text)
    print("requests:" + json.dumps(found))


if __name__ == "__main__":
    main()
