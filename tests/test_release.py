"""What workflows and templates name is there, and the version is the same in both places."""

import re

import yaml

import lightning_smddp
from tests.programs import ROOT


def test_workflows_templates_and_version() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = {line.split()[1] for line in lines if "matrix.target" not in line}
    named |= set(jobs["check"]["strategy"]["matrix"]["target"])
    assert named == {"lint", "types", "docs", "test", "dist"}
    assert named <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    assert "lightning-smddp doctor" in form["body"][-1]["attributes"]["label"]
    assert ".ci/run" in (ROOT / ".github" / "pull_request_template.md").read_text()
    assert f'\nversion = "{lightning_smddp.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
