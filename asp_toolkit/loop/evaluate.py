"""evaluate: means of a task's measures over all test samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.loop.run import Run, placed
from asp_toolkit.tasks.task import Batch, Task


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
                values = task.measure(model, placed(batch, task, run))
            gathered: dict[str, Tensor] = run.accelerator.gather_for_metrics(values)
            for name, value in gathered.items():
                sums[name] = sums.get(name, 0.0) + float(value.double().sum())
            samples += next(iter(gathered.values())).numel()
    finally:
        model.train(training)
    if samples == 0:
        raise AspError("there is no test batch to evaluate on")
    return {**{name: value / samples for name, value in sums.items()}, "samples": samples}
