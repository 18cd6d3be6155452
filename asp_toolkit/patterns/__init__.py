"""Which sets of entries may stay. `parse("2:4")` gives the pattern that a recipe names."""

from __future__ import annotations

from asp_toolkit.patterns.nm import NM, parse
from asp_toolkit.patterns.pattern import Pattern, masks_of

__all__ = ["NM", "Pattern", "masks_of", "parse"]
