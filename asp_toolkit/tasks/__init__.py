"""Tasks by name: a model with its data, loss and metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asp_toolkit.errors import AspError, closest
from asp_toolkit.tasks.task import Batch, MapDataset, Task

# Each function imports its file when called, so that an image run never loads transformers, nor a text run torchvision.


def _image_classification(section: Any, seed: int) -> Task:
    from asp_toolkit.tasks.image_classification import image_classification

    return image_classification(section, seed)


def _text_classification(section: Any, seed: int) -> Task:
    from asp_toolkit.tasks.text_classification import text_classification

    return text_classification(section, seed)


def _question_answering(section: Any, seed: int) -> Task:
    from asp_toolkit.tasks.question_answering import question_answering

    return question_answering(section, seed)


TASKS: dict[str, Callable[[Any, int], Task]] = {
    "image_classification": _image_classification,
    "text_classification": _text_classification,
    "question_answering": _question_answering,
}


def build_task(section: Any, seed: int) -> Task:
    """The task that a recipe's `task` section describes, with every name, file and column resolved.

    The network is built once and given one batch, so that what does not fit together fails here and not after an
    hour of training. torch's global generator is left as it was.

    Args:
        section: ImageTask, TextTask or QATask of `asp_toolkit.recipe.schema`.
        seed: decides how data is split and which samples a limit keeps, and nothing else.

    Raises:
        AspError: a name, file or column is not there, or model and data do not fit.
    """
    if section.kind not in TASKS:
        raise AspError(f"task.kind: unknown task {section.kind!r}; {closest(section.kind, TASKS)}")
    return TASKS[section.kind](section, seed)


__all__ = ["TASKS", "Batch", "MapDataset", "Task", "build_task"]
