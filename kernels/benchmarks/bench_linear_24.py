"""2:4 products against torch's dense ones: weights cold in cache, interleaved rounds, medians of per-round ratios.

python kernels/benchmarks/bench_linear_24.py [--threads 1] [--quick]   -> results/linear_24*.csv
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from timing import ratio, rounds, write

from asp_kernels import Packed24
from asp_kernels.backends import cpu

SHAPES = ((128, 128), (256, 256), (768, 768), (3072, 768), (768, 3072), (4096, 4096))
ROWS = (1, 4, 8, 16, 32, 64, 256)
COLD = 192 << 20  # bytes of copies of a weight to go round, several times what the caches hold


def measure(rows: int, cols: int, samples: int, dtype: torch.dtype, seconds: float) -> dict[str, object]:
    """One row of the table."""
    copies = max(2, min(64, COLD // (rows * cols * dtype.itemsize)))
    dense = torch.randn(rows, cols, dtype=dtype)
    dense *= cpu.nm_mask(dense.abs(), 2, 4)
    weights = [dense.clone() for _ in range(copies)]
    packed = [Packed24.from_dense(weight) for weight in weights]
    prepared = [torch.ops.mkldnn._reorder_linear_weight(w, samples) for w in weights]
    x, bias = torch.randn(samples, cols, dtype=dtype), torch.randn(rows, dtype=dtype)

    def sparse(batched: bool, number: int) -> torch.Tensor:
        one = packed[number % copies]
        return cpu.linear_24(x, one.values, one.codes, bias, batched)

    for number in range(copies):
        sparse(False, number)
    contenders = {
        "dense": lambda number: F.linear(x, weights[number % copies], bias),
        "prepacked": lambda number: torch.ops.mkldnn._linear_pointwise(
            x, prepared[number % copies], bias, "none", [], ""
        ),
        "batch": lambda number: sparse(True, number),
        "decode": lambda number: sparse(False, number),
    }
    times = rounds(contenders, seconds)
    best = min(("batch", "decode"), key=lambda name: statistics.median(times[name]))
    row: dict[str, object] = {
        "level": cpu.about(),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "cols": cols,
        "samples": samples,
        "form": best,
        "other_ms": f"{1e3 * statistics.median(times['batch' if best == 'decode' else 'decode']):.4f}",
        "sparse_ms": f"{1e3 * statistics.median(times[best]):.4f}",
        "dense_ms": f"{1e3 * statistics.median(times['dense']):.4f}",
        "prepacked_ms": f"{1e3 * statistics.median(times['prepacked']):.4f}",
        "dense_per_sparse": f"{ratio(times, 'dense', best):.3f}",
        "prepacked_per_sparse": f"{ratio(times, 'prepacked', best):.3f}",
        "rounds": len(times["dense"]),
    }
    print(*row.values(), flush=True)
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seconds", type=float, default=0.6, help="for each row of the table")
    options.add_argument("--quick", action="store_true", help="few shapes, nothing written")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    rows = ROWS if not given.quick else (1, 8, 32, 256)
    table = [
        measure(*shape, samples, dtype, given.seconds)
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
        for samples in rows
    ]
    if not given.quick:
        write("linear_24" if given.threads == 1 else f"linear_24_{given.threads}_threads", table)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
