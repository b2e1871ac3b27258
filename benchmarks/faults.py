"""What becomes of a job when a rank fails or the job is told to stop: ours beside Lightning's DDPStrategy.

Every case is a real job on this machine, with the same faults and timeouts for all strategies: of two ranks, or of two
nodes (namespaces) with two ranks each. The last section is what all the watching costs while nothing happens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parent.parent))  # the jobs are those of the tests

import fault_cost
from common import Record, parser, table, target

from lightning_smddp.checkpoint import files
from lightning_smddp.checkpoint.files import CheckpointError
from tests.faults import memory
from tests.faults.case import Case
from tests.faults.injection import MESSAGE, Fault
from tests.faults.jobs import Result, run, temporary_directory
from tests.multinode.namespaces import two_nodes
from tests.ranks import run_trainer_ranks

OURS = ["smddp", "smddp_pipeline"]
ARMS = [*OURS, "ddp"]
TIMEOUT_S = 5.0  # of collectives, where a rank falls silent
LIMIT_S = 20.0
STEP_MS = 1e3 * fault_cost.STEP_S


@dataclass(frozen=True)
class Row:
    """A line of the table: a case, and the words (a regular expression) by which a message would name its cause."""

    name: str
    case: Case
    cause: str = ""
    stops: bool = False
    arms: tuple[str, ...] = tuple(ARMS)


def row(name: str, kind: str, rank: int = 1, phase: str = "forward", cause: str = "", **options: Any) -> Row:
    stops = options.pop("stops", False)
    arms = options.pop("arms", tuple(ARMS))
    return Row(name, Case([Fault(rank, 5, kind, phase)], **options), cause or "SIGKILL|its process ended", stops, arms)


def node_row(name: str, kind: str, cause: str, **options: Any) -> Row:
    """Two nodes of two ranks; the second one's last rank is hit after the first heartbeats."""
    case = Case([Fault(3, 12, kind, "forward")], world_size=4, nodes=2, step_s=0.1, **options)
    return Row(f"two nodes: {name}", case, cause)


SAVES = {"save_every": 3}
STOPS = {"stops": True, "save_every": 1000}
ROWS = [
    row("kill -9 rank 1", "kill"),
    row("kill -9 rank 0", "kill", 0, "comm"),
    row("kill -9 rank 0, rank 1 busy for 25 s", "kill", 0, "data", asleep={1: 25.0}, deeply=True),
    row("kill -9 rank 0, DataLoader workers", "kill", 0, workers=2),
    row("kill -9 rank 1, spawn", "kill", launcher="spawn"),
    row("kill -9 rank 1, torchrun", "kill", launcher="torchrun"),
    row("kill -9 the launcher, spawn, nohup", "launcher", 1, cause="launcher", launcher="spawn", ignores_sigint=True,
        steps=4000),
    row("kill -9 the agent, torchrun", "launcher", 1, cause="launcher", launcher="torchrun", steps=4000),
    row("kill -9 rank 0 while it saves", "kill", 0, "save", **SAVES),
    row("exception", "raise", cause=MESSAGE),
    row("exception, `save_on_exception`", "raise", cause=MESSAGE, saves_on_exception=True, **SAVES),
    row("exception, torchrun", "raise", 0, "optimizer", cause=MESSAGE, launcher="torchrun"),
    row("exception, spawn", "raise", 0, "backward", cause=MESSAGE, launcher="spawn"),
    row("MemoryError", "oom", cause="emory"),
    row("killed by the kernel for lack of memory", "oom_kill", cause="OOM|its process ended"),
    row("segmentation fault", "segv", cause="SIGSEGV|its process ended"),
    row("sys.exit(0)", "sysexit", cause="sys.exit|SystemExit"),
    row("os._exit(0)", "exit", cause="exited|its process ended"),
    row("disk full while saving", "full", 0, "save", cause="File too large", **SAVES),
    row("SIGSTOP", "stop", cause="stopped|did not come", timeout=TIMEOUT_S),
    row("SIGSTOP, timeouts of 60 s", "stop", cause="stopped"),
    row("SIGSTOP, torchrun", "stop", cause="stopped|did not come", timeout=TIMEOUT_S, launcher="torchrun"),
    row("hang in Python", "hang", 0, cause="did not come", timeout=TIMEOUT_S),
    row("NaN on one rank", "nan", 1, "backward", cause="not finite", steps=100),
    Row(
        "rank 0 has 10 batches fewer",
        Case([Fault(0, 9, "none", "forward")], batches=[10, 20], stream=True,
             trainer={"use_distributed_sampler": False}, timeout=TIMEOUT_S),
        "batches",
        arms=("smddp", "ddp"),
    ),
    row("SIGTERM to the script", "term", **STOPS),
    row("SIGTERM, spawn", "term", launcher="spawn", **STOPS),
    row("SIGTERM, torchrun", "term", launcher="torchrun", **STOPS),
    row("Ctrl+C", "int_group", **STOPS),
    Row(
        "SIGTERM while rank 1 hangs",
        Case([Fault(1, 5, "hang", "forward", timed=False), Fault(0, 5, "term", "data")], save_every=3,
             options={"stop_grace": 8.0}),
        stops=True,
    ),
    node_row("kill -9 rank 3", "kill", "SIGKILL|its process ended"),
    node_row("exception", "raise", MESSAGE),
    node_row("all of a node dies", "node", "its host is down"),
    node_row("the network is cut", "cut", "network between the hosts is cut", timeout=TIMEOUT_S),
    node_row("SIGSTOP", "stop", "stopped", timeout=TIMEOUT_S),
]  # fmt: skip
QUICK = {"kill -9 rank 1", "exception", "SIGSTOP", "SIGTERM to the script"}


