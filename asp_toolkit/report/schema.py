"""What report.json holds. schema.json beside this file is its JSON Schema, written by `json_schema`:

python -c "import json; from asp_toolkit.report import json_schema; print(json.dumps(json_schema(), indent=2))"
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from asp_toolkit.errors import AspError, closest
from asp_toolkit.report.speed import SpeedRow

SCHEMA_FILE = Path(__file__).with_name("schema.json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _WithMetric(_Part):
    """Beside the named keys, one more bears the metric's own name ("accuracy"): a number, or null if not known."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, float | None]


class Phase(_WithMetric):
    """The network at the end of a phase, measured on the test data."""

    loss: float | None = Field(description="mean test loss; null if it is not a finite number")
    samples: int = Field(ge=0, description="test samples that loss and metric are means over")
    seconds: float | None = Field(default=None, ge=0, description="wall-clock seconds that the phase took")
    steps: int | None = Field(default=None, ge=0, description="optimizer steps of the phase; 0: nothing was trained")
    epochs: float | None = Field(default=None, ge=0, description="passes over the training data in the phase")


class Phases(_Part):
    """The three states of the network, and the control that shows what more training alone would give."""

    dense: Phase = Field(description="before pruning")
    pruned: Phase = Field(description="right after pruning, before any retraining")
    retrained: Phase = Field(description="after retraining with the masks held")
    control: Phase | None = Field(default=None, description="dense weights trained as long again, without masks")


class HistoryRow(_WithMetric):
    """One line of the training log. Evaluations fill loss and the metric, training steps fill train_loss."""

    phase: str = Field(description="dense, pruned, retrained or control")
    step: int = Field(ge=0, description="optimizer steps since the phase began")
    epoch: float = Field(ge=0, description="passes over the training data since the phase began")
    lr: float | None = Field(default=None, description="learning rate of the step")
    train_loss: float | None = Field(default=None, description="training loss since the line before")
    loss: float | None = Field(default=None, description="mean test loss")
    density: float | None = Field(default=None, ge=0, le=1, description="kept share of the pruned parameters' entries")


class Density(_Part):
    """Kept share of the entries, in [0, 1]."""

    pruned_parameters: float = Field(ge=0, le=1, description="of the parameters that were pruned, together")
    model: float = Field(ge=0, le=1, description="of all parameters, together")


class Sizes(_Part):
    """Bytes."""

    dense: int | None = Field(default=None, ge=0, description="weights file of the dense export; null if none")
    packed: int | None = Field(default=None, ge=0, description="weights file of the packed export; null if none")
    pruned_layers_dense: int = Field(ge=0, description="the pruned parameters alone, every entry stored")
    pruned_layers_packed: int | None = Field(default=None, ge=0, description="the same, packed; null if not packable")


class Layer(_Part):
    """One parameter."""

    name: str = Field(description="the parameter's name in the model")
    layer: str = Field(description="class name of the module that owns it")
    shape: list[int] = Field(description="the parameter's shape")
    pattern: str | None = Field(description="the pattern it was pruned to and holds, e.g. '2:4'; null if left dense")
    density: float = Field(ge=0, le=1, description="share of its entries that are kept")
    skipped: str | None = Field(description="why it was left dense; null if pruned")
    bytes_dense: int = Field(ge=0, description="bytes with every entry stored")
    bytes_packed: int | None = Field(description="bytes packed, values and codes; null if not packable")


class Export(_Part):
    """One export."""

    format: str = Field(description="dense, packed, ...")
    folder: str = Field(description="relative to the run folder")
    verified: bool = Field(description="it was read back: hashes, patterns and outputs are right")


class Report(_Part):
    """One run: train, prune, retrain, export, measured."""

    model_config = ConfigDict(title="asp_toolkit report")

    format: Literal["asp_report"] = Field(description="marks the file")
    version: Literal[1] = Field(description="of this schema; a reader refuses what it does not know")
    name: str = Field(description="of the run")
    created: str = Field(description="ISO 8601, with time zone")
    metric: str = Field(description="key in phases and history that phases are compared by; higher is better")
    phases: Phases = Field(description="loss and metric per phase")
    history: list[HistoryRow] = Field(description="training log, in order")
    density: Density = Field(description="what is left")
    sizes: Sizes = Field(description="what it weighs")
    speed: list[SpeedRow] = Field(description="what was measured; empty if nothing was")
    layers: list[Layer] = Field(description="every parameter, in the model's order")
    exports: list[Export] = Field(description="what was written")
    environment: dict[str, JsonValue] = Field(description="versions and hardware")
    recipe: dict[str, JsonValue] = Field(description="the recipe as resolved; it reproduces the run")
    notes: list[str] = Field(default_factory=list, description="what a reader should know: values not finite, ...")

    @model_validator(mode="after")
    def _metric_is_there(self) -> Report:
        known = set(Phase.model_fields) | set(HistoryRow.model_fields)
        if self.metric in known:
            raise ValueError(f"metric: '{self.metric}' is a key with a meaning of its own; name the metric otherwise")
        for name in Phases.model_fields:
            phase = getattr(self.phases, name)
            if phase is not None and self.metric not in phase.__pydantic_extra__:
                hint = closest(self.metric, phase.__pydantic_extra__)
                raise ValueError(
                    f"phases.{name}: expected a value under the metric's name '{self.metric}', got none; {hint}"
                )
        return self


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of report.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Report.model_json_schema()}


def check(report: dict[str, Any]) -> dict[str, Any]:
    """The report as it came, when it is valid.

    Raises:
        AspError: naming every wrong key with what was expected and what came.
    """
    try:
        text = json.dumps(report, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AspError(f"report: expected plain finite JSON values, got others ({error}); use `build`") from error
    try:
        Report.model_validate_json(text)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            place = ".".join(str(part) for part in problem["loc"]) or "report"
            came = "" if problem["type"] in ("missing", "value_error") else f", got {_short(problem['input'])}"
            lines.append(f"{place}: {problem['msg'].removeprefix('Value error, ')}{came}")
        raise AspError("report does not fit asp_toolkit/report/schema.json:\n  " + "\n  ".join(lines)) from error
    return report


def complete(report: Mapping[str, Any]) -> dict[str, Any]:
    """A valid report with every optional key there, at its default."""
    return Report.model_validate_json(json.dumps(report, allow_nan=False)).model_dump(mode="json")


def finite(value: Any, place: str, notes: list[str]) -> Any:
    """`value` as plain JSON: tuples become lists, paths text; a NaN or infinity becomes null and a line of `notes`."""
    if isinstance(value, dict):
        return {str(key): finite(inner, f"{place}.{key}" if place else str(key), notes) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner, f"{place}.{index}", notes) for index, inner in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        notes.append(f"{place} was {value}; stored as null")
        return None
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
