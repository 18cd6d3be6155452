"""How masks come about while a model is retrained: held as pruned, gradually, straight-through, exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, bare
from asp_toolkit.pruning import Rule, choose
from asp_toolkit.schedules import rigl, stepwise, straight_through
from asp_toolkit.schedules.keeper import Fixed, Keeper, Prepare, held
from asp_toolkit.schedules.stepwise import Schedule, cubic

__all__ = [
    "SCHEDULES",
    "Fixed",
    "Keeper",
    "Schedule",
    "check_reached",
    "check_schedule",
    "cubic",
    "dense_weights",
    "held",
    "keeper_for",
]


SCHEDULES: dict[str, Prepare] = {
    "one_shot": lambda section, chosen, total: Fixed,
    "gradual": partial(stepwise.prepare, stepwise.gradual),
    "steps": partial(stepwise.prepare, stepwise.steps),
    "straight_through": straight_through.prepare,
    "rigl": rigl.prepare,
    "callable": partial(stepwise.prepare, stepwise.own),
}
"""Name in a recipe -> what checks the section and then makes the keeper."""


def check_schedule(section: Any, model: nn.Module, rules: Sequence[Rule], total: int | None) -> None:
    """Refuse before the expensive part what `keeper_for` would refuse; the model is not changed.

    Raises:
        AspError: as `keeper_for`.
    """
    SCHEDULES[section.name](section, choose(model, rules).chosen, total)


def check_reached(masks: MaskSet, first: MaskSet) -> None:
    """Refuse a schedule that did not come to its end.

    masks: at the end of the retraining; first: those that `prune` made, of the rules' patterns

    Raises:
        AspError: a parameter holds another pattern than its rule's.
    """
    for name, pattern in first.patterns.items():
        if (held := masks.patterns.get(name)) != pattern:
            raise AspError(
                f"the retraining ended before its schedule: '{name}' is {held}, its rule wants {pattern}; the weights "
                "are as they were trained: train for as many steps as were foreseen, or prune what is there now"
            )


def dense_weights(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Copies of the parameters that the rules would prune, for `keeper_for`; to be taken before pruning."""
    return {name: one.parameter.detach().clone() for name, one in choose(model, rules).chosen.items()}


@torch.no_grad()
def keeper_for(
    section: Any,
    model: nn.Module,
    rules: Sequence[Rule],
    masks: MaskSet,
    dense: Mapping[str, Tensor],
    total: int | None,
    zeros_stay: bool = False,
) -> Keeper:
    """What keeps `model` sparse through a phase of `total` optimizer steps (None: not known).

    section: a recipe's prune.schedule
    masks:   those that `prune` has made
    dense:   the weights before that, by name, which most schedules begin with
    zeros_stay: the optimizer leaves an entry at +0.0 that never has a gradient

    Raises:
        AspError: the schedule does not suit the patterns, the scores, or the number of steps.
    """
    make = SCHEDULES[section.name](section, choose(model, rules).chosen, total)
    parameters = dict(bare(model).named_parameters(remove_duplicate=False))
    for name in masks.masks:
        parameters[name].copy_(dense[name])
    keeper = make(masks, model)
    keeper.zeros_stay = zeros_stay
    return keeper
