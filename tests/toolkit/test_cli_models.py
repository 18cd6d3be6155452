"""`asp prune`, `asp export` and `asp bench`: what they write, and what they refuse."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.toolkit.made_cli import TINY, Asp, caller, run_in


@pytest.fixture
def asp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Asp:
    """Calls `asp ARGUMENTS` in an empty folder."""
    return caller(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `asp run` leaves it."""
    return run_in(tmp_path_factory.mktemp("runs") / "tiny")


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


@pytest.fixture(scope="module")
def trained(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A recipe, and the override that gives it weights."""
    from safetensors.torch import save_file

    from asp_toolkit.recipe import load
    from asp_toolkit.tasks import build_task

    model = build_task(load(run_folder / "recipe.yaml").task, 0).build()
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return run_folder / "tiny.yaml", f"task.model.weights={path}"


@pytest.mark.parametrize(
    ("pattern", "density"),
    [
        ("2:4 transposable", 0.5),
        ("unstructured 0.75", 0.25),
        ("unstructured 0.75 per row", 0.25),
        ("unstructured 0.75 global", None),
        ("block 2x2 0.5", 0.5),
        ("16:2:8", 0.25),
    ],
)
def test_prune_takes_every_pattern(
    asp: Asp, trained: tuple[Path, str], tmp_path: Path, pattern: str, density: float | None
) -> None:
    recipe, weights = trained
    arguments = ("prune", recipe, weights, "--pattern", pattern, "--include", "Conv2d", "--exclude", "0")
    found = asp(*arguments, "--out", "out", "--json")
    assert (found.code, found.err) == (0, "")
    shares = json.loads(found.out)["density"]
    assert shares
    assert density is None or set(shares.values()) == {density}
    assert asp("verify", "out").out == f"out: ok, {len(shares)} parameters checked\n"
    rows = json.loads(asp("inspect", "out", "--json").out)["layers"]
    assert {row["name"]: row["pattern"] for row in rows if row["pattern"]} == dict.fromkeys(shares, pattern)
    found = asp(*arguments, "--format", "packed", "--out", "packed")
    assert found.code == (0 if ":" in pattern else 1)
    assert (tmp_path / "packed").exists() == (":" in pattern)
    if found.code:
        assert f"nothing to pack: only N:M is packed, the patterns here: '{pattern}'" in found.err


@pytest.mark.parametrize("score", ["taylor", "movement", "fisher", "activation_norm"])
def test_prune_takes_every_score_of_a_recipe(asp: Asp, trained: tuple[Path, str], score: str) -> None:
    from safetensors.torch import load_file

    recipe, weights = trained
    for name, options in (("plain", ()), ("scored", ("--score", score))):
        found = asp("prune", recipe, weights, "prune.calibration.batches=1", *options, "--out", name)
        assert (found.code, found.err) == (0, "")
    plain, scored = (load_file(f"{name}/model.safetensors") for name in ("plain", "scored"))
    assert plain.keys() == scored.keys()
    assert any((plain[name] != 0).ne(scored[name] != 0).any() for name in plain)
    assert asp("verify", "scored").code == 0


OWN_PATTERN = """
from asp_toolkit.patterns import parse

class Same:
    name = "cli_pattern:pattern"
    def __getattr__(self, name):
        return getattr(parse("2:4"), name)

pattern = Same()
"""


def test_pattern_of_ones_own(
    asp: Asp, trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, weights = trained
    (tmp_path / "cli_pattern.py").write_text(OWN_PATTERN)
    monkeypatch.syspath_prepend(tmp_path)
    found = asp("prune", recipe, weights, "--pattern", "cli_pattern:pattern", "--format", "packed", "--out", "out")
    assert (found.code, found.err) == (0, "")
    del sys.modules["cli_pattern"]
    for target, command in (("out", ()), ("again", ("export", "out", "--format", "dense", "--out", "again"))):
        assert not command or asp(*command).code == 0
        told = asp("verify", target)
        assert told.code == 0
        assert "pattern 'cli_pattern:pattern' is not built in, and code that a file names is not run" in told.out
        assert json.loads(asp("verify", target, "--json").out)["notes"]
    assert "cli_pattern" not in sys.modules


def test_recipe_inside_an_export_runs_no_code_unasked(
    asp: Asp, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cli_model.py").write_text("from asp_toolkit.tasks.models import small_cnn\nprint('executed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(run_folder / "exports" / "packed", tmp_path / "export")
    manifest = tmp_path / "export" / "asp_manifest.json"
    text = manifest.read_text()
    assert '"asp_toolkit.tasks.models:small_cnn"' in text
    bench = ("bench", "export", "--sizes", "1", "--rounds", "5")
    for place in ("cli_model:small_cnn", "asp_toolkit.tasks.models:nn.modules.module.torch.hub.load"):
        manifest.write_text(text.replace('"asp_toolkit.tasks.models:small_cnn"', f'"{place}"'))
        for command in (bench, ("export", "export", "--out", "again")):
            found = asp(*command)
            assert found.code == 1
            assert f"its recipe names code, '{place}', which is not run" in found.err
    manifest.write_text(text.replace('"asp_toolkit.tasks.models:small_cnn"', '"cli_model:small_cnn"'))
    assert "executed" in asp(*bench, "--trust").out


@pytest.mark.parametrize("pattern", ["cli_trap:pattern", "cli_trap:\u00e9", " cli_trap:x y"])
def test_patterns_of_a_recipe_inside_an_export_are_not_imported(
    asp: Asp, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    (tmp_path / "cli_trap.py").write_text("print('executed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("cli_trap", None)
    shutil.copytree(run_folder / "exports" / "packed", tmp_path / "export")
    path = tmp_path / "export" / "asp_manifest.json"
    value = json.loads(path.read_text())
    value["recipe"]["prune"]["rules"] = [{"pattern": pattern}]
    path.write_text(json.dumps(value))
    for command in (
        ("bench", "export", "--sizes", "1", "--rounds", "5"),
        ("export", "export", "--format", "dense", "--out", "again"),
        ("verify", "export"),
        ("inspect", "export"),
    ):
        assert "executed" not in "".join(map(str, asp(*command)))
    assert "cli_trap" not in sys.modules


def test_export_that_cannot_be_leaves_what_is_there(asp: Asp, trained: tuple[Path, str], tmp_path: Path) -> None:
    recipe, weights = trained
    assert asp("prune", recipe, weights, "--pattern", "unstructured 0.5", "--out", "loose").code == 0
    assert asp("prune", recipe, weights, "--format", "packed", "--out", "kept").code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    found = asp("export", "loose", "--out", "kept")
    assert found.code == 1
    assert "nothing to pack: only N:M is packed, the patterns here: 'unstructured 0.5'; use format 'dense'" in found.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "loose"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert "mine exists and is not an export" in asp("export", "loose", "--format", "dense", "--out", "mine").err
    assert (
        "--format pakced: unknown format; did you mean 'packed'"
        in asp("export", "loose", "--format", "pakced", "--out", "x").err
    )


CONV1D = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (16, 49)), nn.Conv1d(16, 10, 49), nn.Flatten())
"""


def test_bench_of_layers_without_a_sparse_twin(asp: Asp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asp_toolkit import export, prune
    from asp_toolkit.recipe import load
    from asp_toolkit.tasks import build_task

    (tmp_path / "cli_conv1d.py").write_text(CONV1D)
    (tmp_path / "lines.yaml").write_text(TINY.replace("asp_toolkit.tasks.models:small_cnn", "cli_conv1d:net"))
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load("lines.yaml")
    model = build_task(recipe.task, recipe.seed).build()
    export(model, prune(model), "p", "packed", recipe=recipe.model_dump(mode="json"))
    found = asp("bench", "p", "--trust")
    assert found.code == 1
    assert "no layer of this model has a sparse twin (Linear and Conv2d have)" in found.err
    assert asp("export", "p", "--trust", "--format", "dense", "--out", "d").code == 0


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
    found = asp("prune", tmp_path / "bert", "--score", "taylor", "--out", "x")
    assert found.code == 1
    assert "score 'taylor' needs gradient_abs, which come from training data" in found.err
    assert "name a recipe with trained weights and data" in found.err
