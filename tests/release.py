"""``make dist``: the sources of a release, and its wheel in new environments, as a user gets it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
ROOM = ROOT / "build" / "release"
# What `import torch` calls at its end.
AUTOLOAD = "from importlib.metadata import entry_points as e; e(group='torch.backends')['lightning_smddp'].load()()"


def tracked(*names: str) -> list[str]:
    return subprocess.check_output(["git", "ls-files", *names], cwd=ROOT, text=True).split()


def run(*command: object) -> None:
    """In an empty directory; Python finds what is installed, and nothing else."""
    print("$", *command, flush=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(word) for word in command], cwd=ROOM / "empty", env=variables, check=True)


def copy_sources(repository: str = "") -> None:
    """An index shows README without the files beside it: links become addresses in ``repository``, if given."""
    for name in tracked("lightning_smddp", "pyproject.toml", "README.md", "LICENSE"):
        (ROOM / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, ROOM / "source" / name)
    if not repository:
        return
    settings, readme = ROOM / "source" / "pyproject.toml", ROOM / "source" / "README.md"
    tag = "v" + re.findall(r'^version = "(.*)"', settings.read_text(), re.MULTILINE)[0]
    text = readme.read_text().replace("](#", "](README.md#")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{repository}/raw/{tag}/", text)
    readme.write_text(re.sub(r"(\]\()(?!https?:)", rf"\1{repository}/blob/{tag}/", text))
    pages = {"Source": "", "Issues": "/issues", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
    with settings.open("a") as file:
        file.writelines(["\n[project.urls]\n", *(f'{name} = "{repository}{page}"\n' for name, page in pages.items())])


def try_wheel(wheel: Path, python: str, torch: str) -> None:
    """With that ``torch``, such as ``torch==2.15.0``; "without" tries as much as needs none."""
    place = ROOM / python.strip("/").replace("/", "-")
    run(python, "-m", "venv", place)
    new = place / "bin" / "python"
    if torch == "without":
        run(new, "-m", "pip", "install", "-q", "--no-deps", wheel)
        run(new, "-W", "error", "-m", "compileall", "-q", "-f", *place.glob("lib/*/site-packages/lightning_smddp"))
        run(new, "-W", "error", "-c", AUTOLOAD)
        run(place / "bin" / "lightning-smddp", "--version")
        return
    run(new, "-m", "pip", "install", "-q", wheel, torch)
    program = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    (ROOM / "empty" / "train.py").write_text(program)
    run(new, "train.py")
    run(new, "-c", program.replace('"smddp"', '"smddp_fork"'))  # ranks that are no forks start a script again
    run(place / "bin" / "lightning-smddp", "doctor")
    run(new, "-m", "pip", "install", "-q", "jsonargparse[signatures]", "scikit-learn")
    example, settings = ROOT / "examples" / "cli.py", ROOT / "examples" / "cli.yaml"
    for more in ("--trainer.strategy.bucket_cap_mb=4", "--trainer.strategy=smddp"):
        run(new, example, "fit", "--config", settings, "--trainer.max_epochs=1", more)


if __name__ == "__main__":
    (ROOM / "empty").mkdir(parents=True, exist_ok=True)
    what, *arguments = sys.argv[1:]
    if what == "sources":
        sys.exit(copy_sources(*arguments))
    [built] = (ROOT / "dist").glob("*.whl")
    packed = {name for name in ZipFile(built).namelist() if ".dist-info/" not in name}
    assert packed == set(tracked("lightning_smddp")) >= {"lightning_smddp/py.typed"}
    for one in arguments:
        try_wheel(built, one, torch=what)
