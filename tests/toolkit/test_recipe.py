"""Recipes: what is read, what is refused and how, overrides, round trips."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from asp_toolkit import recipe as recipes
from asp_toolkit.errors import AspError
from asp_toolkit.recipe import difference, dump, from_mapping, load, schema
from asp_toolkit.recipe.yaml_file import parse_yaml
from tests.toolkit.made_recipes import TEXT


def written(tmp_path: Path, text: str = TEXT) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, overrides: Any = None) -> str:
    with pytest.raises(AspError) as caught:
        load(path, overrides)
    return str(caught.value).replace(str(path), "r.yaml")


def test_reads_values_and_defaults(tmp_path: Path) -> None:
    found = load(written(tmp_path))
    assert [rule.pattern for rule in found.prune.rules] == ["2:4", "1:4"]
    assert found.train.optimizer.lr == 0.1
    assert found.seed == 0
    assert found.retrain.repeat == "train"
    assert found.task.data.size == 64


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4", "16:32", "1:2", "7:16"])
@pytest.mark.parametrize("form", ["pattern: {}", "pattern: '{}'", 'pattern: "{}"', "pattern:   {}   # why"])
def test_patterns_need_no_quotes(tmp_path: Path, pattern: str, form: str) -> None:
    text = TEXT.replace("pattern: 2:4", form.format(pattern))
    assert load(written(tmp_path, text)).prune.rules[0].pattern == pattern


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "16:32"])
def test_patterns_need_no_quotes_in_flow_style_and_overrides(tmp_path: Path, pattern: str) -> None:
    head = TEXT[: TEXT.index("prune:")]
    found = load(written(tmp_path, head + f"prune: {{rules: [{{pattern: {pattern}}}]}}\n"))
    assert found.prune.rules[0].pattern == pattern
    path = written(tmp_path)
    assert load(path, [f"prune.rules.0.pattern={pattern}"]).prune.rules[0].pattern == pattern
    assert load(path, {"prune.rules.0.pattern": pattern}).prune.rules[0].pattern == pattern
    assert load(path, [f"prune.rules=[{{pattern: {pattern}}}]"]).prune.rules[0].pattern == pattern


@pytest.mark.parametrize(
    ("change", "told"),
    [
        # (what stands in TEXT, what replaces it), the message
        (("epochs: 3", "epoch: 3"), "r.yaml:8 train.epoch: unknown key; did you mean 'epochs'"),
        (("epochs: 3", "epochs: many"), "r.yaml:8 train.epochs: expected a number, got 'many'"),
        (("epochs: 3", "epochs: '3'"), "r.yaml:8 train.epochs: expected a number, got '3'; leave the quotes out"),
        (("epochs: 3", "epochs: -1"), "r.yaml:8 train.epochs: expected at least 0, got -1"),
        (("epochs: 3", "epochs: true"), "r.yaml:8 train.epochs: expected a number, got true"),
        (("epochs: 3", "batch_size: 2.5"), "r.yaml:8 train.batch_size: expected a whole number, got 2.5"),
        (("epochs: 3", "clip_norm: None"), "r.yaml:8 train.clip_norm: expected a number, got 'None'; write null"),
        (("lr: 1e-1", "nesterov: true"), "r.yaml:9 train.optimizer.lr: required but missing (peak learning rate)"),
        (("lr: 1e-1", "lr: 0"), "r.yaml:10 train.optimizer.lr: expected more than 0, got 0"),
        (("momentum: 0.9", "momentum: 1"), "r.yaml:11 train.optimizer.momentum: expected less than 1, got 1"),
        (
            ("momentum: 0.9", "nesterov: yes"),
            "r.yaml:11 train.optimizer.nesterov: expected true or false, got 'yes'; write true",
        ),
        (("momentum: 0.9", "nesterov: true"), "r.yaml:9 train.optimizer: nesterov needs momentum"),
        (("momentum: 0.9", "name: adamw\n    momentum: 0.9"), "train.optimizer: momentum and nesterov belong to sgd"),
        (("name: resnet18", "name: 18"), "r.yaml:4 task.model.name: expected text, got 18; write '18' in quotes"),
        (
            ("source: synthetic", "source: synthetik"),
            "r.yaml:6 task.data.source: unknown source 'synthetik'; did you mean 'synthetic'",
        ),
        (("source: synthetic", "size: 3"), "r.yaml:5 task.data.source: required but missing; choose from 'package'"),
        (("source: synthetic", "source: [a]"), "r.yaml:6 task.data.source: unknown source ['a']; choose from"),
        (
            ("source: synthetic", "source: synthetic\n    siz: 3"),
            "r.yaml:7 task.data.siz: unknown key of source 'synthetic'; did you mean 'size'",
        ),
        (("kind: image_classification", "kind: images"), "r.yaml:2 task.kind: unknown kind 'images'"),
        (
            ("source: synthetic", "source: synthetic\n    shape: [3, 32]"),
            "r.yaml:7 task.data.shape: too few values, number 3 is missing",
        ),
        (
            ("source: synthetic", "source: synthetic\n    shape: [3, 32, 32, 1]"),
            "r.yaml:7 task.data.shape: expected at most 3 values",
        ),
        (
            ("source: synthetic", "source: synthetic\n    shape: 32"),
            "r.yaml:7 task.data.shape: expected a list, got 32; write [32]",
        ),
        (
            ("source: synthetic", "source: package\n    package: a\n    file: b"),
            "r.yaml:5 task.data.shape: required but missing",
        ),
        (
            ("source: synthetic", "source: package\n    package: a\n    fil: b\n    shape: [1, 2, 2]"),
            "task.data.fil: unknown key of source 'package'; did you mean 'file'",
        ),
        (("pattern: 2:4", "pattern: 2;4"), "r.yaml:14 prune.rules.0.pattern: unknown pattern '2;4'; write N:M"),
        (("pattern: 2:4", "pattern: 5:4"), "r.yaml:14 prune.rules.0.pattern: pattern 5:4"),
        (("pattern: 2:4", "pattern: 0:4"), "r.yaml:14 prune.rules.0.pattern: pattern 0:4"),
        (("pattern: 2:4", "pattern: 124"), "r.yaml:14 prune.rules.0.pattern: expected text, got 124"),
        (
            ("pattern: 2:4", "score: magnitud"),
            "r.yaml:14 prune.rules.0.score: unknown score 'magnitud'; did you mean 'magnitude'",
        ),
        (("include: [fc]", "include: fc"), "r.yaml:15 prune.rules.1.include: expected a list, got 'fc'; write ['fc']"),
        (("include: [fc]", "include: []"), "r.yaml:15 prune.rules.1.include: expected at least 1 value, got []"),
        (("include: [fc]", "incluce: [fc]"), "r.yaml:15 prune.rules.1.incluce: unknown key; did you mean 'include'"),
        (
            ("train:", "device: gpu\ntrain:"),
            "r.yaml:7 device: expected 'auto', 'cpu', 'cuda' or 'mps', got 'gpu'; did you mean 'cpu'",
        ),
        (("train:", "seed: -1\ntrain:"), "r.yaml:7 seed: expected at least 0, got -1"),
        (("train:", "retrain: 3\ntrain:"), "r.yaml:7 retrain: expected keys with values, got 3"),
        (("train:", "retrain: {epoch: 3}\ntrain:"), "r.yaml:7 retrain.epoch: unknown key; did you mean 'epochs'"),
        (
            ("train:", "retrain: {optimizer: {name: adamw}}\ntrain:"),
            "r.yaml:7 retrain.optimizer.lr: required but missing (peak",
        ),
        (("train:", "trian:"), "r.yaml:7 trian: unknown key; did you mean 'train'"),
    ],
)
def test_errors_name_place_expectation_and_way_out(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    assert change[0] in TEXT
    assert told in refusal(written(tmp_path, TEXT.replace(change[0], change[1], 1)))


def test_all_errors_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = TEXT.replace("epochs: 3", "epoch: 3").replace("2:4", "9:4").replace("resnet18", "18")
    lines = refusal(written(tmp_path, text)).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["r.yaml:4", "r.yaml:8", "r.yaml:14"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.epochs"], "override train.epochs: expected KEY=VALUE"),
        (["=3"], "override =3: expected a key like train.epochs"),
        (["train..epochs=3"], "expected a key like train.epochs"),
        (["train.epochs=abc"], "override train.epochs=abc: expected a number, got 'abc'"),
        (["train.epoch=1"], "override train.epoch=1: unknown key; did you mean 'epochs'"),
        (["train.epochs.x=1"], "override train.epochs.x=1: train.epochs is 3, it has no keys"),
        (["prune.rules.2.pattern=1:4"], "prune.rules is a list of 2, counted from 0; there is no 2"),
        (["prune.rules.x.pattern=1:4"], "prune.rules is a list of 2, counted from 0; there is no x"),
        (["prune.rules.-1.pattern=1:4"], "there is no -1"),
        (["train.epochs=[1"], "override train.epochs=[1:1: not valid YAML"),
        (
            ["task.data={source: synthetic, siz: 3}"],
            "task.data.siz: unknown key of source 'synthetic'; did you mean 'size'",
        ),
        ({"train.epochs": object()}, "override train.epochs: expected plain values"),
        ({"train.epochs": float("nan")}, "override train.epochs: expected plain values"),
        ({"train.optimizer": {1.5: 2}}, "override train.optimizer: expected plain values"),
    ],
)
def test_override_errors_name_the_override(tmp_path: Path, overrides: Any, told: str) -> None:
    message = refusal(written(tmp_path), overrides)
    assert told in message
    assert "r.yaml" not in message


def test_overrides_reach_everything(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = load(path)
    found = load(
        path, ["train.epochs=0.5", "retrain.optimizer.lr=1e-3", "task.data.size=8", "prune.rules.1.include=[conv1, fc]"]
    )
    assert found.train.epochs == 0.5
    assert found.retraining().optimizer.lr == 1e-3
    assert found.retraining().optimizer.momentum == 0.9
    assert found.task.data.size == 8
    assert found.prune.rules[1].include == ["conv1", "fc"]
    assert load(path, {"train.epochs": 0.5}).train.epochs == 0.5
    assert load(path) == before


def test_a_later_override_wins_and_can_go_inside_an_earlier_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert load(path, ["train.epochs=1", "train.epochs=2"]).train.epochs == 2
    found = load(path, ["task.data={source: folder, path: a}", "task.data.path=b"])
    assert found.task.data.path == "b"


def test_overrides_do_not_change_the_mappings_they_come_from() -> None:
    data = parse_yaml(TEXT, "r.yaml").value
    options = {"train.optimizer.options": {"foreach": True}}
    before = copy.deepcopy((data, options))
    from_mapping(data, {**options, "train.optimizer.options.foreach": False})
    assert (data, options) == before


def test_dump_spells_everything_out_and_round_trips(tmp_path: Path) -> None:
    found = load(written(tmp_path), ["task.model.options={a: 1e-3, b: '1e-3', c: 2:4, d: [null, true]}"])
    text = dump(found)
    assert "label_smoothing: 0.0" in text
    assert load(written(tmp_path, text)) == found
    assert yaml.safe_load(text)["prune"]["rules"][0]["pattern"] == "2:4"  # quoted: other readers agree


def test_difference_names_keys_and_both_values(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert difference(load(path), load(path)) == ""
    told = difference(load(path), load(path, ["train.epochs=5", "seed=1"]))
    assert told == "train.epochs: 3.0 there, 5.0 here; seed: 0 there, 1 here"


def test_retraining_repeats_train_but_for_what_it_changes(tmp_path: Path) -> None:
    found = load(
        written(tmp_path), ["train.clip_norm=1.0", "train.schedule.name=step", "train.schedule.milestones=[1, 2]"]
    )
    assert found.retraining() == schema.Training.model_validate(found.train.model_dump(exclude={"skip"}))
    changed = load(written(tmp_path), ["train.clip_norm=1.0", "retrain.epochs=1", "retrain.schedule.warmup=0.1"])
    assert changed.retraining().epochs == 1
    assert changed.retraining().clip_norm == 1.0
    assert changed.retraining().schedule.warmup == 0.1
    assert changed.retraining().schedule.name == "cosine"


def test_another_optimizer_in_retrain_does_not_inherit_momentum(tmp_path: Path) -> None:
    found = load(written(tmp_path), ["retrain.optimizer={name: adamw, lr: 1e-3}"])
    assert found.retraining().optimizer == schema.Optimizer(name="adamw", lr=1e-3)


def test_every_training_key_can_be_changed_in_retrain() -> None:
    own = {"repeat", "control"}
    assert set(schema.RetrainSection.model_fields) - own == set(schema.Training.model_fields)


def test_missing_files_and_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(AspError, match="did you mean 'quickstart'"):
        load("quikstart")
    with pytest.raises(AspError, match="the recipe that comes with the toolkit, 'quickstart'"):
        load("nowhere/quickstart.yaml")
    with pytest.raises(AspError, match="a folder, not a recipe"):
        load(tmp_path)
    assert "empty; a recipe has at least task and train" in refusal(written(tmp_path, "# nothing\n"))
    assert "expected keys like task and train" in refusal(written(tmp_path, "- a\n"))
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert "not UTF-8 text" in refusal(path)
    path.write_bytes(b"a" * (2 << 20))
    assert "too many for a recipe" in refusal(path)


def test_bundled_recipes_load_by_name_and_by_path() -> None:
    assert "quickstart" in recipes.bundled()
    for name, file in recipes.bundled().items():
        assert load(name) == load(file)
        first = file.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# "), f"{name}: `asp recipe list` shows the first comment"
