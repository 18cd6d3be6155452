"""The report for a terminal: short, readable at 80 columns, plain text where there is no terminal."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from asp_toolkit.report import wording
from asp_toolkit.report.wording import PHASES, Level, Report

_COLOURS: dict[Level, str] = {"good": "green", "even": "yellow", "bad": "red", "unknown": "dim"}
_NAMES_SHOWN = 3


def table(report: Report) -> RenderableType:
    """What `rich.print` shows: verdict, phases, density, sizes, speed, what was left dense, exports."""
    verdict = wording.verdict(report)
    parts: list[RenderableType] = [
        _text(f"{report['name']}: {verdict.headline}", style=f"bold {_COLOURS[verdict.level]}"),
        _text(verdict.detail),
        _phases(report),
        _facts(report),
    ]
    if report["speed"]:
        parts.append(_speed(report))
    if wording.by_reason(report):
        parts.append(_skipped(report))
    if report["exports"]:
        parts.append(_exports(report))
    parts.extend(_text(f"Note: {note}", style="yellow") for note in report["notes"])
    return Group(*parts)


def as_text(report: Report, width: int = 80) -> str:
    """`table` as plain text without colours or control codes, at most `width` columns, no trailing spaces."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=False,
        no_color=True,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(table(report))
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()) + "\n"


def _text(text: str, style: str = "") -> Text:
    """Text without markup; control characters of a name or note, which could steer a terminal, become visible."""
    return Text("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text), style=style)


def _grid(*columns: str) -> Table:
    """Columns whose name starts with ">" are right-aligned."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        right = column.startswith(">")
        grid.add_column(_text(column.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    return grid


def _phases(report: Report) -> Table:
    key, dense = report["metric"], report["phases"]["dense"].get(report["metric"])
    grid = _grid("phase", f">{wording.metric_name(report).lower()}", ">to dense", ">loss", ">epochs", ">time")
    for name, label in PHASES.items():
        phase = report["phases"].get(name)
        if not phase:
            continue
        trained = bool(phase.get("epochs"))
        grid.add_row(
            label.lower(),
            wording.metric_text(report, phase.get(key)),
            "" if name == "dense" else wording.difference_text(report, phase.get(key), dense, unit=False),
            "not finite" if phase["loss"] is None else f"{phase['loss']:.4f}",
            f"{phase['epochs']:.4g}" if trained else "",
            wording.time_text(phase.get("seconds")) if trained else "",
            style="bold" if name == "retrained" else "",
        )
    return grid


def _facts(report: Report) -> Table:
    sizes, pruned = report["sizes"], wording.pruned_layers(report)
    kept = report["density"]
    layers, model = wording.percent(kept["pruned_parameters"]), wording.percent(kept["model"])
    dense, packed = wording.size_text(sizes.get("dense")), wording.size_text(sizes.get("packed"))
    weights = f"{dense} dense, {packed} packed"
    if sizes.get("dense") and sizes.get("packed"):
        weights += f" ({wording.signed((sizes['packed'] / sizes['dense'] - 1) * 100, 1)}%)"
    patterns = ", ".join(f"{len(rows)} to {pattern}" for pattern, rows in wording.by_pattern(report))
    lines = [
        (
            "pruned",
            f"{len(pruned)} of {len(wording.matrices(report))} matrices" + (f": {patterns}" if patterns else ""),
        ),
        ("density", f"{layers} of the pruned layers, {model} of the whole model"),
        ("weights file", weights),
        ("speed", wording.speed_summary(report)[1]),
    ]
    grid = Table.grid(padding=(0, 1, 0, 1))  # lines up with the tables around it
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(name, _text(value))
    return grid


def _speed(report: Report) -> Table:
    first = report["speed"][0]
    threads = f"{first['threads']} thread" + ("s" if first["threads"] != 1 else "")
    grid = _grid("measured speed", ">dense", ">sparse", ">ratio", "in words")
    for row in report["speed"]:
        grid.add_row(
            _text(row["name"]),
            wording.duration_text(row["dense_ms"]),
            wording.duration_text(row["sparse_ms"]),
            f"{row['speedup']:.2f}",
            _text(wording.speed_text(row), style=_COLOURS[wording.speed_level(row)]),
        )
    grid.caption = _text(
        f"{first['hardware']}, {threads}, {first['dtype']}, torch {first['torch']}; ratio: dense time / sparse time"
    )
    grid.caption_justify = "left"
    return grid


def _skipped(report: Report) -> Table:
    grid = _grid("left dense because", ">count", "parameters")
    for reason, rows in wording.by_reason(report):
        shown = ", ".join(row["name"] for row in rows[:_NAMES_SHOWN])
        more = len(rows) - _NAMES_SHOWN
        grid.add_row(_text(reason), str(len(rows)), _text(shown + (f" and {more} more" if more > 0 else "")))
    return grid


def _exports(report: Report) -> Table:
    grid = _grid("export", "folder", "read back")
    for row in report["exports"]:
        state = _text("verified", style="green") if row["verified"] else _text("NOT VERIFIED", style="bold red")
        grid.add_row(_text(row["format"]), _text(row["folder"]), state)
    return grid
