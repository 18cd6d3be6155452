"""What every command prints: a table for people, or JSON alone on standard output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and JSON, with --json).")]

_HEADING = "\u2063"  # invisible: stands for a heading while rich lays the table out

PLAIN_WIDTH = 160  # columns where the output is not a terminal: wide enough to grep


def console() -> Console:
    """Standard output; not cut to 80 columns when it is a pipe or a file."""
    out = Console(highlight=False, markup=False, emoji=False)
    return out if out.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)


def say(text: str, quiet: bool = False) -> None:
    """A line for people, not wrapped."""
    if not quiet:
        print(text)


def print_json(value: Any) -> None:
    """`value` as indented JSON; dataclasses and paths included, NaN refused."""
    print(json.dumps(value, indent=2, allow_nan=False, default=_plain))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """A table; the columns named in `right` are numbers. A row of one cell is a heading across the table."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    headings: list[str] = []
    for row in rows:
        if len(row) == 1:
            headings.append(str(row[0]))
            table.add_row(_HEADING)
        else:
            table.add_row(*("" if value is None else str(value) for value in row))
    out = console()
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        text = line.rstrip()  # rich fills the last column with spaces
        print(f"\n{headings.pop(0)}" if text == _HEADING else text)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
