"""N:M: keep N of every M consecutive entries (arXiv 2104.08378)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns.pattern import Pattern

_CHUNK = 1 << 18  # scores per piece: bounds the extra memory and keeps a piece in the second-level cache
_RANKS_UP_TO = 16  # above this many entries a group, a stable sort beats comparing all pairs


@dataclass(frozen=True)
class NM:
    """Keep `n` of every `m` consecutive entries of a row: exactly the n highest scores, ties to the lower index."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m <= 64:
            raise AspError(f"pattern {self.n}:{self.m}: N:M keeps N of every M entries, with 1 <= N < M <= 64")

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m}"

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        if rows == 0 or cols == 0 or run == 0:
            return "empty"
        if run % self.m:
            return f"contraction length {run} is not a multiple of {self.m}"
        return None

    def mask(self, scores: Tensor) -> Tensor:
        if scores.ndim != 2 or scores.shape[1] % self.m:
            raise ValueError(f"expected (rows, multiple of {self.m}) scores, got {tuple(scores.shape)}")
        groups = scores.detach().reshape(-1, self.m)  # (rows * cols / m, m)
        out = torch.empty(groups.shape, dtype=torch.bool, device=scores.device)
        step = max(1, _CHUNK // self.m)
        top = _top_by_ranks if self.m <= _RANKS_UP_TO else _top_by_sort
        for start in range(0, groups.shape[0], step):
            piece = groups[start : start + step]
            out[start : start + step] = top(piece, self.n)
        return out.reshape(scores.shape)

    def density(self, rows: int, cols: int) -> float:
        return self.n / self.m

    def holds(self, mask: Tensor) -> bool:
        return mask.shape[1] % self.m == 0 and bool((mask.reshape(-1, self.m).sum(1) <= self.n).all())


def _top_by_ranks(groups: Tensor, n: int) -> Tensor:
    """(G, m) -> (G, m) bool: entry i stays when fewer than n others beat it.

    j beats i when it is higher, or equal with j < i.
    """
    columns = groups.t().contiguous().unbind(0)  # m of (G,)
    beaten = [torch.zeros_like(columns[0], dtype=torch.uint8) for _ in columns]
    for i, low in enumerate(columns):
        for j in range(i + 1, len(columns)):
            later_wins = columns[j] > low
            beaten[i] += later_wins
            beaten[j] += ~later_wins
    return torch.stack([count < n for count in beaten], dim=1)


def _top_by_sort(groups: Tensor, n: int) -> Tensor:
    """As `_top_by_ranks`, by a stable descending sort."""
    order = groups.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return torch.zeros(groups.shape, dtype=torch.bool, device=groups.device).scatter_(1, order, True)


def parse(text: object) -> Pattern:
    """The pattern that `text` names.

    Raises:
        AspError: the text names none, or is no text (YAML 1.1 reads an unquoted 2:4 as the number 124).
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text) if isinstance(text, str) else None
    if found:
        return NM(int(found[1]), int(found[2]))
    raise AspError(f"unknown pattern {text!r}; write N:M, e.g. 2:4 (2 of every 4 entries are kept)")
