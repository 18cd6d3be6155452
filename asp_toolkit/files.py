"""Files that are either whole or not there: atomic writes, hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write `text` so that a kill at any moment leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON; NaN and infinities are refused by `json`, for other readers' sake."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that appears at `path` only when it is complete; a folder already there is replaced at the end.

    Yields a temporary folder beside `path`. On an error it is removed and what was at `path` stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    try:
        yield part
        for entry in part.rglob("*"):
            if entry.is_file():
                entry.chmod(0o644)  # safetensors makes its files private; a checkpoint is there to be served
                _sync(entry)
        part.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
            os.rename(path, old / "was")
            try:
                os.rename(part, path)
            except BaseException:
                os.rename(old / "was", path)
                raise
            finally:
                if path.exists():
                    shutil.rmtree(old)
        else:
            os.rename(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(path.parent)


def remove_parts(folder: Path) -> None:
    """Remove what a killed writer left in `folder` (temporary files and folders of this module).

    A folder that was set aside, and whose successor did not arrive, is put back.
    """
    for entry in folder.glob(".*"):
        path = folder / entry.name[1:].rsplit(".", 2)[0]  # .NAME.random.old
        if entry.name.endswith(".old") and (entry / "was").is_dir() and not path.exists():
            os.rename(entry / "was", path)
        if entry.name.endswith((".part", ".old")):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
