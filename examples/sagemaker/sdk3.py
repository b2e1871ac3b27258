# python examples/sagemaker/sdk3.py --role arn:aws:iam::111122223333:role/Training --train s3://my-bucket/text
"""Start train.py on SageMaker with version 3 of its SDK (``pip install "sagemaker>=3"``).

``--mode dp`` is data parallelism, ``pipeline`` a pipeline.
"""

import tempfile
from typing import Any

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    OutputDataConfig,
    SourceCode,
    StoppingCondition,
)
from sagemaker.train.distributed import Torchrun
from source import IMAGE, parse, stage

MODES: dict[str, dict[str, int]] = {  # hyperparameters
    "dp": {"steps": 500},
    "pipeline": {"steps": 500, "stages": 2, "microbatches": 8},
}


def trainer(mode: str, folder: str, role: str, bucket: str, **more: Any) -> ModelTrainer:
    """A job of two instances with 8 GPUs each, on spot capacity."""
    return ModelTrainer(
        source_code=SourceCode(source_dir=folder, entry_script="train.py", requirements="requirements.txt"),
        distributed=Torchrun(process_count_per_node=8),
        training_image=IMAGE,
        role=role,
        compute=Compute(instance_type="ml.p4d.24xlarge", instance_count=2, enable_managed_spot_training=True),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=3600, max_wait_time_in_seconds=7200),
        checkpoint_config=CheckpointConfig(s3_uri=f"s3://{bucket}/checkpoints", local_path="/opt/ml/checkpoints"),
        output_data_config=OutputDataConfig(s3_output_path=f"s3://{bucket}/models"),
        hyperparameters=dict(MODES[mode]),
        base_job_name="lightning-smddp",
        **more,
    )


def main() -> None:
    options, bucket = parse(__doc__, MODES)
    with tempfile.TemporaryDirectory() as folder:
        job = trainer(options.mode, stage(folder), options.role, bucket)
        job.train([InputData(channel_name="train", data_source=options.train)])


if __name__ == "__main__":
    main()
