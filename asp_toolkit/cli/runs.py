"""Finds the recipe, the task and the exports behind a folder named on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asp_toolkit.errors import AspError

if TYPE_CHECKING:
    from torch import nn

    from asp_toolkit.masks import MaskSet
    from asp_toolkit.tasks.task import Task

MANIFEST = "asp_manifest.json"


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


def open_run(folder: Path) -> Opened:
    """The task and exports of a run folder, or of one export folder (whose manifest holds the recipe).

    Raises:
        AspError: the folder is neither, or the export was made without a recipe.
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
        exports = {manifest.format: folder}
    else:
        raise AspError(f"{folder}: neither a run folder (recipe.yaml) nor an export folder ({MANIFEST})")
    return Opened(build_task(recipe.task, recipe.seed), recipe.model_dump(mode="json"), exports)


def load(folder: Path, model: nn.Module, layers: str = "dense") -> nn.Module:
    """An export of either format in `model`, in eval mode; `layers` as for `load_packed`."""
    from asp_toolkit.exporters import load_dense, load_packed, read_manifest

    packed = read_manifest(folder).format == "packed"
    return (load_packed(folder, model, layers) if packed else load_dense(folder, model)).eval()


def masks_of(folder: Path, model: nn.Module) -> MaskSet:
    """The masks of a loaded export: the zeros of the parameters that its manifest calls pruned."""
    from asp_toolkit.exporters import read_manifest
    from asp_toolkit.masks import MaskSet

    manifest = read_manifest(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    masks = {name: parameters[name].detach() != 0 for name in manifest.parameters}
    return MaskSet(masks, manifest.skipped, {name: entry.pattern for name, entry in manifest.parameters.items()})
