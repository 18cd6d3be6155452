"""inspect: what a model or a checkpoint holds, parameter by parameter, read from the numbers themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from asp_kernels import SparseConv2d, SparseLinear
from asp_kernels.validate import code_bytes
from asp_toolkit.errors import AspError
from asp_toolkit.exporters.checks import broken_together, is_joint
from asp_toolkit.exporters.entry import Entry, known_pattern, not_built_in
from asp_toolkit.exporters.manifest import NAME, read
from asp_toolkit.exporters.stored import Stored, opened
from asp_toolkit.masks import bare, whole
from asp_toolkit.patterns import NM, Pattern, TransposableNM
from asp_toolkit.views import views

PATTERNS = (
    *(NM(1, 16), NM(1, 8), NM(2, 16), NM(1, 4), NM(2, 8)),
    *(NM(2, 4), NM(4, 8), NM(8, 16), NM(16, 32)),
)
"""What is looked for: the sparsest first, and of equal ones the smallest group, which implies the larger."""


@dataclass(frozen=True)
class LayerRow:
    """One parameter.

    layer:   class of the layer that owns it; "" where a file does not say
    pattern: what its zeros hold, or None: of an export what the manifest says, else the sparsest of PATTERNS, and
             "N:M transposable" where they hold that along the other axis too
    density: share of entries that are not zero
    bytes_dense, bytes_packed: as it is stored densely, and packed by `pattern`; None where that is no N:M
    skipped: why it holds no pattern, or None
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    pattern: str | None
    density: float
    bytes_dense: int
    bytes_packed: int | None
    skipped: str | None


@dataclass(frozen=True)
class Totals:
    """Sums over rows.

    density_pruned: of the parameters that hold a pattern
    bytes_packed, pruned_bytes_packed: what is N:M packed, the rest dense
    """

    parameters: int
    pruned: int
    entries: int
    density: float
    density_pruned: float
    bytes_dense: int
    bytes_packed: int
    pruned_bytes_dense: int
    pruned_bytes_packed: int


def held_pattern(matrix: Tensor, run: int) -> Pattern | None:
    """What a (rows, cols) matrix holds along runs of `run` entries: see LayerRow. None for all zeros."""
    keep = matrix != 0
    if not bool(keep.any()):
        return None
    return next((_transposable(p, keep, run) or p for p in PATTERNS if _holds(p, keep, run)), None)


def _holds(pattern: Pattern, keep: Tensor, run: int) -> bool:
    return pattern.why_not(keep.shape[0], keep.shape[1], run) is None and pattern.holds(keep)


def _transposable(nm: NM, keep: Tensor, run: int) -> Pattern | None:
    pattern = TransposableNM(nm.n, nm.m)
    return pattern if _holds(pattern, keep, run) else None


