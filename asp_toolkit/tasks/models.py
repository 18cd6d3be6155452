"""Networks for images too small for torchvision's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def small_cnn(
    in_channels: int = 1,
    num_classes: int = 10,
    channels: Sequence[int] = (32, 64, 128),
    hidden: int = 128,
    image_size: int = 28,
) -> nn.Sequential:
    """A convolutional network whose contractions, the first one aside, are multiples of 16, so that 2:4 fits them all.

    Three 3x3 convolutions with batch norm, pooled right after the first two: most of the arithmetic then happens at
    14x14 and 7x7. 0.9 M parameters for 28x28 images.

    Args:
        in_channels: of the images, (B, in_channels, image_size, image_size).
        num_classes: outputs are (B, num_classes).
        channels: outputs of the three convolutions.
        hidden: width of the layer before the last.
        image_size: height and width, a multiple of 4.

    Raises:
        ValueError: not three channel numbers, or an image size that cannot be halved twice.
    """
    if len(channels) != 3:
        raise ValueError(f"expected three channel numbers, got {list(channels)}")
    if image_size % 4:
        raise ValueError(f"expected an image size that is a multiple of 4, got {image_size}")
    first, second, third = channels
    return nn.Sequential(
        nn.Conv2d(in_channels, first, 3, padding=1, bias=False),
        nn.MaxPool2d(2),  # (B, first, size / 2, size / 2); before the norm, which then has a quarter of the work
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1, bias=False),
        nn.MaxPool2d(2),  # (B, second, size / 4, size / 4)
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.Conv2d(second, third, 3, padding=1, bias=False),
        nn.BatchNorm2d(third),
        nn.ReLU(),
        nn.Flatten(),  # (B, third * size * size / 16)
        nn.Linear(third * (image_size // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )
