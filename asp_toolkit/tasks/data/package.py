"""Images in one csv file that an installed package ships."""

from __future__ import annotations

import warnings

import numpy
import torch

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import PackageData
from asp_toolkit.tasks.data.sets import Images, Source, stratified
from asp_toolkit.tasks.names import package_folder


def images(data: PackageData, seed: int) -> Source:
    """One row per image; a share of each class is held out by `seed`.

    Raises:
        AspError: no such package or file, or rows that are not `shape` pixels of 0..255 and one class number.
    """
    path = package_folder(data.package, "task.data.package") / data.file
    if not path.is_file():
        raise AspError(f"task.data.file: the package {data.package!r} has no file {data.file!r} (looked for {path})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # numpy warns of an empty file
            table = torch.from_numpy(numpy.loadtxt(path, delimiter=",", dtype=numpy.float32, ndmin=2))
    except (ValueError, UserWarning, OSError, EOFError) as error:
        raise AspError(f"task.data.file: {path} is not a csv file of numbers: {error}") from error
    channels, height, width = data.shape
    columns = table.shape[1]
    if columns != channels * height * width + 1:
        raise AspError(
            f"task.data.shape: {list(data.shape)} and a label make {channels * height * width + 1} columns, "
            f"{path.name} has {columns}"
        )
    if not -columns <= data.label_column < columns:
        raise AspError(f"task.data.label_column: expected -{columns} to {columns - 1}, got {data.label_column}")
    column = data.label_column % columns
    labels = table[:, column].long()
    pixels = torch.cat([table[:, :column], table[:, column + 1 :]], dim=1)
    whole = torch.equal(labels.float(), table[:, column])
    if not whole or sorted(set(labels.tolist())) != list(range(int(labels.max()) + 1)):
        raise AspError(
            f"task.data.label_column: column {data.label_column} of {path.name} does not hold class numbers 0, 1, 2, …"
        )
    if not torch.equal(pixels.byte().float(), pixels):
        raise AspError(
            f"task.data.label_column: {path.name} holds values that are not pixels 0..255; is another column the label?"
        )
    pixels = pixels.byte().reshape(-1, *data.shape)
    train, test = stratified(labels, data.test_fraction, seed)
    return Source(
        Images(pixels[train], labels[train].tolist()),
        Images(pixels[test], labels[test].tolist()),
        int(labels.max()) + 1,
    )
