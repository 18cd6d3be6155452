"""Plots as inline SVG in the page's own CSS variables for colours and fonts, so that light and dark both read well."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from asp_toolkit.report import wording
from asp_toolkit.report.wording import PHASES, Report

# Stand-ins that matplotlib draws with; `_svg` turns each into the CSS variable of the page.
_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--dense",
    "#050505": "--pruned",
    "#060606": "--retrained",
    "#070707": "--control",
    "#080808": "--left",
    "#090909": "--card",
}
_COLOUR = {variable.removeprefix("--"): stand_in for stand_in, variable in _VARIABLES.items()}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, in the page's font
    "text.parse_math": False,  # a layer's name may hold a dollar sign
    "axes.unicode_minus": True,
    "font.size": 10.5,
    "text.color": _COLOUR["ink"],
    "axes.edgecolor": _COLOUR["line"],
    "axes.labelcolor": _COLOUR["muted"],
    "xtick.color": _COLOUR["muted"],
    "ytick.color": _COLOUR["muted"],
    "grid.color": _COLOUR["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}
_POINTS = 240  # a longer training curve is averaged down to so many
_NAMED_UP_TO = 16  # matrices; names of more would not fit below the bars


def metric_plot(report: Report) -> str:
    """The metric at the end of each phase; a band shows what a test of this size cannot tell from dense."""
    key, scale = report["metric"], 100 if wording.is_share(report) else 1
    rows = [(name, report["phases"][name][key]) for name in PHASES if report["phases"].get(name)]
    rows = [(name, value) for name, value in rows if value is not None]
    if not rows:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = _figure(0.62 + 0.36 * len(rows))
        axes = figure.add_subplot()
        dense = next((value for name, value in rows if name == "dense"), None)
        fine = wording.resolution(report)
        if dense is not None:
            if fine is not None:
                edges = (dense - fine) * scale, min(dense + fine, 1) * scale
                axes.axvspan(*edges, color=_COLOUR["dense"], alpha=0.10, lw=0)
            axes.axvline(dense * scale, color=_COLOUR["dense"], lw=1, ls=(0, (4, 3)))
        for place, (name, value) in enumerate(rows):
            axes.plot(value * scale, place, "o", ms=9, color=_COLOUR[name])
        values = [value * scale for _, value in rows]
        width = (fine or 0) * scale
        low, high = min(*values, dense * scale - width if dense is not None else values[0]), max(values)
        margin = max((high - low) * 0.14, 0.02 * scale if scale == 100 else abs(high) * 0.02, 1e-9)
        axes.set_xlim(low - margin, min(high + margin, 100.6) if scale == 100 else high + margin)
        labels = [f"{PHASES[name]}  {wording.metric_text(report, value)}" for name, value in rows]
        axes.set_yticks(range(len(rows)), labels, color=_COLOUR["ink"])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel(_plain(wording.metric_name(report), 40) + (" in %" if scale == 100 else ""))
        return _svg(figure, "metric")


def curves_plot(report: Report) -> str:
    """Training loss, test loss and the metric over epochs, phases on one axis since retraining repeats the training.

    Where masks came about on the way, the density too.
    """
    key, scale = report["metric"], 100 if wording.is_share(report) else 1
    history = report["history"]
    phases = [name for name in PHASES if any(row["phase"] == name for row in history)]
    if not phases:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = _figure(3.0, width=9.6)
        moving = len({row["density"] for row in history if row.get("density") is not None}) > 1
        losses, metric, *kept = figure.subplots(1, 3 if moving else 2)
        for name in phases:
            rows = [row for row in history if row["phase"] == name]
            _curve(losses, rows, "train_loss", 1, color=_COLOUR[name], lw=1.1, alpha=0.55)
            _curve(losses, rows, "loss", 1, color=_COLOUR[name], lw=1.8, marker="o", ms=4)
            _curve(metric, rows, key, scale, color=_COLOUR[name], lw=1.8, marker="o", ms=4, label=PHASES[name])
        losses.set_title("Loss: training (thin), test (dots)", loc="left", fontsize=10.5)
        unit = ", %" if scale == 100 else ""
        metric.set_title(f"{_plain(wording.metric_name(report), 40)} on the test data{unit}", loc="left", fontsize=10.5)
        for axes in kept:
            rows = [row for row in history if row.get("density") is not None]
            _curve(axes, rows, "density", 100, color=_COLOUR["retrained"], lw=1.8)
            axes.set_title("Kept of the pruned matrices, %", loc="left", fontsize=10.5)
            axes.set_ylim(0, 103)
        for axes in (losses, metric, *kept):
            axes.set_xlabel("Epochs since the phase began")
            axes.locator_params(nbins=6)
        if not metric.lines and not losses.lines:
            return ""
        metric.legend(loc="lower right")
        return _svg(figure, "curves")


def density_plot(report: Report) -> str:
    """Density of every matrix, in the model's order."""
    rows = wording.matrices(report)
    if not rows:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = _figure(3.0 if len(rows) <= _NAMED_UP_TO else 2.4, width=9.6)
        axes = figure.add_subplot()
        gap = 0.82 if len(rows) <= 60 else 1.0
        for label, colour, skipped in (("Pruned", "retrained", False), ("Left dense", "left", True)):
            places = [place for place, row in enumerate(rows) if (row["skipped"] is not None) is skipped]
            if places:
                heights = [rows[place]["density"] * 100 for place in places]
                edge: dict[str, Any] = {"edgecolor": _COLOUR["card"], "linewidth": 0.4} if gap == 1.0 else {}
                axes.bar(places, heights, gap, color=_COLOUR[colour], label=label, **edge)
        axes.set_ylim(0, 104)
        axes.set_yticks([0, 25, 50, 75, 100])
        axes.set_ylabel("Density in %")
        axes.grid(False, axis="x")
        axes.set_xlim(-0.7, len(rows) - 0.3)
        if len(rows) <= _NAMED_UP_TO:
            names = [_plain(row["name"], 22) for row in rows]
            axes.set_xticks(range(len(rows)), names, rotation=32, ha="right", rotation_mode="anchor")
        else:
            ticks = sorted({round(index * (len(rows) - 1) / 8) for index in range(9)})
            axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
            axes.set_xlabel("Matrix, in the model's order (names: see the table of layers)")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0, handlelength=1.0)
        return _svg(figure, "density")


