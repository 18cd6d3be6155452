"""Image preparation on uint8 tensors: geometry per sample, numbers per batch.

All of it can be pickled, as loading processes need where they are not forked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchvision.transforms.v2.functional as F
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import Transform

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
"""Share of the area and aspect ratio of random crops. Source: Szegedy et al., arXiv 1409.4842, as in torchvision."""


def prepare(transform: Transform, training: bool) -> Callable[[Tensor], Tensor] | None:
    """The geometry: (C, H, W) -> (C, H', W') of the same dtype, drawing from torch's global generator in training.

    None where nothing is to be done, so that nothing is called.
    """
    steps: list[Callable[[Tensor], Tensor]] = []
    random_size = transform.random_resized_crop if training else None
    if random_size is not None:
        steps.append(functools.partial(random_resized_crop, size=random_size))
    elif transform.resize is not None:
        steps.append(functools.partial(F.resize, size=[transform.resize], antialias=True))
    if transform.center_crop is not None and random_size is None:
        steps.append(functools.partial(F.center_crop, output_size=[transform.center_crop] * 2))
    if training and transform.random_crop_padding is not None:
        steps.append(functools.partial(random_shift, padding=transform.random_crop_padding))
    if training and transform.flip:
        steps.append(random_flip)
    return functools.partial(_each, steps=steps) if steps else None


def _each(image: Tensor, steps: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    for step in steps:
        image = step(image)
    return image


def random_resized_crop(image: Tensor, size: int) -> Tensor:
    """A random part of a (C, H, W) image, resized to (C, size, size). Source: arXiv 1409.4842."""
    height, width = image.shape[-2:]
    for _ in range(10):  # a crop that does not fit is drawn again, as torchvision does
        area, log_ratio = torch.rand(2).tolist()
        area = height * width * (AREA[0] + area * (AREA[1] - AREA[0]))
        ratio = math.exp(math.log(ASPECT[0]) + log_ratio * (math.log(ASPECT[1]) - math.log(ASPECT[0])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        h = w = min(height, width)
    top, left = _below(height - h + 1), _below(width - w + 1)
    out: Tensor = F.resized_crop(image, top, left, h, w, [size, size], antialias=True)
    return out


def random_shift(image: Tensor, padding: int) -> Tensor:
    """A (C, H, W) image shifted by up to `padding` pixels each way, zeros moving in."""
    height, width = image.shape[-2:]
    padded = image.new_zeros(*image.shape[:-2], height + 2 * padding, width + 2 * padding)
    padded[..., padding : padding + height, padding : padding + width] = image
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    return padded[..., top : top + height, left : left + width]


def random_flip(image: Tensor) -> Tensor:
    """A (C, H, W) image, mirrored left-right with probability 0.5."""
    return image.flip(-1) if _below(2) else image


def _below(bound: int) -> int:
    return int(torch.randint(bound, ()))


def normaliser(transform: Transform, channels: int) -> Callable[[Tensor], Tensor]:
    """(B, C, H, W) images -> float32; uint8 to 0..1 first, then less the mean, over the standard deviation.

    Raises:
        AspError: only one of mean and std, numbers that do not match the channels, a std of 0.
    """
    if transform.mean is None and transform.std is None:
        mean, std = torch.zeros(1), torch.ones(1)
    elif transform.mean is None or transform.std is None:
        raise AspError("task.transform: expected both mean and std or neither")
    else:
        mean, std = torch.tensor(transform.mean), torch.tensor(transform.std)
    for name, value in (("mean", mean), ("std", std)):
        if len(value) not in (1, channels):
            raise AspError(f"task.transform.{name}: expected {channels} numbers, one per channel, got {len(value)}")
    if not bool((std > 0).all()):
        raise AspError(f"task.transform.std: expected numbers above 0, got {std.tolist()}")
    return functools.partial(_normalise, scale=(1 / std).view(-1, 1, 1), shift=(-mean / std).view(-1, 1, 1))


def _normalise(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    of_range = scale if images.is_floating_point() else scale / 255
    return images.to(torch.float32, copy=True).mul_(of_range).add_(shift)


def collate(samples: Sequence[Any], normalise: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """[(image (C, H, W), class)] -> images (B, C, H, W) float32, classes (B,) int64.

    Raises:
        AspError: images of different shapes.
    """
    images = [image for image, _ in samples]
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise AspError(f"task.transform: images differ in shape ({shapes[0]}, {shapes[1]}); set resize and center_crop")
    return normalise(torch.stack(images)), torch.tensor([label for _, label in samples], dtype=torch.int64)
