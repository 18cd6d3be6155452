"""WordNet's glosses: tell from a noun's definition which kind of thing it names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from asp_toolkit.errors import AspError
from asp_toolkit.tasks.data.sets import Texts, generator

NOUN_FILES = (
    *("Tops", "act", "animal", "artifact", "attribute", "body", "cognition", "communication", "event", "feeling"),
    *("food", "group", "location", "motive", "object", "person", "phenomenon", "plant", "possession", "process"),
    *("quantity", "relation", "shape", "state", "substance", "time"),
)
"""Names of the lexicographer files 03 to 28. Source: lexnames(5WN)."""


@dataclass(frozen=True)
class Glosses(Texts):
    """Glosses with class numbers, and the classes' names in order."""

    classes: tuple[str, ...] = ()


def glosses(
    file: str = "/usr/share/wordnet/data.noun", classes: int = 10, train: int = 4000, test: int = 2000, seed: int = 0
) -> tuple[Glosses, Glosses]:
    """(train, test): definitions of nouns, drawn at random, with the lexicographer file as the class.

    The largest `classes` files are taken, and numbered by size, the largest first. The two sets share no gloss.

    Args:
        file: WordNet's data.noun. Format: wndb(5WN).
        train, test: how many glosses each set gets.
        seed: of the drawing.

    Raises:
        AspError: the file is not there or is another one, or holds fewer glosses than asked for.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise AspError(f"task.data: there is no {path}; apt-get install wordnet-base")
    entries = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("  ")
    ]  # 29 lines of licence
    try:
        found = [(int(line.split(" ", 2)[1]), line.split(" | ", 1)[1].strip()) for line in entries]
    except (IndexError, ValueError) as error:
        raise AspError(f"task.data.options.file: {path} is not WordNet's data.noun") from error
    counts = Counter(number for number, _ in found)
    largest = sorted(counts, key=lambda number: (-counts[number], number))[:classes]
    if len(largest) < classes:
        raise AspError(f"task.data.options.classes: expected at most {len(largest)}, got {classes}")
    place = {number: index for index, number in enumerate(largest)}
    # Synonym sets with the same words for a gloss would stand in both sets: the first one counts.
    unique = {gloss: place[number] for number, gloss in reversed(found) if number in place}
    pool = sorted(unique.items())
    if train + test > len(pool):
        raise AspError(
            f"task.data.options: {train} + {test} glosses asked for, {path} has {len(pool)} in {classes} classes"
        )
    order = torch.randperm(len(pool), generator=generator(seed))[: train + test].tolist()
    drawn = [pool[i] for i in order]
    names = tuple(NOUN_FILES[number - 3] for number in largest)
    return _set(drawn[:train], names), _set(drawn[train:], names)


def _set(pairs: list[tuple[str, int]], names: tuple[str, ...]) -> Glosses:
    return Glosses([text for text, _ in pairs], [label for _, label in pairs], names)
