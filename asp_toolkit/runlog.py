"""The log of a run: one row per logged step and per evaluation, as JSON lines and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asp_toolkit.files import write_text

Row = dict[str, Any]
"""phase, step, epoch, lr, train_loss, and after an evaluation: loss and the task's metrics on the test data."""


@dataclass(frozen=True)
class RunLog:
    """folder/log.jsonl and folder/log.csv; without a folder, nothing is written."""

    folder: Path | None = None

    def append(self, row: Row) -> None:
        """Add a row to log.jsonl, readable while the run goes on."""
        if self.folder is not None:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Replace both files by `rows`: after a phase, and when a run goes on from a checkpoint."""
        if self.folder is None:
            return
        write_text(self.folder / "log.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.folder / "log.csv", text.getvalue())
