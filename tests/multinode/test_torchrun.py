"""Jobs of torchrun on several nodes: data parallelism and a pipeline, as one process trains. Nodes and ranks die."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.faults.nodes import PORT, Nodes
from tests.multinode import job
from tests.multinode.namespaces import Node, nodes_at_a_switch
from tests.rank_processes import forked, kill_session

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(180)]
LIMIT_S = 60.0
# Without this variable a torchrun that joins a c10d job later waits for a port that was told in the first round only,
# and the agents' store outlives ranks, whose restarts agents count in different ways.
REPLACEABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# How soon torchrun takes a node that is gone for gone: 2 s instead of 15 s.
RENDEZVOUS, GONE_S = "keep_alive_interval=1,keep_alive_max_attempt=2", 3.0


@dataclass
class Job:
    """One process for each node, which ends with torchrun's code."""

    where: Path
    nodes: Sequence[Node]
    rendezvous: str
    devices: int
    accident: str
    agents: dict[int, ForkServerProcess] = field(default_factory=dict)

    def start(self, index: int) -> None:
        """Start torchrun on node ``index``."""
        node, first = self.nodes[index], self.nodes[0].address
        if self.rendezvous == "static":
            meeting = [f"--node-rank={index}", f"--master-addr={first}", f"--master-port={PORT}"]
        else:
            meeting = ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={first}:{PORT}"]
            # As no name server knows these nodes.
            meeting += [f"--local-addr={node.address}", f"--rdzv-conf={RENDEZVOUS},is_host={int(index == 0)}"]
        size = [f"--nnodes={len(self.nodes)}", f"--nproc-per-node={self.devices}", "--max-restarts=1"]
        program = ["-m", "tests.multinode.job", str(self.where), str(self.devices), str(len(self.nodes))]
        command = ["python", "-m", "torch.distributed.run", *size, *meeting, *program]
        environment = {name: text for name, text in node.environment().items() if not name.startswith("PYTEST")}
        environment[job.ACCIDENT] = self.accident
        if self.accident != job.NONE:
            environment |= REPLACEABLE
        self.agents[index] = forked(Nodes(self.nodes, self.where).be_apart, index, command, environment)

    def wait(self) -> list[int | None]:
        """Until all have ended; their exit codes."""
        deadline = time.monotonic() + LIMIT_S
        for agent in self.agents.values():
            agent.join(max(0.0, deadline - time.monotonic()))
        return [agent.exitcode for _, agent in sorted(self.agents.items())]

    def wait_for_accident(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (self.where / "accident").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self, index: int) -> None:
        """The whole node: torchrun, ranks, all."""
        kill_session(self.agents.pop(index))

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.where.glob("output-*")))


@contextmanager
def started(where: Path, nodes: int, devices: int, rendezvous: str, accident: str = job.NONE) -> Iterator[Job]:
    with nodes_at_a_switch(nodes) as places:
        one = Job(where, places, rendezvous, devices, accident)
        try:
            for index in range(nodes):
                one.start(index)
            yield one
        finally:
            for index in list(one.agents):
                one.kill(index)


OTHER = pytest.mark.exhaustive


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=OTHER)])
def test_a_rank_is_killed_and_the_job_goes_on(rendezvous: str, tmp_path: Path) -> None:
    with started(tmp_path, 2, 2, rendezvous, accident="kill:3:smddp:5") as one:
        codes = one.wait()
    assert codes == [0, 0], one.output
    job.check(tmp_path, 2, 2, "torchrun", one.output)
    assert re.search("its process ended|killed by SIGKILL", one.output)
    assert "the run goes on from" in one.output
    assert "2 (" in one.output  # nodes, in the table at the start of fit


@pytest.mark.parametrize(
    ("rendezvous", "devices"),
    [("c10d", 1), pytest.param("c10d", 2, marks=OTHER), pytest.param("static", 2, marks=OTHER)],
)
def test_a_node_is_killed_and_the_job_goes_on(rendezvous: str, devices: int, tmp_path: Path) -> None:
    with started(tmp_path, 2, devices, rendezvous, accident=f"wait:{2 * devices - 1}:smddp_pipeline:5") as one:
        one.wait_for_accident()
        one.kill(1)
        time.sleep(GONE_S)  # its torchrun will have the same process id, by which c10d would take it for the old one
        one.start(1)
        codes = one.wait()
    assert codes == [0, 0], one.output
    job.check(tmp_path, devices, 2, "torchrun", one.output)
    assert "the run goes on from" in one.output
