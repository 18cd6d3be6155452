"""Figures in words: the verdict, differences, sizes, speed. Shared by the page and the terminal, so that they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["good", "even", "bad", "unknown"]
Report = Mapping[str, Any]

PHASES: dict[str, str] = {
    "dense": "Dense",
    "pruned": "Pruned",
    "retrained": "Retrained",
    "control": "Control",
}
"""Phases in the order they are shown."""

_SHARES = frozenset({"accuracy", "top1", "top5", "f1", "exact", "precision", "recall", "auc", "matthews"})


@dataclass(frozen=True)
class Verdict:
    """What a reader takes home: a level, one headline, one sentence of detail."""

    level: Level
    headline: str
    detail: str


def is_share(report: Report) -> bool:
    """Whether the metric is a share of 1 that reads best in per cent: by its name, and no value beyond 1."""
    values = [phase.get(report["metric"]) for phase in report["phases"].values() if phase]
    return report["metric"].removeprefix("eval_") in _SHARES and all(-1 <= v <= 1 for v in values if v is not None)


def metric_name(report: Report) -> str:
    """ "accuracy" -> "Accuracy", "f1" -> "F1"."""
    text = str(report["metric"]).replace("_", " ").strip()
    return text[:1].upper() + text[1:]


def metric_text(report: Report, value: float | None) -> str:
    """0.988 -> "98.80%" for a share, "0.988" otherwise, "not known" for None."""
    if value is None:
        return "not known"
    return f"{value * 100:.2f}%" if is_share(report) else f"{value:.4g}"


def difference_text(report: Report, value: float | None, base: float | None, unit: bool = True) -> str:
    """Signed difference: "+0.10 points" for a share, "+0.1" otherwise, "" where one is not known."""
    if value is None or base is None:
        return ""
    if is_share(report):
        return signed((value - base) * 100, 2) + (" points" if unit else "")
    return f"{value - base:+.4g}".replace("-", "\N{MINUS SIGN}")


def signed(value: float, digits: int) -> str:
    """With a real minus sign, and "0.00" rather than "-0.00"."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return text.lstrip("-")
    return ("+" if value > 0 else "\N{MINUS SIGN}") + text.lstrip("-")


def percent(share: float, digits: int = 1) -> str:
    """0.5 -> "50.0%"."""
    return f"{share * 100:.{digits}f}%"


def size_text(count: int | None) -> str:
    """Bytes with a decimal unit: 1_560_000 -> "1.56 MB"."""
    if count is None:
        return "not exported"
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{int(value)} B" if unit == "B" else f"{value:.3g} {unit}"


def count_text(count: int) -> str:
    """Entries: 1_234_567 -> "1.23 M"."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.3g} k" if count < 999_500 else f"{count / 1e6:.3g} M"


def time_text(seconds: float | None) -> str:
    """ "0.4 s", "36 s", "2 min 05 s", "3 h 10 min"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def duration_text(milliseconds: float) -> str:
    """ "0.42 ms", "12.3 ms", "1.52 s"."""
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def resolution(report: Report) -> float | None:
    """Differences below this may be chance: 95% of two independent tests of this size agree within it. Shares only.

    1.96 sqrt(2 p (1 - p) / samples), the binomial bound, which holds for any per-sample value in [0, 1].
    """
    dense = report["phases"]["dense"]
    value, samples = dense.get(report["metric"]), dense["samples"]
    if value is None or not samples or not is_share(report):
        return None
    share = min(max(value, 0.0), 1.0)
    return 1.96 * math.sqrt(2 * share * (1 - share) / samples)


def verdict(report: Report) -> Verdict:
    """Whether retraining brought the metric back to its dense value."""
    name, key = metric_name(report), report["metric"]
    dense = report["phases"]["dense"].get(key)
    pruned = report["phases"]["pruned"].get(key)
    retrained = report["phases"]["retrained"].get(key)
    if dense is None or retrained is None:
        return Verdict(
            "unknown", f"{name} cannot be compared", "It is not known for the dense or for the retrained network."
        )
    ends = f"{metric_text(report, retrained)} retrained, {metric_text(report, dense)} dense"
    apart = difference_text(report, retrained, dense)
    fine = resolution(report)
    noise = ""
    if fine is not None and abs(retrained - dense) < fine:
        samples = report["phases"]["dense"]["samples"]
        noise = (
            f" A test of {samples:,} samples cannot tell differences below about {fine * 100:.2f} points from chance."
        )
    detail = f"Retrained against dense: {apart}."
    if pruned is not None:
        detail = f"Pruning alone: {difference_text(report, pruned, dense)}. After retraining: {apart}."
    if retrained >= dense:
        return Verdict("good", f"{name} is kept: {ends}", detail + noise)
    if noise:
        return Verdict("even", f"{name} is kept within test noise: {ends}", detail + noise)
    return Verdict("bad", f"{name} is below dense: {ends}", detail)


