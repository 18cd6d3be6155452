"""What `asp prune` can prune: the model of a recipe, or a folder that transformers saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asp_toolkit.errors import AspError

if TYPE_CHECKING:
    from torch import nn

    from asp_toolkit.pruning import Rule
    from asp_toolkit.recipe.schema import Recipe
    from asp_toolkit.scores import Stats
    from asp_toolkit.tasks.task import Task

    Calibrate = Callable[[nn.Module, Sequence[Rule]], Mapping[str, Stats]]
    """(model, rules) -> what the rules' scores need, parameter by parameter."""


@dataclass(frozen=True)
class Target:
    """A model with its weights; where it came from a recipe, its rules, the recipe, and calibration on its data."""

    model: nn.Module
    rules: Sequence[Rule] = ()
    recipe: dict[str, Any] | None = None
    save_with: Callable[[Path, nn.Module], None] | None = None
    calibrate: Calibrate | None = None


def statistics(name: str, target: Target, rules: Sequence[Rule]) -> Mapping[str, Stats] | None:
    """What the scores of `rules` need, or None where the weights are enough.

    Raises:
        AspError: a score needs data, and the target has none.
    """
    from asp_toolkit.pruning import resolve_score
    from asp_toolkit.scores import needs_of

    for rule in rules:
        if needed := needs_of(resolve_score(rule.score)):
            if target.calibrate is None:
                raise AspError(
                    f"score '{rule.score}' needs {' and '.join(needed)}, which come from training data, and {name} "
                    "has none; name a recipe with trained weights and data, or use --score magnitude"
                )
            return target.calibrate(target.model, rules)
    return None


def open_target(name: str, overrides: Sequence[str]) -> Target:
    """The model that `name` means.

    Raises:
        AspError: it is neither a recipe with trained weights nor a folder of transformers.
    """
    if (Path(name) / "config.json").is_file():
        if overrides:
            raise AspError(f"{overrides[0]}: {name} is not a recipe, it has no values to set")
        return _pretrained(Path(name))
    return _of_recipe(name, overrides)


def _of_recipe(name: str, overrides: Sequence[str]) -> Target:
    from asp_toolkit.pruning import Rule
    from asp_toolkit.recipe import load
    from asp_toolkit.tasks import build_task

    recipe = load(name, overrides)
    if recipe.task.kind == "image_classification" and recipe.task.model.weights is None:
        raise AspError(
            f"{name} task.model.weights: null, so the weights are random; name trained ones, or use `asp run`"
        )
    task = build_task(recipe.task, recipe.seed)
    rules = [Rule(rule.include, rule.exclude, rule.pattern, rule.score) for rule in recipe.prune.rules]
    return Target(task.build(), rules, recipe.model_dump(mode="json"), task.save_with, _calibrated_on(task, recipe))


def _calibrated_on(task: Task, recipe: Recipe) -> Calibrate:
    """Calibration on the recipe's training batches."""

    def calibrated(model: nn.Module, rules: Sequence[Rule]) -> Mapping[str, Stats]:
        from itertools import islice

        from asp_toolkit.calibration import calibrate
        from asp_toolkit.loaders import train_loader

        batches = train_loader(task, recipe.train, f"{recipe.seed}/calibration", 0)
        return calibrate(
            model,
            rules,
            islice(batches, recipe.prune.calibration.batches),
            lambda model, batch: task.loss(model, batch, 0.0),
        )

    return calibrated


def _pretrained(folder: Path) -> Target:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        names = config.architectures or []
        kind = getattr(transformers, names[0]) if names else transformers.AutoModel
        return Target(kind.from_pretrained(folder, dtype="auto"), save_with=_auxiliary(folder))
    except (OSError, ValueError, AttributeError) as error:
        raise AspError(f"{folder}: transformers cannot load it: {error}") from error


def _auxiliary(folder: Path) -> Callable[[Path, nn.Module], None]:
    """Copies what stands beside the weights (tokenizer, generation settings) and the exporter does not write."""

    def copy(out: Path, model: nn.Module) -> None:
        import shutil

        for file in sorted(folder.iterdir()):
            small = file.suffix in {".json", ".txt", ".model", ".jinja"} and "index" not in file.name
            if file.is_file() and small and not (out / file.name).exists():
                shutil.copyfile(file, out / file.name)

    return copy
