"""A small network and loaders of samples it can learn, for tests of prune_trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def network(inputs: int = 8, classes: int = 4, hidden: int = 16) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def samples(count: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))
    return x, x[:, :4].argmax(1)


def loader(size: int = 8, **keys: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples()), size, **keys)
