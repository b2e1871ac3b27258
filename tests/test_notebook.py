"""The notebook runs from its first cell to its last, and shows what it promises."""

import re
from pathlib import Path

import pytest

from tests.programs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_notebook_trains_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat, _ = map(pytest.importorskip, ("nbclient", "nbformat", "matplotlib"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # forks of a process that has computed on two threads
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # else one that waits for the other takes a processor, too
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.execute(notebook, cwd=str(tmp_path), timeout=120)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [kind for output in outputs for kind in output.get("data", {}) if kind.startswith("image/")]
    assert drawn == ["image/svg+xml", "image/png"]
    rows = re.findall(r"^(\w.*?) +loss (\S+) -> (\S+), accuracy (\S+), (\S+) apart$", outputs[-1].text, re.MULTILINE)
    assert [row[0] for row in rows] == ["one device", "smddp", "smddp_pipeline"]
    for _, first, last, accuracy, _ in rows:
        assert float(last) < 0.2 * float(first)
        assert float(accuracy) > 0.9
    assert float(rows[2][4]) < 1e-4
