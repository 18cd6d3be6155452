"""The command line: what it prints where, and how it exits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asp_toolkit import __version__
from tests.toolkit.made_cli import TINY, Asp, Result, caller, run_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Asp:
    """Calls `asp ARGUMENTS` in an empty folder."""
    return caller(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `asp run` leaves it."""
    return run_in(tmp_path_factory.mktemp("runs") / "tiny")


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
    command = [sys.executable, "-m", "asp_toolkit", "run", "nosuch.yaml"]
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("error: nosuch.yaml: no such file")
    assert found.stderr.count("\n") == 1
