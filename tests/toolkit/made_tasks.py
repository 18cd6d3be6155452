"""A small network, its batches and its task, for tests of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from asp_toolkit.loop import Feed, Run
from asp_toolkit.recipe.schema import Training
from asp_toolkit.tasks.task import Batch, Task

SGD = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "lr": 0.02, "weight_decay": 0.5}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(7)
    layers = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.0), nn.Linear(12, 4)
    return nn.Sequential(*layers).to(dtype)


def batches(count: int = 6, size: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count * size, 8, generator=generator, dtype=torch.float64).to(dtype)
    return list(zip(x.split(size), x[:, :4].argmax(1).split(size), strict=True))


def task(
    see: Callable[[nn.Module], None] = lambda model: None,
    judge: Callable[[nn.Module], None] = lambda model: None,
    change: Callable[[Tensor, float], Tensor] = lambda loss, smoothing: loss,
) -> Task:
    """Classification; `see` is called with the model before each forward pass of training, `judge` in evaluation."""

    def loss(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        see(model)
        return change(F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing), smoothing)

    def measure(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        judge(model)
        found = model(batch[0])
        return {
            "loss": F.cross_entropy(found.float(), batch[1], reduction="none"),
            "accuracy": (found.argmax(1) == batch[1]).float(),
        }

    return Task("test", network, [], [], list, loss, measure, lambda model, batch: model(batch[0]))


def feed(of: list[Batch]) -> Feed:
    return Feed(lambda epoch, skip: of[skip:], len(of), lambda: of)


def section(**keys: Any) -> Training:
    return Training.model_validate({"optimizer": SGD, "epochs": 2.0, "schedule": {"name": "constant"}, **keys})


def run(precision: str = "fp32") -> Run:
    return Run(Accelerator(cpu=True), precision=precision)
