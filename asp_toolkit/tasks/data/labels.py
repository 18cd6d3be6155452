"""Labels as they stand in files -> class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asp_toolkit.errors import AspError


def class_numbers(train: Sequence[Any], test: Sequence[Any]) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Class numbers of both sets, and the classes' names where labels are words.

    Whole numbers are class numbers already. Words are numbered in the order of the alphabet, from the training set.

    Raises:
        AspError: a label is missing, negative (a hidden one), neither whole number nor word, or a word that the
            training set does not have.
    """

    def where(name: str, row: int, label: Any) -> str:
        return f"task.data.label: row {row} of the {name} set has label {label!r}"

    for name, labels in (("training", train), ("test", test)):
        for row, label in enumerate(labels):
            if not isinstance(label, int | str):
                raise AspError(f"{where(name, row, label)}, expected a whole number or a word")
            if isinstance(label, int) and label < 0:
                raise AspError(f"{where(name, row, label)}, which stands for a hidden one; name a split with labels")
    words = {label for label in train if isinstance(label, str)}
    if not words and not any(isinstance(label, str) for label in test):
        return [int(label) for label in train], [int(label) for label in test], ()
    names = tuple(sorted(words))
    numbers = {name: number for number, name in enumerate(names)}
    for name, labels in (("training", train), ("test", test)):
        for row, label in enumerate(labels):
            if label not in numbers:
                raise AspError(f"{where(name, row, label)}, expected one of the training set's: {list(names)}")
    return [numbers[label] for label in train], [numbers[label] for label in test], names
