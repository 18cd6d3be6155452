"""The order of the data and its augmentation depend on (seed, stream, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asp_toolkit import loaders
from asp_toolkit.errors import AspError
from asp_toolkit.loaders import batch_count, stream_seed, train_loader
from asp_toolkit.recipe.schema import Optimizer, Training
from asp_toolkit.tasks.task import MapDataset, Task


class Plain:
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Any:
        return float(index)


class Augmented(Plain):
    """Sample i is i plus a random share, as a random crop would be."""

    def __getitem__(self, index: int, /) -> Any:
        return index + torch.rand(()).item()


class Fetched(Augmented):
    """As `datasets.Dataset`: a whole batch is fetched at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [index + share for index, share in zip(indices, torch.rand(len(indices)).tolist(), strict=True)]


def unused(*_: Any) -> Any:
    raise AssertionError("loading needs no model")


def task_of(train: MapDataset, test: MapDataset | None = None, workers: int = 0) -> Task:
    test = Plain(5) if test is None else test
    return Task("numbers", nn.Identity, train, test, torch.tensor, unused, unused, unused, workers=workers)


def section(batch_size: int) -> Training:
    return Training(batch_size=batch_size, optimizer=Optimizer(lr=0.1))


def batches(task: Task, batch_size: int, stream: str = "0/dense", epoch: int = 0, skip: int = 0) -> list[list[float]]:
    return [batch.tolist() for batch in train_loader(task, section(batch_size), stream, epoch, skip)]


def flat(found: list[list[float]]) -> list[float]:
    return [value for batch in found for value in batch]


@pytest.fixture(autouse=True)
def _global_generator_is_left_alone() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def test_every_sample_comes_once_and_shuffled() -> None:
    found = batches(task_of(Plain(40)), 8)
    assert [len(batch) for batch in found] == [8] * 5
    assert sorted(flat(found)) == list(range(40))
    assert flat(found) != sorted(flat(found))


def test_the_order_depends_on_stream_and_epoch_alone() -> None:
    task = task_of(Plain(64))
    first = batches(task, 8)
    with torch.random.fork_rng():
        torch.manual_seed(123)
        torch.rand(5)
        assert batches(task, 8) == first
    assert batches(task, 8, epoch=1) != first
    assert batches(task, 8, stream="1/dense") != first
    assert batches(task, 8, stream="0/retrain") != first
    # The batch size only cuts the same order into other pieces.
    assert flat(batches(task, 16)) == flat(first)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 40), st.integers(0, 3))
def test_skipping_gives_the_tail_of_the_same_order(size: int, batch_size: int, skip: int, epoch: int) -> None:
    task = task_of(Augmented(size))
    everything = batches(task, batch_size, epoch=epoch)
    skip = min(skip, len(everything))
    assert batches(task, batch_size, epoch=epoch, skip=skip) == everything[skip:]
    assert len(train_loader(task, section(batch_size), "0/dense", epoch, skip)) == len(everything) - skip


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 20))
def test_batches_are_counted_as_they_come(size: int, batch_size: int) -> None:
    whole = sum(1 for start in range(0, size, batch_size) if start + batch_size <= size)
    assert batch_count(size, batch_size, drop_last=True) == whole
    assert batch_count(size, batch_size, drop_last=False) == len(range(0, size, batch_size))


def test_a_part_filled_batch_is_left_out_unless_it_is_the_only_one() -> None:
    assert [len(batch) for batch in batches(task_of(Plain(10)), 4)] == [4, 4]
    assert [len(batch) for batch in batches(task_of(Plain(3)), 4)] == [3]


@pytest.mark.parametrize("data", [Augmented(12), Fetched(12)])
def test_augmentation_does_not_depend_on_workers_or_skipping(data: MapDataset) -> None:
    task = task_of(data)
    first = batches(task, 4)
    assert batches(task, 4) == first
    assert batches(task, 4, skip=2) == first[2:]
    assert batches(replace(task, workers=2), 4) == first
    assert batches(replace(task, workers=2), 4, skip=1) == first[1:]


def test_augmentation_differs_by_epoch_sample_and_stream() -> None:
    def shares(epoch: int, stream: str = "0/dense") -> dict[int, float]:
        return {int(value): value % 1 for value in flat(batches(task_of(Augmented(12)), 4, stream, epoch))}

    first = shares(0)
    assert len(set(first.values())) == 12
    for other in (shares(1), shares(0, "1/dense")):
        assert all(abs(first[index] - other[index]) > 1e-9 for index in range(12))


def test_a_sample_is_augmented_alike_whatever_batch_it_is_in() -> None:
    def by_index(batch_size: int) -> dict[int, float]:
        return {int(value): value for value in flat(batches(task_of(Augmented(12)), batch_size))}

    assert by_index(3) == by_index(4) == by_index(12)


def test_a_failing_sample_leaves_the_generator_as_it_was() -> None:
    class Broken(Plain):
        def __getitem__(self, index: int, /) -> Any:
            torch.rand(())
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        batches(task_of(Broken(4)), 4)


def test_the_training_may_draw_between_batches() -> None:
    """Drop-out and the loader must not disturb each other."""
    task = task_of(Augmented(12))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = torch.rand(3).tolist()
        torch.manual_seed(0)
        drawn, loaded = [], []
        for batch in train_loader(task, section(4), "0/dense", 0):
            loaded.append(batch.tolist())
            drawn.append(torch.rand(()).item())
    assert loaded == batches(task, 4)
    assert drawn == alone


def test_test_samples_come_all_and_in_order() -> None:
    loader = loaders.test_loader(task_of(Plain(4), Plain(10)), 4)
    found: list[Tensor] = list(loader)
    assert [batch.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3


def test_no_samples_is_an_error() -> None:
    with pytest.raises(AspError, match="no training samples"):
        train_loader(task_of(Plain(0)), section(4), "0/dense", 0)
    with pytest.raises(AspError, match="no test samples"):
        loaders.test_loader(task_of(Plain(4), Plain(0)), 4)


def test_stream_seeds_are_fixed_distinct_and_fit_a_generator() -> None:
    # From SHA-256 of "0/dense/order/0": the same in every process and version of Python.
    assert stream_seed("0/dense", "order", 0) == stream_seed("0/dense/order", 0) == 6835649063680869523
    seeds = {stream_seed("0/dense", epoch, index) for epoch in range(20) for index in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
