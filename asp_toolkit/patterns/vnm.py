"""V:N:M: N of M entries of every row, within columns that V rows share (VENOM, arXiv 2310.02065)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns.nm import NM
from asp_toolkit.patterns.pattern import Pattern
from asp_toolkit.patterns.top import addable, in_order, keys, pieces


@dataclass(frozen=True)
class VNM:
    """Keep, of every tile of `v` rows and `m` columns, 2 * n columns, and in every row the `n` highest of those.

    The columns are those with the largest sum of scores, in float64; ties keep the lower index, as in the rows. So
    every row is N:M, and a row's kept entries are N of 2N in the chosen columns (2 of 4: what sparse tensor cores
    take).
    """

    v: int
    n: int
    m: int

    def __post_init__(self) -> None:
        if self.v < 1:
            raise AspError(f"pattern {self.name}: V:N:M shares columns between V rows, with V >= 1, e.g. 64:2:8")
        if not 1 <= self.n < self.m <= 64:
            raise AspError(f"pattern {self.name}: V:N:M keeps N of every M entries, with 1 <= N < M <= 64, e.g. 64:2:8")
        if self.m <= 2 * self.n:
            raise AspError(
                f"pattern {self.name}: V:N:M chooses {2 * self.n} of {self.m} columns, which leaves nothing to choose; "
                f"write {self.n}:{self.m}, or M above {2 * self.n}"
            )

    @staticmethod
    def read(text: str) -> VNM | None:
        """`text` as "64:2:8"; None where it is spelled otherwise."""
        found = re.fullmatch(r"([0-9]{1,9}) ?: ?([0-9]{1,9}) ?: ?([0-9]{1,9})", text)
        return VNM(int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def name(self) -> str:
        return f"{self.v}:{self.n}:{self.m}"

    @property
    def nm(self) -> NM:
        return NM(self.n, self.m)

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        if (reason := self.nm.why_not(rows, cols, run)) is not None:
            return reason
        return f"{rows} rows are not a multiple of {self.v}" if rows % self.v else None

    def mask(self, scores: Tensor) -> Tensor:
        if scores.ndim != 2 or scores.shape[0] % self.v or scores.shape[1] % self.m:
            raise ValueError(f"expected (multiple of {self.v}, multiple of {self.m}) scores, got {tuple(scores.shape)}")
        rows, cols = scores.shape
        out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
        if out.numel() == 0:
            return out
        bands = scores.reshape(rows // self.v, self.v * cols)
        columns = NM(2 * self.n, self.m)
        for first, last in pieces(bands):
            band = bands[first:last].reshape(last - first, self.v, cols)
            chosen = columns.mask(in_order(addable(band).unbind(1)))  # (bands, cols)
            found = keys(band)
            lowest = torch.iinfo(found.dtype).min  # below every score's key
            found = found.masked_fill(~chosen.unsqueeze(1), lowest)
            out[first * self.v : last * self.v] = self.nm.mask(found.view(-1, cols))
        return out

    def density(self, rows: int, cols: int) -> float:
        return self.n / self.m

    def holds(self, mask: Tensor) -> bool:
        rows, cols = mask.shape
        if rows % self.v or not self.nm.holds(mask):
            return False
        columns = mask.reshape(rows // self.v, self.v, cols // self.m, self.m).any(1)  # (down, across, m)
        return bool((columns.sum(2) <= 2 * self.n).all())

    def towards(self, share: float) -> Pattern | None:
        """Drops `share` of what it drops, as `NM.towards`; as plain N:M while that leaves no columns to choose."""
        kept = self.m - math.floor((self.m - self.n) * share)
        if kept == self.m:
            return None
        return VNM(self.v, kept, self.m) if self.m > 2 * kept else NM(kept, self.m)
