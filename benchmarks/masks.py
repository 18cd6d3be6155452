"""What masks cost, and what they keep: `python benchmarks/masks.py`.

Cost: each pattern's mask beside the usual way to write it, the two in turn in one process on one thread. Milliseconds
are processor time, which on one thread is the time itself but for what other processes take; `ratio` is the median of
ours / other over the rounds, `extra` the peak memory that a mask needs, itself included, over the size of the weight,
measured in a fresh process. Kept: share of a weight's magnitude that the mask keeps, for weights drawn with seed 0.
Rows go to benchmarks/results/masks.csv. All of it is torch alone: kernels/benchmarks/bench_mask.py has the C++ kernel.
"""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import torch
from torch import Tensor

from asp_toolkit.patterns import parse
from asp_toolkit.report import environment

os.environ["ASP_KERNELS_CPU"] = "off"  # read at the first mask
RESULTS = Path(__file__).parent / "results" / "masks.csv"
ROUNDS = 5


def topk(scores: Tensor, n: int, m: int) -> Tensor:
    """N:M as most write it; which of equal scores stay is up to the device."""
    groups = scores.view(-1, m)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(1, groups.topk(n, dim=1).indices, True).view_as(scores)


def every_mask(scores: Tensor) -> Tensor:
    """2:4 transposable: the sums of all 90 masks of every tile by one matrix product."""
    rows = product(combinations(range(4), 2), repeat=4)
    masks = [mask for mask in rows if all(sum(c in row for row in mask) == 2 for c in range(4))]
    table = torch.tensor([[c in row for row in mask for c in range(4)] for mask in masks])  # (90, 16)
    tiles = scores.view(scores.shape[0] // 4, 4, -1, 4).transpose(1, 2).reshape(-1, 16)
    best = (tiles @ table.t().to(tiles.dtype)).argmax(1)
    return table[best].view(scores.shape[0] // 4, -1, 4, 4).transpose(1, 2).reshape(scores.shape)


def topk_of_all(scores: Tensor, kept: int) -> Tensor:
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().topk(kept).indices] = True
    return mask.view_as(scores)


def topk_of_blocks(scores: Tensor, size: int, kept: float) -> Tensor:
    blocks = scores.view(scores.shape[0] // size, size, -1, size).sum((1, 3))
    mask = topk_of_all(blocks, round(kept * blocks.numel()))
    return mask.repeat_interleave(size, 0).repeat_interleave(size, 1)


COSTS: list[tuple[str, int, torch.dtype, str, Callable[[Tensor], Tensor] | None]] = [
    ("2:4", 4096, torch.float32, "topk", lambda scores: topk(scores, 2, 4)),
    ("2:4", 4096, torch.bfloat16, "topk", lambda scores: topk(scores, 2, 4)),
    ("2:4", 2048, torch.float16, "topk", lambda scores: topk(scores, 2, 4)),
    ("4:8", 2048, torch.float32, "topk", lambda scores: topk(scores, 4, 8)),
    ("8:16", 2048, torch.float32, "topk", lambda scores: topk(scores, 8, 16)),
    ("16:32", 2048, torch.float32, "topk", lambda scores: topk(scores, 16, 32)),
    ("16:32", 2048, torch.bfloat16, "topk", lambda scores: topk(scores, 16, 32)),
    ("2:4 transposable", 4096, torch.float32, "90 masks by matmul", every_mask),
    ("2:4 transposable greedy", 4096, torch.float32, "", None),
    ("4:8 transposable", 1024, torch.float32, "", None),
    ("unstructured 0.9", 4096, torch.float32, "topk", lambda scores: topk_of_all(scores, round(0.1 * scores.numel()))),
    ("unstructured 0.9 per row", 4096, torch.float32, "topk", lambda scores: topk(scores, 410, 4096)),
    ("block 16x16 0.8", 4096, torch.float32, "sum, topk", lambda scores: topk_of_blocks(scores, 16, 0.2)),
    ("64:2:8", 4096, torch.float32, "", None),
]
WEIGHTS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": lambda generator: torch.randn(1024, 1024, generator=generator),
    "lognormal": lambda generator: torch.randn(1024, 1024, generator=generator).exp(),
    "uniform": lambda generator: torch.rand(1024, 1024, generator=generator),
}
KEPT = ("2:4", "2:4 transposable", "2:4 transposable greedy", "4:8", "4:8 transposable", "64:2:8")


def weight(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(0)).abs().to(dtype)


def milliseconds(run: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - start)


def extra(text: str, size: int, dtype: torch.dtype) -> float:
    """Peak memory of one mask over the weight's own size, in a fresh process on Linux."""
    code = (
        "import re, sys; sys.path.insert(0, 'benchmarks'); import masks, torch; torch.set_num_threads(1)\n"
        f"pattern, weight = masks.parse({text!r}), masks.weight({size}, {dtype})\n"
        "pattern.mask(weight[:64, :64])\n"  # loads what is loaded once
        "def kilobytes(key): return int(re.search(key + r':\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak so far is forgotten
        "before = kilobytes('VmRSS'); mask = pattern.mask(weight)\n"
        "print((kilobytes('VmHWM') - before) * 1024 / (weight.numel() * weight.element_size()))"
    )
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    return float(ran.stdout)


def cost(
    text: str, size: int, dtype: torch.dtype, way: str, other: Callable[[Tensor], Tensor] | None
) -> dict[str, object]:
    pattern, scores = parse(text), weight(size, dtype)
    mask = pattern.mask(scores)
    theirs = other(scores) if other else mask
    assert int((theirs != mask).sum()) <= 0.1 * mask.numel(), f"{way} is no {text}"  # ties in 16 bits differ
    ours_ms, other_ms = [], []
    for _ in range(ROUNDS):
        ours_ms.append(milliseconds(lambda: pattern.mask(scores)))
        if other:
            other_ms.append(milliseconds(lambda: other(scores)))
    return {
        "ms": round(statistics.median(ours_ms), 1),
        "other": way,
        "other_ms": round(statistics.median(other_ms), 1) if other else "",
        "ratio": round(statistics.median(a / b for a, b in zip(ours_ms, other_ms, strict=True)), 3) if other else "",
        "extra": round(extra(text, size, dtype), 2),
        "rounds": ROUNDS,
    }


def kept(text: str, weights: str) -> dict[str, object]:
    scores = WEIGHTS[weights](torch.Generator().manual_seed(0)).abs()
    mask = parse(text).mask(scores)
    share = scores[mask].double().sum() / scores.double().sum()
    return {"weights": weights, "density": mask.double().mean().item(), "kept_magnitude": round(share.item(), 4)}


def main() -> None:
    torch.set_num_threads(1)
    machine = environment()
    measured = [((text, size, dtype), cost(text, size, dtype, way, other)) for text, size, dtype, way, other in COSTS]
    measured += [((text, 1024, torch.float32), kept(text, weights)) for text in KEPT for weights in WEIGHTS]
    columns = ("weights", "ms", "other", "other_ms", "ratio", "extra", "density", "kept_magnitude", "rounds")
    rows = []
    for (text, size, dtype), found in measured:
        rows.append(
            {
                "pattern": text,
                "shape": f"{size}x{size}",
                "dtype": str(dtype).removeprefix("torch."),
                **{column: found.get(column, "") for column in columns},
                "device": "cpu",
                "cpu": machine["cpu"],
                "threads": 1,
                "torch": machine["torch"],
                "date": datetime.date.today().isoformat(),
            }
        )
        print(*(f"{key} {value}" for key, value in rows[-1].items() if value != ""), sep=", ")
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
