"""Somebody's own train(model) and evaluate(model)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from asp_toolkit.errors import AspError
from asp_toolkit.masks import bare
from asp_toolkit.schedules import Keeper, held
from asp_toolkit.trainer.story import Phases

TrainFunction = Callable[[nn.Module], Any]
EvaluateFunction = Callable[[nn.Module], float | Mapping[str, Any]]


def function_phases(model: nn.Module, train: TrainFunction, evaluate: Any, loss: Any) -> Phases:
    """`train(model)` twice, the second time with the masks held. Its optimizer steps are counted the first time."""
    if not callable(evaluate):
        raise AspError("prune_trainer: train is a function, so evaluate must be one too")
    if loss is not None:
        raise AspError("prune_trainer: loss: your train function has its own; leave it out")
    counted = [0]

    def trained() -> None:
        returned = train(model)
        if isinstance(returned, nn.Module) and bare(returned) is not bare(model):
            raise AspError(
                f"prune_trainer: train returned another {type(returned).__name__} than it was given; masks can only be "
                "held on the given one: train it in place (load_state_dict brings other weights into it)"
            )

    def dense() -> None:
        with _steps_counted(model, counted):
            trained()

    def retrained(schedule: Callable[[int | None, bool], Keeper]) -> None:
        with held(schedule(counted[0] or None, False), model):
            trained()

    return Phases(lambda: model, dense, retrained, lambda: evaluate(model), lambda: None)


@contextmanager
def _steps_counted(model: nn.Module, count: list[int]) -> Iterator[None]:
    """Add to count[0] the steps that an optimizer of `model` takes; of the busiest, where there are several."""
    steps: dict[Optimizer, int] = {}

    def step(optimizer: Optimizer, *_: Any) -> None:
        mine = {id(parameter) for parameter in model.parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            steps[optimizer] = steps.get(optimizer, 0) + 1

    handle = register_optimizer_step_post_hook(step)
    try:
        yield
    finally:
        handle.remove()
        count[0] += max(steps.values(), default=0)
