"""What the loop needs to know of a task: how to build its model, batch its data, and judge an output."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

Batch = Any
"""What a loader yields: a tensor, or nested tuples, lists and dicts of tensors."""


class MapDataset(Sized, Protocol):
    """A map-style data set: `len(data)` and `data[i]`."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Task:
    """A model and data set with their loss and metrics. Everything is a plain value or function: no subclassing.

    build:    () -> a fresh model on the CPU in fp32, with the recipe's first weights (random ones drawn from torch's
              global generator, so the caller seeds). Calling it twice gives two independent models.
    train, test:  map-style data sets. `train[i]` may draw from torch's global generator (augmentation).
    collate:  list of samples -> Batch.
    loss:     (model, batch, label_smoothing) -> scalar mean loss of the batch; calls the model.
    measure:  (model, batch) -> per-sample values by name, each of shape (B,), float; holds "loss" and the metric.
    metric:   the name that phases are compared by; higher is better.
    forward:  (model, batch) -> the raw output tensor(s) of the model for the batch's inputs, for comparing two models
              bit by bit and for timing.
    channels_last: the loop keeps 4-D weights and inputs channels-last while training.
    workers:  data loading processes.
    save_with: extra files for a dense export, given the export folder and the model (a tokenizer, a config); or None.
    """

    kind: str
    build: Callable[[], nn.Module]
    train: MapDataset
    test: MapDataset
    collate: Callable[[list[Any]], Batch]
    loss: Callable[[nn.Module, Batch, float], Tensor]
    measure: Callable[[nn.Module, Batch], dict[str, Tensor]]
    forward: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, ...]]
    metric: str = "accuracy"
    channels_last: bool = False
    workers: int = 0
    save_with: Callable[[Any, nn.Module], None] | None = None
