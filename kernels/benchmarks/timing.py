"""Interleaved timing: every round runs each contender once, so that what else the machine does hits all alike."""

from __future__ import annotations

import csv
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def rounds(contenders: Mapping[str, Callable[[int], object]], seconds: float = 0.6) -> dict[str, list[float]]:
    """Seconds of each call, per contender and round; a contender is given the number of the round."""
    for run in contenders.values():
        run(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end, number = time.perf_counter() + seconds, 1
    while number <= 7 or time.perf_counter() < end:
        for name, run in contenders.items():
            start = time.perf_counter()
            run(number)
            times[name].append(time.perf_counter() - start)
        number += 1
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> float:
    """The median over rounds of the time of `slow` per time of `fast`."""
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def processor() -> str:
    """The processor's name and how many are to be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return name


def write(name: str, rows: list[dict[str, object]]) -> None:
    """Write rows to results/<name>.csv, each with processor, threads, versions and date."""
    about = {
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, [*rows[0], *about], lineterminator="\n")
        out.writeheader()
        out.writerows({**row, **about} for row in rows)
