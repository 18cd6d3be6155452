"""Data sets of torchvision.datasets, from raw files on this machine or by torchvision's own download."""

from __future__ import annotations

import functools
import gzip
import inspect
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.task_sections import TorchvisionData
from asp_toolkit.tasks.data.pictures import decoded_sample
from asp_toolkit.tasks.data.sets import Images, Mapped, Source
from asp_toolkit.tasks.task import MapDataset

SPLITS: dict[str, tuple[str, str]] = {"OxfordIIITPet": ("trainval", "test"), "ImageNet": ("train", "val")}
"""Names of the two splits where they are not "train" and "test"."""


def images(data: TorchvisionData, channels: int) -> Source:
    """Training and test split; kept as uint8 in memory where torchvision holds them as one array.

    `local` is used where it exists: its raw files (.gz or not) of the MNIST family are unpacked to ROOT/NAME/raw, for
    other classes it takes the place of `root`. Otherwise torchvision downloads to `root`.

    Args:
        channels: of the images that are decoded one by one: 1 for grey, 3 for colour.

    Raises:
        AspError: unknown class, or the data can neither be found nor downloaded.
    """
    datasets: Any = torchvision.datasets
    if data.name not in datasets.__all__:
        raise AspError(
            f"task.data.name: torchvision.datasets has no {data.name!r}; {closest(data.name, datasets.__all__)}"
        )
    kind = getattr(datasets, data.name)
    root, local = Path(data.root).expanduser(), Path(data.local).expanduser() if data.local else None
    if local is not None and local.is_dir():
        if issubclass(kind, datasets.MNIST):
            _unpack(local, root / data.name / "raw")
        else:
            root = local
    train, test = (_open(kind, data, root, arguments) for arguments in _splits(kind, data.name))
    classes = getattr(train, "classes", None)
    parts = _in_memory(train, channels), _in_memory(test, channels)
    known = [part.labels for part in parts if isinstance(part, Images)]
    count = len(classes) if classes is not None else max(map(max, known)) + 1 if known else None
    return Source(*parts, count, tuple(str(name) for name in classes or ()))


def _splits(kind: Any, name: str) -> list[dict[str, Any]]:
    parameters = inspect.signature(kind).parameters
    if "train" in parameters:
        return [{"train": True}, {"train": False}]
    if "split" in parameters:
        return [{"split": split} for split in SPLITS.get(name, ("train", "test"))]
    raise AspError(
        f"task.data.name: torchvision's {name} has no training and test split; use source: folder or callable"
    )


def _open(kind: Any, data: TorchvisionData, root: Path, arguments: dict[str, Any]) -> Any:
    can_download = "download" in inspect.signature(kind).parameters
    try:
        try:
            return kind(root, **arguments, **({"download": False} if can_download else {}))
        except (RuntimeError, OSError):
            if not can_download:
                raise
            return kind(root, **arguments, download=True)
    except Exception as error:
        looked = f"in {data.local} or {root}" if data.local else f"in {root}"
        way_out = (
            f"; try: {data.hint}"
            if data.hint
            else "; fetch it on a machine with network and name its folder as task.data.local"
        )
        raise AspError(
            f"task.data: {data.name} is not {looked}, and downloading it failed ({error}){way_out}"
        ) from error


def _unpack(local: Path, raw: Path) -> None:
    """Copy the raw files of `local` to `raw`, unzipped; each appears when it is whole."""
    for packed in sorted(local.glob("*-ubyte*")):
        target = raw / (packed.stem if packed.suffix == ".gz" else packed.name)
        if target.exists():
            continue
        try:
            raw.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=raw, prefix=f".{target.name}.", suffix=".part")
            try:
                with (
                    os.fdopen(handle, "wb") as out,
                    gzip.open(packed) if packed.suffix == ".gz" else packed.open("rb") as file,
                ):
                    shutil.copyfileobj(file, out)
                os.chmod(part, 0o644)
                os.replace(part, target)
            finally:
                Path(part).unlink(missing_ok=True)
        except (OSError, EOFError) as error:
            raise AspError(f"task.data.local: {packed} could not be unpacked to {raw}: {error}") from error


def _in_memory(data: Any, channels: int) -> MapDataset:
    pixels = getattr(data, "data", None)
    labels = getattr(data, "targets", getattr(data, "labels", None))
    if not hasattr(pixels, "dtype") or labels is None:
        return Mapped(data, functools.partial(decoded_sample, channels=channels))
    tensor: Tensor = torch.as_tensor(pixels)
    if tensor.ndim == 3:
        tensor = tensor.unsqueeze(1)  # (N, H, W) -> (N, 1, H, W)
    elif tensor.shape[1] not in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2).contiguous()  # (N, H, W, C) -> (N, C, H, W)
    return Images(tensor, [int(label) for label in labels])
