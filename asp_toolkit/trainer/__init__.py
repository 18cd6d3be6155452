"""prune_trainer: the same story around somebody's own model, training function, or Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from asp_toolkit.errors import AspError
from asp_toolkit.pruning import Rule
from asp_toolkit.recipe.schema import Recipe
from asp_toolkit.tasks.task import Batch
from asp_toolkit.trainer.batches import Loss, batch_phases
from asp_toolkit.trainer.hugging_face import hf_phases, is_hf_trainer
from asp_toolkit.trainer.own_functions import EvaluateFunction, TrainFunction, function_phases
from asp_toolkit.trainer.settings import settings
from asp_toolkit.trainer.story import PruneResult, tell

__all__ = ["PruneResult", "prune_trainer"]


def prune_trainer(
    model: Any,
    recipe: str | Path | Recipe | Mapping[str, Any] | None = None,
    *,
    train: TrainFunction | Iterable[Batch] | None = None,
    evaluate: EvaluateFunction | Iterable[Batch] | None = None,
    loss: Loss | None = None,
    trained: bool = False,
    pattern: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    score: str | None = None,
    prune_schedule: str | Mapping[str, Any] | None = None,
    quiet: bool = False,
    **training: Any,
) -> PruneResult:
    """Train, prune and retrain in one call: dense training, one pruning, the same training again with masks held.

    Three ways to call it:

    * `prune_trainer(model, train=loader, evaluate=test_loader, loss=F.cross_entropy, epochs=3, optimizer={"lr": 0.1})`:
      our loop over your batches, (inputs, targets) pairs, or dicts for a model that takes them as keywords. Without
      `loss`, the model's output must have its own `.loss`. `evaluate` may also be a function of the model. A loader
      without a length needs max_steps; that many steps are then its epoch. Without an optimizer: SGD, lr 0.1, cosine.
    * `prune_trainer(model, train=train, evaluate=evaluate)`: your `train(model)` is called twice, the second time with
      the masks held whatever optimizer it makes; it should make a fresh one, and train the model it is given.
      `evaluate(model)` returns a number or a dict of them.
    * `prune_trainer(trainer)`: a transformers Trainer; `trainer.train()` and `trainer.evaluate()` are called. The
      retraining makes a fresh optimizer and scheduler, and its checkpoints go to OUTPUT_DIR/retrained, so that those
      of the dense phase stay.

    The model is changed in place. Hooks, random state, and the Trainer's arguments are afterwards as they were.

    Args:
        recipe: a recipe file, the name of one, a Recipe, or a mapping of some of its sections. With batches, its
            train, prune, retrain, seed, device and precision are used. With functions or a Trainer, its prune
            section alone is used. Of a whole recipe, the rest (task, batch sizes, checkpoints, export) gives way to
            what is given here; in a mapping without a task, written for this call, the rest is refused.
        trained: the model is trained already: start with pruning.
        pattern, include, exclude, score: as for `prune`, in place of the recipe's rules.
        prune_schedule: how masks come about in the retraining, as a recipe's prune.schedule: "straight_through", or
            {"name": "gradual", "end": 0.5}; default: pruned once and held.
        quiet: print nothing (a Trainer or a function of yours prints what it prints).
        training: with batches: keys of the recipe's train section (epochs, optimizer, schedule, ema ...), and seed,
            device, precision.

    Returns:
        PruneResult: model, masks, metrics of each phase, skipped layers with reasons, `.export(...)`.

    Raises:
        AspError: arguments that do not fit together or would be ignored, or as `prune` and the recipe.
    """
    trainer = is_hf_trainer(model)
    if not trainer and not isinstance(model, nn.Module):
        kind = model.__name__ + ", a class: make an object of it" if isinstance(model, type) else type(model).__name__
        raise AspError(f"prune_trainer: expected an nn.Module or a transformers Trainer, got {kind}")
    if trainer:
        if train is not None or evaluate is not None or loss is not None:
            raise AspError("prune_trainer(trainer): the Trainer has its own data and loss; leave yours out")
    elif train is None or evaluate is None:
        raise AspError("prune_trainer: give both train and evaluate: two functions of the model, or two loaders")
    ours = not trainer and not callable(train)  # whether the training loop is ours
    said = settings(recipe, training, prune_schedule, ours)
    rules = [Rule(rule.include, rule.exclude, rule.pattern, rule.score) for rule in said.prune.rules]
    if any(given is not None for given in (pattern, include, exclude, score)):
        rules = [Rule(tuple(include or ("*",)), tuple(exclude or ()), pattern or "2:4", score or "magnitude")]
    trained = trained or said.train.skip
    if trainer:
        return tell(hf_phases(model, trained), rules, said.prune, trained, quiet)
    if callable(train):
        return tell(function_phases(model, train, evaluate, loss), rules, said.prune, trained, quiet)
    with batch_phases(model, train, evaluate, loss, said, trained, quiet) as phases:  # type: ignore[arg-type]
        return tell(phases, rules, said.prune, trained, quiet)