def speed_level(row: Mapping[str, Any]) -> Level:
    """ "good" where sparse is faster in nine rounds of ten and by 2%, "bad" the other way round, else "even"."""
    if row["speedup_p10"] > 1 and row["speedup"] >= 1.02:
        return "good"
    return "bad" if row["speedup_p90"] < 1 and row["speedup"] <= 0.98 else "even"


def speed_text(row: Mapping[str, Any]) -> str:
    """One row in words, without flattery."""
    level = speed_level(row)
    if level == "good":
        return f"{row['speedup']:.2f} times as fast"
    if level == "bad":
        return f"slower: {1 / row['speedup']:.2f} times as long"
    return "no measurable difference"


def speed_badge(row: Mapping[str, Any]) -> str:
    """`speed_text` in a word or two."""
    return {"good": "faster", "even": "no measurable difference", "bad": "slower", "unknown": ""}[speed_level(row)]


def rate_text(per_second: float) -> str:
    """Samples per second to three digits: 12345.6 -> "12,300", 3.456 -> "3.46"."""
    return f"{float(f'{per_second:.3g}'):,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def backend_counts(report: Report) -> list[tuple[str, int]]:
    """Kernel backends that the sparse layers ran with, and for how many layers, over the distinct (layer, backend)."""
    pairs = {pair for row in report["speed"] for pair in row["backends"].items()}
    backends = [backend for _, backend in pairs]
    return sorted({backend: backends.count(backend) for backend in backends}.items())


def speed_summary(report: Report) -> tuple[Level, str]:
    """All rows in one sentence."""
    rows = report["speed"]
    if not rows:
        return "unknown", "Speed was not measured."
    levels = {speed_level(row) for row in rows}
    used = {backend for row in rows for backend in row["backends"].values()}
    why = ""
    if "good" not in levels and used and used <= {"reference", "dense"}:
        why = " No sparse kernel was used here: the sparse layers computed densely, so no gain is to be expected."
    if levels == {"good"}:
        return "good", "The sparse model is faster for every batch that was measured."
    if "good" in levels:
        return "even", "The sparse model is faster for some batches and not for others; see each row."
    if "bad" in levels:
        return "bad", "The sparse model is not faster on this machine." + why
    return "even", "The sparse model is as fast as the dense one on this machine, not faster." + why


def pruned_layers(report: Report) -> list[Mapping[str, Any]]:
    """Layers that were pruned, in order."""
    return [row for row in report["layers"] if row["pattern"] is not None and row["skipped"] is None]


def matrices(report: Report) -> list[Mapping[str, Any]]:
    """Pruned layers and every other parameter with two dimensions or more, in order: what could have been pruned."""
    return [row for row in report["layers"] if len(row["shape"]) >= 2]


def masks_text(report: Report) -> str:
    """How masks came about in the retraining, after "Retraining repeats the dense training"."""
    schedule = report["recipe"].get("prune", {}).get("schedule", {}).get("name", "one_shot")
    return "with the masks held" if schedule == "one_shot" else f"while masks change by the schedule {schedule}"


def by_pattern(report: Report) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Pruned layers by pattern, the largest group first."""
    return _groups(pruned_layers(report), "pattern")


def by_reason(report: Report) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Skipped parameters by reason; reasons that leave a matrix dense come first."""
    groups = _groups([row for row in report["layers"] if row["skipped"] is not None], "skipped")
    return sorted(groups, key=lambda group: all(len(row["shape"]) < 2 for row in group[1]))


def _groups(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return sorted(found.items(), key=lambda group: -sum(entries(row) for row in group[1]))


def entries(row: Mapping[str, Any]) -> int:
    """Number of entries of a layer's parameter."""
    return math.prod(row["shape"])


def shape_text(row: Mapping[str, Any]) -> str:
    """[64, 32, 3, 3] -> "64 x 32 x 3 x 3", with real multiplication signs."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, row["shape"])) or "scalar"


def total_entries(rows: Sequence[Mapping[str, Any]]) -> int:
    """Number of entries of several parameters together."""
    return sum(entries(row) for row in rows)
