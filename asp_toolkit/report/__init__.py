"""What a run leaves for its reader: report.json (see schema.json), report.html, a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asp_toolkit import files
from asp_toolkit.report.build import build, read
from asp_toolkit.report.environment import environment
from asp_toolkit.report.schema import check, json_schema
from asp_toolkit.report.speed import SpeedRow
from asp_toolkit.report.text import as_text, table

__all__ = ["SpeedRow", "as_text", "build", "check", "environment", "json_schema", "read", "table", "write"]


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    Raises:
        AspError: the report does not fit the schema; nothing is written.
    """
    from asp_toolkit.report.page import render  # matplotlib and jinja2: only who writes a page pays

    plain = check(dict(report))
    page = render(plain)
    files.write_json(folder / "report.json", plain)
    files.write_text(folder / "report.html", page)
