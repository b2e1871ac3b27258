"""What a training thread that has an error of its own leaves behind in the interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.programs import run_program

PROFILED = """
import cProfile
from lightning_smddp.supervision.shutdown import Shutdown

def function():
    return "profiled"

ending = Shutdown(None, lambda: "here", lambda: False)
ending.take_over()
profile = cProfile.Profile()
profile.enable()
result = function()
profile.disable()
print(result, ending.is_handled)
"""


def test_taking_over_leaves_no_error_that_never_comes(tmp_path: Path) -> None:
    (tmp_path / "profiled.py").write_text(PROFILED)
    result = run_program(["profiled.py"], tmp_path, timeout=30)
    assert result.stdout == "profiled True\n", result.stderr
