"""How fast a sparse model is beside its dense twin, measured so that the answer can be trusted.

Both models run in one process and take turns, the order changing every round, so that a warm processor or a busy
neighbour meets both alike. The figure of a row is the median of the rounds' own ratios, not the ratio of two medians.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asp_kernels.swap import layer_backends
from asp_toolkit.errors import AspError
from asp_toolkit.report.environment import device_name
from asp_toolkit.report.speed import SpeedRow
from asp_toolkit.tasks.task import Task

__all__ = ["SpeedRow", "bench", "bench_export"]

Batch = Any
Forward = Callable[[nn.Module, Batch], Any]

_FEWEST_ROUNDS = 5  # below this a median says nothing
_SHORTEST_SAMPLE = 0.005  # seconds; shorter calls are timed several at a time


def bench(
    dense_model: nn.Module,
    sparse_model: nn.Module,
    forward: Forward,
    batches: Mapping[str, Batch] | Callable[[int], Batch],
    *,
    sizes: Sequence[int] = (1, 32),
    threads: int | None = None,
    dtype: torch.dtype | None = None,
    rounds: int = 30,
    seconds: float = 10.0,
    backends: Mapping[str, str] | None = None,
) -> list[SpeedRow]:
    """Measured rows, one per batch, in the order given.

    Args:
        forward: (model, batch) -> output; called in eval mode under `torch.inference_mode`.
        batches: batches by name, or a function making a batch of `b` samples for each b of `sizes`.
        threads: torch threads while measuring; None leaves them. The setting is put back afterwards.
        dtype: measure copies of both models, and of floating-point inputs, in this dtype; None takes them as they are.
        rounds: rounds per row, at least 5.
        seconds: stop a row early, but not before 5 rounds, when it has taken so long.
        backends: sparse layer -> backend; None asks the sparse model's own layers.

    Both models must sit on one device; modes (train, eval) of every submodule are put back afterwards.

    Raises:
        AspError: nothing to measure, too few rounds, models on different devices or of different dtypes.
    """
    named = dict(batches) if isinstance(batches, Mapping) else {f"batch {b}": batches(b) for b in sizes}
    if not named:
        raise AspError("bench: expected at least one batch, got none; give `batches` or `sizes`")
    if rounds < _FEWEST_ROUNDS:
        raise AspError(f"bench: expected at least {_FEWEST_ROUNDS} rounds for a median to mean something, got {rounds}")
    if threads is not None and threads < 1:
        raise AspError(f"bench: expected at least 1 thread, got {threads}")
    if dtype is not None:
        dense_model, sparse_model = (copy.deepcopy(model).to(dtype) for model in (dense_model, sparse_model))
    device, kind = _place(dense_model, "dense")
    other, other_kind = _place(sparse_model, "sparse")
    if device != other or kind != other_kind:
        raise AspError(
            f"bench: the dense model is {kind} on {device}, the sparse one {other_kind} on {other}; "
            "compare like with like: move one, or pass dtype"
        )
    rows = []
    with _threads(threads), _evaluating(dense_model), _evaluating(sparse_model), torch.inference_mode():
        for name, batch in named.items():
            ready = _moved(batch, device, dtype)
            rows.append(_row(name, ready, dense_model, sparse_model, forward, device, kind, rounds, seconds, backends))
    return rows


def bench_export(
    dense_model: nn.Module, sparse_model: nn.Module, task: Task, sizes: Sequence[int] = (1, 32), **options: Any
) -> list[SpeedRow]:
    """`bench` on the task's own test samples, taken from the first on and repeated where they are too few.

    Raises:
        AspError: as `bench`; or the task has no test samples.
    """
    if not len(task.test):
        raise AspError("bench: expected at least one test sample to measure with, got none")

    def batch(size: int) -> Batch:
        return task.collate([task.test[index % len(task.test)] for index in range(size)])

    return bench(dense_model, sparse_model, task.forward, batch, sizes=sizes, **options)


def _row(
    name: str,
    batch: Batch,
    dense_model: nn.Module,
    sparse_model: nn.Module,
    forward: Forward,
    device: torch.device,
    kind: str,
    rounds: int,
    seconds: float,
    backends: Mapping[str, str] | None,
) -> SpeedRow:
    shapes = list(_tensors(batch))
    if not shapes or shapes[0].ndim == 0 or shapes[0].shape[0] == 0:
        raise AspError(f"bench: batch '{name}': expected a first tensor with samples along its first axis")

    def sample(model: nn.Module, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            forward(model, batch)
        _synchronize(device)
        return (time.perf_counter() - start) / repeats

    for model in (dense_model, sparse_model):  # caches, allocators and lazy packing settle here
        sample(model, 2)
    shortest = min(sample(dense_model, 1), sample(sparse_model, 1))
    repeats = max(1, round(_SHORTEST_SAMPLE / max(shortest, 1e-7)))
    dense, sparse = [], []
    stop = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn % 2:
            sparse.append(sample(sparse_model, repeats))
            dense.append(sample(dense_model, repeats))
        else:
            dense.append(sample(dense_model, repeats))
            sparse.append(sample(sparse_model, repeats))
        if len(dense) >= _FEWEST_ROUNDS and time.perf_counter() > stop:
            break
    ratios = [a / b for a, b in zip(dense, sparse, strict=True)]
    size = shapes[0].shape[0]
    return SpeedRow(
        name=name,
        batch=size,
        inputs=", ".join(f"{'x'.join(map(str, t.shape))} {_plain(t.dtype)}" for t in shapes),
        dtype=kind,
        device=str(device),
        hardware=device_name(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        rounds=len(ratios),
        repeats=repeats,
        dense_ms=statistics.median(dense) * 1e3,
        dense_ms_p10=_percentile(dense, 10) * 1e3,
        dense_ms_p90=_percentile(dense, 90) * 1e3,
        sparse_ms=statistics.median(sparse) * 1e3,
        sparse_ms_p10=_percentile(sparse, 10) * 1e3,
        sparse_ms_p90=_percentile(sparse, 90) * 1e3,
        speedup=statistics.median(ratios),
        speedup_p10=_percentile(ratios, 10),
        speedup_p90=_percentile(ratios, 90),
        dense_per_second=size / statistics.median(dense),
        sparse_per_second=size / statistics.median(sparse),
        backends=dict(backends) if backends is not None else layer_backends(sparse_model),
    )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _percentile(values: Sequence[float], percent: int) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _place(model: nn.Module, which: str) -> tuple[torch.device, str]:
    """The device of a model and the dtypes of its floating-point tensors, e.g. (cpu, "float32")."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise AspError(f"bench: the {which} model is spread over {', '.join(sorted(map(str, devices)))}; move it")
    kinds = sorted({_plain(tensor.dtype) for tensor in tensors if tensor.is_floating_point()})
    return next(iter(devices), torch.device("cpu")), "+".join(kinds) or "none"


def _tensors(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _moved(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device, dtype) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device, dtype) for value in batch)
    return batch


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:  # each its own: a frozen norm may be in eval mode
            module.training = training
