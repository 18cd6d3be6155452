"""Text classification: any transformers AutoModelForSequenceClassification on texts from any source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import CallableData, FilesData, HubData, SyntheticData, TextTask
from asp_toolkit.tasks.data.sets import Source, limited
from asp_toolkit.tasks.pretrained import builder, check_length, tokenizer_of
from asp_toolkit.tasks.task import MapDataset, Task

TextBatch = dict[str, Tensor]
"""input_ids and attention_mask int64 (B, tokens), labels int64 (B,)."""


def text_classification(section: TextTask, seed: int) -> Task:
    """The task of `section`; texts are tokenised here, once. Outputs are logits (B, classes).

    Raises:
        AspError: names that do not exist, or model and data that do not fit.
    """
    source = _source(section.data, seed)
    if source.classes is not None and source.classes != section.classes:
        raise AspError(f"task.classes: expected {source.classes}, as many as the data has, got {section.classes}")
    tokenizer = tokenizer_of(section.model)
    changes: dict[str, Any] = {"num_labels": section.classes}
    if source.names:
        changes |= {
            "id2label": dict(enumerate(source.names)),
            "label2id": {name: i for i, name in enumerate(source.names)},
        }
    build = builder(section.model, transformers.AutoModelForSequenceClassification, tokenizer, **changes)
    train, test = (
        _tokens(limited(data, limit, seed), tokenizer, section, name)
        for name, data, limit in (
            ("training", source.train, section.limit_train),
            ("test", source.test, section.limit_test),
        )
    )
    batching = functools.partial(
        collate, pad=tokenizer.pad_token_id, width=section.max_length if section.padding == "max_length" else None
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build().eval()
        check_length(model, section.max_length)
        logits = forward(model, batching([test[i] for i in range(min(len(test), 2))]))
    if logits.ndim != 2 or logits.shape[1] != section.classes:
        raise AspError(
            f"task.model: {section.model.name} returned shape {tuple(logits.shape)}, expected (B, {section.classes})"
        )
    return Task(
        kind=section.kind,
        build=build,
        train=train,
        test=test,
        collate=batching,
        loss=_loss,
        measure=_measure,
        forward=forward,
        metric=section.metric,
        workers=section.workers,
        save_with=functools.partial(save_tokenizer, tokenizer),
    )


def _source(data: Any, seed: int) -> Source:
    match data:
        case SyntheticData():
            from asp_toolkit.tasks.data import synthetic

            return synthetic.texts(data, seed)
        case CallableData():
            from asp_toolkit.tasks.data import called

            return called.texts(data)
        case FilesData():
            from asp_toolkit.tasks.data import huggingface

            return huggingface.files(data)
        case HubData():
            from asp_toolkit.tasks.data import huggingface

            return huggingface.texts(data)
    raise AspError(f"task.data.source: {data.source!r} holds no texts")


@dataclass(frozen=True)
class Tokens:
    """Tokenised texts end to end. ids: int32 (all tokens,); text i begins at starts[i]. Samples: (its ids, class)."""

    ids: Tensor
    starts: Sequence[int]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.ids[self.starts[index] : self.starts[index + 1]], self.labels[index]


def _tokens(data: MapDataset, tokenizer: Any, section: TextTask, name: str) -> Tokens:
    if len(data) == 0:
        raise AspError(f"task.data: the {name} set is empty")
    pieces: list[Tensor] = []
    starts: list[int] = [0]
    labels: list[int] = []
    for first in range(0, len(data), 1000):  # in parts: lists of Python numbers take ten times the memory
        samples = [data[i] for i in range(first, min(first + 1000, len(data)))]
        encoded = tokenizer(
            [text for text, _ in samples], truncation=True, max_length=section.max_length, padding=False
        )
        for (_, label), ids in zip(samples, encoded["input_ids"], strict=True):
            if not 0 <= label < section.classes:
                raise AspError(
                    f"task.data.label: sample {len(labels)} of the {name} set has class {label}, "
                    f"expected 0 to {section.classes - 1}"
                )
            pieces.append(torch.tensor(ids, dtype=torch.int32))
            starts.append(starts[-1] + len(ids))
            labels.append(label)
    return Tokens(torch.cat(pieces), starts, labels)


def collate(samples: Sequence[tuple[Tensor, int]], pad: int, width: int | None) -> TextBatch:
    """Samples -> a batch, padded on the right to `width`, or to the longest of them where it is None."""
    longest = width or max(len(ids) for ids, _ in samples)
    input_ids = torch.full((len(samples), max(longest, 1)), pad, dtype=torch.int64)
    attention = torch.zeros_like(input_ids)
    for row, (ids, _) in enumerate(samples):
        input_ids[row, : len(ids)] = ids
        attention[row, : len(ids)] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": attention,
        "labels": torch.tensor([label for _, label in samples], dtype=torch.int64),
    }


def forward(model: nn.Module, batch: TextBatch) -> Tensor:
    """Logits (B, classes)."""
    logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits


def save_tokenizer(tokenizer: Any, folder: Path, model: nn.Module) -> None:
    """Write the tokenizer's files beside the model's, so that the folder loads on its own."""
    tokenizer.save_pretrained(str(folder))


def _loss(model: nn.Module, batch: TextBatch, label_smoothing: float) -> Tensor:
    return F.cross_entropy(forward(model, batch).float(), batch["labels"], label_smoothing=label_smoothing)


def _measure(model: nn.Module, batch: TextBatch) -> dict[str, Tensor]:
    logits = forward(model, batch).float()  # (B, classes)
    return {
        "loss": F.cross_entropy(logits, batch["labels"], reduction="none"),
        "accuracy": (logits.argmax(dim=1) == batch["labels"]).float(),
    }
