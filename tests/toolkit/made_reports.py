"""Made-up reports that several test files read."""

from __future__ import annotations

import math
from typing import Any

from asp_toolkit import report as reports
from asp_toolkit.report.speed import SpeedRow

HOSTILE = "\x1b[31m" + '</td><script>alert(1)</script>"$\\frac$&{{7*7}}[bold red]\N{SNOWMAN}'


def layer(name: str, shape: list[int], pattern: str | None, share: float, skipped: str | None = None) -> dict[str, Any]:
    count = math.prod(shape)
    return {
        "name": name,
        "layer": "Linear",
        "shape": shape,
        "pattern": pattern,
        "density": share,
        "skipped": skipped,
        "bytes_dense": 4 * count,
        "bytes_packed": None if pattern is None else 2 * count + count // 8,
    }


def speed(ratio: float, name: str = "batch 1", backend: str = "reference") -> SpeedRow:
    return SpeedRow(
        name=name, batch=1, inputs="1x8 float32", dtype="float32", device="cpu", hardware="Test CPU", threads=1,
        torch="2.0", rounds=9, repeats=1, dense_ms=2.0, dense_ms_p10=1.9, dense_ms_p90=2.1, sparse_ms=2.0 / ratio,
        sparse_ms_p10=1.9 / ratio, sparse_ms_p90=2.1 / ratio, speedup=ratio, speedup_p10=ratio * 0.99,
        speedup_p90=ratio * 1.01, dense_per_second=500.0, sparse_per_second=500.0 * ratio, backends={"fc": backend},
    )  # fmt: skip


def facts(**changes: Any) -> dict[str, Any]:
    def phase(accuracy: float | None, loss: float, epochs: float) -> dict[str, Any]:
        return {"loss": loss, "accuracy": accuracy, "samples": 1000, "seconds": 12.5, "steps": 40, "epochs": epochs}

    history = [
        {
            "phase": name,
            "step": step,
            "epoch": step / 40,
            "lr": 0.1,
            "train_loss": 2.0 - step / 40,
            "loss": None,
            "accuracy": None,
        }
        for name in ("dense", "retrained")
        for step in range(41)
    ]
    for row in history[40::41]:
        row.update(loss=0.5, accuracy=0.9)
    return {
        "name": "tiny",
        "metric": "accuracy",
        "phases": {"dense": phase(0.9, 0.5, 1.0), "pruned": phase(0.7, 0.9, 0.0), "retrained": phase(0.91, 0.4, 1.0)},
        "history": history,
        "layers": [
            layer("fc1.weight", [8, 16], "2:4", 0.5),
            layer("fc1.bias", [8], None, 1.0, "vector (bias, norm or scale)"),
            layer("fc2.weight", [3, 30], None, 1.0, "contraction length 30 is not a multiple of 4"),
        ],
        "sizes": {"dense": 1000, "packed": 600},
        "speed": [speed(0.9)],
        "exports": [{"format": "packed", "folder": "exports/packed", "verified": True}],
        "recipe": {
            "train": {"epochs": 1, "optimizer": {"name": "sgd", "lr": 0.1}},
            "prune": {"rules": [{"include": ["*"]}]},
        },
        **changes,
    }


def hostile_report() -> dict[str, Any]:
    given = facts(name=HOSTILE, recipe={HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}, environment={HOSTILE: HOSTILE})
    given["layers"] += [layer(HOSTILE, [8, 8], "2:4", 0.5), layer(HOSTILE + "2", [8, 8], None, 1.0, HOSTILE)]
    given["layers"][-1]["layer"] = HOSTILE
    given["exports"] = [{"format": HOSTILE, "folder": HOSTILE, "verified": False}]
    given["speed"] = [speed(0.9, HOSTILE, HOSTILE)]
    given["metric"] = HOSTILE
    for row in [*given["phases"].values(), *given["history"]]:
        row[HOSTILE] = row.pop("accuracy")
    return reports.build(**given)
