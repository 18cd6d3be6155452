"""How long imports take beside `import torch`: `python benchmarks/import_time.py`.

Each import runs in a fresh interpreter, the candidates in turn, several rounds; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version

CANDIDATES = {
    "nothing": "pass",
    "torch": "import torch",
    "asp_toolkit": "import asp_toolkit",
    "asp_toolkit.prune": "from asp_toolkit import prune",
    "asp_kernels": "import asp_kernels",
    "asp_toolkit.run_recipe": "from asp_toolkit import run_recipe",
    "asp --help": "import asp_toolkit.cli",
}


def seconds(code: str) -> float:
    """Seconds that `code` takes in a fresh interpreter, without the interpreter's own start."""
    timed = f"import time; start = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for code in CANDIDATES.values():  # once for the disk cache
        seconds(code)
    found: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in range(rounds):
        for name, code in CANDIDATES.items():
            found[name].append(seconds(code))
    base = statistics.median(found["torch"])
    print(f"python {platform.python_version()}, torch {version('torch')}, median of {rounds} rounds")
    for name, times in found.items():
        median = statistics.median(times)
        print(
            f"{name:24} {median * 1e3:8.1f} ms   {median / base:5.2f} x import torch   (fastest {min(times) * 1e3:.1f})"
        )


if __name__ == "__main__":
    main()
