"""Extractive question answering in SQuAD's form: find the answer to a question in a context.

A context longer than the model takes is read in windows that overlap. An answer outside a window is the window's
class token there. Source: Devlin et al., arXiv 1810.04805, and its run_squad.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import CallableData, HubData, QATask, SyntheticData
from asp_toolkit.tasks.data.sets import limited
from asp_toolkit.tasks.pretrained import builder, check_length, tokenizer_of
from asp_toolkit.tasks.task import MapDataset, Task
from asp_toolkit.tasks.text_classification import save_tokenizer

QABatch = dict[str, Tensor]
"""Inputs int64 (B, tokens); allowed bool (B, tokens): where spans may be; spans int64 (B, answers, 2): first and last
token, -1 where a window has fewer answers than others."""

QUESTION_TOKENS = 64
ANSWER_TOKENS = 30
"""Longest question, longest predicted answer. Source: run_squad.py, max_query_length and max_answer_length."""


def question_answering(section: QATask, seed: int) -> Task:
    """The task of `section`; one sample is one window. Outputs are start and end logits, each (B, tokens).

    Raises:
        AspError: names that do not exist, samples in another form, lengths that do not fit.
    """
    if section.stride >= section.max_length - QUESTION_TOKENS - 3:
        most = section.max_length - QUESTION_TOKENS - 4
        raise AspError(
            f"task.stride: expected at most {most} for max_length {section.max_length}, got {section.stride}"
        )
    sets = _source(section.data, seed)
    tokenizer = tokenizer_of(section.model)
    if tokenizer.cls_token_id is None:
        raise AspError(
            f"task.model: the tokenizer of {section.model.name} has no class token, which stands for: no answer here"
        )
    build = builder(section.model, transformers.AutoModelForQuestionAnswering, tokenizer)
    train, test = (
        _windows(limited(data, limit, seed), tokenizer, section, name)
        for name, data, limit in (("training", sets[0], section.limit_train), ("test", sets[1], section.limit_test))
    )
    batching = functools.partial(collate, pad=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build().eval()
        check_length(model, section.max_length)
        batch = batching([test[i] for i in range(min(len(test), 2))])
        start, end = forward(model, batch)
    for logits in (start, end):
        if logits.shape != batch["input_ids"].shape:
            raise AspError(
                f"task.model: expected logits of shape {tuple(batch['input_ids'].shape)}, got {tuple(logits.shape)}"
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


def _source(data: Any, seed: int) -> tuple[MapDataset, MapDataset]:
    match data:
        case SyntheticData():
            from asp_toolkit.tasks.data import synthetic

            return synthetic.questions(data, seed)
        case CallableData():
            from asp_toolkit.tasks.data import called

            return called.pair(data)
        case HubData():
            from asp_toolkit.tasks.data import huggingface

            return huggingface.questions(data)
    raise AspError(f"task.data.source: {data.source!r} holds no questions")


@dataclass(frozen=True)
class Window:
    """One window. ids, kinds: int32 (tokens,); allowed: bool (tokens,); spans: int32 (answers, 2), first and last."""

    ids: Tensor
    kinds: Tensor | None
    allowed: Tensor
    spans: Tensor


def _windows(data: MapDataset, tokenizer: Any, section: QATask, name: str) -> list[Window]:
    windows: list[Window] = []
    for index in range(len(data)):
        question, context, answers = _checked(data[index], index, name)
        encoded = tokenizer(
            _shortened(question, tokenizer),
            context,
            truncation="only_second",
            max_length=section.max_length,
            stride=section.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        count = len(encoded["input_ids"])
        windows += [_window(encoded, i, answers, tokenizer.cls_token_id) for i in range(count)]
    if not windows:
        raise AspError(f"task.data: the {name} set is empty")
    return windows


def _checked(sample: Any, index: int, name: str) -> tuple[str, str, list[tuple[int, int]]]:
    """Question, context, and the answers as (first character, one past the last)."""
    where = f"task.data: sample {index} of the {name} set"
    try:
        question, context, answers = sample["question"].strip(), sample["context"], sample["answers"]
        given = list(zip(answers["text"], answers["answer_start"], strict=True))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise AspError(
            f"{where}: expected question, context, answers: {{text: […], answer_start: […]}} ({error!r})"
        ) from error
    for text, start in given:
        if context[start : start + len(text)] != text:
            raise AspError(f"{where}: the context does not have the answer {text!r} at character {start}")
    # Several people's same answer counts once; no answer at all is SQuAD 2's "cannot be answered".
    return question, context, list(dict.fromkeys((start, start + len(text)) for text, start in given if text))


def _shortened(question: str, tokenizer: Any) -> str:
    offsets = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return question[: offsets[QUESTION_TOKENS - 1][1]] if len(offsets) > QUESTION_TOKENS else question


def _window(encoded: Any, i: int, answers: Sequence[tuple[int, int]], class_token: int) -> Window:
    ids = encoded["input_ids"][i]
    nothing = ids.index(class_token)
    offsets = encoded["offset_mapping"][i]
    inside = [token for token, part in enumerate(encoded.sequence_ids(i)) if part == 1]
    spans = []
    for start, end in answers:
        covered = [t for t in inside if offsets[t][0] < end and offsets[t][1] > start]
        whole = bool(covered) and offsets[covered[0]][0] <= start and offsets[covered[-1]][1] >= end
        if whole:  # an answer that a window cuts is not an answer there
            spans.append((covered[0], covered[-1]))
    allowed = torch.zeros(len(ids), dtype=torch.bool)
    allowed[[*inside, nothing]] = True
    kinds = encoded["token_type_ids"][i] if "token_type_ids" in encoded else None
    return Window(
        torch.tensor(ids, dtype=torch.int32),
        None if kinds is None else torch.tensor(kinds, dtype=torch.int32),
        allowed,
        torch.tensor(list(dict.fromkeys(spans)) or [(nothing, nothing)], dtype=torch.int32),
    )


def collate(samples: Sequence[Window], pad: int) -> QABatch:
    """Windows -> a batch, padded on the right to the longest."""
    width = max(len(window.ids) for window in samples)
    answers = max(len(window.spans) for window in samples)
    batch = {
        "input_ids": torch.full((len(samples), width), pad, dtype=torch.int64),
        "attention_mask": torch.zeros(len(samples), width, dtype=torch.int64),
        "allowed": torch.zeros(len(samples), width, dtype=torch.bool),
        "spans": torch.full((len(samples), answers, 2), -1, dtype=torch.int64),
    }
    if samples[0].kinds is not None:
        batch["token_type_ids"] = torch.zeros(len(samples), width, dtype=torch.int64)
    for row, window in enumerate(samples):
        tokens = len(window.ids)
        batch["input_ids"][row, :tokens] = window.ids
        batch["attention_mask"][row, :tokens] = 1
        batch["allowed"][row, :tokens] = window.allowed
        batch["spans"][row, : len(window.spans)] = window.spans
        if window.kinds is not None:
            batch["token_type_ids"][row, :tokens] = window.kinds
    return batch


def forward(model: nn.Module, batch: QABatch) -> tuple[Tensor, Tensor]:
    """Start and end logits, each (B, tokens)."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    output = model(**{name: batch[name] for name in names if name in batch})
    return output.start_logits, output.end_logits


