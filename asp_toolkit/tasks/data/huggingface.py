"""Data sets of the `datasets` library: from the hub, a local folder, or files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.task_sections import FilesData, HubData
from asp_toolkit.tasks.data.labels import class_numbers
from asp_toolkit.tasks.data.sets import Mapped, Source, Texts
from asp_toolkit.tasks.task import MapDataset

BUILDERS: dict[str, str] = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the library's progress bars, which would run into the caller's."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def splits(data: HubData) -> tuple[Any, Any]:
    """Training and test split, each a `datasets.Dataset`.

    A local folder may be one that `save_to_disk` wrote, or hold data files as `datasets.load_dataset` takes them.

    Raises:
        AspError: no such data set, configuration or split.
    """
    folder = Path(data.name).expanduser()
    try:
        with _quietly():
            if (folder / "dataset_dict.json").is_file():
                found: Any = datasets.load_from_disk(str(folder))
            else:
                found = datasets.load_dataset(str(folder) if folder.is_dir() else data.name, data.config)
    except Exception as error:
        raise AspError(
            f"task.data.name: {data.name!r} is no local folder of data, and could not be had from the hub "
            f"({type(error).__name__}: {error}); on a machine without network name a folder that `save_to_disk` wrote"
        ) from error
    for key, split in (("train_split", data.train_split), ("test_split", data.test_split)):
        if split not in found:
            raise AspError(f"task.data.{key}: {data.name!r} has no split {split!r}; {closest(split, found)}")
    return found[data.train_split], found[data.test_split]


def column(table: Any, name: str, key: str) -> None:
    """Raises: AspError if `table` lacks the column `name`."""
    if name not in table.column_names:
        raise AspError(f"{key}: there is no column {name!r}; {closest(name, table.column_names)}")


def images(data: HubData, channels: int) -> Source:
    """Images decoded when asked for: 1 channel is grey, 3 are RGB."""
    from asp_toolkit.tasks.data.pictures import decoded_sample  # here: a text run needs no torchvision

    tables = splits(data)
    for table in tables:
        column(table, data.image, "task.data.image")
    labels, names, classes = _labels(tables, data.label)
    decode = functools.partial(decoded_sample, channels=channels)
    train, test = (
        Mapped(_Numbered(table.select_columns([data.image]), data.image, numbers), decode)
        for table, numbers in zip(tables, labels, strict=True)
    )
    return Source(train, test, classes, names)


@dataclass(frozen=True)
class _Numbered:
    """One column of a table beside class numbers that were read once."""

    table: Any
    name: str
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.table[int(index)][self.name], self.numbers[index]


def texts(data: HubData) -> Source:
    """Texts and class numbers, read into memory."""
    return _texts(splits(data), data.text, data.label)


def files(data: FilesData) -> Source:
    """Texts and class numbers of two .csv, .json, .jsonl or .parquet files.

    Raises:
        AspError: a file is not there, of another kind, or cannot be read; a column is missing.
    """
    train, test = (_file(name, key) for name, key in ((data.train, "task.data.train"), (data.test, "task.data.test")))
    return _texts((train, test), data.text, data.label)


def _file(name: str, key: str) -> Any:
    path = Path(name).expanduser()
    if not path.is_file():
        raise AspError(f"{key}: there is no file {path}")
    if path.suffix.lower() not in BUILDERS:
        raise AspError(f"{key}: expected a file ending in {', '.join(BUILDERS)}, got {path.name}")
    try:
        with _quietly():
            return datasets.load_dataset(BUILDERS[path.suffix.lower()], data_files=str(path), split="train")
    except Exception as error:
        raise AspError(f"{key}: {path} cannot be read ({type(error).__name__}: {error})") from error


def _texts(tables: tuple[Any, Any], text: str, label: str) -> Source:
    for name, table in zip(("training", "test"), tables, strict=True):
        column(table, text, "task.data.text")
        for row, value in enumerate(table[text]):
            if not isinstance(value, str):
                raise AspError(
                    f"task.data.text: row {row} of the {name} set has {value!r} in column {text!r}, expected a text"
                )
    labels, names, classes = _labels(tables, label)
    return Source(Texts(list(tables[0][text]), labels[0]), Texts(list(tables[1][text]), labels[1]), classes, names)


def _labels(tables: tuple[Any, Any], label: str) -> tuple[tuple[list[int], list[int]], tuple[str, ...], int | None]:
    for table in tables:
        column(table, label, "task.data.label")
    train, test, names = class_numbers(list(tables[0][label]), list(tables[1][label]))
    feature = tables[0].features[label]
    names = names or tuple(getattr(feature, "names", None) or ())
    return (train, test), names, len(names) or None


def questions(data: HubData) -> tuple[MapDataset, MapDataset]:
    """Rows in SQuAD's form, with columns question, context and answers."""
    train, test = splits(data)
    for table in (train, test):
        for name in ("question", "context", "answers"):
            column(table, name, "task.data.name")
    return train, test
