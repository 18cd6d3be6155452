"""load_dense and load_packed: everything is checked before the model is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from asp_kernels import PackedNM, swap_
from asp_kernels.packed_layer import why_not_swap
from asp_toolkit.errors import AspError, closest
from asp_toolkit.exporters.entry import Entry
from asp_toolkit.exporters.manifest import Manifest, damaged_files, read
from asp_toolkit.exporters.stored import Stored, opened
from asp_toolkit.masks import bare
from asp_toolkit.views import View, views


def _checked(folder: Path, wanted: str) -> Manifest:
    manifest = read(folder)
    if manifest.format != wanted:
        raise AspError(f"{folder}: a {manifest.format} export; load it with load_{manifest.format}(folder, model)")
    for name, what in damaged_files(folder, manifest).items():
        raise AspError(f"{folder / name}: {what}; export again or fetch the folder anew")
    return manifest


def _match(stored: Stored, slots: Mapping[str, Tensor], folder: Path) -> None:
    """Raise AspError unless the folder has exactly the tensors that the model wants, in their shapes."""
    have, tied = stored.parameters(), stored.manifest.tied
    filled = {id(slots[name]) for name in have if name in slots}
    missing = [n for n, slot in slots.items() if n not in have and tied.get(n) not in have and id(slot) not in filled]
    unexpected = sorted((have | set(tied)) - set(slots))
    if missing or unexpected:
        said = [f"{what} {', '.join(map(repr, names[:5]))}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                for what, names in (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
        hint = f" ({closest(unexpected[0], slots)})" if unexpected else ""
        raise AspError(f"{folder}: {'; '.join(said)}{hint}; build the model that was exported, then load")
    for name in have:
        entry, shape = stored.manifest.parameters.get(name), stored.shape(name)
        for alias in (name, *(a for a, kept in tied.items() if kept == name)):
            if shape != tuple(slots[alias].shape):
                raise AspError(f"{folder}: '{alias}': expected shape {tuple(slots[alias].shape)}, got {shape}")
        if entry is not None and tuple(entry.shape) != shape:
            raise AspError(
                f"{folder}: '{name}': the manifest says shape {tuple(entry.shape)}, the weights file {shape}"
            )


def _owners(model: nn.Module, slot: Tensor) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for own, tensor in held.items():
                if tensor is slot:
                    yield module, own


def _fill_(model: nn.Module, slot: Tensor, tensor: Tensor) -> None:
    """Give a parameter or buffer of `model` these values, in their dtype, on its device, in its strides."""
    device = tensor.device if slot.is_meta else slot.device
    fresh = torch.empty_like(slot, dtype=tensor.dtype, device=device, requires_grad=False).copy_(tensor)
    if not slot.is_meta:
        slot.data = fresh
        return
    made = nn.Parameter(fresh, slot.requires_grad) if isinstance(slot, nn.Parameter) else fresh
    for module, own in list(_owners(model, slot)):
        (module._parameters if isinstance(slot, nn.Parameter) else module._buffers)[own] = made  # type: ignore[assignment]


def _tied_(model: nn.Module, slots: Mapping[str, Tensor], tied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Make the names in `tied` one tensor with the stored one; returns the state dict's tensors as they are then."""
    for alias, name in tied.items():
        for module, own in list(_owners(model, slots[alias])):
            held = module._parameters if own in module._parameters else module._buffers
            held[own] = slots[name]  # type: ignore[assignment]
    return model.state_dict(keep_vars=True)


def _check_dtype(folder: Path, name: str, slot: Tensor, tensor: Tensor) -> None:
    if slot.is_floating_point() != tensor.is_floating_point() or slot.is_complex() != tensor.is_complex():
        raise AspError(f"{folder}: '{name}': expected {slot.dtype}, got {tensor.dtype}")


