"""Two nodes for real: network namespaces, torchrun in each, ``Trainer(strategy="smddp", num_nodes=2)``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multinode import namespaces
from tests.multinode.train import GLOBAL_BATCH, train

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(180)]


def test_two_nodes_of_two_ranks_train_as_one_process(tmp_path):
    output = tmp_path / "result"
    with namespaces.two_nodes() as nodes:
        started = []
        for index, node in enumerate(nodes):
            torchrun = [
                *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
                *(f"--node-rank={index}", f"--master-addr={nodes[0].address}", "--master-port=29511"),
                str(Path(__file__).with_name("train.py")),
                str(output),
            ]
            environment = {**node.environment(), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
            started.append(
                subprocess.Popen(
                    node.command(*torchrun),
                    env={**environment, "PYTHONPATH": os.getcwd()},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            logs = [process.communicate(timeout=120)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(logs)
    assert "2 (" in logs[0]  # the table at the start of fit
    assert "nodes" in logs[0]
    results = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(4)]
    assert len({result["checksum"] for result in results}) == 1

    _, alone = train("auto", devices=1, num_nodes=1, local_batch=GLOBAL_BATCH)
    assert results[0]["losses"] == pytest.approx(alone.losses, rel=1e-5)
    # Between two nodes an exact exchange sends each node's gradients once each way, in as many flows as ranks.
    if results[0]["intra_node_bytes"]:
        assert results[0]["inter_node_bytes"] <= 4 * results[0]["gradient_bytes"]
