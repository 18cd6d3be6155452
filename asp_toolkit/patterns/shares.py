"""The share of entries that a pattern drops, read as the decimal that was written."""

from __future__ import annotations

from fractions import Fraction

from asp_toolkit.errors import AspError

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"


def checked(pattern: str, sparsity: float) -> float:
    """`sparsity` as a float.

    Raises:
        AspError: it is not between 0 and 1.
    """
    if not 0 < sparsity < 1:
        raise AspError(
            f"pattern {pattern} {sparsity}: the share of entries dropped lies between 0 and 1, e.g. 0.9 drops 90%; "
            "to drop none, exclude the layer"
        )
    return float(sparsity)


def dropped(sparsity: float, count: int) -> int:
    """How many of `count` are dropped: the decimal times `count`, rounded to the nearest, a half to even."""
    return round(Fraction(str(sparsity)) * count)


def kept_share(sparsity: float) -> float:
    """What is left of the whole; 0.1 for 0.9, where floats subtract to 0.09999999999999998."""
    return float(1 - Fraction(str(sparsity)))


def eased(sparsity: float, share: float) -> float:
    """`share` of `sparsity` to four decimals, so that names stay readable; 0.0 where that rounds to nothing."""
    return sparsity if share == 1 else min(sparsity, round(sparsity * share, 4))
