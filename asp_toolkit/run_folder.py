"""The folder of a run: claimed by one process, known by its recipe, finished once it holds a report."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asp_toolkit import recipe as recipes
from asp_toolkit.errors import AspError
from asp_toolkit.files import remove_parts, write_text
from asp_toolkit.recipe.schema import Recipe

_WRITTEN = (
    *("report.json", "report.html", "checkpoints", "exports", "masks.safetensors", "log.jsonl", "log.csv"),
    "recipe.yaml",  # last: without it the folder is not known as a run's
)
"""What a run writes into its folder, and what --fresh deletes, in that order."""


def finished(folder: Path) -> dict[str, Any] | None:
    """The report that a run left in `folder`, or None where it is not finished."""
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        return report
    except (OSError, json.JSONDecodeError):
        return None


@contextlib.contextmanager
def claimed(folder: Path, recipe: Recipe, fresh: bool) -> Iterator[None]:
    """The run folder, ours alone while we work in it; the operating system lets go when the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AspError(f"{folder}: another run is working in this folder; use another --out") from error
        saved = folder / "recipe.yaml"
        others = [e for e in folder.iterdir() if e.name != ".lock" and not e.name.startswith(f".{saved.name}.")]
        if others and not saved.exists():
            raise AspError(f"{folder} is not empty and holds no run; use another --out")
        remove_parts(folder)
        if fresh:
            for entry in [folder / name for name in _WRITTEN]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
        begun = (folder / "log.jsonl").exists()
        if saved.exists() and begun:
            if difference := recipes.difference(recipes.load(saved), recipe):
                raise AspError(
                    f"{folder} holds a run of another recipe ({difference}); use another --out, or --fresh to delete it"
                )
        else:
            stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            write_text(saved, f"# resolved {stamp}; `asp run` of this file repeats the run\n" + recipes.dump(recipe))
        yield
