"""What a pattern is: a rule for which entries of a (rows, cols) matrix may stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Pattern(Protocol):
    """A rule for masks of a (rows, cols) matrix. Frozen dataclasses: equal patterns compare equal.

    A pattern whose masks are chosen for several matrices together (unstructured global) also has
    `masks(scores: Sequence[Tensor]) -> list[Tensor]`, which `masks_of` finds. One that gradual schedules can ease into
    has `towards(share)`. One that is N:M as well, and so can be packed, has `nm`.
    """

    @property
    def name(self) -> str:
        """How a recipe spells it; `parse(name)` gives an equal pattern."""

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        """Why it does not fit a (rows, cols) matrix whose rows consist of runs of `run` entries; None where it fits."""

    def mask(self, scores: Tensor) -> Tensor:
        """(rows, cols) scores -> (rows, cols) bool, True keeps; of equal scores the lower index stays."""

    def holds(self, mask: Tensor) -> bool:
        """Whether a (rows, cols) bool mask obeys the pattern: keeps no more, and nowhere else, than it allows."""

    def density(self, rows: int, cols: int) -> float:
        """Share of entries that `mask` keeps of a (rows, cols) matrix, in [0, 1]."""


def masks_of(pattern: Pattern, scores: Sequence[Tensor]) -> list[Tensor]:
    """The masks of several matrices under one pattern: together where it chooses among all of them, else one by one."""
    together = getattr(pattern, "masks", None)
    return list(together(scores)) if together is not None else [pattern.mask(one) for one in scores]
