"""The story: train, prune, retrain, verify, export, report. Read this file first.

The rule is that of "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378): train dense, prune once by
magnitude, then repeat the training with the masks held. Repeating a killed run's command goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asp_toolkit import recipe as recipes
from asp_toolkit.bench import bench_export
from asp_toolkit.calibration import calibrate
from asp_toolkit.checkpoint import Checkpoints, State
from asp_toolkit.errors import AspError, closest
from asp_toolkit.exporters import EXPORTERS, LOADERS, export, load_packed
from asp_toolkit.inspection import LayerRow, inspect
from asp_toolkit.loaders import train_loader
from asp_toolkit.loop import Fitted, Run, accelerator_for, evaluate, feed_of, fit, placed, steps_of
from asp_toolkit.masks import MaskSet
from asp_toolkit.optimizers import optimizer_arguments
from asp_toolkit.patterns import Pattern
from asp_toolkit.progress import Progress, figures
from asp_toolkit.pruning import Rule, choose, prune, resolve_pattern, resolve_score
from asp_toolkit.recipe.schema import Recipe, Training
from asp_toolkit.report import build, environment, write
from asp_toolkit.run_folder import claimed, finished
from asp_toolkit.runlog import RunLog
from asp_toolkit.schedules import Keeper, check_reached, check_schedule, keeper_for
from asp_toolkit.schedules.keeper import masks_state
from asp_toolkit.scores import Stats, needs_of
from asp_toolkit.tasks import build_task
from asp_toolkit.tasks.task import Batch, Task
from asp_toolkit.verification import same_outputs, verify

_NONE = MaskSet({})


def run_recipe(
    recipe: str | Path | Recipe,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    *,
    quiet: bool = False,
    fresh: bool = False,
) -> dict[str, Any]:
    """Run a recipe from its beginning, or from where it was stopped, to its report.

    Args:
        recipe: a file, the name of one that comes with the package, or a Recipe.
        out: the run folder; default runs/NAME.
        overrides: {"train.epochs": 2} or ["train.epochs=2"].
        quiet: print nothing but warnings.
        fresh: delete what an earlier run left in the folder.

    Returns:
        The report, as in report.json (schema: asp_toolkit/report/schema.json).

    Raises:
        AspError: the recipe is wrong, its data is missing, the folder belongs to another recipe, or the result does
            not verify.
    """
    if not isinstance(recipe, Recipe):
        try:
            return _run(Path(recipe).stem, recipes.load(recipe, overrides), out, quiet, fresh)
        except AspError as error:
            raise AspError(recipes.located(recipe, str(error), overrides)) from error
    return _run("recipe", recipe, out, quiet, fresh)


def _run(name: str, recipe: Recipe, out: str | Path | None, quiet: bool, fresh: bool) -> dict[str, Any]:
    folder = Path(out) if out is not None else Path("runs") / name
    accelerator = accelerator_for(recipe.device)
    first = accelerator.is_main_process  # of several (torchrun), the others compute but neither write nor speak
    progress = Progress(quiet or not first)
    with claimed(folder, recipe, fresh) if first else contextlib.nullcontext():
        accelerator.wait_for_everyone()
        if (report := finished(folder)) is not None:
            progress.say(f"{folder} is finished already; --fresh starts it again")
            return report
        checkpoints = Checkpoints(folder / "checkpoints", progress.warn if first else progress.say)
        run = Run(accelerator, recipe.seed, recipe.precision, checkpoints, RunLog(folder if first else None), progress)
        report = _story(name, recipe, folder, run)
        accelerator.wait_for_everyone()
        return report


def _story(name: str, recipe: Recipe, folder: Path, run: Run) -> dict[str, Any]:
    task, rules = build_task(recipe.task, recipe.seed), _rules(recipe)
    model = _built(task, recipe.seed)
    _check_at_the_door(recipe, task, model, rules, run)
    phases = {"dense": _phase("dense", model, task, recipe.train, run, skip=recipe.train.skip)[0]}
    dense = {key: value.clone() for key, value in model.state_dict().items()}

    masks = prune(model, rules=rules, stats=_stats(model, rules, task, recipe, run))
    phases["pruned"] = _judged("pruned", model, task, recipe, run)

    schedule = partial(keeper_for, recipe.prune.schedule, model, rules, masks, dense)
    phases["retrained"], held = _phase("retrained", model, task, recipe.retraining(), run, masks, schedule)
    check_reached(held, masks)
    masks = held
    _raise_if_wrong(verify(model, masks, _patterns(rules)).problems)

    if recipe.retrain.control:
        other = _built(task, recipe.seed)
        other.load_state_dict(dense)
        phases["control"] = _phase("control", other, task, recipe.retraining(), run, stream="retrained")[0]

    model = _as_loaded(model, task, recipe.seed)
    exports = _export(model, masks, task, recipe, folder, run) if run.accelerator.is_main_process else []
    speed = []
    if recipe.export.bench and any(made["format"] == "packed" for made in exports):
        speed = bench_export(model, load_packed(folder / "exports" / "packed", _built(task, recipe.seed)), task)
    report = build(
        name=name,
        metric=task.metric,
        phases=phases,
        history=run.rows,
        layers=[_row(row, masks, _patterns(rules)) for row in inspect(model)],
        exports=exports,
        folder=folder,
        speed=speed,
        recipe=recipe.model_dump(mode="json"),
        environment=environment(run.device),
    )
    if run.accelerator.is_main_process:
        write(folder, report)
    return report


def _export(
    model: nn.Module, masks: MaskSet, task: Task, recipe: Recipe, folder: Path, run: Run
) -> list[dict[str, Any]]:
    """Write every format; each is read back, verified, and must compute the same bits as the model."""
    masks.save(folder / "masks.safetensors")
    about = recipe.model_dump(mode="json")
    batch = task.collate([task.test[i] for i in range(min(len(task.test), recipe.train.batch_size))])
    made, patterns = [], _patterns(_rules(recipe))
    for format in recipe.export.formats:
        target = folder / "exports" / format
        export(model, masks, target, format, recipe=about, save_with=task.save_with, patterns=patterns)
        same_outputs(model, LOADERS[format](target, _built(task, recipe.seed)), batch, task.forward)
        _raise_if_wrong(verify(target, patterns=patterns).problems)
        made.append({"format": format, "folder": str(target.relative_to(folder)), "verified": True})
        run.progress.say(f"export {format}: {target}, reloaded, same outputs bit for bit")
    return made


def _row(row: LayerRow, masks: MaskSet, patterns: Mapping[str, Pattern]) -> LayerRow:
    """What was pruned, and the reasons of the pruning, in place of what the zeros alone tell."""
    pattern = masks.patterns.get(row.name)
    packed = row.bytes_packed if pattern is not None and hasattr(patterns.get(pattern), "nm") else None
    return dataclasses.replace(row, pattern=pattern, bytes_packed=packed, skipped=masks.skipped.get(row.name))


def _phase(
    phase: str,
    model: nn.Module,
    task: Task,
    section: Training,
    run: Run,
    masks: MaskSet = _NONE,
    schedule: Callable[[int, bool], Keeper] | None = None,
    *,
    stream: str | None = None,
    skip: bool = False,
) -> tuple[dict[str, float], MaskSet]:
    """One phase, computed or taken from its finished checkpoint; leaves its weights in `model`.

    Returns its figures, and the masks at its end: `masks`, or what `schedule` made of them.
    """
    assert run.checkpoints is not None
    done = run.checkpoints.final(phase)
    if done is None:
        if skip:
            section = section.model_copy(update={"epochs": 0.0})
        done = _record(phase, fit(model, task, section, run, phase, stream=stream, masks=schedule), model, run)
        if run.accelerator.is_main_process:
            run.checkpoints.finish(phase, done)
        run.accelerator.wait_for_everyone()
    else:
        model.load_state_dict(done["model"])
        model.to(run.device)
        run.rows.extend(done["rows"])
    figures_: dict[str, float] = done["figures"]
    _say(phase, figures_, task, run)
    held = done.get("keeper")
    return figures_, masks if held is None else MaskSet(held["masks"], masks.skipped, held["patterns"])


def _record(phase: str, fitted: Fitted, model: nn.Module, run: Run) -> State:
    return {
        "figures": {
            **fitted.metrics,
            "seconds": round(fitted.seconds, 3),
            "steps": fitted.steps,
            "epochs": fitted.epochs,
        },
        "model": model.state_dict(),
        "keeper": masks_state(fitted.masks) if fitted.masks is not None else None,
        "rows": [row for row in run.rows if row["phase"] == phase],
    }


def _judged(phase: str, model: nn.Module, task: Task, recipe: Recipe, run: Run) -> dict[str, float]:
    """Evaluate without training, for the phase that has none."""
    started = time.monotonic()
    metrics = evaluate(model, task, run, feed_of(task, recipe.train, run, phase).test())
    found = {**metrics, "seconds": round(time.monotonic() - started, 3), "steps": 0, "epochs": 0.0}
    run.rows.append({"phase": phase, "step": 0, "epoch": 0.0, **metrics})
    _say(phase, found, task, run)
    return found


def _say(phase: str, found: Mapping[str, float], task: Task, run: Run) -> None:
    shown = figures({key: found[key] for key in ("loss", task.metric)})
    run.progress.say(f"{phase:<10} {shown}  ({found['steps']:.0f} steps, {found['seconds']:.0f} s)")


def _built(task: Task, seed: int) -> nn.Module:
    """A fresh model whose random weights depend on the seed alone; the process's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return task.build()


