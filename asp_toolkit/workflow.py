"""The story: train, prune, retrain, verify, export, report. Read this file first.

The rule is that of "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378): train dense, prune once by
magnitude, then repeat the training with the masks held. Repeating a killed run's command goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asp_toolkit import recipe as recipes
from asp_toolkit.bench import bench_export
from asp_toolkit.checkpoint import Checkpoints, State
from asp_toolkit.errors import AspError, closest
from asp_toolkit.exporters import EXPORTERS, LOADERS, export, load_packed
from asp_toolkit.files import remove_parts, write_text
from asp_toolkit.inspection import LayerRow, inspect
from asp_toolkit.loop import Fitted, Run, accelerator_for, evaluate, feed_of, fit
from asp_toolkit.masks import MaskSet
from asp_toolkit.optimizers import optimizer_arguments
from asp_toolkit.progress import Progress, figures
from asp_toolkit.pruning import Rule, choose, prune
from asp_toolkit.recipe.schema import Recipe, Training
from asp_toolkit.report import build, environment, write
from asp_toolkit.runlog import RunLog
from asp_toolkit.tasks import build_task
from asp_toolkit.tasks.task import Task
from asp_toolkit.verification import same_outputs, verify

_WRITTEN = (
    *("report.json", "report.html", "checkpoints", "exports", "masks.safetensors", "log.jsonl", "log.csv"),
    "recipe.yaml",  # last: without it the folder is not known as a run's
)
"""What a run writes into its folder, and what --fresh deletes, in that order."""


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
    with _claimed(folder, recipe, fresh) if first else contextlib.nullcontext():
        accelerator.wait_for_everyone()
        if (finished := _finished(folder)) is not None:
            progress.say(f"{folder} is finished already; --fresh starts it again")
            return finished
        checkpoints = Checkpoints(folder / "checkpoints", progress.warn if first else progress.say)
        run = Run(accelerator, recipe.seed, recipe.precision, checkpoints, RunLog(folder if first else None), progress)
        report = _story(name, recipe, folder, run)
        accelerator.wait_for_everyone()
        return report


def _story(name: str, recipe: Recipe, folder: Path, run: Run) -> dict[str, Any]:
    task, rules = build_task(recipe.task, recipe.seed), _rules(recipe)
    model = _built(task, recipe.seed)
    _check_at_the_door(recipe, model, rules, run)
    phases = {"dense": _phase("dense", model, task, recipe.train, run, skip=recipe.train.skip)}
    dense = {key: value.clone() for key, value in model.state_dict().items()}

    masks = prune(model, rules=rules)
    phases["pruned"] = _judged("pruned", model, task, recipe, run)

    phases["retrained"] = _phase("retrained", model, task, recipe.retraining(), run, masks=masks)
    _raise_if_wrong(verify(model, masks).problems)

    if recipe.retrain.control:
        other = _built(task, recipe.seed)
        other.load_state_dict(dense)
        phases["control"] = _phase("control", other, task, recipe.retraining(), run, stream="retrained")

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
        layers=[_row(row, masks) for row in inspect(model)],
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
    made = []
    for format in recipe.export.formats:
        target = export(model, masks, folder / "exports" / format, format, recipe=about, save_with=task.save_with)
        same_outputs(model, LOADERS[format](target, _built(task, recipe.seed)), batch, task.forward)
        _raise_if_wrong(verify(target).problems)
        made.append({"format": format, "folder": str(target.relative_to(folder)), "verified": True})
        run.progress.say(f"export {format}: {target}, reloaded, same outputs bit for bit")
    return made


def _row(row: LayerRow, masks: MaskSet) -> LayerRow:
    """What was pruned, and the reasons of the pruning, in place of what the zeros alone tell."""
    return dataclasses.replace(row, pattern=masks.patterns.get(row.name), skipped=masks.skipped.get(row.name))


def _phase(
    phase: str,
    model: nn.Module,
    task: Task,
    section: Training,
    run: Run,
    *,
    masks: MaskSet | None = None,
    stream: str | None = None,
    skip: bool = False,
) -> dict[str, float]:
    """One phase, computed or taken from its finished checkpoint; leaves its weights in `model`."""
    assert run.checkpoints is not None
    done = run.checkpoints.final(phase)
    if done is None:
        if skip:
            section = section.model_copy(update={"epochs": 0.0})
        done = _record(phase, fit(model, task, section, run, phase, stream=stream, masks=masks), model, run)
        if run.accelerator.is_main_process:
            run.checkpoints.finish(phase, done)
        run.accelerator.wait_for_everyone()
    else:
        model.load_state_dict(done["model"])
        model.to(run.device)
        run.rows.extend(done["rows"])
    figures_: dict[str, float] = done["figures"]
    _say(phase, figures_, task, run)
    return figures_


def _record(phase: str, fitted: Fitted, model: nn.Module, run: Run) -> State:
    return {
        "figures": {
            **fitted.metrics,
            "seconds": round(fitted.seconds, 3),
            "steps": fitted.steps,
            "epochs": fitted.epochs,
        },
        "model": model.state_dict(),
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


def _rules(recipe: Recipe) -> list[Rule]:
    return [Rule(rule.include, rule.exclude, rule.pattern, rule.score) for rule in recipe.prune.rules]


def _check_at_the_door(recipe: Recipe, model: nn.Module, rules: Sequence[Rule], run: Run) -> None:
    """Everything that can be refused, before the expensive part."""
    choose(model, rules)
    for place, section in (("train", recipe.train), ("retrain", recipe.retraining())):
        try:
            optimizer_arguments(section.optimizer)
        except AspError as error:
            raise AspError(f"{place}.{error}") from error
    for format in recipe.export.formats:
        if format not in EXPORTERS:
            raise AspError(f"export.formats: unknown format '{format}'; {closest(format, EXPORTERS)}")
    if recipe.device not in ("auto", run.device.type):
        raise AspError(f"device: {recipe.device} was asked for, but torch has {run.device.type}; use auto or cpu")


def _raise_if_wrong(problems: Sequence[str]) -> None:
    if problems:
        raise AspError("the result does not verify:\n" + "\n".join(problems))


def _finished(folder: Path) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        return report
    except (OSError, json.JSONDecodeError):
        return None


@contextlib.contextmanager
def _claimed(folder: Path, recipe: Recipe, fresh: bool) -> Iterator[None]:
    """The run folder, ours alone while we work in it; the operating system lets go when the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AspError(f"{folder}: another run is working in this folder; use another --out") from error
        saved = folder / "recipe.yaml"
        others = [e for e in folder.iterdir() if e.name != ".lock" and not e.name.startswith(f".{saved.name}.")]
        if others and not saved.exists():
            raise AspError(f"{folder} is not empty and holds no run; use another --out")
        remove_parts(folder)
        if fresh:
            for entry in [folder / name for name in _WRITTEN]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
        begun = (folder / "log.jsonl").exists()
        if saved.exists() and begun:
            if difference := recipes.difference(recipes.load(saved), recipe):
                raise AspError(
                    f"{folder} holds a run of another recipe ({difference}); use another --out, or --fresh to delete it"
                )
        else:
            stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            write_text(saved, f"# resolved {stamp}; `asp run` of this file repeats the run\n" + recipes.dump(recipe))
        yield
