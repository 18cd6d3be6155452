"""Transposable N:M: the mask and its transpose are both N:M, so that forward and backward products are sparse.

Source: Hubara et al., arXiv 2102.08124.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

from asp_toolkit.patterns.nm import NM
from asp_toolkit.patterns.top import addable, in_order, pieces
from asp_toolkit.patterns.transposable_greedy import greedy_tiles

_EXACT_UP_TO = 4  # a 4x4 tile has 90 masks with two in each row and column, a 6x6 tile 297,200 with three


@dataclass(frozen=True)
class TransposableNM:
    """Keep `n` of `m` in every row and in every column of every m x m tile: exactly n * m entries a tile.

    m <= 4: the mask with the largest sum of scores; of those with equal sums the one whose kept entries, read row by
    row, come first. A row is summed from its first entry on, the upper (m + 1) // 2 rows and the lower ones from the
    first row on, then the two, in float64.
    Above, or where `greedy` asks for it: from the highest score down each entry that has room in its row and column,
    then swaps until all rows and columns are full. The paper proves half of the largest sum for what the first step
    takes of scores >= 0; the swaps have not been seen to fall below it.
    """

    n: int
    m: int
    greedy: bool = False

    def __post_init__(self) -> None:
        NM(self.n, self.m)  # refuses impossible counts

    @staticmethod
    def read(text: str) -> TransposableNM | None:
        """`text` as "2:4 transposable" or "2:4 transposable greedy"; None where it is spelled otherwise."""
        found = re.fullmatch(r"([0-9]{1,9}) ?: ?([0-9]{1,9}) transposable( greedy)?", text)
        return TransposableNM(int(found[1]), int(found[2]), found[3] is not None) if found else None

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m} transposable{' greedy' if self.greedy else ''}"

    @property
    def nm(self) -> NM:
        return NM(self.n, self.m)

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        if (reason := self.nm.why_not(rows, cols, run)) is not None:
            return reason
        return f"{rows} rows are not a multiple of {self.m}" if rows % self.m else None

    def mask(self, scores: Tensor) -> Tensor:
        m = self.m
        if scores.ndim != 2 or scores.shape[0] % m or scores.shape[1] % m:
            raise ValueError(f"expected (multiple of {m}, multiple of {m}) scores, got {tuple(scores.shape)}")
        rows, cols = scores.shape
        best = greedy_tiles if self.greedy or m > _EXACT_UP_TO else _exact_tiles
        out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
        bands, masks = scores.reshape(rows // m, m * cols), out.view(rows // m, m * cols)
        for first, last in pieces(bands) if cols else ():
            tiles = bands[first:last].view(last - first, m, cols // m, m).permute(1, 3, 0, 2)  # (m, m, down, across)
            kept = best(tiles.flatten(2).contiguous(), self.n)  # (m, T, m)
            masks[first:last].view(last - first, m, cols).copy_(kept.reshape(m, last - first, cols).transpose(0, 1))
        return out

    def density(self, rows: int, cols: int) -> float:
        return self.n / self.m

    def holds(self, mask: Tensor) -> bool:
        return mask.shape[0] % self.m == 0 and self.nm.holds(mask) and self.nm.holds(mask.t())

    def towards(self, share: float) -> TransposableNM | None:
        """Drops `share` of what it drops, rounded down to whole entries of a row; None where that is none."""
        kept = self.m - math.floor((self.m - self.n) * share)
        return replace(self, n=kept) if kept < self.m else None


@cache
def _masks(n: int, m: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """All masks of a tile, in lexicographic order: per row the columns kept."""
    rows = list(combinations(range(m), n))
    return tuple(
        mask for mask in product(rows, repeat=m) if all(sum(col in row for row in mask) == n for col in range(m))
    )


def _exact_tiles(tiles: Tensor, n: int) -> Tensor:
    """(m, m, T) scores of T tiles, rows x columns -> (m, T, m) bool by rows, of each the mask with the largest sum.

    A mask's sum is that of its upper rows plus that of its lower rows: 36 + 36 sums of two rows for 2:4, which all 90
    masks share.
    """
    m, masks, scores = len(tiles), _masks(n, len(tiles)), addable(tiles)
    rows = [
        {kept: in_order([scores[row, col] for col in kept]) for kept in combinations(range(m), n)} for row in range(m)
    ]
    half = (m + 1) // 2
    uppers = {mask[:half]: in_order([rows[i][kept] for i, kept in enumerate(mask[:half])]) for mask in masks}
    lowers = {mask[half:]: in_order([rows[half + i][kept] for i, kept in enumerate(mask[half:])]) for mask in masks}
    best = uppers[masks[0][:half]] + lowers[masks[0][half:]]
    index, total, better = torch.zeros_like(best), torch.empty_like(best), torch.empty_like(best)
    for number, mask in enumerate(masks[1:], start=1):
        torch.add(uppers[mask[:half]], lowers[mask[half:]], out=total)
        torch.gt(total, best, out=better)  # 1.0 or 0.0: several times faster than a bool, and than torch.where after it
        torch.maximum(index, better.mul_(number), out=index)
        torch.maximum(best, total, out=best)
    table = torch.tensor([[[col in kept for col in range(m)] for kept in row] for row in zip(*masks, strict=True)])
    return table.to(tiles.device).index_select(1, index.long())
