"""RigL (arXiv 1911.11134): drop the weakest kept weights, grow the dropped ones whose gradients are the steepest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, whole
from asp_toolkit.pruning import Chosen, choose_masks, scores_of
from asp_toolkit.recipe.schema import RigL as Section
from asp_toolkit.schedules.keeper import (
    Keeper,
    State,
    clear_moments_,
    finite_gradients,
    known,
    masks_from_state,
    masks_state,
    refuse_stats,
)


class RigL:
    """Every `every` steps a share of each layer's kept weights, f/2 (1 + cos(pi t / last)), is exchanged.

    What grows is what the pattern allows: within N:M a weight gives way to one of its own group. Grown weights begin
    at zero, with fresh optimizer state, as in the paper; the step at which they grow trains them already.
    """

    def __init__(
        self, section: Section, chosen: Mapping[str, Chosen], masks: MaskSet, model: nn.Module, every: int, last: int
    ) -> None:
        """every: steps between two exchanges; last: the step from which on masks stay."""
        self.section, self.chosen, self.every, self.last, self.zeros_stay = section, chosen, every, last, False
        self.masks = masks.placed_like(model)
        self.masks.apply_(model)

    def wants_dense_gradients(self, step: int) -> bool:
        return 0 < step < self.last and step % self.every == 0

    @torch.no_grad()
    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if self.wants_dense_gradients(step) and finite_gradients(self.chosen):
            share = self.section.fraction / 2 * (1 + math.cos(math.pi * step / self.last))
            learning = {name: one for name, one in self.chosen.items() if one.parameter.grad is not None}
            found = {**self.masks.masks, **choose_masks(learning, lambda name: self._scores(name, share))}
            self.masks = MaskSet(found, self.masks.skipped, self.masks.patterns).placed_like(model)
            self.masks.apply_(model)
            for name, one in self.chosen.items():
                clear_moments_(optimizer, one.parameter, self.masks.masks[name])
        self.masks.zero_grads_(model)

    def _scores(self, name: str, share: float) -> Tensor:
        """Kept entries that stay: 2. Dropped ones: their gradient's size in (0, 1). The weakest of the kept: below 0,
        the stronger the higher, since a group without enough dropped entries takes some of them back. Last, dropped
        ones without any gradient: they would stay at zero."""
        one = self.chosen[name]
        kept = one.view.matrix(whole(self.masks.masks[name]))
        assert one.parameter.grad is not None
        steep = one.view.matrix(whole(one.parameter.grad)).abs().float()
        steep = steep / (steep.max() * (1 + 1e-6) + torch.finfo(steep.dtype).tiny)
        strength = torch.where(kept, scores_of(name, one).float(), math.inf).flatten()
        count = min(int(share * int(kept.sum())), int((~kept & (steep > 0)).sum()))
        weakest = strength.sort(stable=True).indices[:count]
        scores = torch.where(kept, 2.0, torch.where(steep > 0, steep, -3.0))
        given_up = strength[weakest]
        scores.view(-1)[weakest] = -1 - 1 / (1 + given_up / (given_up.mean() + torch.finfo(given_up.dtype).tiny))
        return scores

    def after_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if not self.zeros_stay:
            self.masks.apply_(model)

    def state(self) -> State:
        return masks_state(self.masks)

    def load(self, state: State, model: nn.Module) -> None:
        self.masks = masks_from_state(state, self.masks, model)


def prepare(
    section: Section, chosen: Mapping[str, Chosen], total: int | None
) -> Callable[[MaskSet, nn.Module], Keeper]:
    """As `keeper.Prepare`."""
    refuse_stats(chosen, section.name)
    last = round(section.until * known(total, section.name))
    every = section.every or min(100, max(1, last // 10))
    if every >= last:
        raise AspError(
            f"prune.schedule: rigl exchanges every {every} steps until step {last} of {total}, so never; lower every"
        )
    return lambda masks, model: RigL(section, chosen, masks, model, every, last)
