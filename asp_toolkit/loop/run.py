"""Where a phase is computed, and the batches it is computed on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from asp_toolkit.checkpoint import Checkpoints
from asp_toolkit.loaders import channels_last, test_loader, train_loader
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


def placed(batch: Batch, task: Task, run: Run) -> Batch:
    """The batch on the run's device, in the task's memory format."""
    batch = send_to_device(batch, run.device)
    return channels_last(batch) if task.channels_last else batch
