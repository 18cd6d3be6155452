"""Keepers: who keeps a model sparse while it trains, and changes its masks where the schedule says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, bare, whole, zero_dropped_
from asp_toolkit.pruning import Chosen
from asp_toolkit.scores import needs_of

State = dict[str, Any]
"""Nested dicts of tensors, numbers and texts: what a checkpoint can hold."""


class Keeper(Protocol):
    """Keeps a model sparse through one phase of training. Between two steps the model obeys `masks`.

    Steps count optimizer steps from 0. A keeper is made after the first masks were, when training is about to begin.

    masks:      the masks now
    zeros_stay: the optimizer leaves an entry at +0.0 that never has a gradient (optimizers.keeps_zeros)
    """

    masks: MaskSet
    zeros_stay: bool

    def wants_dense_gradients(self, step: int) -> bool:
        """Whether the gradients of dropped entries are needed before optimizer step `step`."""

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """Gradients are complete, unscaled and not yet clipped; the optimizer is about to step."""

    def after_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """The optimizer has stepped: make the model obey the masks, which may change now."""

    def state(self) -> State:
        """What `load` needs to go on from here, for a checkpoint."""

    def load(self, state: State, model: nn.Module) -> None:
        """Go on from what `state` returned."""


Prepare = Callable[[Any, Mapping[str, Chosen], int | None], Callable[[MaskSet, nn.Module], Keeper]]
"""(section of the recipe, parameters to be pruned, optimizer steps of the phase if known) -> what makes the keeper.

The first call raises AspError where the schedule does not suit them. The second gets the masks that `prune` made and
the model with its dense weights, and leaves it sparse."""


def known(total: int | None, name: str) -> int:
    """`total`, where it is known.

    Raises:
        AspError: it is not.
    """
    if total is None:
        raise AspError(
            f"prune.schedule: {name} speaks of shares of the retraining, whose number of optimizer steps is not known; "
            "use one_shot, or steps, which gives them by number"
        )
    return total


def refuse_stats(chosen: Mapping[str, Chosen], schedule: str) -> None:
    """Raise AspError where a score needs more than the weights, which a schedule that scores often does not have."""
    for name, one in chosen.items():
        if needs := needs_of(one.score):
            raise AspError(
                f"prune.schedule: {schedule} judges by the weights at every change, but the score of '{name}' needs "
                f"{', '.join(needs)}; use magnitude, or the one_shot or gradual schedule"
            )


class Fixed:
    """The masks stay as they are: the paper's rule."""

    zeros_stay = False

    def __init__(self, masks: MaskSet, model: nn.Module) -> None:
        self.masks = masks.placed_like(model)
        self.masks.apply_(model)

    def wants_dense_gradients(self, step: int) -> bool:
        return False

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        self.masks.zero_grads_(model)

    def after_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if not self.zeros_stay:
            self.masks.apply_(model)

    def state(self) -> State:
        return {}

    def load(self, state: State, model: nn.Module) -> None:
        pass


def masks_state(masks: MaskSet) -> State:
    """Masks and their patterns, as a checkpoint holds them."""
    return {"masks": dict(masks.masks), "patterns": dict(masks.patterns)}


def masks_from_state(state: State, masks: MaskSet, model: nn.Module) -> MaskSet:
    """`masks` with what `masks_state` saw, placed like the model's parameters."""
    return MaskSet(state["masks"], masks.skipped, state["patterns"]).placed_like(model)


def finite_gradients(chosen: Mapping[str, Chosen]) -> bool:
    """Whether the optimizer will step: a gradient scaler leaves a step out whose gradients have overflowed."""
    gradients = [one.parameter.grad for one in chosen.values() if one.parameter.grad is not None]
    return all(bool(whole(torch.isfinite(gradient).all())) for gradient in gradients)


@torch.no_grad()
def clear_moments_(optimizer: Optimizer, parameter: nn.Parameter, mask: Tensor) -> None:
    """Set what the optimizer remembers of dropped entries (momentum, second moments) to 0.

    A dropped entry must not move by an old momentum, and one that comes back begins afresh.
    """
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
            zero_dropped_(value, mask)


@contextmanager
def held(keeper: Keeper, model: nn.Module) -> Iterator[None]:
    """Let `keeper` work inside somebody else's training loop, whatever optimizer it makes; nothing is left behind.

    Gradients of dropped entries are zeroed as soon as `backward` has accumulated them, so before any clipping, except
    before steps for which the keeper wants them. One optimizer must train all the masked parameters.

    Raises:
        AspError: a second optimizer trains masked parameters, or one steps with a closure.
    """
    if isinstance(keeper, Fixed):
        with keeper.masks.held(model):
            yield
        return
    step = 0
    stepping: list[Optimizer] = []

    def parameters() -> dict[str, nn.Parameter]:
        known = dict(bare(model).named_parameters(remove_duplicate=False))
        return {name: known[name] for name in keeper.masks.masks}

    def ours(optimizer: Optimizer) -> bool:
        mine = {id(parameter) for parameter in parameters().values()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            return False
        if stepping and stepping[0] is not optimizer:
            raise AspError("a schedule counts the steps of one optimizer, but two train pruned parameters")
        stepping[:] = [optimizer]
        return True

    def zero(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and not keeper.wants_dense_gradients(step):
                zero_dropped_(parameter.grad, keeper.masks.masks[name])

        return hook

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if ours(optimizer):
            if any(callable(given) for given in (*args[1:], *kwargs.values())):
                raise AspError(
                    f"a schedule cannot follow {type(optimizer).__name__}.step(closure), which computes gradients "
                    "inside the step; use step() after backward(), or the one_shot schedule"
                )
            keeper.before_step(model, optimizer, step)

    def after(optimizer: Optimizer, *_: Any) -> None:
        nonlocal step
        if ours(optimizer):
            keeper.after_step(model, optimizer, step)
            step += 1

    with ExitStack() as hooks:
        for name, parameter in parameters().items():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(zero(name))  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
        hooks.callback(register_optimizer_step_pre_hook(before).remove)
        hooks.callback(register_optimizer_step_post_hook(after).remove)
        try:
            yield
            keeper.masks.warn_of_changes(model, stacklevel=4)
        finally:
            keeper.masks.apply_(model)
