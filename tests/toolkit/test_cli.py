"""The command line: what it prints where, and how it exits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from asp_toolkit import __version__
from asp_toolkit.cli import main

ROOT = Path(__file__).resolve().parents[2]

TINY = """\
# A few steps on random images.
task:
  kind: image_classification
  model: {name: asp_toolkit.tasks.models:small_cnn}
  data: {source: synthetic, shape: [1, 28, 28], size: 16}
train:
  epochs: 1
  batch_size: 16
  optimizer: {lr: 0.01}
export: {bench: false}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Asp = Callable[..., Result]


@pytest.fixture
def asp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Asp:
    """Calls `asp ARGUMENTS` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["asp", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `asp run` leaves it, as far as these commands read it."""
    from asp_toolkit import export, prune
    from asp_toolkit.recipe import dump, load
    from asp_toolkit.tasks import build_task

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    recipe = load(folder / "tiny.yaml")
    (folder / "recipe.yaml").write_text(dump(recipe))
    model = build_task(recipe.task, recipe.seed).build().eval()
    masks = prune(model)
    for name in ("dense", "packed"):
        export(model, masks, folder / "exports" / name, name, recipe=recipe.model_dump(mode="json"))
    return folder


def test_version_and_help(asp: Asp) -> None:
    assert asp("--version") == Result(0, f"asp_toolkit {__version__}\n", "")
    shown = asp("--help")
    assert shown.code == 0
    for command in ("run", "prune", "export", "inspect", "verify", "bench", "recipe", "doctor"):
        assert command in shown.out


@pytest.mark.parametrize(
    "command",
    [["run"], ["prune"], ["export"], ["inspect"], ["verify"], ["bench"], ["doctor"]]
    + [["recipe", name] for name in ("check", "explain", "schema", "list")],
)
def test_every_command_has_json_and_quiet(asp: Asp, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = asp(*command, "--help")
    assert shown.code == 0
    assert "--json" in shown.out
    assert "--quiet" in shown.out


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["nonsense"], ["run", "quickstart", "--epochs", "3"], ["verify"], ["bench", "x", "--threads", "0"]],
)
def test_wrong_usage_exits_with_2(asp: Asp, arguments: list[str]) -> None:
    assert asp(*arguments).code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "quikstart"], "did you mean 'quickstart'?"),
        (["run", "quickstart", "train.epoch=1"], "override train.epoch=1: unknown key; did you mean 'epochs'"),
        (
            ["recipe", "check", "quickstart", "export.formats=[pakced]"],
            "unknown format 'pakced'; did you mean 'packed'?",
        ),
        (["recipe", "check", "quickstart", "train.optimizer={name: sdg, lr: 1.0}"], "did you mean 'SGD'"),
        (["recipe", "explain", "trian"], "trian: no such key in a recipe; did you mean 'train'"),
        (["verify", "nowhere"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["bench", "nowhere"], "nowhere: no such folder"),
        (["export", "nowhere", "--out", "x"], "nowhere: no such folder"),
        (["prune", "nowhere", "--out", "x"], "nowhere: no such file"),
        (["bench", ".", "--sizes", "1"], "neither a run folder (recipe.yaml) nor an export folder"),
    ],
)
def test_what_a_user_can_mend_is_one_message_and_exit_1(asp: Asp, arguments: list[str], told: str) -> None:
    found = asp(*arguments)
    assert found.code == 1
    assert found.out == ""
    assert found.err.startswith("error: ")
    assert told in found.err
    assert "Traceback" not in found.err


