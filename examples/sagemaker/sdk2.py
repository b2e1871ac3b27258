# python examples/sagemaker/sdk2.py --role arn:aws:iam::111122223333:role/Training --train s3://my-bucket/text
"""Start train.py on SageMaker with version 2 of its SDK (``pip install "sagemaker<3"``).

``--mode dp`` is data parallelism, ``pipeline`` a pipeline, ``smp`` a pipeline from parameters of SageMaker's model
parallel library, as old projects have them.
"""

import tempfile
from typing import Any

from sagemaker.inputs import TrainingInput
from sagemaker.pytorch import PyTorch
from source import IMAGE, parse, stage

TORCHRUN = {"torch_distributed": {"enabled": True}}
SMP = {
    "smdistributed": {
        "modelparallel": {"enabled": True, "parameters": {"partitions": 2, "microbatches": 8, "ddp": True}}
    },
    "mpi": {"enabled": True, "processes_per_host": 8},
}
MODES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {  # distribution, hyperparameters
    "dp": (TORCHRUN, {"steps": 500}),
    "pipeline": (TORCHRUN, {"steps": 500, "stages": 2, "microbatches": 8}),
    "smp": (SMP, {"steps": 500}),
}


def estimator(mode: str, folder: str, role: str, bucket: str, **more: Any) -> PyTorch:
    """A job of two instances with 8 GPUs each, on spot capacity."""
    distribution, hyperparameters = MODES[mode]
    return PyTorch(
        entry_point="train.py",
        source_dir=folder,
        role=role,
        image_uri=IMAGE,
        instance_count=2,
        instance_type="ml.p4d.24xlarge",
        distribution=distribution,
        hyperparameters=hyperparameters,
        use_spot_instances=True,
        max_run=3600,
        max_wait=7200,
        checkpoint_s3_uri=f"s3://{bucket}/checkpoints",  # copied back at the next start
        output_path=f"s3://{bucket}/models",
        disable_profiler=True,
        **more,
    )


def main() -> None:
    options, bucket = parse(__doc__, MODES)
    with tempfile.TemporaryDirectory() as folder:
        job = estimator(options.mode, stage(folder), options.role, bucket)
        job.fit({"train": TrainingInput(options.train)})


if __name__ == "__main__":
    main()
