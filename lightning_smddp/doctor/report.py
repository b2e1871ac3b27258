"""An examination as text for people, and as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_smddp.doctor.findings import Finding
from lightning_smddp.wording import counted

_WIDTH = 16


def as_json(facts: Mapping[str, Any], measured: Mapping[str, Any] | None, findings: Sequence[Finding]) -> str:
    """One object: ``facts``, ``measured`` (or null), ``findings``."""
    return json.dumps({"facts": facts, "measured": measured, "findings": [asdict(f) for f in findings]}, indent=2)


def as_text(facts: Mapping[str, Any], measured: Mapping[str, Any] | None, findings: Sequence[Finding]) -> str:
    """A page for people: what was seen, what was measured, and what is wrong, each with its cure."""
    lines = [f"lightning-smddp doctor, on host {facts['host']}", *_facts(facts)]
    if measured is not None:
        lines += ["", *_measured(measured)]
    return "\n".join([*lines, "", *_findings(findings)])


def _facts(facts: Mapping[str, Any]) -> list[str]:
    versions, network, memory = facts["versions"], facts["network"], facts["shared_memory"]
    processors, accelerators, launch = facts["processors"], facts["accelerators"], facts["launch"]
    interfaces = [f"{name} ({', '.join(found) or 'no address'})" for name, found in network["interfaces"].items()]
    line, will_set, shared = "unclear", [], "none"
    if launch:
        line = launch["line"]
        will_set = [f"{name}={value}" for name, value in launch.get("will_set", {}).items()]
    if memory:
        shared = f"{memory['free'] / 2**30:.1f} of {memory['size'] / 2**30:.1f} GiB free"
    rows = [
        ("launcher", line),
        ("will be set", ", ".join(will_set)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("backends", ", ".join(name for name, there in facts["backends"].items() if there)),
        ("GPUs", ", ".join(accelerators["gpus"]) or "none"),
        ("interfaces", ", ".join(interfaces)),
        ("/dev/shm", shared),
        ("processors", f"{processors['usable']}, {processors['threads_of_a_rank']} threads in this process"),
    ]
    return [f"  {name:<{_WIDTH}}{value}" for name, value in rows if value]


def _measured(measured: Mapping[str, Any]) -> list[str]:
    nodes = measured["nodes"]
    ranks = counted(measured["world_size"], "rank")
    lines = [f"measured with {ranks} on {counted(len(nodes), 'node')}, {measured['device']}"]
    lines.append(f"  {'all-reduce':<{_WIDTH}}" + "".join(f"{_bytes(size):>12}" for size in measured["sizes"]))
    for name, seconds in measured["all_reduce"].items():
        lines.append(f"    {name:<{_WIDTH - 2}}" + "".join(f"{_time(value):>12}" for value in seconds))
    for link in measured["links"]:
        speed = f"{_time(link['latency_us'] / 1e6)}, {link['gigabytes_per_s']:.2f} GB/s"
        lines.append(f"  {'link':<{_WIDTH}}to rank {link['rank']} (host {link['host']}): {speed}")
    for what, problem in measured.get("paths", {}).items():
        lines.append(f"  {'self-test':<{_WIDTH}}{what}: {problem or 'right'}")
    for link in measured.get("neighbours", []):
        speed = f"{_time(link['latency_us'] / 1e6)}, {link['gigabytes_per_s']:.2f} GB/s"
        lines.append(f"  {'neighbours':<{_WIDTH}}ranks {link['ranks'][0]} and {link['ranks'][1]}: {speed}")
    return [*lines, f"  {'memory':<{_WIDTH}}{measured['memory_gb_s']:.1f} GB/s copied by a rank"]


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["Nothing wrong was found."]
    lines = []
    for finding in findings:
        where = ""
        if finding.hosts:
            where = f" [{', '.join(finding.hosts)}]"
        lines += [f"{finding.level.upper()}{where}: {finding.what}", f"    {finding.cure}"]
    return lines


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms"