def test_several_errors_stand_one_a_line(asp: Asp, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(TINY.replace("epochs: 1", "epoch: 1").replace("batch_size", "batchsize"))
    found = asp("recipe", "check", "r.yaml")
    assert found.code == 1
    first, *lines = found.err.splitlines()
    assert first == "errors:"
    assert [line.split(": ")[0] for line in lines] == ["r.yaml:7 train.epoch", "r.yaml:8 train.batchsize"]


def test_recipe_check(asp: Asp, tmp_path: Path) -> None:
    found = asp("recipe", "check", "quickstart")
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("quickstart: ok (image_classification")
    assert asp("recipe", "check", "quickstart", "--quiet") == Result(0, "", "")
    resolved = json.loads(asp("recipe", "check", "quickstart", "train.epochs=2", "--json").out)
    assert resolved["train"]["epochs"] == 2
    assert resolved["train"]["label_smoothing"] == 0


def test_recipe_explain(asp: Asp) -> None:
    found = asp("recipe", "explain", "train.epochs")
    assert found.code == 0
    header, row = found.out.splitlines()
    assert header.split() == ["key", "type", "default", "meaning"]
    assert row.split()[0] == "train.epochs"
    assert "passes over the data" in row
    rows = json.loads(asp("recipe", "explain", "--json").out)
    assert {"key", "type", "default", "meaning", "where"} == set(rows[0])
    everything = asp("recipe", "explain").out
    assert "with kind: image_classification, source: folder" in everything.splitlines()
    assert all(row["key"] in everything for row in rows)


def test_recipe_schema(asp: Asp, tmp_path: Path) -> None:
    printed = json.loads(asp("recipe", "schema").out)
    assert printed["properties"]["train"]
    assert asp("recipe", "schema", "--out", "s.json").out == "s.json written\n"
    assert json.loads((tmp_path / "s.json").read_text()) == printed


def test_recipe_list(asp: Asp) -> None:
    names = [row["name"] for row in json.loads(asp("recipe", "list", "--json").out)]
    assert "quickstart" in names
    shown = asp("recipe", "list").out.splitlines()
    assert len(shown) == len(names) + 1
    assert all(line == line.rstrip() for line in shown)


def test_doctor(asp: Asp) -> None:
    findings = {row["what"]: row for row in json.loads(asp("doctor", "--json").out)}
    assert findings["torch"]["verdict"] == "ok"
    assert "quickstart" in findings["recipes"]["found"]
    assert asp("doctor").code == 0
    assert asp("doctor", "--quiet") == Result(0, "", "")


def test_inspect(asp: Asp, run_folder: Path) -> None:
    for target in (run_folder, run_folder / "exports" / "packed", run_folder / "exports" / "dense"):
        found = json.loads(asp("inspect", target, "--json").out)
        held = [row for row in found["layers"] if row["pattern"] == "2:4"]
        assert held
        assert all(row["density"] <= 0.5 for row in held)
        assert found["totals"]["pruned"] == len(held)
    shown = asp("inspect", run_folder / "exports" / "dense").out
    assert all(row["name"] in shown for row in found["layers"])
    assert f"{len(held)} of {len(found['layers'])} parameters hold a pattern" in shown
    assert asp("inspect", run_folder, "--quiet") == Result(0, "", "")


def test_verify(asp: Asp, run_folder: Path, tmp_path: Path) -> None:
    assert asp("verify", run_folder).code == 0
    assert json.loads(asp("verify", run_folder / "exports" / "packed", "--json").out)["ok"] is True
    assert asp("verify", run_folder, "--quiet") == Result(0, "", "")
    shutil.copytree(run_folder / "exports" / "dense", tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    found = asp("verify", tmp_path / "damaged")
    assert found.code == 1
    assert "does not verify" in found.err
    assert "model.safetensors" in found.err
    found = asp("verify", tmp_path / "damaged", "--json")
    assert found.code == 1
    assert json.loads(found.out)["ok"] is False


def test_bench(asp: Asp, run_folder: Path) -> None:
    rows = json.loads(asp("bench", run_folder, "--sizes", "1,2", "--rounds", "5", "--json").out)
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row["dense_ms"] > 0 and row["sparse_ms"] > 0 for row in rows)
    shown = asp("bench", run_folder / "exports" / "packed", "--sizes", "1", "--rounds", "5").out
    assert "speed-up" in shown
    found = asp("bench", run_folder / "exports" / "dense")
    assert found.code == 1
    assert "no packed export to measure; `asp export" in found.err
    assert "expected whole numbers" in asp("bench", run_folder, "--sizes", "a").err


def test_export_to_another_format_and_back(asp: Asp, run_folder: Path, tmp_path: Path) -> None:
    first = run_folder / "exports" / "dense"
    found = asp("export", first, "--format", "packed", "--out", tmp_path / "p")
    assert (found.code, found.err) == (0, "")
    assert "same outputs bit for bit" in found.out
    assert (
        json.loads(asp("export", tmp_path / "p", "--format", "dense", "--out", "d", "--json").out)["verified"] is True
    )
    assert (tmp_path / "d/model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    found = asp("export", first, "--out", first)
    assert found.code == 1
    assert "that is the export to read" in found.err


def test_prune_takes_trained_weights_of_a_recipe(asp: Asp, run_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from asp_toolkit.recipe import load
    from asp_toolkit.tasks import build_task

    model = build_task(load(run_folder / "recipe.yaml").task, 0).build()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    recipe = run_folder / "tiny.yaml"
    found = asp("prune", recipe, "--out", "out")
    assert found.code == 1
    assert "the weights are random; name trained ones" in found.err
    weights = f"task.model.weights={tmp_path / 'w.safetensors'}"
    found = asp("prune", recipe, weights, "--pattern", "1:4", "--out", "out")
    assert (found.code, found.err) == (0, "")
    assert "1:4" in found.out
    pruned = load_file(tmp_path / "out" / "model.safetensors")
    density = json.loads(asp("prune", recipe, weights, "--out", "two", "--json").out)["density"]
    for name, value in density.items():
        assert value == 0.5
        assert (pruned[name] != 0).float().mean() <= 0.25
    assert asp("verify", "out").code == 0


def test_prune_takes_a_folder_of_transformers(asp: Asp, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 20,
    }
    transformers.BertForSequenceClassification(transformers.BertConfig(**shape)).save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("a\n")
    found = asp("prune", tmp_path / "bert", "--out", "sparse")
    assert found.code == 0, found.err
    assert "bert.encoder.layer.0.intermediate.dense.weight" in found.out
    assert (tmp_path / "sparse" / "vocab.txt").read_text() == "a\n"
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "sparse")
    assert (again.bert.encoder.layer[0].intermediate.dense.weight == 0).float().mean() == 0.5
    assert "is not a recipe" in asp("prune", tmp_path / "bert", "seed=1", "--out", "x").err


def test_run_prints_a_table_or_json_alone(asp: Asp, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    found = asp("run", "tiny.yaml", "train.optimizer.lr=0.02")
    assert found.code == 0, found.err
    assert "report: runs/tiny/report.html" in found.out
    assert (tmp_path / "runs/tiny/report.html").is_file()
    assert "lr: 0.02" in (tmp_path / "runs/tiny/recipe.yaml").read_text()
    report = json.loads(asp("run", "tiny.yaml", "train.optimizer.lr=0.02", "--json").out)
    assert set(report["phases"]) == {"dense", "pruned", "retrained"}
    assert asp("run", "tiny.yaml", "--out", "quiet", "--quiet")[:2] == (0, "")
    found = asp("run", "tiny.yaml", "train.epochs=2")
    assert found.code == 1
    assert "train.epochs: 1.0 there, 2.0 here" in found.err
    for folder in ("runs/tiny", "quiet"):
        assert asp("verify", folder).code == 0


def test_as_a_process_errors_go_to_stderr_without_a_traceback(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    command = [sys.executable, "-m", "asp_toolkit.cli", "run", "nosuch.yaml"]
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("error: nosuch.yaml: no such file")
    assert found.stderr.count("\n") == 1
