"""Somebody's own train(model) and evaluate(model)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, bare
from asp_toolkit.trainer.story import Phases

TrainFunction = Callable[[nn.Module], Any]
EvaluateFunction = Callable[[nn.Module], float | Mapping[str, Any]]


def function_phases(model: nn.Module, train: TrainFunction, evaluate: Any, loss: Any) -> Phases:
    """`train(model)` twice, the second time inside `masks.held`."""
    if not callable(evaluate):
        raise AspError("prune_trainer: train is a function, so evaluate must be one too")
    if loss is not None:
        raise AspError("prune_trainer: loss: your train function has its own; leave it out")

    def trained() -> None:
        returned = train(model)
        if isinstance(returned, nn.Module) and bare(returned) is not bare(model):
            raise AspError(
                f"prune_trainer: train returned another {type(returned).__name__} than it was given; masks can only be "
                "held on the given one: train it in place (load_state_dict brings other weights into it)"
            )

    def retrained(masks: MaskSet) -> None:
        with masks.held(model):
            trained()

    return Phases(lambda: model, trained, retrained, lambda: evaluate(model))
