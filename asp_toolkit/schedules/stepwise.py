"""Schedules as functions of the step: gradual pruning, given patterns at given steps, one's own."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from asp_toolkit.calibration import GradientStats
from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, whole
from asp_toolkit.patterns import Pattern, parse
from asp_toolkit.pruning import Chosen, choose_masks, scores_of
from asp_toolkit.recipe.schema import Gradual, OwnSchedule, Steps
from asp_toolkit.schedules.keeper import (
    Keeper,
    State,
    clear_moments_,
    finite_gradients,
    known,
    masks_from_state,
    masks_state,
)
from asp_toolkit.scores import needs_of

Schedule = Callable[[int], Pattern | str | None]
"""Optimizer step -> the pattern from there on, or None: as before."""


def cubic(step: int, begin: int, end: int) -> float:
    """Share of the dropping that is done before optimizer step `step`: 1 - (1 - t)^3 (arXiv 1710.01878, eq. 1)."""
    if step < begin:
        return 0.0
    return 1.0 if step >= end else 1 - (1 - (step - begin) / (end - begin)) ** 3


Plan = Callable[[int], Mapping[str, Pattern | None] | None]
"""Optimizer step -> the pattern of every parameter that changes there (None: dense), or None: as before."""


class Stepwise:
    """Another pattern from given steps on. Dropped entries come last, so that each mask lies inside the one before it.

    Where a pattern ties entries together (transposable, V:N:M), a few dropped ones may have to come back, at zero.
    """

    def __init__(
        self,
        chosen: Mapping[str, Chosen],
        masks: MaskSet,
        model: nn.Module,
        plan: Plan,
    ) -> None:
        """The model has its dense weights; those that the plan drops at step 0 are zeroed."""
        self.chosen, self.plan, self.zeros_stay = chosen, plan, False
        self.skipped = masks.skipped
        everything = {name: torch.ones_like(mask) for name, mask in masks.masks.items()}
        self.masks = MaskSet(everything, masks.skipped, dict.fromkeys(everything, "dense")).placed_like(model)
        self.gradients = GradientStats(chosen) if any(needs_of(one.score) for one in chosen.values()) else None
        if first := plan(0):
            self._change(model, first)
            self.masks.apply_(model)

    @torch.no_grad()
    def _change(self, model: nn.Module, patterns: Mapping[str, Pattern | None]) -> None:
        if not any(patterns.values()):
            return  # still dense
        stats = self.gradients.stats() if self.gradients is not None else None
        now = {}
        for name, pattern in patterns.items():
            if pattern is not None:
                old = self.chosen[name]
                now[name] = Chosen(old.view, old.module, old.own, pattern, old.score, old.rule)

        def scores(name: str) -> torch.Tensor:
            one = now[name]
            found = scores_of(name, one, stats)
            dropped = ~one.view.matrix(whole(self.masks.masks[name]))
            lowest = torch.nextafter(found.min(), torch.full_like(found.min(), -torch.inf))
            return torch.where(dropped, lowest, found)

        masks = {**self.masks.masks, **choose_masks(now, scores)}
        names = {**self.masks.patterns, **{name: one.pattern.name for name, one in now.items()}}
        self.masks = MaskSet(masks, self.skipped, names).placed_like(model)
        if self.gradients is not None:
            self.gradients = GradientStats(self.chosen)  # each pruning judges by the gradients since the one before

    def wants_dense_gradients(self, step: int) -> bool:
        return False

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if self.gradients is not None and finite_gradients(self.chosen):
            self.gradients.update(model)
        self.masks.zero_grads_(model)

    def after_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        patterns = self.plan(step + 1)
        if patterns is not None:
            self._change(model, patterns)
            for name, one in self.chosen.items():
                clear_moments_(optimizer, one.parameter, self.masks.masks[name])
        if patterns is not None or not self.zeros_stay:
            self.masks.apply_(model)

    def state(self) -> State:
        return {**masks_state(self.masks), "gradients": self.gradients.state() if self.gradients else None}

    def load(self, state: State, model: nn.Module) -> None:
        self.masks = masks_from_state(state, self.masks, model)
        if self.gradients is not None:
            self.gradients.load(state["gradients"])


def prepare(
    plan_of: Callable[[Any, Mapping[str, Chosen], int | None], Plan],
    section: Any,
    chosen: Mapping[str, Chosen],
    total: int | None,
) -> Callable[[MaskSet, nn.Module], Keeper]:
    """As `keeper.Prepare`, for a schedule whose plan `plan_of` makes: `gradual`, `steps` or `own`."""
    plan = plan_of(section, chosen, total)
    gradients = False
    for name, one in chosen.items():
        gradients |= bool(needs_of(one.score))
        if needs_of(one.score) and not one.parameter.requires_grad:
            raise AspError(f"prune.schedule: '{name}' is scored by its gradients, but is frozen; use magnitude for it")
        if "input_norm" in needs_of(one.score):
            raise AspError(
                f"prune.schedule: '{name}' is scored by its inputs, which are not seen while training; use magnitude, "
                "taylor, fisher or movement, or the one_shot schedule"
            )
    if gradients and any((plan(0) or {}).values()):
        raise AspError("prune.schedule: a score of gradients cannot prune before the first step; let it begin later")
    return lambda masks, model: Stepwise(chosen, masks, model, plan)


def gradual(section: Gradual, chosen: Mapping[str, Chosen], total: int | None) -> Plan:
    """From dense to every parameter's own pattern, along `cubic`."""
    total = known(total, section.name)
    for name, one in chosen.items():
        if not hasattr(one.pattern, "towards"):
            raise AspError(
                f"prune.schedule: gradual: '{name}' has pattern {one.pattern.name}, with nothing on the way to it; "
                "use one_shot, steps or straight_through"
            )
    if total < 1:
        raise AspError("prune.schedule: gradual: the retraining has no optimizer step; use one_shot")
    end = max(1, round(section.end * total))
    begin = min(round(section.begin * total), end - 1)
    every = section.every or max(1, (end - begin) // 10)
    if every >= end - begin > 1:
        raise AspError(
            f"prune.schedule: gradual prunes every {every} steps, but has only steps {begin} to {end}: one jump; "
            "lower every, or use one_shot"
        )
    changes = range(begin, end, every)

    def plan(step: int) -> Mapping[str, Pattern | None] | None:
        if step not in changes and step != end:
            return None
        share = cubic(step, begin, end)
        return {name: one.pattern.towards(share) for name, one in chosen.items()}  # type: ignore[attr-defined]

    return plan


def _for_all(chosen: Mapping[str, Chosen], pattern: Pattern, place: str) -> Mapping[str, Pattern]:
    for name, one in chosen.items():
        if reason := pattern.why_not(one.view.rows, one.view.cols, one.view.run):
            raise AspError(f"{place}: {pattern.name} does not fit '{name}': {reason}; exclude that layer in the rule")
    return dict.fromkeys(chosen, pattern)


def _checked(at: Mapping[int, Pattern], chosen: Mapping[str, Chosen], place: str) -> Plan:
    """A plan of patterns for all: each fits everywhere, none keeps more than the one before, the last is the rules'."""
    patterns = {step: _for_all(chosen, pattern, f"{place}: step {step}") for step, pattern in at.items()}
    for (_, before), (step, after) in itertools.pairwise(sorted(at.items())):
        for one in chosen.values():
            if after.density(one.view.rows, one.view.cols) > before.density(one.view.rows, one.view.cols):
                raise AspError(
                    f"{place}: step {step}: {after.name} keeps more than {before.name} before it, but what was dropped "
                    "does not come back; straight_through and rigl let it"
                )
    for name, one in chosen.items():
        last = at[max(at)] if at else None
        if last != one.pattern:
            said = f"ends with {last.name}" if last else "never prunes"
            raise AspError(f"{place}: it {said}, but the rule of '{name}' wants {one.pattern.name}")
    return lambda step: patterns.get(step)


def steps(section: Steps, chosen: Mapping[str, Chosen], total: int | None) -> Plan:
    """The patterns given for the steps; the last one must be the rules' own, and its step must come."""
    at = {int(step): parse(text) for step, text in section.at.items()}
    if total is not None and max(at) > total:
        raise AspError(f"prune.schedule.at: step {max(at)} never comes: the retraining has {total} optimizer steps")
    return _checked(at, chosen, "prune.schedule.at")


_FORESEEN = 10_000_000  # optimizer steps; fewer are asked about beforehand


def own(section: OwnSchedule, chosen: Mapping[str, Chosen], total: int | None) -> Plan:
    """What the user's function says, for all parameters alike.

    It is asked about every step before the training begins, unless there are very many, or nobody knows yet how many.
    """
    place = f"prune.schedule.call: '{section.call}'"
    module, _, name = section.call.partition(":")
    total = known(total, "callable")
    try:
        made = getattr(importlib.import_module(module), name)(total, **section.options)
    except Exception as error:  # somebody else's code: whatever it raises, this is the place
        raise AspError(f"{place}: {type(error).__name__}: {error}") from error
    if not callable(made):
        raise AspError(f"{place}: expected a function of the step back, got {type(made).__name__}")

    def ask(step: int) -> Pattern | None:
        try:
            said = made(step)
            pattern = parse(said) if isinstance(said, str) else said
        except Exception as error:
            raise AspError(f"{place}: step {step}: {type(error).__name__}: {error}") from error
        if pattern is not None and not hasattr(pattern, "why_not"):
            raise AspError(f"{place}: step {step}: expected a pattern, its text or None, got {pattern!r}")
        return pattern

    if total < _FORESEEN:
        return _checked({step: found for step in range(total + 1) if (found := ask(step))}, chosen, place)

    def plan(step: int) -> Mapping[str, Pattern | None] | None:
        pattern = ask(step)
        return None if pattern is None else _for_all(chosen, pattern, f"{place}: step {step}")

    return plan
