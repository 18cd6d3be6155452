"""Run recipes with several seeds and say whether retraining gave the accuracy back.

    python benchmarks/three_seeds.py fashion_mnist_cnn minilm_wordnet --seeds 0 1 2

Every run goes on where it was stopped. Rows go to benchmarks/results/accuracy.csv (a recipe's old rows are replaced);
the table printed is the one in the README. "control" is the dense network trained twice as long: the retraining
without masks. The bar: the retrained mean is not below the dense mean by more than the dense spread (max - min).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from asp_toolkit import run_recipe

RESULTS = Path(__file__).parent / "results" / "accuracy.csv"
PHASES = ("dense", "pruned", "retrained", "control")


def rows_of(report: dict[str, Any], recipe: str, seed: int) -> list[dict[str, Any]]:
    """One row per phase."""
    machine = report["environment"]
    return [
        {
            "recipe": recipe,
            "seed": seed,
            "phase": phase,
            "metric": report["metric"],
            "value": round(found[report["metric"]], 5),
            "loss": round(found["loss"], 5),
            "samples": found["samples"],
            "epochs": found["epochs"],
            "steps": found["steps"],
            "seconds": found["seconds"],
            "precision": report["recipe"]["precision"],
            "device": machine["device"],
            "cpu": machine["cpu"],
            "threads": machine["threads"],
            "torch": machine["torch"],
            "date": report["created"][:10],
        }
        for phase, found in report["phases"].items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean and [min, max] of the metric per recipe and phase, and whether the bar is met."""
    heads = ["recipe", *PHASES, "retrained - dense", "dense spread", "bar"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        values = {p: [float(r["value"]) for r in rows if r["recipe"] == recipe and r["phase"] == p] for p in PHASES}
        mean = {p: sum(v) / len(v) for p, v in values.items() if v}
        cells = [f"{mean[p]:.4f} [{min(values[p]):.4f}, {max(values[p]):.4f}]" if values[p] else "-" for p in PHASES]
        spread = max(values["dense"]) - min(values["dense"])
        change = mean["retrained"] - mean["dense"]
        verdict = "met" if change >= -spread else "missed"
        lines.append(f"| {recipe} | {' | '.join(cells)} | {change:+.4f} | {spread:.4f} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names of bundled recipes; none: print the table of the stored rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run folders RECIPE-seedN")
    arguments = parser.parse_args()
    for recipe in arguments.recipes:
        new = []
        for seed in arguments.seeds:
            report = run_recipe(recipe, arguments.runs / f"{recipe}-seed{seed}", {"seed": seed})
            new += rows_of(report, recipe, seed)
        old = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        rows = [row for row in old if row["recipe"] != recipe] + new
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(new[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(table(list(csv.DictReader(RESULTS.open()))))


if __name__ == "__main__":
    main()
