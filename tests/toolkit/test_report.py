"""report: what is written is valid, whole, says what was measured, and cannot be broken by names."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asp_toolkit import report as reports
from asp_toolkit.errors import AspError
from asp_toolkit.report import wording
from asp_toolkit.report.build import density
from asp_toolkit.report.page import outline, render
from asp_toolkit.report.schema import SCHEMA_FILE
from tests.toolkit.made_reports import facts, hostile_report, speed


def test_build_fills_what_can_be_computed() -> None:
    built = reports.build(**facts())
    assert (built["format"], built["version"], built["notes"]) == ("asp_report", 1, [])
    assert built["density"]["pruned_parameters"] == 0.5
    assert built["density"]["model"] == pytest.approx((64 + 8 + 90) / (128 + 8 + 90))
    assert built["sizes"] == {"pruned_layers_dense": 512, "pruned_layers_packed": 272, "dense": 1000, "packed": 600}
    assert built["speed"][0]["speedup"] == 0.9
    assert {"python", "torch", "cpu", "threads", "device", "platform"} <= set(built["environment"])


def test_build_leaves_its_input_alone_and_takes_tuples_and_paths() -> None:
    given = facts(recipe={"folder": Path("a/b"), "shape": (1, 28, 28)})
    before = copy.deepcopy(given)
    built = reports.build(**given)
    assert given == before
    assert built["recipe"] == {"folder": "a/b", "shape": [1, 28, 28]}


def test_sizes_of_the_weights_files_are_read_from_the_exports(tmp_path: Path) -> None:
    (tmp_path / "exports" / "packed").mkdir(parents=True)
    (tmp_path / "exports" / "packed" / "model-1.safetensors").write_bytes(b"x" * 70)
    (tmp_path / "exports" / "packed" / "model-2.safetensors").write_bytes(b"x" * 7)
    (tmp_path / "exports" / "packed" / "asp_manifest.json").write_bytes(b"x" * 1000)
    given = facts()
    del given["sizes"]
    sizes = reports.build(folder=tmp_path, **given)["sizes"]
    assert sizes == {"pruned_layers_dense": 512, "pruned_layers_packed": 272, "packed": 77}


def test_build_names_a_key_that_the_schema_does_not_know() -> None:
    with pytest.raises(AspError, match="phasse"):
        reports.build(**facts(phasse={}))


def test_density_of_nothing_pruned_is_one() -> None:
    assert density([]) == {"pruned_parameters": 1.0, "model": 1.0}


def test_nan_becomes_null_and_is_said() -> None:
    given = facts()
    given["phases"]["pruned"]["loss"] = math.nan
    given["history"][3]["train_loss"] = math.inf
    built = reports.build(**given)
    assert built["phases"]["pruned"]["loss"] is None
    assert built["history"][3]["train_loss"] is None
    assert built["notes"] == [
        "phases.pruned.loss was nan; stored as null",
        "history.3.train_loss was inf; stored as null",
    ]
    assert "not finite" in reports.as_text(built)
    assert "stored as null" in render(built)


def test_many_nans_are_counted_not_listed() -> None:
    given = facts()
    for row in given["history"]:
        row["train_loss"] = math.nan
    notes = reports.build(**given)["notes"]
    assert len(notes) == 11
    assert notes[-1].startswith("72 more")


def test_check_refuses_nan() -> None:
    built = reports.build(**facts())
    built["phases"]["dense"]["loss"] = math.nan
    with pytest.raises(AspError, match="finite"):
        reports.check(built)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("density", "model"), 1.5, r"density\.model: .*less than or equal to 1, got 1\.5"),
        (("layers", 0, "shape"), "8x16", r"layers\.0\.shape: .*array.*got '8x16'"),
        (("layers", 0, "shpae"), [1], r"layers\.0\.shpae"),
        (("speed", 0, "speedup"), 0.0, r"speed\.0\.speedup"),
        (("speed", 0, "flattery"), 9.0, r"speed\.0\.flattery"),
        (("phases", "dense", "samples"), "many", r"phases\.dense\.samples"),
        (("phases", "dense", "accuracy"), "high", r"phases\.dense\.accuracy"),
        (("version",), 2, r"version"),
        (("metric",), "acuracy", r"phases\.dense: .*'acuracy'.*did you mean 'accuracy'"),
        (("metric",), "loss", r"'loss' is a key"),
    ],
)
def test_check_names_the_place(path: tuple[str | int, ...], value: Any, message: str) -> None:
    built: Any = reports.build(**facts())
    inner = built
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(AspError, match=message):
        reports.check(built)


def test_check_names_a_missing_key() -> None:
    built = reports.build(**facts())
    del built["phases"]["retrained"]
    with pytest.raises(AspError, match=r"phases\.retrained: Field required"):
        reports.check(built)


def test_schema_file_is_the_models_schema_and_every_key_has_a_meaning() -> None:
    written = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert written == reports.json_schema(), "write schema.json anew: see the top of asp_toolkit/report/schema.py"
    for part in [written, *written["$defs"].values()]:
        for key, field in part.get("properties", {}).items():
            assert field.get("description"), f"{part['title']}.{key}"


def test_write_and_read_back(tmp_path: Path) -> None:
    built = reports.build(**facts())
    reports.write(tmp_path, built)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["report.html", "report.json"]
    assert reports.read(tmp_path / "report.json") == built


def test_an_invalid_report_is_not_written(tmp_path: Path) -> None:
    built = reports.build(**facts())
    built["layers"][0]["density"] = -1
    with pytest.raises(AspError):
        reports.write(tmp_path, built)
    assert list(tmp_path.iterdir()) == []


def test_read_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    (tmp_path / "b.json").write_text('{"format": "other"}', encoding="utf-8")
    for name in ("a.json", "b.json", "none.json"):
        with pytest.raises(AspError, match=name):
            reports.read(tmp_path / name)


def with_retrained(value: float, **changes: Any) -> dict[str, Any]:
    given = facts(**changes)
    given["phases"]["retrained"]["accuracy"] = value
    return reports.build(**given)


@pytest.mark.parametrize(
    ("value", "level", "headline"),
    [
        (0.95, "good", "Accuracy is kept: 95.00% retrained, 90.00% dense"),
        (0.90, "good", "Accuracy is kept: 90.00% retrained, 90.00% dense"),
        (0.89, "even", "Accuracy is kept within test noise: 89.00% retrained, 90.00% dense"),
        (0.85, "bad", "Accuracy is below dense: 85.00% retrained, 90.00% dense"),
    ],
)
def test_verdict(value: float, level: str, headline: str) -> None:
    found = wording.verdict(with_retrained(value))
    assert (found.level, found.headline) == (level, headline)


def test_noise_of_a_test_of_1000_at_ninety_per_cent() -> None:
    assert wording.resolution(reports.build(**facts())) == pytest.approx(
        0.0263, abs=1e-4
    )  # 1.96 sqrt(2 0.9 0.1 / 1000)


def test_a_metric_that_is_no_share_is_not_in_per_cent() -> None:
    given = facts(metric="score")
    for phase in given["phases"].values():
        phase["score"] = 20 * phase.pop("accuracy")
    for row in given["history"]:
        row["score"] = row.pop("accuracy")
    built = reports.build(**given)
    assert wording.verdict(built).headline == "Score is kept: 18.2 retrained, 18 dense"
    assert wording.resolution(built) is None
    assert "%" not in reports.as_text(built).split("pruned  ")[0]


@pytest.mark.parametrize(
    ("ratio", "backend", "level", "words"),
    [
        (1.5, "cpu", "good", "faster for every batch"),
        (1.0, "reference", "even", "not faster. No sparse kernel was used here"),
        (0.8, "reference", "bad", "not faster on this machine. No sparse kernel was used here"),
        (0.8, "cpu", "bad", "not faster on this machine."),
    ],
)
def test_speed_is_said_without_flattery(ratio: float, backend: str, level: str, words: str) -> None:
    found = wording.speed_summary(reports.build(**facts(speed=[speed(ratio, backend=backend)])))
    assert found[0] == level
    assert words in found[1]
    assert ("No sparse kernel" in found[1]) == (backend == "reference")


def test_mixed_speed_is_called_mixed() -> None:
    built = reports.build(**facts(speed=[speed(1.5), speed(0.7, "batch 32")]))
    assert wording.speed_summary(built)[1].startswith("The sparse model is faster for some batches and not for others")


def test_text_fits_80_columns_and_is_plain() -> None:
    for built in (reports.build(**facts()), hostile_report()):
        text = reports.as_text(built)
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
        assert not any(line != line.rstrip() for line in text.splitlines())
    text = reports.as_text(reports.build(**facts()))
    for words in (
        "retrained     91.00%",
        "+1.00",
        "1.11 times as long",
        "exports/packed",
        "fc2.weight",
        "1 of 2 matrices",
    ):
        assert words in text
    assert "[bold red]" in "".join(reports.as_text(hostile_report()).split()).replace("[boldred]", "[bold red]")


def test_an_export_that_is_not_verified_is_shouted() -> None:
    built = reports.build(**facts(exports=[{"format": "dense", "folder": "exports/dense", "verified": False}]))
    assert "NOT VERIFIED" in reports.as_text(built)
    assert "Please note" in render(built)
    assert "Please note" not in render(reports.build(**facts()))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (1_560_000, "1.56 MB"), (None, "not exported")],
)
def test_size_text(count: int | None, text: str) -> None:
    assert wording.size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (36.2, "36 s"), (59.7, "1 min 00 s"), (125, "2 min 05 s"), (11_400, "3 h 10 min"), (None, "")],
)
def test_time_text(seconds: float | None, text: str) -> None:
    assert wording.time_text(seconds) == text


def test_signed_has_no_negative_zero() -> None:
    assert [wording.signed(value, 2) for value in (-0.001, 0.5, -0.5)] == ["0.00", "+0.50", "\N{MINUS SIGN}0.50"]


def test_outline_nests() -> None:
    assert outline({"a": {"b": [1, 2]}, "c": [{"d": None}], "e": True}) == [
        (0, "a", ""), (1, "b", "1, 2"), (0, "c", ""), (1, "1.", ""), (2, "d", "none"), (0, "e", "true"),
    ]  # fmt: skip


def test_report_imports_no_plotting_until_a_page_is_written() -> None:
    code = "import sys, asp_toolkit.report; print(sorted({'matplotlib', 'jinja2', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]"
