"""Finds the recipe, the task and the exports behind a folder named on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asp_toolkit.errors import AspError

if TYPE_CHECKING:
    from torch import nn

    from asp_toolkit.masks import MaskSet
    from asp_toolkit.patterns import Pattern
    from asp_toolkit.recipe.schema import Recipe
    from asp_toolkit.tasks.task import Task

MANIFEST = "asp_manifest.json"

_HARMLESS = re.compile(r"asp_toolkit\.tasks\.models:[a-z_]+|torch\.nn:[A-Z][A-Za-z0-9]*")
"""Callables that the recipe inside a stranger's export may name."""


@dataclass(frozen=True)
class Opened:
    """A run or an export: its task, its recipe as plain values, and the export folders by format."""

    task: Task
    recipe: dict[str, Any]
    exports: dict[str, Path]


def is_run(folder: Path) -> bool:
    """Whether `asp run` made this folder."""
    return (folder / "recipe.yaml").is_file()


def exports_of(folder: Path) -> dict[str, Path]:
    """format -> export folder of a run folder.

    Raises:
        AspError: there are none yet.
    """
    found = {path.parent.name: path.parent for path in sorted((folder / "exports").glob(f"*/{MANIFEST}"))}
    if not found:
        raise AspError(f"{folder}: no exports yet: the run has not got so far; repeat its `asp run` command")
    return found


def _foreign_code(recipe: Recipe) -> str | None:
    """The first callable that building the recipe's task would import, other than those that are harmless."""
    model, data = recipe.task.model, recipe.task.data
    names = [model.name, *(part.name for part in model.replace.values())]
    names += [data.name] if data.source == "callable" else []
    return next((name for name in names if ":" in name and not _HARMLESS.fullmatch(name)), None)


def open_run(folder: Path, trust: bool = False) -> Opened:
    """The task and exports of a run folder, or of one export folder (whose manifest holds the recipe).

    trust: import what the recipe in an export's manifest names; a run folder's recipe is the user's own.

    Raises:
        AspError: the folder is neither; the export was made without a recipe, or its recipe names code.
    """
    from asp_toolkit import recipe as recipes
    from asp_toolkit.exporters import read_manifest
    from asp_toolkit.tasks import build_task

    if not folder.is_dir():
        raise AspError(f"{folder}: no such folder; name a run folder or an export folder")
    if is_run(folder):
        recipe = recipes.load(folder / "recipe.yaml")
        exports = exports_of(folder)
    elif (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest.recipe is None:
            raise AspError(f"{folder / MANIFEST}: made without a recipe, so its model cannot be built here")
        recipe = recipes.from_mapping(manifest.recipe, name=str(folder / MANIFEST))
        if not trust and (code := _foreign_code(recipe)) is not None:
            raise AspError(
                f"{folder / MANIFEST}: its recipe names code, '{code}', which is not run for a file that may come from "
                "anywhere; name the run folder instead, or add --trust where you know who wrote it"
            )
        exports = {manifest.format: folder}
    else:
        raise AspError(f"{folder}: neither a run folder (recipe.yaml) nor an export folder ({MANIFEST})")
    return Opened(build_task(recipe.task, recipe.seed), recipe.model_dump(mode="json"), exports)


def load(folder: Path, model: nn.Module, layers: str = "dense") -> nn.Module:
    """An export of either format in `model`, in eval mode; `layers` as for `load_packed`."""
    from asp_toolkit.exporters import load_dense, load_packed, read_manifest

    packed = read_manifest(folder).format == "packed"
    return (load_packed(folder, model, layers) if packed else load_dense(folder, model)).eval()


def masks_of(folder: Path, model: nn.Module) -> tuple[MaskSet, dict[str, Pattern]]:
    """The masks of a loaded export: the zeros of the parameters that its manifest calls pruned.

    With them the N:M that patterns which are not built in hold too, by the names of these patterns.
    """
    from asp_toolkit.exporters import read_manifest
    from asp_toolkit.masks import MaskSet

    manifest = read_manifest(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # of tied ones
    names = {name: first[id(parameters[name])] for name in manifest.parameters}
    masks = {names[name]: parameters[name].detach() != 0 for name in manifest.parameters}
    patterns = {names[name]: entry.pattern for name, entry in manifest.parameters.items()}
    found = MaskSet(masks, manifest.skipped, patterns)
    return found, {entry.pattern: entry.nm for entry in manifest.parameters.values() if entry.also and entry.nm}


def sparse_layers(model: nn.Module) -> list[str]:
    """Names of the layers of a loaded model that hold their weight packed."""
    from asp_kernels.swap import layer_backends

    return list(layer_backends(model))