def _last_line(error: str) -> str:
    """Of a traceback what was raised, without this machine's paths."""
    return re.sub(r"'?/\S+/(?=\S)", "", error.strip().splitlines()[-1]) if error.strip() else ""


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--real", action="store_true", help="start new interpreters instead of forking warm ones")
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument("--steps", type=int, default=600, help="for the cost of watching; 0: leave it out")
    args = options.parse_args()
    rows = [row for row in ROWS if args.only in row.name and (not args.quick or row.name in QUICK)]
    args.steps = min(args.steps, 100) if args.quick else args.steps
    record = Record("faults", "Faults and stops", args, "Nothing can end before the fault is noticed: 0 s.")
    record.data["cases"] = {}
    lines = []
    for one in rows:
        if reason := _refused(one):
            print(f"{one.name}: left out, {reason}", file=sys.stderr, flush=True)
            continue
        results = {arm: _measure(one, arm, args.real) for arm in one.arms}
        record.data["cases"][one.name] = results
        lines.append([one.name, *(_cell(one, results.get(arm)) for arm in ARMS)])
        print(f"{one.name}: {', '.join(map(str, lines[-1][1:]))}", file=sys.stderr, flush=True)
    if lines:
        record.section("Ends", table(["fault", *ARMS], lines), _legend(args.real))
    if args.steps:
        _cost(record, args.steps)
    record.finish()


def _refused(one: Row) -> str | None:
    """Why this machine cannot run it, or None."""
    if one.case.faults[0].kind == "oom_kill":
        return memory.no_cgroups()
    if one.case.nodes > 1:
        try:
            with two_nodes():
                return None
        except (OSError, subprocess.CalledProcessError) as error:
            return f"network namespaces are not permitted: {error}"
    return None


def _measure(one: Row, arm: str, real: bool) -> dict[str, Any]:
    options = {} if arm == "ddp" else one.case.options
    case = replace(one.case, strategy=arm, real=real, options=options)
    with temporary_directory() as directory:
        result = run(case, Path(directory), LIMIT_S)
        return {
            "seconds": result.seconds,
            "cut_off": result.cut_off,
            "code": result.code,
            "named": _names(one, result),
            "saved": _is_saved(result),
            "survivors_raised": result.raised,
            "errors": {rank: _last_line(text) for rank, text in result.errors.items()},
        }


