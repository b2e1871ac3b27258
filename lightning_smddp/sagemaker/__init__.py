"""Amazon SageMaker's way of asking for distributed training, turned into our strategies."""

from lightning_smddp.sagemaker.distribution import Translation, from_sagemaker, translate

__all__ = ["Translation", "from_sagemaker", "translate"]
