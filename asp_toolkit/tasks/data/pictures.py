"""Decoded images as tensors."""

from __future__ import annotations

from typing import Any

import torchvision.transforms.v2.functional as F
from torch import Tensor

from asp_toolkit.errors import AspError


def decoded(image: Any, channels: int) -> Tensor:
    """A PIL image -> uint8 (C, H, W), grey for one channel and RGB otherwise; tensors pass as they are.

    Raises:
        AspError: neither an image nor a tensor.
    """
    if isinstance(image, Tensor):
        return image
    if not hasattr(image, "convert"):
        raise AspError(
            f"task.data: expected images, got {type(image).__name__}; name the image column, and the task's kind"
        )
    tensor: Tensor = F.pil_to_tensor(image.convert("L" if channels == 1 else "RGB"))
    return tensor


def decoded_sample(sample: Any, channels: int) -> tuple[Tensor, int]:
    """A pair of image and class number, with the image `decoded`.

    Raises:
        AspError: the sample is no such pair.
    """
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise AspError(f"task.data: a sample is a {type(sample).__name__}, expected (image, class number)")
    return decoded(sample[0], channels), int(sample[1])
