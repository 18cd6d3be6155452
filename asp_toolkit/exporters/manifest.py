"""asp_manifest.json: what an export folder holds, checked before anything in the folder is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from asp_toolkit.errors import AspError
from asp_toolkit.exporters.entry import Entry, Size, Strict
from asp_toolkit.files import sha256, write_json

NAME = "asp_manifest.json"
VERSION = 1
_MAX_BYTES = 64 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


def _plain_path(name: str) -> str:
    path = PurePosixPath(name)
    if not name or "\\" in name or "\0" in name or ":" in name or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not a plain path inside the folder")
    if str(path) != name or name == NAME:
        raise ValueError(f"{name!r} is not the plain name of another file in the folder")
    return name


FileName = Annotated[str, Field(max_length=1000)]


class File(Strict):
    """One file: hex SHA-256 and size."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: Size


class Manifest(Strict):
    """Everything about an export folder.

    format:     "packed" stores a parameter P whose entry is N:M as P.values and P.codes, everything else as it is
    parameters: pruned parameter -> Entry, under the name it has in the weights files
    skipped:    parameter left dense -> why
    tied:       parameter -> the one it is the same tensor as, which alone is stored
    weights:    the files that hold tensors; files: every file but the manifest, by its path with forward slashes
    """

    asp_manifest: Literal[1]
    format: Literal["dense", "packed"]
    parameters: dict[str, Entry]
    skipped: dict[str, str]
    tied: dict[str, str]
    recipe: dict[str, Any] | None
    weights: list[FileName]
    files: dict[FileName, File]

    @field_validator("weights")
    @classmethod
    def _plain(cls, names: list[str]) -> list[str]:
        return [_plain_path(name) for name in names]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        for name in self.files:
            _plain_path(name)
        for name in self.weights:
            if name not in self.files or not name.endswith(".safetensors"):
                raise ValueError(f"weights: {name!r} is not a .safetensors file listed under files")
        return self


def read(folder: Path) -> Manifest:
    """The manifest of an export folder.

    Raises:
        AspError: it is missing, damaged, or of another version.
    """
    path = folder / NAME
    if not path.is_file():
        raise AspError(f"{folder}: expected an export folder with {NAME}; make one with export(model, masks, folder)")
    if path.stat().st_size > _MAX_BYTES:
        raise AspError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, so it is no manifest")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AspError(f"{path}: damaged: {error}; export again or fetch the folder anew") from error
    version = value.get("asp_manifest") if isinstance(value, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise AspError(
            f"{path}: version {version}, this asp_toolkit reads version {VERSION}; update it or export again"
        )
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AspError(
            f"{path}: {where or 'manifest'}: {first['msg']}; export again or fetch the folder anew"
        ) from error


def write(
    folder: Path,
    format: Literal["dense", "packed"],
    parameters: Mapping[str, Entry],
    skipped: Mapping[str, str],
    tied: Mapping[str, str],
    recipe: Mapping[str, Any] | None,
    weights: list[str],
) -> None:
    """Describe and hash every file that `folder` holds."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / NAME:
            files[path.relative_to(folder).as_posix()] = File(sha256=sha256(path), bytes=path.stat().st_size)
    manifest = Manifest(
        asp_manifest=1,
        format=format,
        parameters=dict(parameters),
        skipped=dict(skipped),
        tied=dict(tied),
        recipe=None if recipe is None else dict(recipe),
        weights=weights,
        files=files,
    )
    value = manifest.model_dump(mode="json")
    value["parameters"] = {
        name: entry.model_dump(mode="json", exclude_none=True) for name, entry in manifest.parameters.items()
    }
    write_json(folder / NAME, value)


def damaged_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """File name -> what is wrong with it, for every listed file that is not what was written."""
    found = {}
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found[name] = "missing"
        elif path.stat().st_size != file.bytes:
            found[name] = f"expected {file.bytes} bytes, got {path.stat().st_size}"
        elif sha256(path) != file.sha256:
            found[name] = "its content has changed (SHA-256 differs)"
    return found


def weights_bytes(folder: Path) -> int:
    """Bytes of the weights files of an export folder."""
    manifest = read(folder)
    return sum(manifest.files[name].bytes for name in manifest.weights)
