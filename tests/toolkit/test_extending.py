"""The files of docs/extending.md, as they stand there, added from outside the package."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asp_toolkit import inspect, prune, run_recipe, verify
from asp_toolkit.patterns import NM, parse
from asp_toolkit.recipe import from_mapping
from asp_toolkit.views import LAYER_VIEWS

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = ("my_pattern", "my_score", "my_schedule", "my_layer")


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's files in a folder on the path; nothing of them stays."""
    for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    known = dict(LAYER_VIEWS)
    yield
    LAYER_VIEWS.clear()
    LAYER_VIEWS.update(known)
    for name in FILES:
        sys.modules.pop(name, None)


def recipe(**prune: Any) -> dict[str, Any]:
    return {
        "task": {
            "kind": "image_classification",
            "model": {"name": "my_layer:network"},
            "data": {"source": "synthetic", "size": 64, "shape": [1, 8, 8]},
        },
        "train": {"epochs": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "log_every": 1},
        "prune": prune,
        "export": {"formats": ["dense"], "bench": False},
        "device": "cpu",
    }


def test_a_layer_a_score_and_a_schedule_work_together_in_a_recipe(tmp_path: Path) -> None:
    schedule = {"name": "callable", "call": "my_schedule:halfway", "options": {"pattern": "2:4"}}
    rules = [{"score": "my_score:steep"}]
    report = run_recipe(
        from_mapping(recipe(rules=rules, schedule=schedule)),
        tmp_path / "run",
        quiet=True,
    )
    assert {layer["name"]: layer["pattern"] for layer in report["layers"]} == {"0.kernel": "2:4", "2.kernel": "2:4"}
    density = [row["density"] for row in report["history"] if row.get("density") is not None]
    assert density[-1] == 0.5
    assert verify(tmp_path / "run").ok


def test_a_pattern_works_in_a_recipe(tmp_path: Path) -> None:
    report = run_recipe(from_mapping(recipe(rules=[{"pattern": "my_pattern:banded 8"}])), tmp_path / "run", quiet=True)
    first, second = report["layers"]
    assert first["pattern"] == "my_pattern:banded 8"
    assert first["density"] < 0.6
    assert second["pattern"] == "my_pattern:banded 8"
    assert report["exports"][0]["verified"]


def test_the_pattern_is_what_its_name_says() -> None:
    pattern = parse("my_pattern:banded 8")
    assert parse(pattern.name) == pattern
    mask = pattern.mask(torch.rand(16, 64))
    assert pattern.holds(mask)
    assert not pattern.holds(torch.ones(16, 64, dtype=torch.bool))
    assert pattern.density(16, 64) == float(mask.float().mean())
    assert pattern.why_not(16, 8, 8) == "8 columns are within the band of 8 anyway"


def test_the_layer_is_pruned_along_what_it_sums_over() -> None:
    model = importlib.import_module("my_layer").network()
    masks = prune(model)
    assert NM(2, 4).holds(masks.masks["0.kernel"].t())
    assert [row.pattern for row in inspect(model)] == ["2:4", "2:4"]


def test_without_its_view_the_layer_is_listed_as_dense() -> None:
    layer = importlib.import_module("my_layer").InOut(8, 8)
    del LAYER_VIEWS[type(layer)]
    (row,) = inspect(layer)
    assert row.pattern is None
    assert "no matrix view for parameter 'kernel' of layer type InOut" in str(row.skipped)
