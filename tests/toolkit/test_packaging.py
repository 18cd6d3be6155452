"""What is installed, and that `kernels/` never passes for PyPI's `kernels`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import asp_toolkit

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command, run without our own PYTHONPATH."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=clean)
    assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def bare_venv(folder: Path) -> Path:
    """The python of a new environment that sees the packages of this one, but none that are installed editable."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    here = [path for path in sys.path if path.endswith("site-packages")]
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "outer.pth").write_text("\n".join(here) + "\n")
    return python


def pip_install(python: Path, *what: str | Path, cwd: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", *what, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, since building leaves files behind."""
    out = tmp_path_factory.mktemp("source") / "copy"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "_cpu.*", "_cpu_build.txt")
    for name in ("asp_toolkit", "kernels", "recipes"):
        shutil.copytree(ROOT / name, out / name, ignore=skip)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, out)
    (out / "README.md").write_text("# asp_toolkit\n")
    return out


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source, cwd=out)
    return next(out.glob("asp_toolkit-*.whl"))


TINY_BERT = """
from transformers import BertConfig, BertModel
BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9))
"""

CHECK = """
import json, sys
import asp_kernels, asp_toolkit
from asp_toolkit.recipe import bundled, load
load("quickstart")
print(json.dumps({"toolkit": asp_toolkit.__file__, "kernels": asp_kernels.__file__,
                  "recipes": {name: str(file) for name, file in bundled().items()}}))
"""


ABOUT = "from asp_kernels.backends import cpu; print(cpu.about())"
COMPILED = any(map(shutil.which, ("c++", "g++", "clang++")))
LEVELS = ("generic", "avx2", "avx512", "switched off by ASP_KERNELS_CPU=off")


def test_every_package_is_listed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {"asp_toolkit.recipes"}
    for base, package in ((ROOT, "asp_toolkit"), (ROOT / "kernels", "asp_kernels")):
        for file in (base / package).rglob("*.py"):
            found.add(".".join(file.parent.relative_to(base).parts))
    assert listed == found


def test_wheel_holds_code_recipes_data_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        file.relative_to(base).as_posix()
        for base, package in ((ROOT, "asp_toolkit"), (ROOT / "kernels", "asp_kernels"))
        for file in (base / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("_cpu")
    }
    built = {name for name in names if name.startswith("asp_kernels/_cpu")}
    assert len(built) == 1  # the library, or why there is none
    names -= built
    expected |= {f"asp_toolkit/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")}
    assert names == expected
    assert {"asp_toolkit/py.typed", "asp_kernels/py.typed", "asp_toolkit/recipes/quickstart.yaml"} <= names


def test_wheel_install_works_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    python = bare_venv(tmp_path / "venv")
    pip_install(python, "--no-index", wheel, cwd=tmp_path)
    found = json.loads(run(python, "-c", CHECK, cwd=tmp_path))
    assert all(
        str(tmp_path / "venv") in path for path in (found["toolkit"], found["kernels"], *found["recipes"].values())
    )
    assert not COMPILED or run(python, "-c", ABOUT, cwd=tmp_path).strip() in LEVELS
    assert set(found["recipes"]) == {file.stem for file in (ROOT / "recipes").glob("*.yaml")}
    assert f"asp_toolkit {asp_toolkit.__version__}" in run(tmp_path / "venv/bin/asp", "--version", cwd=tmp_path)


def test_editable_install_reads_the_sources(source: Path, tmp_path: Path) -> None:
    python = bare_venv(tmp_path / "venv")
    pip_install(python, "--no-index", "--editable", source, cwd=tmp_path)
    found = json.loads(run(python, "-c", CHECK, cwd=tmp_path))
    assert found["toolkit"] == str(source / "asp_toolkit" / "__init__.py")
    assert found["kernels"] == str(source / "kernels" / "asp_kernels" / "__init__.py")
    assert found["recipes"]["quickstart"] == str(source / "recipes" / "quickstart.yaml")
    assert "quickstart" in run(tmp_path / "venv/bin/asp", "recipe", "list", cwd=tmp_path)
    assert not COMPILED or run(python, "-c", ABOUT, cwd=tmp_path).strip() in LEVELS


@pytest.mark.parametrize("editable", [False, True])
def test_without_a_compiler_the_install_goes_on_and_the_reason_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool
) -> None:
    copied = tmp_path / "source"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("build", "*.egg-info", "_cpu*"))
    python = bare_venv(tmp_path / "venv")
    monkeypatch.setenv("CXX", "no-such-compiler")
    pip_install(python, "--no-index", *(("--editable", copied) if editable else (copied,)), cwd=tmp_path)
    assert "no-such-compiler" in run(python, "-c", ABOUT, cwd=tmp_path)


def test_a_real_kernels_package_wins_over_our_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("REAL = True\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import kernels; print(kernels.REAL)"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "True"


def test_transformers_takes_our_folder_for_nothing() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import importlib.metadata\n"
        "from transformers.utils import is_kernels_available\n"
        f"{TINY_BERT}"
        "installed = any(d.name == 'kernels' for d in importlib.metadata.distributions())\n"
        "print(is_kernels_available() and not installed)"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "False"


def test_pytest_from_the_root_imports_from_the_root(tmp_path: Path) -> None:
    out = run(sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/toolkit/test_floors.py", cwd=ROOT)
    assert "test_imports_go_down" in out


@pytest.mark.slow
def test_beside_the_real_kernels_package(source: Path, tmp_path: Path) -> None:
    python = bare_venv(tmp_path / "venv")
    pip_install(python, "kernels", cwd=tmp_path)
    pip_install(python, "--no-index", "--editable", source, cwd=tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "import kernels, asp_kernels, asp_toolkit, transformers\n"
        f"{TINY_BERT}"
        "print(kernels.__file__, asp_kernels.__file__)"
    )
    theirs, ours = run(python, "-c", code, cwd=source).split()
    assert str(tmp_path / "venv") in theirs
    assert str(source / "kernels" / "asp_kernels") in ours
