"""Unstructured: the lowest share of entries goes, wherever they are (Han et al., arXiv 1506.02626)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns.shares import NUMBER, checked, dropped, eased, kept_share
from asp_toolkit.patterns.top import top_of_all, top_of_rows

Scope = Literal["layer", "row", "global"]
_ENDINGS: dict[Scope, str] = {"layer": "", "row": " per row", "global": " global"}


@dataclass(frozen=True)
class Unstructured:
    """Drop the share `sparsity`: exactly round(sparsity * entries) of them, the lowest scores, ties the higher index.

    scope: among which entries that is counted: of a layer, of each row, or of all layers of the rule together
    (`masks`; where a mask is asked for alone, of that layer). Of tied layers the earlier one's entries stay.
    """

    sparsity: float
    scope: Scope = "layer"

    def __post_init__(self) -> None:
        if self.scope not in _ENDINGS:
            raise AspError(f"pattern unstructured: scope is one of {', '.join(_ENDINGS)}, not {self.scope!r}")
        object.__setattr__(self, "sparsity", checked("unstructured", self.sparsity))

    @staticmethod
    def read(text: str) -> Unstructured | None:
        """`text` as "unstructured 0.9", "... per row" or "... global"; None where it is spelled otherwise."""
        found = re.fullmatch(rf"unstructured ({NUMBER})( per row| global|)", text)
        if not found:
            return None
        scope = next(scope for scope, ending in _ENDINGS.items() if ending == found[2])
        return Unstructured(float(found[1]), scope)

    @property
    def name(self) -> str:
        return f"unstructured {self.sparsity}{_ENDINGS[self.scope]}"

    def _kept(self, entries: int) -> int:
        return entries - dropped(self.sparsity, entries)

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        if rows == 0 or cols == 0 or run == 0:
            return "empty"
        if self.scope == "row" and self._kept(cols) == 0:
            return f"{self.sparsity} of {cols} entries a row would drop all of them"
        if self.scope == "layer" and self._kept(rows * cols) == 0:
            return f"{self.sparsity} of {rows * cols} entries would drop all of them"
        return None

    def mask(self, scores: Tensor) -> Tensor:
        if scores.ndim != 2:
            raise ValueError(f"expected (rows, cols) scores, got {tuple(scores.shape)}")
        if self.scope != "row":
            return _top([scores], self._kept(scores.numel()))[0]
        kept = self._kept(scores.shape[1])
        if scores.numel() == 0 or kept in (0, scores.shape[1]):
            return torch.full(scores.shape, kept > 0, device=scores.device)
        return top_of_rows(scores, kept)

    def masks(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """The masks of several matrices; scope "global" chooses among all of their entries."""
        if self.scope != "global":
            return [self.mask(one) for one in scores]
        return _top(scores, self._kept(sum(one.numel() for one in scores)))

    def density(self, rows: int, cols: int) -> float:
        """Exact for scopes "layer" and "row"; for "global" that of all matrices together, but for rounding."""
        if self.scope == "global":
            return kept_share(self.sparsity)
        entries = cols if self.scope == "row" else rows * cols
        return self._kept(entries) / entries if entries else 0.0

    def holds(self, mask: Tensor) -> bool:
        """Whether no more is kept than allowed; True for scope "global", where only `holds_together` can tell."""
        if self.scope == "global":
            return True
        if self.scope == "row":
            return bool((mask.sum(1) <= self._kept(mask.shape[1])).all())
        return int(mask.count_nonzero()) <= self._kept(mask.numel())

    def holds_together(self, masks: Sequence[Tensor]) -> bool:
        """Whether the masks of all matrices that were chosen together keep no more than allowed."""
        if self.scope != "global":
            return all(self.holds(mask) for mask in masks)
        return sum(int(mask.count_nonzero()) for mask in masks) <= self._kept(sum(mask.numel() for mask in masks))

    def towards(self, share: float) -> Unstructured | None:
        """Drops `share` of what it drops, to four decimals; None where that is nothing."""
        sparsity = eased(self.sparsity, share)
        return replace(self, sparsity=sparsity) if sparsity else None


def _top(matrices: Sequence[Tensor], kept: int) -> list[Tensor]:
    if kept in (0, sum(matrix.numel() for matrix in matrices)):
        return [torch.full(matrix.shape, kept > 0, device=matrix.device) for matrix in matrices]
    return top_of_all(matrices, kept)
