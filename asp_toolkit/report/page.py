"""report.html: one file, no scripts, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from asp_toolkit.report import plots, wording
from asp_toolkit.report.schema import complete
from asp_toolkit.report.wording import Report

_OPEN_UP_TO = 24  # layers; a longer table scrolls in its own box


def render(report: Report) -> str:
    """The page of a valid report. Every text of the report is escaped; the plots are inline SVG."""
    report = complete(report)
    environment = Environment(
        loader=PackageLoader("asp_toolkit.report", "templates"),
        autoescape=True,  # layer names and recipe values are anybody's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = {
        "metric": plots.metric_plot(report),
        "curves": plots.curves_plot(report),
        "density": plots.density_plot(report),
        "sizes": plots.sizes_plot(report),
        "speed": plots.speed_plot(report),
    }
    pruned = wording.pruned_layers(report)
    matrices = wording.matrices(report)
    return environment.get_template("report.html").render(
        report=report,
        words=wording,
        verdict=wording.verdict(report),
        phases=[
            (key, label, report["phases"][key]) for key, label in wording.PHASES.items() if report["phases"].get(key)
        ],
        plots={name: Markup(svg) for name, svg in drawn.items()},
        pruned=pruned,
        pruned_share=_share(pruned, report),
        matrices=matrices,
        long_table=len(matrices) > _OPEN_UP_TO,
        patterns=wording.by_pattern(report),
        reasons=wording.by_reason(report),
        speed=wording.speed_summary(report),
        recipe=outline(report["recipe"]),
        environment=outline(report["environment"]),
        unverified=[row for row in report["exports"] if not row["verified"]],
    )


def _share(pruned: list[Mapping[str, Any]], report: Report) -> float:
    every = sum(wording.entries(row) for row in report["layers"])
    return sum(wording.entries(row) for row in pruned) / every if every else 0.0


def outline(value: Any, depth: int = 0) -> list[tuple[int, str, str]]:
    """Nested dicts and lists as lines (depth, key, text), for reading; a list of plain values stays on one line."""
    lines: list[tuple[int, str, str]] = []
    pairs = (
        value.items() if isinstance(value, Mapping) else ((f"{index}.", inner) for index, inner in enumerate(value, 1))
    )
    for key, inner in pairs:
        if inner and (isinstance(inner, Mapping) or _deep(inner)):
            lines.append((depth, str(key), ""))
            lines.extend(outline(inner, depth + 1))
        else:
            lines.append((depth, str(key), _text(inner)))
    return lines


def _deep(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict | list) for item in value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    if value is None or value == {}:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