def _as_loaded(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """The trained model on the CPU, laid out as one that is built and loaded: torch picks its algorithms by strides."""
    plain = _built(task, seed)
    plain.load_state_dict(model.state_dict())
    return plain.eval()


def _stats(model: nn.Module, rules: Sequence[Rule], task: Task, recipe: Recipe, run: Run) -> Mapping[str, Stats] | None:
    """What the scores need beside the weights, from the first training batches; the same in every process."""
    if not any(needs_of(resolve_score(rule.score)) for rule in rules):
        return None

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with run.autocast():
            return task.loss(model, placed(batch, task, run), 0.0)

    batches = train_loader(task, recipe.train, f"{run.seed}/calibration", 0)
    return calibrate(model.to(run.device), rules, islice(batches, recipe.prune.calibration.batches), loss)


def _rules(recipe: Recipe) -> list[Rule]:
    return [Rule(rule.include, rule.exclude, rule.pattern, rule.score) for rule in recipe.prune.rules]


def _patterns(rules: Sequence[Rule]) -> dict[str, Pattern]:
    """Name -> pattern: what exports and verify could not know of a pattern that is not built in."""
    return {pattern.name: pattern for pattern in (resolve_pattern(rule.pattern) for rule in rules)}


def _check_at_the_door(recipe: Recipe, task: Task, model: nn.Module, rules: Sequence[Rule], run: Run) -> None:
    """Everything that can be refused, before the expensive part."""
    chosen = choose(model, rules).chosen
    for place, section in (("train", recipe.train), ("retrain", recipe.retraining())):
        try:
            optimizer_arguments(section.optimizer)
        except AspError as error:
            raise AspError(f"{place}.{error}") from error
    for format in recipe.export.formats:
        if format not in EXPORTERS:
            raise AspError(f"export.formats: unknown format '{format}'; {closest(format, EXPORTERS)}")
    if "packed" in recipe.export.formats and not any(hasattr(one.pattern, "nm") for one in chosen.values()):
        kinds = ", ".join(dict.fromkeys(one.pattern.name for one in chosen.values()))
        raise AspError(f"export.formats: packed holds N:M patterns, not {kinds}; use [dense]")
    per_epoch = feed_of(task, recipe.retraining(), run, "retrained").per_epoch
    check_schedule(recipe.prune.schedule, model, rules, steps_of(recipe.retraining(), per_epoch)[1])
    if recipe.device not in ("auto", run.device.type):
        raise AspError(f"device: {recipe.device} was asked for, but torch has {run.device.type}; use auto or cpu")


def _raise_if_wrong(problems: Sequence[str]) -> None:
    if problems:
        raise AspError("the result does not verify:\n" + "\n".join(problems))
