"""The packed format: a parameter P pruned to N:M becomes P.values and P.codes (`asp_kernels.PackedNM`), the rest as is.

N:M are also the patterns that are one by another name: "2:4 transposable", "64:2:8". A parameter pruned by any other
pattern is stored as an ordinary tensor; the manifest lists it all the same, and it is verified as the others are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asp_kernels import PackedNM
from asp_toolkit.errors import AspError
from asp_toolkit.exporters import manifest
from asp_toolkit.exporters.tensors import Collected, is_pretrained, storable, stored_names, tied_to_stored

# Not model.safetensors: transformers would open that, warn of unknown keys and go on with random layers.
WEIGHTS = "packed.safetensors"


def _save_config(folder: Path, model: Any) -> None:
    """What rebuilds the architecture of a transformers model: config.json and, where it generates, its settings."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


@torch.no_grad()
def write_packed(
    folder: Path,
    found: Collected,
    skipped: Mapping[str, str],
    recipe: Mapping[str, Any] | None,
    save_with: Callable[[Path, nn.Module], None] | None,
) -> None:
    """Fill `folder`: packed.safetensors; config.json of a transformers model; `save_with`'s files.

    Raises:
        AspError: nothing can be packed, a weight is not of its pattern, or a name is taken.
    """
    nms = {name: entry.nm for name, entry in found.entries.items()}
    if not any(nms.values()):
        kinds = ", ".join(sorted({f"'{entry.pattern}'" for entry in found.entries.values()})) or "none"
        raise AspError(f"export: nothing to pack: only N:M is packed, the patterns here: {kinds}; use format 'dense'")
    out: dict[str, Tensor] = {}
    for name, tensor in found.tensors.items():
        nm = nms.get(name)
        if nm is None:
            out[name] = storable(tensor)
            continue
        try:
            packed = PackedNM.from_dense(found.entries[name].matrix(tensor), nm.n, nm.m)
        except ValueError as error:
            raise AspError(f"export: '{name}': {error}") from error
        for part, held in (("values", packed.values), ("codes", packed.codes)):
            if f"{name}.{part}" in found.tensors:
                raise AspError(f"export: the model has its own '{name}.{part}'; rename it or use the dense format")
            out[f"{name}.{part}"] = storable(held)
    save_file(out, folder / WEIGHTS, {"format": "asp_packed"})
    if is_pretrained(found.model):
        _save_config(folder, found.model)
    if save_with is not None:
        save_with(folder, found.model)
    if stored_names(folder, [WEIGHTS]) != set(out):
        raise AspError(f"export: save_with replaced {WEIGHTS}; let it write under other names")
    tied = tied_to_stored(found.groups, set(found.tensors))
    manifest.write(folder, "packed", found.entries, skipped, tied, recipe, [WEIGHTS])
