"""Compiles ``device.cpp`` at its first use: about a minute, once for each version of it and of torch."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

NAME = "simulated_cuda_device"
SOURCE = Path(__file__).with_name("device.cpp")
SOURCES = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
TIME_LIMIT_S = 900
ROOT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_smddp_tests")


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def problem() -> str | None:
    """Why the device cannot be had here, or None."""
    if torch.version.cuda is not None:
        return f"torch {torch.__version__} is a build with CUDA, whose place the simulated device takes"
    if compiler() is None and not library().exists():
        return f"no C++ compiler ({os.environ.get('CXX', 'c++')}) to build the simulated device with"
    if not Path(sysconfig.get_path("include"), "Python.h").exists() and not library().exists():
        return "no Python.h to build the simulated device with"
    return None


def _command(output: Path) -> list[str]:
    from torch.utils import cpp_extension  # with setuptools, which takes a while

    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    folders = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    defines = [f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    return [str(compiler()), *FLAGS, *defines, *includes, str(SOURCE), *folders, *libraries, "-o", str(output)]


@functools.cache
def library() -> Path:
    """Where the compiled device is, or will be."""
    versions = f"{FLAGS} {torch.__version__} {sysconfig.get_config_var('SOABI')}"
    text = b"".join(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(text + versions.encode()).hexdigest()[:16]
    return ROOT / f"{NAME}-{key}.so"


def build() -> Path:
    """Compile unless that has been done; processes that come meanwhile wait.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    target = library()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(f".{os.getpid()}")
            result = subprocess.run(
                _command(unfinished), capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
            if result.returncode != 0:
                raise RuntimeError(f"the simulated device does not compile:\n{result.stderr[-8000:]}")
            unfinished.replace(target)
    return target


def load(path: str) -> ModuleType:
    """Load the device into this process: from here on torch has one. There is no way back."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
