"""Batches in an order that depends on the seed and the epoch alone, so that a resumed run sees the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.schema import Training
from asp_toolkit.tasks.task import Batch, MapDataset, Task


def stream_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all `parts`, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class _Seeded:
    """A data set whose random transforms draw from a generator seeded by (stream, epoch, index): the same sample
    whichever process loads it, and whether or not the samples before it were loaded."""

    data: MapDataset
    stream: str
    epoch: int

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        generator = torch.default_generator
        before = generator.get_state()
        try:
            fetch = getattr(self.data, "__getitems__", None)
            if fetch is not None:
                generator.manual_seed(stream_seed(self.stream, self.epoch, *indices))
                return list(fetch(indices))
            samples = []
            for index in indices:
                generator.manual_seed(stream_seed(self.stream, self.epoch, index))
                samples.append(self.data[index])
            return samples
        finally:
            generator.set_state(before)


class _Order:
    """Batches of indices: shuffled by (stream, epoch), from batch `skip` on."""

    def __init__(self, size: int, batch_size: int, stream: str | None, epoch: int, skip: int) -> None:
        self.size, self.stream, self.epoch, self.skip = size, stream, epoch, skip
        self.batch_size = batch_size
        self.drop_last = stream is not None and size >= batch_size

    def __len__(self) -> int:
        return batch_count(self.size, self.batch_size, self.drop_last) - self.skip

    def __iter__(self) -> Iterator[list[int]]:
        if self.stream is None:
            order = list(range(self.size))
        else:
            generator = torch.Generator().manual_seed(stream_seed(self.stream, "order", self.epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
        for batch in range(self.skip, self.skip + len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]


def batch_count(size: int, batch_size: int, drop_last: bool) -> int:
    """Batches in one pass over `size` samples."""
    return size // batch_size if drop_last else -(-size // batch_size)


def train_loader(task: Task, section: Training, stream: str, epoch: int, skip: int = 0) -> DataLoader[Any]:
    """The training batches of `epoch` from batch `skip` on; a last part-filled batch is left out."""
    if len(task.train) == 0:
        raise AspError("task.data: there are no training samples")
    order = _Order(len(task.train), section.batch_size, stream, epoch, skip)
    return _loader(task, _Seeded(task.train, stream, epoch), order)


def test_loader(task: Task, batch_size: int) -> DataLoader[Any]:
    """All test samples in their own order."""
    if len(task.test) == 0:
        raise AspError("task.data: there are no test samples")
    return _loader(task, task.test, _Order(len(task.test), batch_size, None, 0, 0))


def _loader(task: Task, data: Any, order: _Order) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_sampler=order,
        collate_fn=task.collate,
        num_workers=task.workers,
        generator=torch.Generator(),  # its own: making an iterator must not draw from the training's generator
    )


def channels_last(batch: Batch) -> Batch:
    """The batch with its 4-D tensors, (B, C, H, W), laid out channels-last."""
    if isinstance(batch, Tensor):
        return batch.to(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    if isinstance(batch, tuple | list):
        return type(batch)(channels_last(part) for part in batch)
    if isinstance(batch, dict):
        return {key: channels_last(value) for key, value in batch.items()}
    return batch
