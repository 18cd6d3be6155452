"""Imports go down only, files stay short, heavy libraries stay where they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the ground up. A unit may import itself and anything below its floor; neighbours on one floor do not meet.
FLOORS = (
    ("asp_kernels",),
    ("errors", "files"),
    ("views", "progress", "runlog"),
    ("patterns", "scores"),
    ("masks", "recipe"),
    ("tasks",),
    ("pruning", "optimizers", "loaders", "checkpoint", "run_folder"),
    ("calibration",),
    ("schedules",),
    ("loop",),
    ("exporters", "report"),
    ("verification", "inspection", "bench"),
    ("workflow", "trainer"),
    ("cli",),
    ("__main__",),
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}

# library -> the only places that import it
HOMES = {
    "transformers": ("tasks/", "trainer/", "exporters/", "inspection.py", "cli/targets.py"),
    "datasets": ("tasks/data/",),
    "torchvision": ("tasks/",),
    "matplotlib": ("report/plots.py",),
    "jinja2": ("report/page.py",),
    "accelerate": ("loop/", "workflow.py", "trainer/"),
    "typer": ("cli/",),
    "rich": ("cli/", "report/", "progress.py"),
    "yaml": ("recipe/yaml_file.py",),
    "pydantic": ("recipe/", "report/", "exporters/"),
    "safetensors": ("masks.py", "exporters/", "inspection.py", "verification.py", "checkpoint.py", "tasks/"),
}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def toolkit_units() -> list[tuple[str, Path]]:
    package = ROOT / "asp_toolkit"
    return [(path.relative_to(package).parts[0].removesuffix(".py"), path) for path in sources("asp_toolkit")]


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_of(name: str) -> str | None:
    """The unit an imported name belongs to; None for other libraries and for `import asp_toolkit` itself."""
    parts = name.split(".")
    if parts[0] == "asp_kernels":
        return "asp_kernels"
    if parts[0] == "asp_toolkit" and len(parts) > 1 and parts[1] != "__version__":
        return parts[1]
    return None


def test_every_unit_has_a_floor() -> None:
    unknown = {unit for unit, _ in toolkit_units() if unit != "__init__"} - set(FLOOR)
    assert not unknown, f"add {sorted(unknown)} to FLOORS"


def test_imports_go_down() -> None:
    wrong = []
    for unit, path in toolkit_units():
        if unit == "__init__":
            continue  # the door: it names everything, and imports it when asked
        for name in imports(path):
            other = unit_of(name)
            if other is not None and other != unit and FLOOR[other] >= FLOOR[unit]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}, which is not below it")
    assert not wrong, "\n".join(wrong)


def test_kernels_import_torch_and_numpy_only() -> None:
    allowed = {"asp_kernels", "torch", "numpy", *sys.stdlib_module_names}
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("kernels/asp_kernels")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    }
    assert not wrong


def test_heavy_libraries_stay_home() -> None:
    package = ROOT / "asp_toolkit"
    wrong = []
    for path in sources("asp_toolkit"):
        place = path.relative_to(package).as_posix()
        for name in imports(path):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and not place.startswith(homes):
                wrong.append(f"asp_toolkit/{place} imports {name}; only {', '.join(homes)} may")
    assert not wrong, "\n".join(wrong)


def test_files_stay_short() -> None:
    long = {}
    for folder in ("asp_toolkit", "kernels", "examples", "benchmarks"):
        for path in sources(folder) if (ROOT / folder).is_dir() else []:
            length = len(path.read_text(encoding="utf-8").splitlines())
            if length > 300:
                long[str(path.relative_to(ROOT))] = length
    assert not long


def test_no_packages_where_none_belong() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/ would shadow PyPI's `kernels`"
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests are not packages"
    assert not (ROOT / "recipes" / "__init__.py").exists()


def test_no_module_bears_the_name_of_an_exported_function() -> None:
    import asp_toolkit

    units = {unit for unit, _ in toolkit_units()}
    assert not units & set(asp_toolkit.__all__)


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'kernels')]!r}\n{code}\n"
        "print(*{m.split('.')[0] for m in sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(found.stdout.split("\n")[-2].split())


HEAVY = {"torch", "numpy", "transformers", "datasets", "torchvision", "matplotlib", "accelerate", "pandas", "pyarrow"}


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import asp_toolkit", set()),
        ("from asp_toolkit import AspError", set()),
        ("import asp_toolkit.cli", set()),
        ("from asp_toolkit.recipe.explain import explain; explain()", set()),
        ("from asp_toolkit import prune, MaskSet", {"torch", "numpy"}),
        ("import asp_kernels", {"torch", "numpy"}),
    ],
)
def test_imports_are_cheap(code: str, allowed: set[str]) -> None:
    loaded = loaded_by(code)
    assert loaded & HEAVY <= allowed
    assert "asp_toolkit" in loaded or "asp_kernels" in loaded
    if code == "import asp_kernels":
        assert "asp_toolkit" not in loaded
