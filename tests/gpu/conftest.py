"""Writes a page of results, to be pasted somewhere: `make gpu` names the file."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

PAGE = "LIGHTNING_SMDDP_GPU_PAGE"  # where to write it; without, nothing is written
PACKAGES = ("lightning-smddp", "torch", "lightning")
MOST_LINES = 12  # of a failure


class Page:
    """Collects the results of this folder's tests."""

    def __init__(self) -> None:
        self.reports: dict[str, pytest.TestReport] = {}
        self.began = time.time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("tests/gpu/")[2]
        if name and (report.when == "call" or not report.passed):
            self.reports[name] = report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.reports:
            path = Path(os.environ[PAGE])
            path.write_text(self.text(path.name))

    def text(self, title: str) -> str:
        """The page, as Markdown."""
        counts = Counter(report.outcome for report in self.reports.values())
        result = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        lines = [f"# lightning-smddp: {title}", "", *table([("", ""), *self.about()])]
        lines += ["", f"**{result}**, in {time.time() - self.began:.0f} s.", ""]
        numbers = [(name, str(value)) for report in self.reports.values() for name, value in report.user_properties]
        if numbers:
            lines += ["## Step times", "", *table([("median", "value"), *numbers]), ""]
        lines += ["## Items", "", *table([("test", "result", "s"), *map(row, self.reports.items())]), ""]
        for name, report in self.reports.items():
            if report.failed:
                said = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                lines += [f"### {name}", "", "```", *said[-MOST_LINES:], "```", ""]
        return "\n".join(lines)

    def about(self) -> list[tuple[str, str]]:
        """What it was run on. Tests on simulated devices say so, whatever the machine has."""
        gpus = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        devices = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
        if any("simulated" in name and not report.skipped for name, report in self.reports.items()):
            devices = "**simulated** (host memory; not a GPU: no times, no kernels of CUDA)"
        elif torch.version.cuda is not None:
            devices += f"; CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        versions = [(found.name, found.version) for found in distributions() if found.name in PACKAGES]
        host = f"{platform.platform()}, {os.cpu_count()} processors"
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return [("devices", devices), ("host", host), *versions, ("date", date)]


def row(item: tuple[str, pytest.TestReport]) -> tuple[str, ...]:
    name, report = item
    reason = f": {report.longrepr[2].removeprefix('Skipped: ')}" if isinstance(report.longrepr, tuple) else ""
    return name, report.outcome + reason, f"{report.duration:.1f}"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of Markdown; the first row is the head."""
    head, *rest = [[cell.replace("|", "\\|").replace("\n", " ") for cell in cells] for cells in rows]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rest)]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(PAGE):
        config.pluginmanager.register(Page(), "page of results")
