"""verify: does what is in the file, or in the model, hold? Nothing is taken from a manifest that the data can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.exporters.loading import Stored, opened
from asp_toolkit.exporters.manifest import NAME, WEIGHT_SUFFIXES, Entry, Manifest, damaged_files, read
from asp_toolkit.masks import MaskSet, bare
from asp_toolkit.patterns import parse
from asp_toolkit.views import View, views

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LayerCheck:
    """One pruned parameter: the pattern it should hold, its share of nonzero entries, what is wrong or None."""

    name: str
    pattern: str
    density: float
    problem: str | None


@dataclass(frozen=True)
class Verification:
    """ok: nothing is wrong. problems: what is, each naming its place. checked: how many pruned parameters were read."""

    ok: bool
    problems: list[str] = field(default_factory=list)
    checked: int = 0
    layers: list[LayerCheck] = field(default_factory=list)


def _result(problems: list[str], layers: list[LayerCheck], where: str = "") -> Verification:
    said = problems + [f"{where}'{layer.name}': {layer.problem}" for layer in layers if layer.problem]
    return Verification(not said, said, len(layers), layers)


def _density(tensor: Tensor) -> float:
    return int(tensor.count_nonzero()) / max(1, tensor.numel())


def _bits_set(tensor: Tensor) -> Tensor:
    """True where an entry is not +0.0 (so also at -0.0 and NaN)."""
    return tensor.contiguous().view(_BITS[tensor.element_size()]) != 0


def _check_entry(stored: Stored, name: str, entry: Entry, mask: Tensor | None) -> LayerCheck:
    if stored.manifest.format == "packed":
        try:
            tensor = entry.unmatrix(stored.packed(name).to_dense())
        except AspError as error:
            return LayerCheck(name, entry.pattern, 0.0, str(error).removeprefix(f"'{name}': "))
    elif name not in stored.files:
        return LayerCheck(name, entry.pattern, 0.0, "missing from the weights files")
    else:
        tensor = stored.tensor(name)
    density = _density(tensor)
    problem = None
    if list(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
        problem = f"expected {entry.dtype} {entry.shape}, got {tensor.dtype} {list(tensor.shape)}"
    elif not entry.nm.holds(entry.matrix(_bits_set(tensor))):
        held = entry.nm.holds(entry.matrix(tensor != 0))
        problem = "holds -0.0 where +0.0 was expected" if held else f"is not {entry.pattern} along axis {entry.axis}"
    elif density != entry.density:
        problem = f"the manifest says density {entry.density}, the file has {density}"
    elif mask is not None and (mask.shape != tensor.shape or bool((tensor[~mask.cpu()] != 0).any())):
        problem = "has entries that the given mask drops"
    return LayerCheck(name, entry.pattern, density, problem)


@torch.no_grad()
def _verify_export(folder: Path, masks: MaskSet | None) -> Verification:
    try:
        manifest: Manifest = read(folder)
        problems = [f"{folder / name}: {what}" for name, what in damaged_files(folder, manifest).items()]
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if name.endswith(WEIGHT_SUFFIXES) and name not in manifest.files:
                problems.append(f"{path}: a weights file that the manifest does not know")
        with opened(folder, manifest) as stored:
            given = masks.masks if masks is not None else {}
            layers = [_check_entry(stored, name, entry, given.get(name)) for name, entry in manifest.parameters.items()]
            absent = sorted(set(manifest.tied.values()) - stored.parameters())
            problems += [f"{folder}: '{name}' is missing from the weights files" for name in absent]
    except AspError as error:
        return Verification(False, [str(error)])
    unknown = sorted(set(given) - set(manifest.parameters))
    problems += [f"{folder}: '{name}' has a mask but is not listed as pruned" for name in unknown]
    return _result(problems, layers, f"{folder}: ")


@torch.no_grad()
def _verify_model(model: nn.Module, masks: MaskSet) -> Verification:
    wrong = masks.violations(model)
    known: dict[str, View | str] = {name: view for name, _, view in views(bare(model))}
    slots = dict(bare(model).named_parameters(remove_duplicate=False))
    layers = []
    for name, mask in masks.masks.items():
        pattern, view, problem = masks.patterns.get(name, "?"), known.get(name), wrong.get(name)
        if problem is None and isinstance(view, View) and not parse(pattern).holds(view.matrix(mask)):
            problem = f"its mask is not {pattern}"
        layers.append(LayerCheck(name, pattern, _density(slots[name].detach()), problem))
    return _result([] if layers else ["nothing is pruned: there are no masks"], layers)


def verify(target: str | Path | nn.Module, masks: MaskSet | None = None) -> Verification:
    """Check an export folder, a run folder (all its exports), or a model against its masks.

    Of an export: every file's hash and structure; in the file itself, that every pattern holds, that dropped entries
    are +0.0 and the density is what the manifest says; with `masks`, that nothing else than they keep is there.

    Raises:
        AspError: there is nothing to verify at `target`, or a model came without masks.
    """
    if isinstance(target, nn.Module):
        if masks is None:
            raise AspError("verify: a model needs its masks: verify(model, masks)")
        return _verify_model(target, masks)
    folder = Path(target)
    if (folder / NAME).is_file():
        return _verify_export(folder, masks)
    exports = sorted(path.parent for path in folder.glob(f"exports/*/{NAME}"))
    if not exports:
        raise AspError(f"verify: {folder} is neither an export (it has no {NAME}) nor a run folder with exports")
    results = [_verify_export(export, masks) for export in exports]
    return Verification(
        all(result.ok for result in results),
        [problem for result in results for problem in result.problems],
        sum(result.checked for result in results),
        [layer for result in results for layer in result.layers],
    )


def _difference(a: Any, b: Any, place: str) -> str | None:
    """Where two outputs differ, or None where every bit is the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{place}: expected {a.dtype} {tuple(a.shape)}, got {b.dtype} {tuple(b.shape)}"
        unequal = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8) if a.ndim else a != b
        if not bool(unequal.any()):
            return None
        return (
            f"{place}: {int((a != b).sum())} of {a.numel()} entries differ, by at most {float((a - b).abs().max()):.3g}"
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping) and list(a) == list(b):
        found = (_difference(a[key], b[key], f"{place}[{key!r}]") for key in a)
        return next((text for text in found if text), None)
    if isinstance(a, Sequence) and not isinstance(a, str | bytes) and type(a) is type(b) and len(a) == len(b):
        found = (_difference(x, y, f"{place}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((text for text in found if text), None)
    if type(a) is type(b) and hasattr(a, "__dict__") and not isinstance(a, type):  # a dataclass, a cache of keys
        return _difference(vars(a), vars(b), place)
    if type(a) is type(b) and bool(a == b):
        return None
    return f"{place}: expected {type(a).__name__}, got {type(b).__name__} or other entries"


@torch.no_grad()
def same_outputs(
    a: nn.Module, b: nn.Module, inputs: Any, forward: Callable[[nn.Module, Any], Any] | None = None
) -> None:
    """Return when both models give the same bits for `inputs`; both are put to eval mode meanwhile.

    forward: (model, inputs) -> outputs, nested as you like; without it, model(inputs)

    Raises:
        AspError: an output differs; says where and by how much.
    """
    outputs = []
    for model in (a, b):
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            outputs.append(model(inputs) if forward is None else forward(model, inputs))
        finally:
            for module, mode in modes.items():
                module.training = mode
    difference = _difference(outputs[0], outputs[1], "output")
    if difference:
        raise AspError(f"the two models do not compute the same: {difference}")
