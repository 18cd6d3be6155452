"""Images on disk, a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import FolderData
from asp_toolkit.tasks.data.pictures import decoded
from asp_toolkit.tasks.data.sets import Source

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class ImageFiles:
    """Images decoded when asked for. Samples are (uint8 (channels, H, W), class)."""

    files: Sequence[Path]
    labels: Sequence[int]
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Raises: AspError naming a file that is no image."""
        try:
            with Image.open(self.files[index]) as image:
                return decoded(image, self.channels), self.labels[index]
        except (UnidentifiedImageError, OSError) as error:
            raise AspError(f"task.data: {self.files[index]} cannot be read as an image: {error}") from error


def images(data: FolderData, channels: int) -> Source:
    """PATH/train/CLASS/… and PATH/val/CLASS/… (or PATH/test/CLASS/…); classes in the order of the alphabet.

    Args:
        channels: 1 decodes to grey, 3 to RGB.

    Raises:
        AspError: a folder is not there, holds no images, or the two have different classes.
    """
    root = Path(data.path).expanduser()
    train = root / "train"
    test = root / "val" if (root / "val").is_dir() else root / "test"
    for folder, expected in ((train, "train/"), (test, "val/ or test/")):
        if not folder.is_dir():
            raise AspError(f"task.data.path: expected {expected} in {root}, with a folder per class; there is none")
    classes, others = _classes(train), _classes(test)
    if classes != others:
        odd = sorted(set(classes) ^ set(others))
        raise AspError(f"task.data.path: {train} and {test} differ in classes: {odd[:5]}")
    return Source(_list(train, classes, channels), _list(test, classes, channels), len(classes), tuple(classes))


def _classes(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list(folder: Path, classes: list[str], channels: int) -> ImageFiles:
    files: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        found = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in SUFFIXES)
        if not found:
            raise AspError(f"task.data.path: {folder / name} holds no images ({', '.join(SUFFIXES)})")
        files += found
        labels += [number] * len(found)
    if not files:
        raise AspError(f"task.data.path: {folder} holds no folders of classes")
    return ImageFiles(files, labels, channels)
