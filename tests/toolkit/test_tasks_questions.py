"""Question answering: windows, spans, scores, and everything that must fail before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.schema import QATask
from asp_toolkit.tasks import build_task
from asp_toolkit.tasks.question_answering import ANSWER_TOKENS, Window, best_spans, span_scores
from asp_toolkit.tasks.task import Task

CONTEXT = "the sky is blue and the sea is green"


def sample(answer: str, context: str = CONTEXT, question: str = "what is it?") -> dict[str, Any]:
    return {
        "question": question,
        "context": context,
        "answers": {"text": [answer] if answer else [], "answer_start": [context.index(answer)] if answer else []},
    }


def task_of(folder: Path, data: dict[str, Any] | None = None, **rest: Any) -> Task:
    given = {
        "kind": "question_answering",
        "max_length": 100,
        "stride": 8,
        "model": {"name": str(folder)},
        "data": data or {"source": "synthetic", "size": 4, "length": 30},
        **rest,
    }
    return build_task(QATask.model_validate(given), 0)


@pytest.fixture
def on_samples(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """samples -> the task of them, given by a user's own function."""

    def build(samples: list[dict[str, Any]], **rest: Any) -> Task:
        module = f"own_{tmp_path.name}"  # another one in every test: Python keeps what it has imported
        (tmp_path / f"{module}.json").write_text(json.dumps(samples))
        (tmp_path / f"{module}.py").write_text(
            "import json, pathlib\ndef sets():\n"
            "    samples = json.loads(pathlib.Path(__file__).with_suffix('.json').read_text())\n"
            "    return samples, samples\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        return task_of(tiny_bert, {"source": "callable", "name": f"{module}:sets"}, **rest)

    return build


def words_of(window: Window, tokenizer: Any, span: torch.Tensor) -> str:
    return str(tokenizer.decode(window.ids[int(span[0]) : int(span[1]) + 1].tolist()))


def test_a_span_is_the_answers_tokens(on_samples: Any, tiny_bert: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    task = on_samples([sample("blue and the sea"), sample("")])
    assert len(task.train) == 2
    assert words_of(task.train[0], tokenizer, task.train[0].spans[0]) == "blue and the sea"
    assert task.train[1].spans.tolist() == [[0, 0]]  # the class token: no answer
    allowed = task.train[0].ids[task.train[0].allowed]
    assert tokenizer.decode(allowed.tolist()) == f"[CLS] {CONTEXT}"


def test_windows_overlap_and_only_whole_answers_count(on_samples: Any, tiny_bert: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    context = " ".join(["of"] * 150 + ["red", "sea"] + ["to"] * 150)
    task = on_samples([sample("red sea", context)])
    windows = [task.train[i] for i in range(len(task.train))]
    assert len(windows) > 3
    assert all(len(window.ids) <= 100 for window in windows)
    found = [words_of(w, tokenizer, w.spans[0]) for w in windows]
    assert set(found) == {"[CLS]", "red sea"}
    tokens = [window.ids[window.allowed][1:].tolist() for window in windows]
    whole = tokens[0] + [token for part in tokens[1:] for token in part[8:]]  # 8 tokens stand in both of two neighbours
    assert whole == tokenizer(context, add_special_tokens=False)["input_ids"]


def test_several_answers_the_best_counts(on_samples: Any) -> None:
    both = sample("blue")
    both["answers"] = {"text": ["blue", "blue", "green"], "answer_start": [11, 11, 31]}
    task = on_samples([both, sample("the")])
    batch = task.collate([task.train[0], task.train[1]])
    assert batch["spans"].shape == (2, 2, 2)
    assert batch["spans"][1, 1].tolist() == [-1, -1]
    f1, exact = span_scores(batch["spans"][:, 0], batch["spans"])
    assert f1.tolist() == exact.tolist() == [1.0, 1.0]
    f1, exact = span_scores(torch.stack([batch["spans"][0, 1], torch.tensor([0, 0])]), batch["spans"])
    assert f1.tolist() == exact.tolist() == [1.0, 0.0]


def test_span_f1_is_that_of_token_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        a, b = (torch.randint(12, (2,), generator=generator).sort().values for _ in range(2))
        ours, gold = set(range(int(a[0]), int(a[1]) + 1)), set(range(int(b[0]), int(b[1]) + 1))
        precision, recall = len(ours & gold) / len(ours), len(ours & gold) / len(gold)
        expected = 2 * precision * recall / (precision + recall) if ours & gold else 0.0
        f1, exact = span_scores(a[None], b[None, None])
        assert f1.item() == pytest.approx(expected)
        assert exact.item() == float(ours == gold)


def test_best_spans_agrees_with_trying_all() -> None:
    generator = torch.Generator().manual_seed(1)
    start, end = torch.randn(2, 3, 40, generator=generator, dtype=torch.float64)
    allowed = torch.rand(3, 40, generator=generator) < 0.6
    allowed[:, 0] = True
    found = best_spans(start, end, allowed)
    for row in range(3):
        possible = [
            (start[row, i] + end[row, j], i, j)
            for i in range(40)
            for j in range(i, min(40, i + ANSWER_TOKENS))
            if allowed[row, i] and allowed[row, j]
        ]
        assert found[row].tolist() == list(max(possible)[1:])


def test_loss_and_measure(tiny_bert: Path) -> None:
    task = task_of(tiny_bert)
    assert task.metric == "f1"
    model = task.build().eval()
    batch = task.collate([task.test[i] for i in range(4)])
    start, end = task.forward(model, batch)
    rows = torch.arange(4)
    by_hand = (
        -sum(
            torch.log_softmax(logits.double(), 1)[rows, batch["spans"][:, 0, i]]
            for i, logits in enumerate((start, end))
        )
        / 2
    )
    values = task.measure(model, batch)
    torch.testing.assert_close(values["loss"].double(), by_hand, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.loss(model, batch, 0.0).double(), by_hand.mean(), rtol=1e-5, atol=1e-6)
    assert all(value.shape == (4,) for value in values.values())


def test_a_perfect_model_scores_one(on_samples: Any) -> None:
    task = on_samples([sample("blue"), sample("the sea"), sample("")])
    batch = task.collate([task.train[i] for i in range(3)])

    class Perfect(nn.Module):
        def forward(self, **inputs: torch.Tensor) -> Any:
            hot = torch.nn.functional.one_hot(batch["spans"][:, 0], inputs["input_ids"].shape[1]) * 9.0
            return transformers.modeling_outputs.QuestionAnsweringModelOutput(
                start_logits=hot[:, 0], end_logits=hot[:, 1]
            )

    values = task.measure(Perfect(), batch)
    assert values["f1"].tolist() == values["exact"].tolist() == [1.0] * 3


def test_a_long_question_is_cut(on_samples: Any) -> None:
    task = on_samples([sample("blue", question=" ".join(["who"] * 90))])
    window = task.train[0]
    assert int(window.kinds.sum()) > 0
    assert int((window.kinds == 0).sum()) == 64 + 2  # and the class and separating tokens


def test_what_does_not_fit_is_refused(on_samples: Any, tiny_bert: Path) -> None:
    wrong = sample("blue")
    wrong["answers"]["answer_start"] = [0]
    for samples, message in (
        (
            [sample("sky"), wrong],
            "sample 1 of the training set: the context does not have the answer 'blue' at character 0",
        ),
        ([{"question": "who?", "context": "a"}], "expected question, context, answers"),
    ):
        with pytest.raises(AspError, match=message):
            on_samples(samples)
    with pytest.raises(AspError, match="expected at most 32 for max_length 100, got 50"):
        task_of(tiny_bert, stride=50)
    with pytest.raises(AspError, match="expected at most 160"):
        task_of(tiny_bert, max_length=300)


def test_huggingface_source(tiny_bert: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list([sample("blue"), sample("green")])
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(tmp_path / "set"))
    data = {"source": "huggingface", "name": str(tmp_path / "set"), "test_split": "validation"}
    assert len(task_of(tiny_bert, data).test) == 2
    datasets.DatasetDict({"train": split, "validation": split.remove_columns("context")}).save_to_disk(
        str(tmp_path / "b")
    )
    with pytest.raises(AspError, match="no column 'context'"):
        task_of(tiny_bert, {**data, "name": str(tmp_path / "b")})
