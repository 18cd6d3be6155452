"""The dense format: an ordinary checkpoint that loads everywhere, with exact +0.0 zeros, and a manifest beside it.

A transformers model is saved under the names that it has in memory, which `from_pretrained` of transformers 5 reads:
some of its classes (Mixtral) would else write each expert of a fused weight as a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from asp_toolkit.errors import AspError
from asp_toolkit.exporters import manifest
from asp_toolkit.exporters.tensors import (
    Collected,
    config_kept,
    is_pretrained,
    no_bars,
    storable,
    stored_names,
    tied_to_stored,
)

WEIGHTS = "model.safetensors"


def write_dense(
    folder: Path,
    found: Collected,
    skipped: Mapping[str, str],
    recipe: Mapping[str, Any] | None,
    save_with: Callable[[Path, nn.Module], None] | None,
) -> None:
    """Fill `folder`: model.safetensors, or what `save_pretrained` of a transformers model writes; `save_with`'s files.

    Raises:
        AspError: a pruned parameter did not arrive in the weights files under its name.
    """
    model: Any = found.model
    if is_pretrained(model):
        with config_kept(model), no_bars():
            if found.changed:
                everything = {**model.state_dict(), **found.tensors}
                everything.update({alias: found.tensors[names[0]] for names in found.groups for alias in names[1:]})
                model.save_pretrained(folder, state_dict=everything, save_original_format=False)
            else:
                model.save_pretrained(folder, save_original_format=False)
    else:
        save_file(
            {name: storable(tensor) for name, tensor in found.tensors.items()}, folder / WEIGHTS, {"format": "pt"}
        )
    if save_with is not None:
        save_with(folder, found.model)
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    stored = stored_names(folder, weights)
    tied = tied_to_stored(found.groups, stored)
    entries = {tied.get(name, name): entry for name, entry in found.entries.items()}
    lost = sorted(set(entries) - stored)
    if lost:
        raise AspError(f"export: '{lost[0]}' was saved under another name; the saved names begin {sorted(stored)[:3]}")
    manifest.write(folder, "dense", entries, skipped, tied, recipe, weights)
