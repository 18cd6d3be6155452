"""N:M masks against one read of the scores, one thread: python kernels/benchmarks/bench_mask.py -> results/mask.csv"""

from __future__ import annotations

import statistics

import torch
from timing import ratio, rounds, write

from asp_kernels.backends import cpu

SIZE = 4096


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table: list[dict[str, object]] = []
    for dtype in (torch.float32, torch.bfloat16):
        scores = [torch.randn(SIZE, SIZE).abs().to(dtype) for _ in range(4)]
        integers = [one.view(torch.int32) for one in scores]
        for n, m in ((2, 4), (1, 4), (4, 8), (4, 16)):
            times = rounds(
                {
                    "read": lambda number, of=integers: of[number % 4].amax(),
                    "mask": lambda number, of=scores, n=n, m=m: cpu.nm_mask(of[number % 4], n, m),
                }
            )
            row: dict[str, object] = {
                "level": cpu.about(),
                "dtype": str(dtype).removeprefix("torch."),
                "pattern": f"{n}:{m}",
                "size": SIZE,
                "mask_ms": f"{1e3 * statistics.median(times['mask']):.3f}",
                "read_ms": f"{1e3 * statistics.median(times['read']):.3f}",
                "mask_per_read": f"{ratio(times, 'mask', 'read'):.3f}",
                "rounds": len(times["mask"]),
            }
            print(*row.values(), flush=True)
            table.append(row)
    write("mask", table)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
