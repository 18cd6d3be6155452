"""Block: whole blocks of a matrix go, those whose scores sum to the least (arXiv 1711.02782)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns.shares import NUMBER, checked, dropped, eased
from asp_toolkit.patterns.top import addable, in_order, pieces, top_of_all


@dataclass(frozen=True)
class Block:
    """Drop the share `sparsity` of the blocks of `b_rows` x `b_cols` entries: exactly round(sparsity * blocks) of them.

    Those with the least sum of scores, in float64, go; ties keep the block with the lower index, row by row. Columns
    of blocks lie inside a run of the contraction, so a block of a 3x3 convolution has one kernel position.
    """

    b_rows: int
    b_cols: int
    sparsity: float

    def __post_init__(self) -> None:
        size = f"block {self.b_rows}x{self.b_cols}"
        if self.b_rows < 1 or self.b_cols < 1:
            raise AspError(f"pattern {size} {self.sparsity}: a block has at least one row and one column, e.g. 16x16")
        object.__setattr__(self, "sparsity", checked(size, self.sparsity))

    @staticmethod
    def read(text: str) -> Block | None:
        """`text` as "block 16x16 0.8", rows x columns and the share dropped; None where it is spelled otherwise."""
        found = re.fullmatch(rf"block ([0-9]{{1,9}}) ?x ?([0-9]{{1,9}}) ({NUMBER})", text)
        return Block(int(found[1]), int(found[2]), float(found[3])) if found else None

    @property
    def name(self) -> str:
        return f"block {self.b_rows}x{self.b_cols} {self.sparsity}"

    def _blocks(self, rows: int, cols: int) -> tuple[int, int]:
        """How many blocks a (rows, cols) matrix has, and how many of them are kept."""
        blocks = (rows // self.b_rows) * (cols // self.b_cols)
        return blocks, blocks - dropped(self.sparsity, blocks)

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        if rows == 0 or cols == 0 or run == 0:
            return "empty"
        if rows % self.b_rows:
            return f"{rows} rows are not a multiple of {self.b_rows}"
        if run % self.b_cols:
            return f"contraction length {run} is not a multiple of {self.b_cols}"
        blocks, kept = self._blocks(rows, cols)
        return f"{self.sparsity} of {blocks} blocks would drop all of them" if kept == 0 else None

    def mask(self, scores: Tensor) -> Tensor:
        if scores.ndim != 2 or scores.shape[0] % self.b_rows or scores.shape[1] % self.b_cols:
            raise ValueError(
                f"expected (multiple of {self.b_rows}, multiple of {self.b_cols}) scores, got {tuple(scores.shape)}"
            )
        rows, cols = scores.shape
        across = (rows // self.b_rows, cols // self.b_cols)
        blocks, kept = self._blocks(rows, cols)
        if kept in (0, blocks):
            return torch.full(scores.shape, kept > 0, device=scores.device)
        kept_blocks = top_of_all([self._sums(scores, across)], kept)[0]
        out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
        out.view(across[0], self.b_rows, across[1], self.b_cols).copy_(kept_blocks[:, None, :, None])
        return out

    def _sums(self, scores: Tensor, across: tuple[int, int]) -> Tensor:
        """(rows, cols) scores -> `across` float64, the sum of each block: over its rows, then over its columns."""
        sums = torch.empty(across, dtype=torch.float64, device=scores.device)
        bands = scores.reshape(across[0], self.b_rows * scores.shape[1])  # (down, rows of a block * cols)
        for first, last in pieces(bands):
            band = addable(bands[first:last]).view(last - first, self.b_rows, across[1], self.b_cols)
            by_column = in_order(band.unbind(1))  # (down, across, columns of a block)
            sums[first:last] = in_order(by_column.unbind(2))
        return sums

    def density(self, rows: int, cols: int) -> float:
        blocks, kept = self._blocks(rows, cols)
        return kept / blocks if blocks else 0.0

    def holds(self, mask: Tensor) -> bool:
        """A block of which any entry is kept counts as kept."""
        rows, cols = mask.shape
        if rows % self.b_rows or cols % self.b_cols:
            return False
        tiles = mask.reshape(rows // self.b_rows, self.b_rows, cols // self.b_cols, self.b_cols)
        return int(tiles.any(3).any(1).count_nonzero()) <= self._blocks(rows, cols)[1]

    def towards(self, share: float) -> Block | None:
        """Drops `share` of what it drops, to four decimals; None where that is nothing."""
        sparsity = eased(self.sparsity, share)
        return replace(self, sparsity=sparsity) if sparsity else None
