"""What a call says beside its data: a recipe or parts of one, and keywords. What would be ignored is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from asp_toolkit.errors import AspError
from asp_toolkit.recipe import from_mapping, load
from asp_toolkit.recipe.schema import Recipe

_WHOLE_RUN = ("seed", "device", "precision")
_PLACEHOLDER = {"kind": "image_classification", "model": {"name": "given"}, "data": {"source": "synthetic"}}
_OTHERWISE = {
    "export": "result.export(folder, format) writes the checkpoints",
    "batch_size": "the batches of your loader decide",
    "eval_batch_size": "the batches of your loader decide",
    "checkpoint_every": "prune_trainer writes no checkpoints; run_recipe does",
    "skip": "say trained=True",
    "control": "prune_trainer trains no control; run_recipe does",
}


def settings(
    recipe: str | Path | Recipe | Mapping[str, Any] | None,
    training: Mapping[str, Any],
    prune_schedule: str | Mapping[str, Any] | None,
    ours: bool,
) -> Recipe:
    """The recipe that is meant, checked, with a placeholder for its task.

    Args:
        recipe, training, prune_schedule: as of `prune_trainer`.
        ours: whether the training loop is ours; else nothing but the prune section is read, and the rest is refused
            where it was written for this call (in a mapping or as keywords).
    """
    if isinstance(recipe, str | Path):
        recipe = load(recipe)
    elif isinstance(recipe, Mapping) and "task" in recipe:
        recipe = from_mapping(recipe, name="prune_trainer")
    written = recipe if isinstance(recipe, Mapping) else {}
    if not ours:
        _refuse((*(key for key in written if key != "prune"), *training), "your train function or Trainer decides")
    for keys in (written, training, *(written.get(part) for part in ("train", "retrain"))):
        if isinstance(keys, Mapping):
            for key in keys:
                if key in _OTHERWISE:
                    _refuse((key,), _OTHERWISE[key])
    for key, value in training.items():
        if isinstance(value, Optimizer) or (isinstance(value, type) and issubclass(value, Optimizer)):
            way = "describe it: optimizer={'name': 'sgd', 'lr': 0.1}"
            raise AspError(f"prune_trainer: {key}: the retraining needs a fresh one; {way}")

    given: dict[str, Any] = dict(written)
    if isinstance(recipe, Recipe):
        given = recipe.model_dump(exclude_unset=True)
        if ours and recipe.retrain.control:
            _refuse(("retrain.control",), _OTHERWISE["control"])
    if isinstance(given.get("train", {}), Mapping):  # anything else is refused below, in the recipe's words
        about_train = {key: value for key, value in training.items() if key not in _WHOLE_RUN}
        given["train"] = {"optimizer": {"lr": 0.1}, **given.get("train", {}), **about_train}
    given |= {key: training[key] for key in _WHOLE_RUN if key in training}
    if prune_schedule is not None:
        named = {"name": prune_schedule} if isinstance(prune_schedule, str) else prune_schedule
        given["prune"] = {**given.get("prune", {}), "schedule": named}
    said = from_mapping({**given, "task": _PLACEHOLDER}, name="prune_trainer")
    for part, section in (("train", said.train), ("retrain", said.retraining())):
        if ours and section.label_smoothing:
            raise AspError(
                f"prune_trainer: {part}.label_smoothing: the loss is yours and would not know; set it to 0 and "
                "smooth there, e.g. loss=functools.partial(F.cross_entropy, label_smoothing=0.1)"
            )
    return said


def _refuse(keys: Iterable[str], otherwise: str) -> None:
    if named := ", ".join(keys):
        raise AspError(f"prune_trainer: {named}: would have no effect here: {otherwise}; leave it out")
