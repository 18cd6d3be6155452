"""Random samples with random labels, to try a recipe without its data."""

from __future__ import annotations

from typing import Any

import torch

from asp_toolkit.recipe.task_sections import SyntheticData
from asp_toolkit.tasks.data.sets import Images, Source, Texts, generator

WORDS = (
    *("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not"),
    *("he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you"),
    *("were", "her", "all", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will"),
)


def images(data: SyntheticData, seed: int) -> Source:
    """uint8 noise of `data.shape`."""
    random = generator(seed)

    def draw() -> Images:
        pixels = torch.randint(256, (data.size, *data.shape), generator=random, dtype=torch.uint8)
        return Images(pixels, torch.randint(data.classes, (data.size,), generator=random).tolist())

    return Source(draw(), draw(), data.classes)


def words(count: int, random: torch.Generator) -> list[str]:
    """`count` common English words at random."""
    return [WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=random).tolist()]


def texts(data: SyntheticData, seed: int) -> Source:
    """Random words, `data.length` of them in every text."""
    random = generator(seed)

    def draw() -> Texts:
        written = [" ".join(words(data.length, random)) for _ in range(data.size)]
        return Texts(written, torch.randint(data.classes, (data.size,), generator=random).tolist())

    return Source(draw(), draw(), data.classes)


def questions(data: SyntheticData, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Samples in SQuAD's form: a context of `data.length` random words, of which up to three are the answer."""
    random = generator(seed)

    def draw() -> dict[str, Any]:
        context = words(data.length, random)
        first = int(torch.randint(data.length, (), generator=random))
        answer = " ".join(context[first : first + 3])
        start = len(" ".join([*context[:first], ""]))
        question = " ".join(words(5, random)) + "?"
        return {
            "question": question,
            "context": " ".join(context),
            "answers": {"text": [answer], "answer_start": [start]},
        }

    return [draw() for _ in range(data.size)], [draw() for _ in range(data.size)]