def _loss(model: nn.Module, batch: QABatch, label_smoothing: float) -> Tensor:
    return _cross_entropy(forward(model, batch), batch, "mean", label_smoothing)


def _cross_entropy(
    logits: tuple[Tensor, Tensor], batch: QABatch, reduction: str, label_smoothing: float = 0.0
) -> Tensor:
    """Of the first answer's first and last token, averaged."""
    start, end = (
        F.cross_entropy(part.float(), batch["spans"][:, 0, i], reduction=reduction, label_smoothing=label_smoothing)
        for i, part in enumerate(logits)
    )
    return (start + end) / 2


def _measure(model: nn.Module, batch: QABatch) -> dict[str, Tensor]:
    logits = forward(model, batch)
    found = best_spans(logits[0].float(), logits[1].float(), batch["allowed"])
    f1, exact = span_scores(found, batch["spans"])
    return {"loss": _cross_entropy(logits, batch, "none"), "f1": f1, "exact": exact}


def best_spans(start: Tensor, end: Tensor, allowed: Tensor) -> Tensor:
    """The spans (B, 2) of the greatest start + end logit, among those that begin and end on an allowed token and are at
    most ANSWER_TOKENS long.

    Args:
        start, end: (B, tokens) float logits.
        allowed: (B, tokens) bool.
    """
    tokens = start.shape[1]
    band = torch.ones(tokens, tokens, dtype=torch.bool, device=start.device).triu().tril(ANSWER_TOKENS - 1)
    possible = band & allowed[:, :, None] & allowed[:, None, :]  # (B, first, last)
    scores = (start[:, :, None] + end[:, None, :]).masked_fill(~possible, -torch.inf)
    best = scores.flatten(1).argmax(dim=1)
    return torch.stack([best // tokens, best % tokens], dim=1)


def span_scores(found: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """F1 of the tokens shared with the answer, and 1 where the span is exactly it; of several answers the best counts.

    Args:
        found: (B, 2) first and last token.
        spans: (B, answers, 2), -1 where there is none.

    Returns:
        Two float tensors (B,).
    """
    first, last = found[:, None, 0], found[:, None, 1]  # (B, 1)
    shared = (torch.minimum(last, spans[..., 1]) - torch.maximum(first, spans[..., 0]) + 1).clamp(min=0)
    lengths = (last - first + 1) + (spans[..., 1] - spans[..., 0] + 1)
    real = spans[..., 0] >= 0  # (B, answers)
    f1 = (2 * shared / lengths).where(real, 0.0).amax(dim=1)
    exact = ((spans == found[:, None]).all(dim=2) & real).any(dim=1).float()
    return f1.float(), exact
