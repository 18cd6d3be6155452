"""A user's own function that returns (train, test)."""

from __future__ import annotations

import functools
from typing import Any

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import CallableData
from asp_toolkit.tasks.data.labels import class_numbers
from asp_toolkit.tasks.data.sets import Mapped, Source, Texts
from asp_toolkit.tasks.names import call_named
from asp_toolkit.tasks.task import MapDataset


def pair(data: CallableData) -> tuple[MapDataset, MapDataset]:
    """What the function returns: two map-style data sets.

    Raises:
        AspError: it cannot be called so, or returns something else.
    """
    result = call_named(data.name, data.options, "task.data.options")
    if not isinstance(result, tuple) or len(result) != 2:
        raise AspError(f"task.data.name: {data.name} returned a {type(result).__name__}, expected (train, test)")
    for part in result:
        if not hasattr(part, "__getitem__") or not hasattr(part, "__len__"):
            raise AspError(
                f"task.data.name: {data.name} returned a {type(part).__name__}, "
                f"expected a data set with len(data) and data[i]"
            )
        if len(part) == 0:
            raise AspError(f"task.data.name: {data.name} returned an empty data set")
    return result


def images(data: CallableData, channels: int) -> Source:
    """Samples (image, class number); the image a tensor (C, H, W), uint8 or float on a 0..1 scale, or of PIL."""
    from asp_toolkit.tasks.data.pictures import decoded_sample  # here: a text run needs no torchvision

    train, test = pair(data)
    names = tuple(str(name) for name in getattr(train, "classes", ()))
    decode = functools.partial(decoded_sample, channels=channels)
    return Source(Mapped(train, decode), Mapped(test, decode), len(names) or None, names)


def texts(data: CallableData) -> Source:
    """Samples (text, label) or {"text": …, "label": …}; labels class numbers or words."""
    sets = pair(data)
    (train_texts, train_labels), (test_texts, test_labels) = (_read(part, data.name) for part in sets)
    train, test, names = class_numbers(train_labels, test_labels)
    names = names or tuple(str(name) for name in getattr(sets[0], "classes", ()))
    return Source(Texts(train_texts, train), Texts(test_texts, test), len(names) or None, names)


def _read(data: MapDataset, name: str) -> tuple[list[str], list[Any]]:
    texts, labels = [], []
    for index in range(len(data)):
        sample = data[index]
        if isinstance(sample, dict) and {"text", "label"} <= sample.keys():
            sample = sample["text"], sample["label"]
        if not isinstance(sample, tuple | list) or len(sample) != 2 or not isinstance(sample[0], str):
            raise AspError(f"task.data.name: sample {index} of {name} is not (text, label)")
        texts.append(sample[0])
        labels.append(sample[1].item() if hasattr(sample[1], "item") else sample[1])
    return texts, labels
