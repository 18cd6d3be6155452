"""The CPU kernels, built with the system's C++ compiler when the package is installed; all else is in pyproject.toml.

Plain C ABI, no headers of Python or torch. Without a compiler, or where it fails, the install goes on, and
`_cpu_build.txt` beside the library's place says why: `asp doctor` shows it, and the dense product serves.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "kernels/csrc/cpu"
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-DNDEBUG", "-fvisibility=default"]
_LEVELS = {  # each instruction set in a unit of its own; which one runs is chosen on the machine that runs it
    "main": [],
    "generic": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
        "-Wno-maybe-uninitialized",
    ],
}


def compile_cpu(out: Path, temporary: Path) -> None:
    """Build the library `out`; objects go to `temporary`.

    Raises:
        RuntimeError: no compiler, or what it said.
    """
    wanted = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if wanted is None:
        raise RuntimeError("no C++ compiler found (c++, g++, clang++, or the environment variable CXX)")
    compiler = shlex.split(wanted)
    intel = platform.machine().lower() in ("x86_64", "amd64")
    temporary.mkdir(parents=True, exist_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    objects = {name: str(temporary / f"{name}.o") for name in _LEVELS}
    commands = [
        [*compiler, *_FLAGS, *(flags if intel else []), "-c", f"{SOURCES}/{name}.cpp", "-o", objects[name]]
        for name, flags in _LEVELS.items()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    new = out.with_name(out.name + ".part")
    _run([*compiler, "-shared", "-pthread", *objects.values(), "-o", str(new)])
    os.replace(new, out)  # a process that has the old library loaded keeps it


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{shlex.join(command)}\n{error.stderr.strip()[-2000:]}") from error


class BuildCpu(build_ext):
    """Compiles the one extension by `compile_cpu`; a failure is written down, never raised."""

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name))
        places = {out.parent, Path("kernels/asp_kernels")} if self.editable_mode or self.inplace else {out.parent}
        for place in places:
            (place / "_cpu_build.txt").unlink(missing_ok=True)
        try:
            compile_cpu(out, Path(self.build_temp))
        except (RuntimeError, OSError) as error:
            out.unlink(missing_ok=True)
            print(f"the CPU kernels were not built: {error}")
            for place in places:
                place.mkdir(parents=True, exist_ok=True)
                (place / "_cpu_build.txt").write_text(f"{error}\n", encoding="utf-8")


setup(
    ext_modules=[Extension("asp_kernels._cpu", sources=[f"{SOURCES}/main.cpp"], optional=True)],
    cmdclass={"build_ext": BuildCpu},
)
