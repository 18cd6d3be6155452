"""The optimizer and the learning rate that a recipe names."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.schema import LrSchedule, Optimizer


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    base = torch.optim.Optimizer
    classes = [c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, base) and c is not base]
    known = {c.__name__: c for c in classes}
    by_case = {n.lower(): c for n, c in known.items()}
    if name.lower() not in by_case:
        raise AspError(f"optimizer.name: unknown optimizer '{name}'; {closest(name, known)}")
    return by_case[name.lower()]


def optimizer_arguments(section: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and its keyword arguments, checked before anything is trained.

    Raises:
        AspError: no such optimizer, or it does not take one of the arguments.
    """
    kind = _optimizer_class(section.name)
    arguments: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay, **section.options}
    for key in ("momentum", "nesterov"):
        if (value := getattr(section, key)) is not None:
            arguments[key] = value
    taken = set(inspect.signature(kind).parameters) - {"params"}
    for key in arguments:
        if key not in taken and not (key == "weight_decay" and section.weight_decay == 0):
            raise AspError(f"optimizer: {kind.__name__} takes no '{key}'; {closest(key, taken)}")
    arguments = {key: value for key, value in arguments.items() if key in taken}
    try:
        kind([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (TypeError, ValueError) as error:
        raise AspError(f"optimizer: {kind.__name__} refuses its arguments: {error}") from error
    return kind, arguments


def build_optimizer(model: nn.Module, section: Optimizer) -> torch.optim.Optimizer:
    """An optimizer with fresh state over the parameters that train; vectors (norms, biases) are not decayed.

    Raises:
        AspError: as `optimizer_arguments`; or it does not take these parameters (torch.optim.Muon: matrices only).
    """
    kind, arguments = optimizer_arguments(section)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in trained if p.ndim >= 2]}]
    if vectors := [p for p in trained if p.ndim < 2]:
        groups.append({"params": vectors, **({"weight_decay": 0.0} if "weight_decay" in arguments else {})})
    try:
        return kind([group for group in groups if group["params"]], **arguments)
    except ValueError as error:
        raise AspError(f"optimizer: {kind.__name__} refuses this model's parameters: {error}") from error


def keeps_zeros(section: Optimizer) -> bool:
    """Whether an entry that is +0.0 and never has a gradient stays +0.0 by the optimizer's own arithmetic.

    True of optimizers that treat every entry by itself (SGD, Adam, ...): masks then hold after every step without
    another pass over the weights. Found by trying the optimizer on a small matrix, not by its name; one that mixes
    entries (Muon) or steps otherwise is found out.
    """
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(8, 8, generator=generator) < 0.5
    kind, arguments = optimizer_arguments(section)
    weight = nn.Parameter(torch.where(keep, torch.randn(8, 8, generator=generator), 0.0))
    try:
        optimizer = kind([weight], **arguments)
        step: Any = kind.step
        while getattr(step, "hooked", False):  # torch's wrapper, which would call hooks meant for real steps
            step = step.__wrapped__
        for _ in range(3):
            weight.grad = torch.where(keep, torch.randn(8, 8, generator=generator), 0.0)
            step(optimizer)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not weight.detach()[~keep].view(torch.int32).any()


def lr_factor(schedule: LrSchedule, step: int, total: int, steps_per_epoch: int) -> float:
    """The learning rate before optimizer step `step` (from 0) of `total`, as a share of the peak."""
    warmup = schedule.warmup
    if schedule.name == "one_cycle" and warmup == 0:
        warmup = 0.3
    rising = round(warmup * total)
    if step < rising:
        share = (step + 1) / rising
        if schedule.name == "one_cycle":  # Smith and Topin, arXiv 1708.07120: from 1/25 of the peak, by a cosine
            return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * share)) / 2
        return share
    gone = (step - rising) / max(1, total - rising)
    if schedule.name in ("cosine", "one_cycle"):
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * gone)) / 2
    if schedule.name == "linear":
        return schedule.final + (1 - schedule.final) * (1 - gone)
    if schedule.name == "step":
        epoch = step / steps_per_epoch
        passed = int(epoch // schedule.every) if schedule.every else sum(epoch >= m for m in schedule.milestones)
        return float(schedule.gamma**passed)
    return 1.0
