"""SR-STE (arXiv 2102.04010): the network computes with the sparse weights, the optimizer trains the dense ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, whole, zero_dropped_
from asp_toolkit.pruning import Chosen, choose_masks, scores_of
from asp_toolkit.recipe.schema import StraightThrough as Section
from asp_toolkit.schedules.keeper import (
    Keeper,
    State,
    clear_moments_,
    known,
    masks_from_state,
    masks_state,
    refuse_stats,
)


class StraightThrough:
    """Between two steps the parameters are sparse; the weights they lack are kept aside and put back for each step.

    The gradient at the sparse weights is applied to all of them, dropped ones too ("straight through"), plus `decay`
    times each dropped weight (eq. 8 of the paper). Then masks are chosen anew, every `every` steps. A kept entry's
    score counts for (1 + hysteresis) times its value, so that masks do not flicker between near equals.

    Memory: one more copy of the masked weights.
    """

    def __init__(
        self,
        section: Section,
        chosen: Mapping[str, Chosen],
        masks: MaskSet,
        model: nn.Module,
        last: int | None,
    ) -> None:
        """last: the step after which masks stay, or None for never. The model has its dense weights."""
        self.section, self.chosen, self.last, self.zeros_stay = section, chosen, last, False
        self.masks = masks.placed_like(model)
        self.hidden: dict[str, Tensor] = {}  # the dropped weights; +0.0 where an entry is kept
        self._hide()

    @torch.no_grad()
    def _hide(self) -> None:
        for name, one in self.chosen.items():
            mask = self.masks.masks[name]
            aside = one.parameter.detach().clone()
            zero_dropped_(aside, ~mask)
            zero_dropped_(one.parameter, mask)
            self.hidden[name] = aside

    def wants_dense_gradients(self, step: int) -> bool:
        return self.last is None or step < self.last

    @torch.no_grad()
    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if not self.wants_dense_gradients(step):
            self.masks.zero_grads_(model)
            return
        for name, one in self.chosen.items():
            parameter, hidden = one.parameter, self.hidden[name]
            if parameter.grad is not None and self.section.decay:
                parameter.grad.add_(hidden, alpha=self.section.decay)
            parameter.add_(hidden)

    @torch.no_grad()
    def after_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if not self.wants_dense_gradients(step):
            if not self.zeros_stay:
                self.masks.apply_(model)
            return
        if (step + 1) % self.section.every == 0:
            found = choose_masks(self.chosen, self._scores)
            self.masks = MaskSet(found, self.masks.skipped, self.masks.patterns).placed_like(model)
        if step + 1 == self.last:
            self.hidden = {}
            for name, one in self.chosen.items():
                clear_moments_(optimizer, one.parameter, self.masks.masks[name])
            self.masks.apply_(model)
        else:
            self._hide()

    def _scores(self, name: str) -> Tensor:
        one = self.chosen[name]
        scores = scores_of(name, one)
        if not self.section.hysteresis:
            return scores
        kept = one.view.matrix(whole(self.masks.masks[name]))
        return torch.where(kept, scores * (1 + self.section.hysteresis), scores)

    def state(self) -> State:
        return {**masks_state(self.masks), "hidden": dict(self.hidden)}

    def load(self, state: State, model: nn.Module) -> None:
        self.masks = masks_from_state(state, self.masks, model)
        self.hidden = {}
        for name, hidden in state["hidden"].items():
            parameter = self.chosen[name].parameter
            self.hidden[name] = torch.empty_like(parameter, requires_grad=False).copy_(hidden)


def prepare(
    section: Section, chosen: Mapping[str, Chosen], total: int | None
) -> Callable[[MaskSet, nn.Module], Keeper]:
    """As `keeper.Prepare`."""
    refuse_stats(chosen, section.name)
    if total is not None and section.every > total:
        raise AspError(
            f"prune.schedule: straight_through chooses masks every {section.every} steps, but the retraining has "
            f"{total}, so never; lower every"
        )
    last = None if section.until == 1 else round(section.until * known(total, section.name))
    return lambda masks, model: StraightThrough(section, chosen, masks, model, last)
