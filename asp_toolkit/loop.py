"""fit and evaluate: one training loop for every phase and task, on accelerate's devices and processes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from asp_toolkit.checkpoint import Checkpoints, State, random_state, seed_all, set_random_state
from asp_toolkit.errors import AspError
from asp_toolkit.loaders import channels_last, stream_seed, test_loader, train_loader
from asp_toolkit.masks import MaskSet, bare
from asp_toolkit.optimizers import build_optimizer, keeps_zeros, lr_factor
from asp_toolkit.progress import Progress
from asp_toolkit.recipe.schema import Training
from asp_toolkit.runlog import Row, RunLog
from asp_toolkit.tasks.task import Batch, Task

_AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def accelerator_for(device: str) -> Accelerator:
    """Devices and processes; "cpu" stays on the CPU. A second one in a process may not name another precision than the
    first (that of a Hugging Face Trainer, say); ours comes from `Run`."""
    return Accelerator(mixed_precision=None if is_initialized() else "no", cpu=device == "cpu")


@dataclass(frozen=True)
class Run:
    """Where and how the phases of one run are computed, and who is told.

    rows: the log so far, all phases; `fit` adds to it.
    """

    accelerator: Accelerator
    seed: int = 0
    precision: str = "fp32"
    checkpoints: Checkpoints | None = None
    log: RunLog = field(default_factory=RunLog)
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.accelerator.device
        return device

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Arithmetic in the run's precision; weights stay as they are."""
        return torch.autocast(self.device.type, dtype=_AUTOCAST[self.precision], enabled=self.precision != "fp32")


@dataclass(frozen=True)
class Feed:
    """Batches for one phase.

    train:     (epoch, batches to leave out at its beginning) -> the epoch's batches
    per_epoch: batches in a whole epoch
    test:      () -> all test batches
    """

    train: Callable[[int, int], Iterable[Batch]]
    per_epoch: int
    test: Callable[[], Iterable[Batch]]


def feed_of(task: Task, section: Training, run: Run, stream: str) -> Feed:
    """The task's data in the order that `stream` (a name) and the run's seed fix, shared among the processes."""
    processes, key = run.accelerator.num_processes, f"{run.seed}/{stream}"

    def shared(loader: DataLoader[Any]) -> DataLoader[Any]:
        return run.accelerator.prepare_data_loader(loader) if processes > 1 else loader

    return Feed(
        lambda epoch, skip: shared(train_loader(task, section, key, epoch, skip * processes)),
        max(1, len(train_loader(task, section, key, 0)) // processes),
        lambda: shared(test_loader(task, section.eval_batch_size or section.batch_size)),
    )


@dataclass(frozen=True)
class Fitted:
    """What a phase came to: metrics on the test data, optimizer steps, epochs, seconds spent."""

    metrics: dict[str, float]
    steps: int
    epochs: float
    seconds: float


def fit(
    model: nn.Module,
    task: Task,
    section: Training,
    run: Run,
    phase: str,
    *,
    stream: str | None = None,
    masks: MaskSet | None = None,
    feed: Feed | None = None,
) -> Fitted:
    """Train `model` in place for one phase and evaluate it; goes on from the phase's newest checkpoint if there is one.

    With `masks`, dropped entries are +0.0 after every optimizer step and the optimizer never sees their gradients.
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
    zeros_stay = keeps_zeros(section.optimizer)
    masks = masks.placed_like(model) if masks else None
    if masks is not None:
        masks.apply_(model)
    wrapped = run.accelerator.prepare_model(model) if run.accelerator.num_processes > 1 else model
    optimizer = build_optimizer(model, section.optimizer)
    peaks = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(run.device.type, enabled=run.precision == "fp16")
    average = _average(model, section.ema)

    per_epoch = max(1, feed.per_epoch // section.accumulate)  # optimizer steps in an epoch
    total = round(section.epochs * per_epoch)
    total = total if section.max_steps is None else min(total, section.max_steps)
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

    def judge() -> dict[str, float]:
        judged = average.module if average is not None else model
        if masks is not None:
            masks.apply_(judged)
        found = evaluate(judged, task, run, feed.test())
        report({"seconds": round(time.monotonic() - started, 3), **found})
        return found

    def state() -> State:
        if masks is not None:
            masks.apply_(model)
        return {
            "step": step,
            "seconds": time.monotonic() - started,
            "metrics": metrics,
            "loss_sum": loss_sum,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "average": average.state_dict() if average is not None else None,
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
                        batch = _placed(next(batches), task, run)
                        with run.autocast():
                            loss = task.loss(wrapped, batch, section.label_smoothing) / section.accumulate
                        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                    loss_sum += loss.detach()
                scaler.unscale_(optimizer)
                if masks is not None:
                    masks.zero_grads_(model)
                if section.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if masks is not None and not zeros_stay:
                    masks.apply_(model)
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
                    report({"lr": optimizer.param_groups[0]["lr"], "train_loss": mean})
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
    if masks is not None:
        masks.apply_(model)
    if run.accelerator.is_main_process:
        run.log.rewrite(run.rows)
    return Fitted(metrics, step, round(step / per_epoch, 4), time.monotonic() - started)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, run: Run, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean of each of the task's measures over all samples, and their number as "samples"; in evaluation mode."""
    training = model.training
    model.eval()
    sums: dict[str, float] = {}
    samples = 0
    try:
        for batch in batches:
            with run.autocast():
                values = task.measure(model, _placed(batch, task, run))
            gathered: dict[str, Tensor] = run.accelerator.gather_for_metrics(values)
            for name, value in gathered.items():
                sums[name] = sums.get(name, 0.0) + float(value.double().sum())
            samples += next(iter(gathered.values())).numel()
    finally:
        model.train(training)
    if samples == 0:
        raise AspError("there is no test batch to evaluate on")
    return {**{name: value / samples for name, value in sums.items()}, "samples": samples}


def _average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    averaging = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(bare(model), multi_avg_fn=averaging, use_buffers=True)


def _placed(batch: Batch, task: Task, run: Run) -> Batch:
    batch = send_to_device(batch, run.device)
    return channels_last(batch) if task.channels_last else batch
