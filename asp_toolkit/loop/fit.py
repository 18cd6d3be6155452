"""fit: train a model for one phase, with or without masks; go on where a killed run stopped."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asp_toolkit.checkpoint import State, random_state, seed_all, set_random_state
from asp_toolkit.errors import AspError
from asp_toolkit.loaders import stream_seed
from asp_toolkit.loop.evaluate import evaluate
from asp_toolkit.loop.run import Feed, Run, feed_of, placed
from asp_toolkit.masks import MaskSet, bare
from asp_toolkit.optimizers import build_optimizer, keeps_zeros, lr_factor
from asp_toolkit.recipe.schema import Training
from asp_toolkit.runlog import Row
from asp_toolkit.schedules import Fixed, Keeper
from asp_toolkit.tasks.task import Task


@dataclass(frozen=True)
class Fitted:
    """What a phase came to: metrics on the test data, optimizer steps, epochs, seconds spent, masks at its end."""

    metrics: dict[str, float]
    steps: int
    epochs: float
    seconds: float
    masks: MaskSet | None = None


def steps_of(section: Training, per_epoch: int) -> tuple[int, int]:
    """Optimizer steps in an epoch of `per_epoch` batches, and in the whole phase."""
    steps = max(1, per_epoch // section.accumulate)
    total = round(section.epochs * steps)
    return steps, total if section.max_steps is None else min(total, section.max_steps)


def fit(
    model: nn.Module,
    task: Task,
    section: Training,
    run: Run,
    phase: str,
    *,
    stream: str | None = None,
    masks: MaskSet | Callable[[int, bool], Keeper] | None = None,
    feed: Feed | None = None,
) -> Fitted:
    """Train `model` in place for one phase and evaluate it; goes on from the phase's newest checkpoint if there is one.

    With `masks`, dropped entries are +0.0 after every optimizer step, and the optimizer does not see their gradients.
    A MaskSet is held as it is; a schedule changes its masks on the way: then `masks` is a function of (optimizer steps
    of the phase, whether the optimizer keeps zeros) that returns a Keeper.
    `stream` names the order of the data and the random numbers (default: the phase); phases to be compared share one.

    Raises:
        AspError: the loss is not finite, or an epoch has too few batches for one step.
    """
    stream = stream or phase
    feed = feed or feed_of(task, section, run, stream)
    seed_all(stream_seed(run.seed, stream))
    model.to(run.device)
    if task.channels_last:
        model.to(memory_format=torch.channels_last)
    per_epoch, total = steps_of(section, feed.per_epoch)
    keeper = _keeper(masks, model, total, keeps_zeros(section.optimizer)) if masks is not None else None
    wrapped = run.accelerator.prepare_model(model) if run.accelerator.num_processes > 1 else model
    optimizer = build_optimizer(model, section.optimizer)
    peaks = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(run.device.type, enabled=run.precision == "fp16")
    average = _average(model, section.ema)

    if total and feed.per_epoch < section.accumulate:
        raise AspError(
            f"{phase}: accumulate {section.accumulate} is more than the {feed.per_epoch} batches of an epoch"
        )
    step, spent, loss_sum, metrics = 0, 0.0, torch.zeros((), device=run.device), dict[str, float]()

    saved = run.checkpoints.latest(phase) if run.checkpoints else None
    if saved is not None:
        step, spent, metrics = saved["step"], saved["seconds"], saved["metrics"]
        loss_sum.copy_(saved["loss_sum"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        if average is not None:
            average.load_state_dict(saved["average"])
        if keeper is not None:
            keeper.load(saved["keeper"], model)
        run.rows[:] = [row for row in run.rows if row["phase"] != phase] + saved["rows"]
        set_random_state(saved["random"])
        run.progress.say(f"{phase}: going on from step {step} of {total}")
    if run.accelerator.is_main_process:
        run.log.rewrite(run.rows)
    started = time.monotonic() - spent

    def report(row: Row) -> None:
        row = {"phase": phase, "step": step, "epoch": round(step / per_epoch, 4), **row}
        run.rows.append(row)
        if run.accelerator.is_main_process:
            run.log.append(row)

    counted: list[tuple[MaskSet, float]] = []

    def density() -> dict[str, float]:
        """The kept share, counted anew where masks have changed."""
        if keeper is None:
            return {}
        if not counted or counted[0][0] is not keeper.masks:
            counted[:] = [(keeper.masks, round(keeper.masks.share(), 6))]
        return {"density": counted[0][1]}

    def judge() -> dict[str, float]:
        judged = average.module if average is not None else model
        if keeper is not None:
            if average is not None:
                judged = copy.deepcopy(judged)  # the average itself goes on with what masks drop now
            keeper.masks.apply_(judged)
        found = evaluate(judged, task, run, feed.test())
        report({"seconds": round(time.monotonic() - started, 3), **density(), **found})
        return found

    def state() -> State:
        return {
            "step": step,
            "seconds": time.monotonic() - started,
            "metrics": metrics,
            "loss_sum": loss_sum,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "average": average.state_dict() if average is not None else None,
            "keeper": keeper.state() if keeper is not None else None,
            "rows": [row for row in run.rows if row["phase"] == phase],
            "random": random_state(),
        }

    def due(every: float) -> bool:
        return step % max(1, round(every * per_epoch)) == 0

    with run.progress.bar(phase, total, step) as bar:
        while step < total:
            wrapped.train()
            done = step % per_epoch
            batches = iter(feed.train(step // per_epoch, done * section.accumulate))
            for _ in range(min(per_epoch - done, total - step)):
                lr = lr_factor(section.schedule, step, total, per_epoch)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * lr
                for part in range(section.accumulate):
                    last = part == section.accumulate - 1
                    with contextlib.nullcontext() if last else run.accelerator.no_sync(wrapped):
                        batch = placed(next(batches), task, run)
                        with run.autocast():
                            loss = task.loss(wrapped, batch, section.label_smoothing) / section.accumulate
                        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                    loss_sum += loss.detach()
                scaler.unscale_(optimizer)
                if keeper is not None:
                    keeper.before_step(model, optimizer, step)
                if section.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                if keeper is not None:
                    keeper.after_step(model, optimizer, step)
                optimizer.zero_grad()
                if average is not None:
                    average.update_parameters(model)
                step += 1

                shown = None
                if step % section.log_every == 0 or step == total:
                    mean = float(loss_sum) / (
                        section.log_every if step % section.log_every == 0 else step % section.log_every
                    )
                    loss_sum.zero_()
                    if not math.isfinite(mean):
                        raise AspError(
                            f"{phase}: the loss is {mean} at step {step}; try a lower lr, warm-up or clip_norm"
                        )
                    shown = {"loss": mean}
                    report({"lr": optimizer.param_groups[0]["lr"], "train_loss": mean, **density()})
                bar.advance(shown)
                if step == total or due(section.evaluate_every) or step == section.evaluate_first:
                    metrics = judge()
                    wrapped.train()
                if (
                    run.checkpoints
                    and step < total
                    and due(section.checkpoint_every)
                    and run.accelerator.is_main_process
                ):
                    run.checkpoints.save(phase, step, state())
    if not total:
        metrics = judge()
    if average is not None and total:
        model.load_state_dict(average.module.state_dict())
    if keeper is not None:
        keeper.masks.apply_(model)
    if run.accelerator.is_main_process:
        run.log.rewrite(run.rows)
    held = keeper.masks if keeper is not None else None
    return Fitted(metrics, step, round(step / per_epoch, 4), time.monotonic() - started, held)


def _keeper(masks: MaskSet | Callable[[int, bool], Keeper], model: nn.Module, total: int, zeros_stay: bool) -> Keeper:
    if not isinstance(masks, MaskSet):
        return masks(total, zeros_stay)
    fixed = Fixed(masks, model)
    fixed.zeros_stay = zeros_stay
    return fixed


def _average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    averaging = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(bare(model), multi_avg_fn=averaging, use_buffers=True)
