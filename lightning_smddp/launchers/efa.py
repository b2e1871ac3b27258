"""Environment variables for the network of SageMaker's instances, as SageMaker's own launchers set them.

Source: ``SM_EFA_NCCL_INSTANCES`` and ``SM_EFA_RDMA_INSTANCES`` of aws/sagemaker-python-sdk (container drivers) and
aws/sagemaker-training-toolkit, and the instance types that have come since. Without them NCCL falls back to TCP.
"""

from __future__ import annotations

from lightning_smddp.launchers.launch import Launch

_EFA = {
    "ml.g4dn.8xlarge", "ml.g4dn.12xlarge", "ml.g5.48xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge",
    "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge", "ml.p6e-gb200.36xlarge", "ml.trn1.32xlarge",
}  # fmt: skip
_WITHOUT_RDMA = {"ml.g4dn.8xlarge", "ml.g4dn.12xlarge", "ml.g5.48xlarge", "ml.p3dn.24xlarge"}


def network_variables(launch: Launch) -> dict[str, str]:
    """What to set, where it is not set yet, before NCCL or gloo start. Empty elsewhere than on SageMaker."""
    found: dict[str, str] = {}
    if launch.interface:
        found["NCCL_SOCKET_IFNAME"] = found["GLOO_SOCKET_IFNAME"] = launch.interface
    if launch.instance_type in _EFA:
        found |= {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple", "RDMAV_FORK_SAFE": "1"}
        if launch.instance_type not in _WITHOUT_RDMA:
            found["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return found