def _row(
    name: str,
    layer: str,
    tensor: Tensor,
    shape: tuple[int, int] | None,
    pattern: Pattern | None,
    reason: str | None,
) -> LayerRow:
    """The row of a tensor whose (rows, cols) matrix of that `shape` holds `pattern`."""
    nonzero = int(tensor.count_nonzero())
    density = nonzero / max(1, tensor.numel())
    nm: NM | None = getattr(pattern, "nm", None)
    packed = None
    if nm is not None and shape is not None:
        rows, cols = shape
        packed = rows * (cols // nm.m * nm.n * tensor.element_size() + code_bytes(cols, nm.n, nm.m))
    if pattern is not None:
        reason = None
    elif reason is None:
        reason = "all zeros" if nonzero == 0 else f"dense: its zeros ({1 - density:.1%}) hold no N:M pattern"
    held = None if pattern is None else pattern.name
    return LayerRow(name, layer, tuple(tensor.shape), held, density, tensor.nbytes, packed, reason)


def _found(name: str, layer: str, tensor: Tensor, matrix: Tensor, run: int, reason: str | None = None) -> LayerRow:
    return _row(name, layer, tensor, (matrix.shape[0], matrix.shape[1]), held_pattern(matrix, run), reason)


def _of_packed_layer(name: str, module: SparseLinear | SparseConv2d) -> LayerRow:
    weight = module.weight
    density = int(weight.count_nonzero()) / max(1, weight.numel())
    held = module.values.nbytes + module.codes.nbytes
    return LayerRow(
        name, type(module).__name__, tuple(weight.shape), f"{module.n}:{module.m}", density, weight.nbytes, held, None
    )


def _of_model(model: nn.Module) -> Iterator[LayerRow]:
    model = bare(model)
    for prefix, module in model.named_modules():
        if isinstance(module, SparseLinear | SparseConv2d):
            yield _of_packed_layer(f"{prefix}.weight" if prefix else "weight", module)
    slots = dict(model.named_parameters(remove_duplicate=False))
    for name, module, view in views(model):
        if slots[name].is_meta:
            raise AspError(f"inspect: '{name}' is on the meta device and has no values; load its weights first")
        tensor = whole(slots[name].detach())
        if isinstance(view, str):
            yield _row(name, type(module).__name__, tensor, None, None, view)
        else:
            yield _found(name, view.layer, tensor, view.matrix(tensor), view.run, view.reason)


def _of_tensor(name: str, tensor: Tensor) -> LayerRow:
    """A tensor whose layer is unknown: read as Linear where it has two dimensions, as a convolution with more."""
    if not tensor.is_floating_point():
        return _row(name, "", tensor, None, None, f"{str(tensor.dtype).removeprefix('torch.')}, not floating point")
    if tensor.ndim < 2:
        return _row(name, "", tensor, None, None, "vector (bias, norm or scale)")
    order = (0, *range(2, tensor.ndim), 1)
    matrix = tensor.permute(order).reshape(tensor.shape[0], tensor[:1].numel())
    return _found(name, "", tensor, matrix, tensor.shape[1])


def _of_entry(name: str, entry: Entry, tensor: Tensor, wrong: str | None) -> LayerRow:
    """A parameter that the manifest calls pruned: its pattern where that holds, else what does."""
    matrix = entry.matrix(tensor)
    said = known_pattern(entry.pattern)
    if said is not None and wrong is None and said.holds(matrix != 0):
        return _row(name, "", tensor, (entry.rows, entry.cols), said, None)
    reason = not_built_in(entry.pattern) if said is None else f"is not {entry.pattern}, as the manifest says"
    return _found(name, "", tensor, matrix, entry.groups_run, f"{reason}: {wrong}" if wrong else reason)


def _joint(stored: Stored) -> Iterator[tuple[Pattern, Tensor]]:
    for name, entry in stored.manifest.parameters.items():
        if (pattern := known_pattern(entry.pattern)) is not None and is_joint(pattern):
            yield pattern, entry.matrix(stored.pruned(name) != 0)


def _of_export(folder: Path) -> Iterator[LayerRow]:
    manifest = read(folder)
    with opened(folder, manifest) as stored:
        broken = broken_together(_joint(stored))
        for name in sorted(stored.parameters()):
            entry = manifest.parameters.get(name)
            if entry is None:
                row = _of_tensor(name, stored.tensor(name))
                reason = manifest.skipped.get(name)
                yield (
                    row
                    if reason is None
                    else LayerRow(**{**vars(row), "pattern": None, "bytes_packed": None, "skipped": reason})
                )
                continue
            yield _of_entry(name, entry, stored.pruned(name), broken.get(entry.pattern))


def _of_safetensors(files: list[Path]) -> Iterator[LayerRow]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened_file:
                for name in opened_file.keys():  # noqa: SIM118 - not a mapping
                    yield _of_tensor(name, opened_file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise AspError(f"inspect: {path}: cannot be read: {error}") from error


def _of_torch_file(path: Path) -> Iterator[LayerRow]:
    try:
        state: Any = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise AspError(f"inspect: {path}: cannot be read with weights_only=True: {error}") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)} if isinstance(state, Mapping) else {}
    if not tensors:
        raise AspError(f"inspect: {path}: expected a state dict of tensors, got {type(state).__name__}")
    for name, tensor in tensors.items():
        yield _of_tensor(name, tensor)


def _shards(folder: Path) -> list[Path]:
    """The weights files of a folder as transformers writes them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise AspError(f"inspect: {index}: damaged: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise AspError(f"inspect: {index}: {name!r} is not the name of a file in the folder")
    return [folder / name for name in names]


def inspect(target: str | Path | nn.Module) -> list[LayerRow]:
    """One row per parameter of a model, a .safetensors or .pt state dict, an export folder, or a transformers folder.

    Nothing is executed from a file (`weights_only`).

    Raises:
        AspError: there is nothing to inspect at `target`, or it cannot be read.
    """
    if isinstance(target, nn.Module):
        with torch.no_grad():
            return list(_of_model(target))
    path = Path(target)
    if path.is_dir():
        if (path / NAME).is_file():
            return list(_of_export(path))
        shards = _shards(path)
        if shards:
            return list(_of_safetensors(shards))
        files = sorted(path.glob("*.bin"))
        if files:
            return [row for file in files for row in _of_torch_file(file)]
        raise AspError(f"inspect: {path} holds no {NAME} and no weights files; name an export, or a file of weights")
    if not path.is_file():
        raise AspError(f"inspect: {path} does not exist")
    return list(_of_safetensors([path]) if path.suffix == ".safetensors" else _of_torch_file(path))


def totals(rows: list[LayerRow]) -> Totals:
    """Sums over `rows`; densities are shares of entries that are not zero."""

    def entries(some: list[LayerRow]) -> tuple[int, float]:
        sizes = [torch.Size(row.shape).numel() for row in some]
        return sum(sizes), sum(row.density * size for row, size in zip(some, sizes, strict=True)) / max(1, sum(sizes))

    held = [row for row in rows if row.pattern is not None]
    count, density = entries(rows)
    return Totals(
        parameters=len(rows),
        pruned=len(held),
        entries=count,
        density=density,
        density_pruned=entries(held)[1],
        bytes_dense=sum(row.bytes_dense for row in rows),
        bytes_packed=sum(row.bytes_dense if row.bytes_packed is None else row.bytes_packed for row in rows),
        pruned_bytes_dense=sum(row.bytes_dense for row in held),
        pruned_bytes_packed=sum(row.bytes_dense if row.bytes_packed is None else row.bytes_packed for row in held),
    )
