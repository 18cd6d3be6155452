"""Exports: a folder with weights and a manifest. Exporters check, they never decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from asp_toolkit.errors import AspError, closest
from asp_toolkit.exporters.dense import write_dense
from asp_toolkit.exporters.loading import load_dense, load_packed
from asp_toolkit.exporters.manifest import NAME, Manifest, weights_bytes
from asp_toolkit.exporters.manifest import read as read_manifest
from asp_toolkit.exporters.packed import write_packed
from asp_toolkit.exporters.tensors import Collected, collect
from asp_toolkit.files import new_folder
from asp_toolkit.masks import MaskSet
from asp_toolkit.patterns import Pattern

__all__ = [
    "EXPORTERS",
    "LOADERS",
    "Manifest",
    "check_place",
    "export",
    "load_dense",
    "load_packed",
    "read_manifest",
    "weights_bytes",
]

SaveWith = Callable[[Path, nn.Module], None]
Exporter = Callable[[Path, Collected, Mapping[str, str], Mapping[str, Any] | None, SaveWith | None], None]
"""(new folder, checked tensors, skipped, recipe, save_with): write the files and the manifest."""

EXPORTERS: dict[str, Exporter] = {"dense": write_dense, "packed": write_packed}

Loader = Callable[[Path, nn.Module], nn.Module]
"""(folder, model of the same architecture) -> the model with the folder's weights."""

LOADERS: dict[str, Loader] = {"dense": load_dense, "packed": load_packed}


def check_place(folder: Path) -> None:
    """Raise AspError where an export into `folder` would replace something that is no export."""
    if folder.exists() and not (folder / NAME).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise AspError(f"export: {folder} exists and is not an export; choose another folder or remove it")


def export(
    model: nn.Module,
    masks: MaskSet,
    folder: str | Path,
    format: str = "dense",
    *,
    recipe: Mapping[str, Any] | None = None,
    save_with: SaveWith | None = None,
    patterns: Mapping[str, Pattern] | None = None,
) -> Path:
    """Write `model` into a new `folder`, whole or not at all; an export already there is replaced.

    format:    a key of EXPORTERS: "dense" loads everywhere; "packed" is smaller, needs `load_packed`, and packs what is
               N:M under any name
    recipe:    kept in the manifest
    save_with: called with the folder and the model to add files (a tokenizer)
    patterns:  name -> pattern, of those in `masks.patterns` that are not built in ("package.module:name"); without its
               pattern, such a mask is exported unchecked, and its parameter is not packed

    The model in memory is not changed. A model whose zeros are its masks: `masks_from_zeros(model)` makes them.

    Returns:
        The folder.

    Raises:
        AspError: unknown format; the folder holds something else; a mask does not suit the model or its pattern, or a
            dropped entry is not zero; nothing can be packed.
    """
    write = EXPORTERS.get(format)
    if write is None:
        raise AspError(f"export: unknown format '{format}'; {closest(format, EXPORTERS)}")
    folder = Path(folder)
    check_place(folder)
    found = collect(model, masks, patterns)
    with new_folder(folder) as part:
        write(part, found, masks.skipped, recipe, save_with)
    return folder