def sizes_plot(report: Report) -> str:
    """Bytes of the exports, and of the pruned layers alone."""
    sizes = report["sizes"]
    wanted = [
        ("Weights file, dense", sizes.get("dense"), "dense"),
        ("Weights file, packed", sizes.get("packed"), "retrained"),
        ("Pruned layers, dense", sizes["pruned_layers_dense"], "dense"),
        ("Pruned layers, packed", sizes.get("pruned_layers_packed"), "retrained"),
    ]
    rows = [(label, value, colour) for label, value, colour in wanted if value]
    if not rows:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = _figure(0.35 + 0.36 * len(rows))
        axes = figure.add_subplot()
        top = max(value for _, value, _ in rows)
        for place, (_, value, colour) in enumerate(rows):
            axes.barh(place, value, 0.58, color=_COLOUR[colour])
            axes.text(value + top * 0.02, place, wording.size_text(value), va="center")
        axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], color=_COLOUR["ink"])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, top * 1.22)
        axes.set_xticks([])
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        return _svg(figure, "sizes")


def speed_plot(report: Report) -> str:
    """Median ratio of dense to sparse time per batch, with its 10th to 90th percentile."""
    rows = report["speed"]
    if not rows:
        return ""
    colours = {"good": "retrained", "even": "muted", "bad": "pruned", "unknown": "muted"}
    with matplotlib.rc_context(_STYLE):
        figure = _figure(0.75 + 0.36 * len(rows), width=5.2)
        axes = figure.add_subplot()
        axes.axvline(1, color=_COLOUR["ink"], lw=1)
        for place, row in enumerate(rows):
            colour = _COLOUR[colours[wording.speed_level(row)]]
            axes.plot([row["speedup_p10"], row["speedup_p90"]], [place, place], color=colour, lw=4, alpha=0.35)
            axes.plot(row["speedup"], place, "o", ms=9, color=colour)
        low = min(0.8, *(row["speedup_p10"] for row in rows))
        high = max(1.2, *(row["speedup_p90"] for row in rows))
        axes.set_xlim(low - 0.05, high + 0.05)
        labels = [f"{_plain(row['name'], 24)}  {row['speedup']:.2f}" for row in rows]
        axes.set_yticks(range(len(rows)), labels, color=_COLOUR["ink"])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel("Dense time / sparse time (above 1: sparse is faster)")
        return _svg(figure, "speed")


def _figure(height: float, width: float = 4.7) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)  # pyplot would keep the figure, and pick a display
    return figure


def _curve(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str, scale: float, **style: Any) -> None:
    points = [(row["epoch"], row[key] * scale) for row in rows if row.get(key) is not None]
    if not points:
        return
    size = -(-len(points) // _POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    means = [tuple(sum(axis) / len(piece) for axis in zip(*piece, strict=True)) for piece in pieces]
    axes.plot([x for x, _ in means], [y for _, y in means], **style)


def _plain(name: str, length: int) -> str:
    """A name as a label: printable ASCII (a plot has no font for all scripts), its middle left out where it is long."""
    text = "".join(char if " " <= char <= "~" else "?" for char in name)
    if len(text) <= length:
        return text
    return text[: length // 2 - 1] + ".." + text[-(length - length // 2 - 1) :]


def _svg(figure: Figure, name: str) -> str:
    """The drawing as one <svg> element, its ids its own, hidden from screen readers (the page says it in words)."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"asp-{name}", "svg.id": None}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # only clip paths and markers are referred to
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1; font-family: var(--sans)", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", text)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    head = r'<svg class="plot" viewBox="\1" aria-hidden="true" focusable="false" xmlns:xlink="http://www.w3.org/1999/xlink">'
    text = re.sub(r'<svg\b[^>]*?viewBox="([^"]+)"[^>]*>', head, text, count=1)
    return text.strip()
