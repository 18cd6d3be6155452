"""The report as one dict: the facts of a run, completed, made plain JSON and checked."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asp_toolkit.errors import AspError
from asp_toolkit.report.environment import environment
from asp_toolkit.report.schema import Report, check, finite


def build(*, folder: Path | None = None, **facts: Any) -> dict[str, Any]:
    """report.json as a dict, valid by asp_toolkit/report/schema.json.

    Args:
        folder: the run folder; the sizes of the weights files are read from its exports.
        facts: the schema's keys. name, metric, phases and layers must be there; rows of `speed` and `layers` may be
            dataclasses. Left out: format, version and created are set; density and the sizes of the pruned layers are
            computed from `layers`; environment is that of this process; history, speed, exports and recipe are empty.

    A NaN or infinity becomes null, and `notes` says where. What is passed in is not changed.

    Raises:
        AspError: the result does not fit the schema; every wrong key is named.
    """
    report: dict[str, Any] = {
        "format": "asp_report",
        "version": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "history": [],
        "speed": [],
        "exports": [],
        "recipe": {},
        **facts,
    }
    report["speed"] = [_row(row) for row in report["speed"]]
    report["layers"] = [_row(row) for row in report.get("layers", [])]
    report.setdefault("density", density(report["layers"]))
    files = {} if folder is None else file_sizes(folder, report["exports"])
    report["sizes"] = {**layer_sizes(report["layers"]), **files, **report.get("sizes", {})}
    report.setdefault("environment", environment())
    ordered = [key for key in Report.model_fields if key in report]
    ordered += [key for key in report if key not in Report.model_fields]  # `check` names them
    notes: list[str] = []
    plain = {key: finite(report[key], key, notes) for key in ordered}
    plain["notes"] = [*plain.get("notes", []), *_grouped(notes)]
    return check(plain)


def file_sizes(folder: Path, exports: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of the weights files (.safetensors, all shards) of the dense and the packed export, where there are any."""
    found = {}
    for row in exports:
        weights = list((folder / row["folder"]).glob("*.safetensors"))
        if weights and row["format"] in ("dense", "packed"):
            found[row["format"]] = sum(path.stat().st_size for path in weights)
    return found


def density(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Kept share of the pruned parameters and of all, weighted by their number of entries; 1.0 of nothing."""

    def share(rows: list[Mapping[str, Any]]) -> float:
        total = sum(math.prod(row["shape"]) for row in rows)
        return sum(math.prod(row["shape"]) * row["density"] for row in rows) / total if total else 1.0

    pruned = [row for row in layers if row["pattern"] is not None and row["skipped"] is None]
    return {"pruned_parameters": share(pruned), "model": share(list(layers))}


def layer_sizes(layers: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Bytes of the pruned parameters together, dense and packed (None where one of them cannot be packed)."""
    pruned = [row for row in layers if row["pattern"] is not None and row["skipped"] is None]
    packed = [row["bytes_packed"] for row in pruned]
    return {
        "pruned_layers_dense": sum(row["bytes_dense"] for row in pruned),
        "pruned_layers_packed": None if None in packed else sum(packed),
    }


def _row(row: Any) -> Any:
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return dataclasses.asdict(row)
    return dict(row) if isinstance(row, Mapping) else row


def _grouped(notes: list[str]) -> list[str]:
    shown = 10  # a run that diverged has a NaN in every later line
    more = len(notes) - shown
    return notes if more <= 0 else [*notes[:shown], f"{more} more values were not finite and are stored as null"]


def read(path: Path) -> dict[str, Any]:
    """A report.json, checked.

    Raises:
        AspError: no such file, not JSON, or not a report of this version.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AspError(f"{path}: expected a report.json, could not read it ({error})") from error
    if not isinstance(value, dict) or value.get("format") != "asp_report":
        raise AspError(f'{path}: expected an object with "format": "asp_report"; is this a run folder\'s report.json?')
    return check(value)
