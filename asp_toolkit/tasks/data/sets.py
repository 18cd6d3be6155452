"""The map-style data sets that sources return, and how they are split and limited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from asp_toolkit.errors import AspError
from asp_toolkit.tasks.task import MapDataset


@dataclass(frozen=True)
class Images:
    """Images in memory. pixels: uint8 (N, C, H, W); labels: N class numbers. Samples are (uint8 (C, H, W), class)."""

    pixels: Tensor
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index], self.labels[index]


@dataclass(frozen=True)
class Texts:
    """Texts with their class numbers; samples are (text, class)."""

    texts: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.texts[index], self.labels[index]


@dataclass(frozen=True)
class Mapped:
    """The samples of `data`, each passed through `change` when it is asked for."""

    data: MapDataset
    change: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.data[index])


@dataclass(frozen=True)
class Source:
    """What a source returns.

    train, test:  data sets of (image or text, class number).
    classes:      how many classes there are, or None where the source cannot know.
    names:        of the classes, in order of their numbers; empty where they have none.
    """

    train: MapDataset
    test: MapDataset
    classes: int | None
    names: tuple[str, ...] = ()


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that no source depends on what was drawn before."""
    return torch.Generator().manual_seed(seed)


def limited(data: MapDataset, count: int | None, seed: int) -> MapDataset:
    """At most `count` samples of `data`, drawn by `seed`: the first ones are of few classes where data is sorted."""
    if count is None or count >= len(data):
        return data
    chosen: list[int] = torch.randperm(len(data), generator=generator(seed))[:count].tolist()
    return Subset(data, chosen)  # type: ignore[arg-type]  # torch asks for its own base class and uses [] and len


def stratified(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices for training and testing, int64: of every class about `fraction`, at least one, goes to testing.

    Args:
        labels: (N,) class numbers.

    Raises:
        AspError: a class with fewer than two samples.
    """
    random = generator(seed)
    train, test = [], []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        if len(members) < 2:
            raise AspError(f"task.data: class {label} has {len(members)} sample, expected two or more to split")
        members = members[torch.randperm(len(members), generator=random)]
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        test.append(members[:count])
        train.append(members[count:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values
