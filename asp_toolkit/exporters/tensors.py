"""From a model and its masks to the tensors an export writes: each once, checked, never changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asp_kernels import SparseConv2d, SparseLinear
from asp_toolkit.errors import AspError, closest
from asp_toolkit.exporters.checks import broken_together
from asp_toolkit.exporters.entry import Entry, known_pattern
from asp_toolkit.masks import MaskSet, bare, whole, zero_dropped_
from asp_toolkit.patterns import Pattern
from asp_toolkit.views import View, views


@dataclass(frozen=True)
class Collected:
    """What to write.

    model:   out of its wrappers
    tensors: state-dict name -> tensor, every tensor once; dropped entries +0.0
    groups:  names of one and the same tensor, the stored one first; groups of two and more
    entries: pruned parameter -> its line in the manifest
    """

    model: nn.Module
    tensors: dict[str, Tensor]
    groups: list[list[str]]
    entries: dict[str, Entry]
    changed: bool


def _same(tensor: Tensor) -> tuple[Any, ...]:
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset()) if tensor.numel() else (id(tensor), 0)
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _unique(model: nn.Module) -> tuple[dict[str, Tensor], list[list[str]]]:
    first: dict[tuple[Any, ...], str] = {}
    groups: dict[str, list[str]] = {}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise AspError(
                f"export: '{name}' in the state dict is a {type(tensor).__name__}, not a tensor; it cannot be stored"
            )
        if tensor.is_meta:
            raise AspError(f"export: '{name}' is on the meta device and has no values; load its weights first")
        if hasattr(tensor, "full_tensor"):
            raise AspError(f"export: '{name}' is spread over processes; export a model that holds its whole weights")
        kept = first.setdefault(_same(tensor), name)
        groups.setdefault(kept, []).append(name)
        if kept == name:
            tensors[name] = tensor.detach()
    return tensors, [names for names in groups.values() if len(names) > 1]


def _entry(name: str, tensor: Tensor, mask: Tensor, view: View, text: str, pattern: Pattern | None) -> Entry:
    if mask.shape != tensor.shape:
        raise AspError(f"export: mask of '{name}': expected shape {tuple(tensor.shape)}, got {tuple(mask.shape)}")
    reason = None if pattern is None else pattern.why_not(view.rows, view.cols, view.run)
    if reason:
        raise AspError(f"export: '{name}': {text} does not fit: {reason}")
    own = known_pattern(text) is None and pattern is not None
    nm = getattr(pattern, "nm", None) if own else None
    try:
        entry = Entry(
            pattern=text,
            shape=list(view.shape),
            axis=view.order[-1],
            order=list(view.order),
            row_dims=view.row_dims,
            density=int(tensor.count_nonzero()) / max(1, tensor.numel()),
            dtype=str(tensor.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked by the model
            split=None if view.split == view.shape else list(view.split),
            run=None if view.run == view.split[view.order[-1]] else view.run,
            also=None if nm is None else nm.name,
        )
    except ValueError as error:
        raise AspError(f"export: '{name}': {error}") from error
    if pattern is not None and not pattern.holds(entry.matrix(mask)):
        raise AspError(f"export: the mask of '{name}' is not {text}; prune the model again")
    return entry


def _pattern(name: str, masks: MaskSet, patterns: Mapping[str, Pattern] | None) -> tuple[str, Pattern | None]:
    text = masks.patterns.get(name)
    if text is None:
        raise AspError(f"export: the mask of '{name}' has no pattern; name it in MaskSet.patterns, e.g. '2:4'")
    try:
        return text, known_pattern(text, patterns)
    except AspError as error:
        raise AspError(f"export: '{name}': {error}") from error


@torch.no_grad()
def collect(model: nn.Module, masks: MaskSet, patterns: Mapping[str, Pattern] | None = None) -> Collected:
    """The tensors of `model` with their descriptions. Checks; never prunes and never changes the model.

    patterns: name -> pattern, of those that are not built in; masks under others of these names are not checked.

    Raises:
        AspError: a mask has no parameter, is not of its pattern, or drops entries that are not zero.
    """
    model = bare(model)
    packed = next((n for n, module in model.named_modules() if isinstance(module, SparseLinear | SparseConv2d)), None)
    if packed is not None:
        raise AspError(f"export: layer '{packed}' is packed already; call asp_kernels.unswap_(model) first")
    tensors, groups = _unique(model)
    known = {name: view for name, _, view in views(model)}
    entries, joint, changed = {}, [], False
    for name, given in masks.masks.items():
        view = known.get(name)
        if not isinstance(view, View) or name not in tensors:
            reason = f"'{name}' has no matrix view: {view}" if name in known else closest(name, known)
            raise AspError(f"export: mask for '{name}': the model has no such weight; {reason}")
        text, pattern = _pattern(name, masks, patterns)
        tensor, mask = tensors[name], whole(given).to(tensors[name].device)
        entries[name] = _entry(name, tensor, mask, view, text, pattern)
        if pattern is not None:
            joint.append((pattern, entries[name].matrix(mask)))
        dropped = tensor[~mask]
        if wrong := int(dropped.count_nonzero()):
            raise AspError(
                f"export: '{name}': {wrong} dropped entries are not zero; call masks.apply_(model) before exporting"
            )
        if bool(torch.signbit(dropped).any()):
            tensors[name] = tensor.clone()
            zero_dropped_(tensors[name], mask)
            changed = True
    for text, wrong_together in broken_together(joint).items():
        raise AspError(f"export: the masks under {text} are not {text}: {wrong_together}; prune the model again")
    return Collected(model, tensors, groups, entries, changed)


def storable(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, alone in its memory; the tensor itself where it is so already."""
    tensor = tensor.cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def stored_names(folder: Path, weights: list[str]) -> set[str]:
    """The tensor names in the weights files."""
    names: set[str] = set()
    for file in weights:
        with safe_open(folder / file, framework="pt") as opened:
            names.update(opened.keys())
    return names


def tied_to_stored(groups: list[list[str]], stored: set[str]) -> dict[str, str]:
    """Name that is not stored -> the stored name of the same tensor.

    Raises:
        AspError: none of the names is stored.
    """
    tied = {}
    for names in groups:
        kept = next((name for name in names if name in stored), None)
        if kept is None:
            raise AspError(f"export: none of the tied parameters {names} was saved")
        tied.update({name: kept for name in names if name not in stored})
    return tied


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is a transformers model: it has a config and saves itself."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(getattr(model, "config", None), "to_dict")


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar over ours; its setting is put back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def config_kept(model: nn.Module) -> Iterator[None]:
    """Undo what saving writes into the config object of a transformers model."""
    config = model.config
    before = copy.copy(vars(config))
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(before)
