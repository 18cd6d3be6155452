"""Answer requests from several threads with a packed checkpoint, and say how long they took.

    python examples/own_training_loop.py               # writes digits_packed
    python examples/serve_packed.py [FOLDER] [--requests 200] [--threads 4]

A server keeps one model for all threads: the layers hold their weights packed, and answering changes nothing.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from own_training_loop import data, network

from asp_toolkit import load_packed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="digits_packed")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()

    model = load_packed(options.folder, network()).eval()  # damaged or foreign files are refused
    print(model)
    torch.set_num_threads(1)  # the requests are what runs in parallel
    images, digits = data()

    def answer(request: int) -> tuple[bool, float]:
        """Whether the answer was right, and the milliseconds it took."""
        began = time.perf_counter()
        row = request % len(images)
        with torch.inference_mode():
            found = model(images[row : row + 1]).argmax(1)  # (1, 64) -> (1,)
        return bool(found == digits[row]), (time.perf_counter() - began) * 1e3

    began = time.perf_counter()
    with ThreadPoolExecutor(options.threads) as threads:
        answers = list(threads.map(answer, range(options.requests)))
    seconds = time.perf_counter() - began

    times = torch.tensor([milliseconds for _, milliseconds in answers])
    p50, p90, p99 = times.quantile(torch.tensor([0.5, 0.9, 0.99])).tolist()
    print(f"latency in ms: p50 {p50:.3f}  p90 {p90:.3f}  p99 {p99:.3f}")
    print(f"{options.requests} requests, {options.threads} threads: {options.requests / seconds:.0f} a second")
    print(f"right: {sum(right for right, _ in answers) / len(answers):.3f}")


if __name__ == "__main__":
    main()
