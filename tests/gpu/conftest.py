"""Writes a page of results, to be pasted somewhere: `make gpu` names the file."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

PAGE = "LIGHTNING_SMDDP_GPU_PAGE"  # where to write it; without, nothing is written
PACKAGES = ("lightning-smddp", "torch", "lightning")
MOST_LINES = 12  # of a failure


@dataclass
class Item:
    """A test's result."""

    name: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    numbers: list[tuple[str, object]] = field(default_factory=list)


class Page:
    """Collects the results of this folder's tests."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.began = time.time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "tests/gpu/" not in report.nodeid:
            return
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("tests/gpu/")[1]
        found = Item(name, report.outcome, report.duration, "", list(report.user_properties))
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            found.reason = "\n".join(lines[-MOST_LINES:])
        if report.skipped:
            found.reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if name not in self.items or not report.passed:
            self.items[name] = found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.items:
            path = Path(os.environ[PAGE])
            path.write_text(self.text(path.name))

    def text(self, title: str) -> str:
        """The page, as Markdown."""
        items = list(self.items.values())
        counts = {kind: sum(item.outcome == kind for item in items) for kind in ("passed", "failed", "skipped")}
        lines = ["# lightning-smddp: results on devices", ""]
        lines += table([("", ""), *about(items)])
        result = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines += ["", f"**{result}**, in {time.time() - self.began:.0f} s.", ""]
        numbers = [(name, str(value)) for item in items for name, value in item.numbers]
        if numbers:
            lines += ["## Step times", "", *table([("median", "value"), *numbers]), ""]
        lines += ["## Items", "", *table([("test", "result", "s"), *map(row, items)]), ""]
        for item in items:
            if item.outcome == "failed":
                lines += [f"### {item.name}", "", "```", item.reason, "```", ""]
        return "\n".join(lines)


def row(item: Item) -> tuple[str, ...]:
    result = f"skipped: {item.reason.removeprefix('Skipped: ')}" if item.outcome == "skipped" else item.outcome
    return item.name, result, f"{item.seconds:.1f}"


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of Markdown; the first row is the head."""
    head, *rest = [[cell.replace("|", "\\|").replace("\n", " ") for cell in cells] for cells in rows]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rest)]


def about(items: list[Item]) -> list[tuple[str, str]]:
    """What it was run on. Tests on simulated devices say so, whatever the machine has."""
    simulated = any("simulated" in item.name and item.outcome != "skipped" for item in items)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    if simulated:
        devices = ["**simulated** (host memory; not a GPU: no times, no kernels of CUDA)"]
    rows = [("devices", ", ".join(devices)), ("host", f"{platform.platform()}, {os.cpu_count()} processors")]
    rows += [(name, found) for name in PACKAGES if (found := _version(name)) is not None]
    if torch.version.cuda is not None and not simulated:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        rows.append(("CUDA, NCCL", f"{torch.version.cuda}, {nccl}"))
    return [*rows, ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(PAGE):
        config.pluginmanager.register(Page(), "page of results")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are not kept in the user's cache, and each is measured once."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    cache.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
