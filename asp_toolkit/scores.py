"""How much each entry of a weight matters: the higher stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

Stats = Mapping[str, Tensor]
"""Calibration statistics of one layer by name; None where the score needs none."""

Score = Callable[[Tensor, Stats | None], Tensor]
"""(rows, cols) weight, calibration statistics -> (rows, cols) scores."""


def magnitude(weight: Tensor, stats: Stats | None = None) -> Tensor:
    """|w|. Source: Han et al., arXiv 1506.02626."""
    return weight.detach().abs()


SCORES: dict[str, Score] = {"magnitude": magnitude}
