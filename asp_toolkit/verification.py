"""verify: does what is in the file, or in the model, hold? Nothing is taken from a manifest that the data can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asp_kernels.dispatch import dense_only
from asp_toolkit.errors import AspError
from asp_toolkit.exporters.checks import broken_together, is_joint
from asp_toolkit.exporters.entry import Entry, known_pattern, not_built_in
from asp_toolkit.exporters.manifest import NAME, WEIGHT_SUFFIXES, Manifest, damaged_files, read
from asp_toolkit.exporters.stored import Stored, opened
from asp_toolkit.masks import MaskSet, bare, whole
from asp_toolkit.patterns import Pattern
from asp_toolkit.views import View, views

Patterns = Mapping[str, Pattern] | None
"""Name -> pattern, of those that are not built in."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LayerCheck:
    """One pruned parameter.

    pattern: what it should hold; density: its share of nonzero entries
    problem: what is wrong, or None; note: what could not be checked, or None
    """

    name: str
    pattern: str
    density: float
    problem: str | None
    note: str | None = None


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    ok:       nothing is wrong
    problems: what is, each naming its place
    checked:  how many pruned parameters were read
    notes:    what could not be checked, each naming its place
    """

    ok: bool
    problems: list[str] = field(default_factory=list)
    checked: int = 0
    layers: list[LayerCheck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _result(problems: list[str], layers: list[LayerCheck], where: str = "") -> Verification:
    said = problems + [f"{where}'{layer.name}': {layer.problem}" for layer in layers if layer.problem]
    notes = [f"{where}'{layer.name}': {layer.note}" for layer in layers if layer.note]
    return Verification(not said, said, len(layers), layers, notes)


def _density(tensor: Tensor) -> float:
    return int(tensor.count_nonzero()) / max(1, tensor.numel())


def _bits_set(tensor: Tensor) -> Tensor:
    """True where an entry is not +0.0 (so also at -0.0 and NaN)."""
    return tensor.contiguous().view(_BITS[tensor.element_size()]) != 0


def _check_entry(stored: Stored, name: str, entry: Entry, mask: Tensor | None, patterns: Patterns) -> LayerCheck:
    pattern = known_pattern(entry.pattern, patterns)
    note = not_built_in(entry.pattern) if pattern is None else None
    try:
        tensor = stored.pruned(name)
    except AspError as error:
        return LayerCheck(name, entry.pattern, 0.0, str(error).removeprefix(f"'{name}': "), note)
    density = _density(tensor)
    problem = _not_held(entry, tensor, entry.nm if pattern is None else pattern)
    if problem is None and density != entry.density:
        problem = f"the manifest says density {entry.density}, the file has {density}"
    if problem is None and mask is not None:
        keep = whole(mask).cpu()
        if keep.shape != tensor.shape or bool((tensor[~keep] != 0).any()):
            problem = "has entries that the given mask drops"
    return LayerCheck(name, entry.pattern, density, problem, note)


def _not_held(entry: Entry, tensor: Tensor, pattern: Pattern | None) -> str | None:
    if pattern is None:
        return None
    reason = pattern.why_not(entry.rows, entry.cols, entry.groups_run)  # one that was given is not checked yet
    if reason is None and pattern.holds(entry.matrix(_bits_set(tensor))):
        return None
    if reason is None and pattern.holds(entry.matrix(tensor != 0)):
        return "holds -0.0 where +0.0 was expected"
    return f"is not {entry.pattern} along axis {entry.axis}" + (f": {reason}" if reason else "")


def _joint(stored: Stored, patterns: Patterns, kept: Callable[[Tensor], Tensor]) -> Iterator[tuple[Pattern, Tensor]]:
    for name, entry in stored.manifest.parameters.items():
        pattern = known_pattern(entry.pattern, patterns)
        if pattern is not None and is_joint(pattern):
            with suppress(AspError):  # which is that parameter's own problem
                yield pattern, entry.matrix(kept(stored.pruned(name)))


def _not_held_together(stored: Stored, patterns: Patterns) -> Iterator[str]:
    broken = broken_together(_joint(stored, patterns, _bits_set))
    by_value = broken_together(_joint(stored, patterns, lambda tensor: tensor != 0)) if broken else {}
    for text in broken:
        why = by_value.get(text, "they hold -0.0 where +0.0 was expected")
        yield f"the parameters under {text} are not {text}: {why}"


@torch.no_grad()
def _verify_export(folder: Path, masks: MaskSet | None, patterns: Patterns) -> Verification:
    try:
        manifest: Manifest = read(folder)
        problems = [f"{folder / name}: {what}" for name, what in damaged_files(folder, manifest).items()]
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if name.endswith(WEIGHT_SUFFIXES) and name not in manifest.files:
                problems.append(f"{path}: a weights file that the manifest does not know")
        with opened(folder, manifest) as stored:
            given = masks.masks if masks is not None else {}
            layers = [
                _check_entry(stored, name, entry, given.get(name), patterns)
                for name, entry in manifest.parameters.items()
            ]
            problems += [f"{folder}: {problem}" for problem in _not_held_together(stored, patterns)]
            absent = sorted(set(manifest.tied.values()) - stored.parameters())
            problems += [f"{folder}: '{name}' is missing from the weights files" for name in absent]
    except AspError as error:
        return Verification(False, [str(error)])
    unknown = sorted(set(given) - set(manifest.parameters))
    problems += [f"{folder}: '{name}' has a mask but is not listed as pruned" for name in unknown]
    return _result(problems, layers, f"{folder}: ")


@torch.no_grad()
def _verify_model(model: nn.Module, masks: MaskSet, patterns: Patterns) -> Verification:
    wrong = masks.violations(model)
    known: dict[str, View | str] = {name: view for name, _, view in views(bare(model))}
    slots = dict(bare(model).named_parameters(remove_duplicate=False))
    layers, joint = [], []
    for name, mask in masks.masks.items():
        text, view, problem, note = masks.patterns.get(name), known.get(name), wrong.get(name), None
        pattern = None
        try:
            pattern = None if text is None else known_pattern(text, patterns)
        except AspError as error:
            problem = problem or str(error)
        if pattern is None and problem is None:
            note = "its mask has no pattern to be checked against" if text is None else not_built_in(text)
        if pattern is not None and isinstance(view, View):
            matrix = view.matrix(whole(mask))
            joint.append((pattern, matrix))
            if problem is None and not pattern.holds(matrix):
                problem = f"its mask is not {text}"
        layers.append(LayerCheck(name, text or "?", _density(whole(slots[name].detach())), problem, note))
    problems = [] if layers else ["nothing is pruned: there are no masks"]
    problems += [f"the masks under {text} are not {text}: {why}" for text, why in broken_together(joint).items()]
    return _result(problems, layers)


def verify(target: str | Path | nn.Module, masks: MaskSet | None = None, patterns: Patterns = None) -> Verification:
    """Check an export folder, a run folder (all its exports), or a model against its masks.

    Of an export: every file's hash and structure; in the file itself, that every pattern holds, that dropped entries
    are +0.0 and the density is what the manifest says; with `masks`, that nothing else than they keep is there.

    patterns: name -> pattern, for names that are not built in ("package.module:name"). Names from files and masks are
              never imported: without its pattern, a parameter is checked as far as that goes, and a note says so.

    Raises:
        AspError: there is nothing to verify at `target`, or a model came without masks.
    """
    if isinstance(target, nn.Module):
        if masks is None:
            raise AspError("verify: a model needs its masks: verify(model, masks)")
        return _verify_model(target, masks, patterns)
    folder = Path(target)
    if (folder / NAME).is_file():
        return _verify_export(folder, masks, patterns)
    exports = sorted(path.parent for path in folder.glob(f"exports/*/{NAME}"))
    if not exports:
        raise AspError(f"verify: {folder} is neither an export (it has no {NAME}) nor a run folder with exports")
    results = [_verify_export(export, masks, patterns) for export in exports]
    return Verification(
        all(result.ok for result in results),
        [problem for result in results for problem in result.problems],
        sum(result.checked for result in results),
        [layer for result in results for layer in result.layers],
        [note for result in results for note in result.notes],
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
            with dense_only():  # a sparse kernel sums in another order
                outputs.append(model(inputs) if forward is None else forward(model, inputs))
        finally:
            for module, mode in modes.items():
                module.training = mode
    difference = _difference(outputs[0], outputs[1], "output")
    if difference:
        raise AspError(f"the two models do not compute the same: {difference}")