@torch.no_grad()
def load_dense(folder: str | Path, model: nn.Module) -> nn.Module:
    """Load a dense export into a model of the same architecture, in place; parameters take the stored dtype.

    Returns:
        `model`. Ties are restored.

    Raises:
        AspError: a file is damaged; missing or unexpected tensors; wrong shapes. The model is then unchanged.
    """
    folder = Path(folder)
    target = bare(model)
    with opened(folder, _checked(folder, "dense")) as stored:
        slots: Mapping[str, Tensor] = target.state_dict(keep_vars=True)
        _match(stored, slots, folder)
        for name in stored.files:
            _check_dtype(folder, name, slots[name], stored.tensor(name))
        slots = _tied_(target, slots, stored.manifest.tied)
        for name in stored.files:
            _fill_(target, slots[name], stored.tensor(name))
        _settle_(target)
    return model


def _settle_(model: nn.Module) -> None:
    """What layers keep of their parameters beside them: on a GPU, cuDNN wants those of an LSTM in one piece."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _sparse_owners(model: nn.Module, slot: Tensor) -> list[str]:
    """Names of the weights that hold `slot`, where a sparse layer can stand for every owner; else none."""
    names = []
    for name, module in model.named_modules():
        if any(parameter is slot for parameter in module._parameters.values()):
            if module is model or module._parameters.get("weight") is not slot or why_not_swap(module):
                return []
            names.append(f"{name}.weight")
    return names


def _check_view(folder: Path, name: str, view: View | str | None, entry: Entry) -> None:
    if not isinstance(view, View):
        return  # a layer type that only the exporting program knew: its tensor is right whatever its axes are
    if (list(view.split), list(view.order), view.row_dims) != (entry.dims, entry.order, entry.row_dims):
        raise AspError(
            f"{folder}: '{name}' was pruned along axis {entry.axis} of {tuple(entry.dims)}, "
            "which is not how this model multiplies it"
        )


@torch.no_grad()
def load_packed(folder: str | Path, model: nn.Module, layers: str = "sparse") -> nn.Module:
    """Load a packed export into a model of the same architecture, in place; parameters take the stored dtype.

    layers: "sparse" puts SparseLinear and SparseConv2d in place of layers pruned to N:M (one without a sparse twin, and
            any pruned otherwise, gets its ordinary weight); "dense" fills the ordinary weights. Both compute the bits
            of the exported model.
    model:  may be on the meta device.

    Returns:
        `model`. Ties are restored.

    Raises:
        AspError: a file is damaged; missing or unexpected tensors; wrong shapes, codes or axes. The model is then
            unchanged.
    """
    if layers not in ("sparse", "dense"):
        raise AspError(f"load_packed: layers={layers!r}; {closest(str(layers), ('sparse', 'dense'))}")
    folder = Path(folder)
    target = bare(model)
    with opened(folder, _checked(folder, "packed")) as stored:
        slots: Mapping[str, Tensor] = target.state_dict(keep_vars=True)
        _match(stored, slots, folder)
        known = {name: view for name, _, view in views(target)}
        names = [name for name in stored.manifest.parameters if stored.is_packed(name)]
        for name in names:
            _check_view(folder, name, known.get(name), stored.manifest.parameters[name])
        try:
            packed = {name: stored.packed(name) for name in names}
        except AspError as error:
            raise AspError(f"{folder}: {error}") from error
        plain = stored.parameters() - set(packed)
        for name in plain:
            _check_dtype(folder, name, slots[name], stored.tensor(name))
        slots = _tied_(target, slots, stored.manifest.tied)
        for name in plain:
            _fill_(target, slots[name], stored.tensor(name))
        sparse: dict[str, PackedNM] = {}
        for name, matrix in packed.items():
            slot, entry = slots[name], stored.manifest.parameters[name]
            swaps = layers == "sparse" and isinstance(known.get(name), View)
            owners = _sparse_owners(target, slot) if swaps else []
            if owners:
                moved = matrix.to("cpu" if slot.is_meta else slot.device)
                own = PackedNM(moved.values.clone(), moved.codes.clone(), moved.shape, moved.n, moved.m)
                sparse.update(dict.fromkeys(owners, own))
            else:
                _fill_(target, slot, entry.unmatrix(matrix.to_dense()))
        swap_(target, sparse)
        _settle_(target)
    return model
