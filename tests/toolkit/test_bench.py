"""bench: honest rows, and nothing left changed behind it."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asp_kernels.formats import PackedNM
from asp_kernels.swap import swap_
from asp_toolkit.bench import bench, bench_export
from asp_toolkit.errors import AspError
from asp_toolkit.tasks.task import Task


class Slow(nn.Module):
    """Sleeps, and records under which conditions it was called."""

    def __init__(self, seconds: float, calls: list[tuple[str, bool, bool, int]], name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds, self.calls, self.name = seconds, calls, name

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self.name, self.training, torch.is_inference_mode_enabled(), torch.get_num_threads()))
        time.sleep(self.seconds)
        return x * self.weight


def call(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def test_a_sparse_model_twice_as_fast_has_a_ratio_of_two() -> None:
    calls: list[tuple[str, bool, bool, int]] = []
    (row,) = bench(Slow(0.006, calls, "dense"), Slow(0.003, calls, "sparse"), call, torch.ones, sizes=(4,), rounds=7)
    assert 1.6 < row.speedup < 2.4
    assert row.speedup_p10 <= row.speedup <= row.speedup_p90
    assert row.dense_ms >= 6
    assert row.sparse_per_second == pytest.approx(4 / (row.sparse_ms / 1e3))
    assert (row.batch, row.rounds, row.inputs, row.dtype, row.device) == (4, 7, "4 float32", "float32", "cpu")
    assert row.hardware
    assert row.torch == torch.__version__


def test_models_take_turns_and_the_order_changes() -> None:
    calls: list[tuple[str, bool, bool, int]] = []
    (row,) = bench(Slow(0.006, calls, "d"), Slow(0.006, calls, "s"), call, {"x": torch.ones(2, 4)}, rounds=6)
    names = "".join(name for name, *_ in calls)
    assert row.repeats == 1
    assert names.endswith("dssddssddssd")


def test_models_run_in_eval_and_inference_mode_with_the_threads_asked_for() -> None:
    calls: list[tuple[str, bool, bool, int]] = []
    before = torch.get_num_threads()
    (row,) = bench(Slow(0.0, calls, "d"), Slow(0.0, calls, "s"), call, {"x": torch.ones(1, 4)}, threads=2, rounds=5)
    assert {rest for _, *rest in map(tuple, calls) for rest in [tuple(rest)]} == {(False, True, 2)}
    assert row.threads == 2
    assert torch.get_num_threads() == before


def test_modes_and_threads_are_put_back_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model.train()
    model[1].eval()
    before = torch.get_num_threads()

    def broken(model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        bench(model, copy.deepcopy(model), broken, {"x": torch.ones(2, 4)}, threads=before + 1)
    assert [module.training for module in model] == [True, False, True]
    assert torch.get_num_threads() == before


def test_nested_batches_and_dtype_measure_copies() -> None:
    model = nn.Linear(4, 4)

    def forward(model: nn.Module, batch: Any) -> Any:
        assert batch["ids"].dtype == torch.int64
        assert batch["x"][0].dtype == torch.bfloat16
        return model(batch["x"][0])

    batch = {"ids": torch.zeros(3, 2, dtype=torch.int64), "x": (torch.ones(3, 4),)}
    (row,) = bench(model, copy.deepcopy(model), forward, {"mixed": batch}, dtype=torch.bfloat16, rounds=5)
    assert (row.name, row.batch, row.dtype) == ("mixed", 3, "bfloat16")
    assert row.inputs == "3x2 int64, 3x4 bfloat16"
    assert model.weight.dtype == torch.float32


def test_a_row_stops_at_its_time_but_not_before_five_rounds() -> None:
    calls: list[tuple[str, bool, bool, int]] = []
    models = Slow(0.006, calls, "d"), Slow(0.006, calls, "s")
    (row,) = bench(*models, call, {"x": torch.ones(1, 4)}, rounds=1000, seconds=0.0)
    assert row.rounds == 5


def test_backends_of_sparse_layers_are_told() -> None:
    dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        dense[0].weight.view(8, 2, 4)[:, :, 2:] = 0
    sparse = copy.deepcopy(dense)
    swap_(sparse, {"0.weight": PackedNM.from_dense(sparse[0].weight, 2, 4)})
    (row,) = bench(dense, sparse, call, {"x": torch.ones(2, 8)}, rounds=5)
    assert row.backends == {"0": "reference"}


def task_of(samples: list[Tensor]) -> Task:
    return Task(
        kind="test", build=lambda: nn.Linear(4, 4), train=samples, test=samples, collate=torch.stack,
        loss=lambda model, batch, smoothing: model(batch).sum(), measure=lambda model, batch: {}, forward=call,
    )  # fmt: skip


def test_an_export_is_measured_on_the_tasks_samples_repeated_where_they_are_few() -> None:
    rows = bench_export(nn.Linear(4, 4), nn.Linear(4, 4), task_of([torch.ones(4)] * 3), sizes=(2, 5), rounds=5)
    assert [(row.name, row.inputs) for row in rows] == [("batch 2", "2x4 float32"), ("batch 5", "5x4 float32")]
    with pytest.raises(AspError, match="at least one test sample"):
        bench_export(nn.Linear(4, 4), nn.Linear(4, 4), task_of([]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": {}}, "at least one batch"),
        ({"rounds": 2}, "at least 5 rounds"),
        ({"threads": 0}, "at least 1 thread"),
        ({"batches": {"empty": torch.ones(0, 4)}}, "batch 'empty'"),
        ({"batches": {"text": "words"}}, "batch 'text'"),
        ({"sparse_model": nn.Linear(4, 4).double()}, "the dense model is float32 on cpu, the sparse one float64"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"sparse_model": nn.Linear(4, 4), "batches": {"x": torch.ones(1, 4)}, **arguments}
    with pytest.raises(AspError, match=message):
        bench(nn.Linear(4, 4), forward=call, **given)