def _names(one: Row, result: Result) -> bool:
    """Whether what the user sees names the rank that failed, and why: in one line, or in the launcher's report."""
    fault, devices = one.case.faults[0], one.case.devices
    hit = {fault.rank}
    if fault.kind in ("node", "cut"):
        hit = {rank for rank in range(one.case.world_size) if rank // devices == fault.rank // devices}
    said = [*map(result.said_by, range(result.case.world_size)), result.main_stderr, result.output]
    lines = [line for text in said for line in text.splitlines()]
    if one.case.launcher != "script":
        lines += [" ".join(result.main_stderr.split()), " ".join(result.output.split())]
    who = "" if one.cause == "launcher" else rf"\b([Rr]ank\s*:?\s*|[Pp]rocess )({'|'.join(map(str, hit))})\b"
    return any(re.search(who, line) and re.search(one.cause, line) for line in lines)


def _is_saved(result: Result) -> bool:
    """Whether there is a checkpoint, and the newest one is valid."""
    if not result.checkpoints:
        return False
    try:
        files.load(result.checkpoints[-1])
    except (CheckpointError, OSError):
        return False
    return True


def _cell(one: Row, seen: dict[str, Any] | None) -> str:
    if seen is None:
        return "-"
    if seen["cut_off"]:
        return f"> {LIMIT_S:.0f} s"
    seconds = "-" if seen["seconds"] is None else f"{seen['seconds']:.1f} s"
    if one.stops:
        return f"{seconds}, exit {seen['code']}, {'saved' if seen['saved'] else 'NOT saved'}"
    if seen["code"] == 0:
        return "not noticed, exit 0"
    return f"{seconds}, exit {seen['code']}, {'named' if seen['named'] else 'not named'}"


def _legend(real: bool) -> str:
    ranks = "new interpreters" if real else "forked from a process that has imported torch and Lightning"
    return (
        "*Seconds* are from the fault until the last process of the job has gone; `>`: some still ran then, and were "
        "killed. *Exit* is the code of the first process: the script, the parent of spawned ranks, or torchrun; "
        "negative for a signal. *Named*: a line, or the launcher's report, says which rank failed and why. *Saved*: a "
        f"valid checkpoint is there. Collectives time out after {TIMEOUT_S:.0f} s where a rank falls silent, "
        f"else after 60 s, in all columns. Ranks are {ranks}; without another word, Lightning's script launcher starts "
        "them."
    )


def _cost(record: Record, steps: int) -> None:
    rows, targets = [], []
    for strategy in OURS:
        ranks = run_trainer_ranks(fault_cost.rank_main, 2, strategy, steps, timeout=300.0)
        record.data[f"cost of {strategy}"] = ranks
        for rank, seen in enumerate(ranks):
            wall, cpu, share = seen["wall_ms"], seen["cpu_ms"], seen["thread_share"]
            numbers = [wall["off"], wall["on"], cpu["off"], cpu["on"]]
            rows.append([f"{strategy}, rank {rank}", *numbers, f"{100 * share:.3f} %"])
            percent = 100 * max(wall["on"] - wall["off"], 0.0) / (STEP_MS + wall["off"]) + 100 * share
            targets.append(target(f"{strategy}, rank {rank}: of a {STEP_MS:.0f} ms step", percent, 1.0, False, " %"))
    costs = fault_cost.call_costs()
    record.data["calls_us"] = costs
    record.section(
        "What watching costs",
        table(["", "off ms", "on ms", "CPU off ms", "CPU on ms", "watching thread, of a CPU"], rows),
        f"Medians over {steps} steps that sleep {STEP_MS:.0f} ms and then train a model with 8 MB of gradients; on and "
        f"off take turns every {fault_cost.BLOCK} steps of one run. *On* is supervision and the look for NaN, *CPU* "
        "that of the training thread. Alone: "
        + ", ".join(f"{name} {value:.2f} us" for name, value in costs.items()) + ".",
        "\n".join(targets),
    )  # fmt: skip


if __name__ == "__main__":
    main()
