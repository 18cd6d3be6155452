"""Which sets of entries may stay. `parse("2:4")` gives the pattern that a recipe names."""

from __future__ import annotations

from asp_toolkit.patterns.block import Block
from asp_toolkit.patterns.nm import NM
from asp_toolkit.patterns.pattern import Pattern, masks_of
from asp_toolkit.patterns.registry import PATTERNS, parse
from asp_toolkit.patterns.transposable import TransposableNM
from asp_toolkit.patterns.unstructured import Unstructured
from asp_toolkit.patterns.vnm import VNM

__all__ = ["NM", "PATTERNS", "VNM", "Block", "Pattern", "TransposableNM", "Unstructured", "masks_of", "parse"]
