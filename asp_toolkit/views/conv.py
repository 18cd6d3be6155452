"""Axes of convolutions: groups run over the input channels of one kernel pixel (arXiv 2104.08378, sec. 3)."""

from __future__ import annotations

from torch import nn

from asp_toolkit.views.view import Axes, no_view, shape_of

_DEPTHWISE = "depthwise convolution: one input channel per group"


def conv(module: nn.Module, own: str) -> Axes | str:
    """W (K, C/g, *kernel) -> (K, pixels C/g)."""
    if own != "weight":
        return no_view(module, own)
    shape = shape_of(module, own)
    depthwise = shape[1] == 1 and getattr(module, "groups", 1) > 1
    return Axes((0, *range(2, len(shape)), 1), reason=_DEPTHWISE if depthwise else None)


def conv_transpose(module: nn.Module, own: str) -> Axes | str:
    """W (C, K/g, *kernel) -> (g K/g, pixels C/g): output channel k of a group sums over that group's C/g inputs."""
    if own != "weight":
        return no_view(module, own)
    channels, *rest = shape_of(module, own)
    groups = getattr(module, "groups", 1)
    split = (groups, channels // groups, *rest)  # (g, C/g, K/g, *kernel)
    depthwise = split[1] == 1 and groups > 1
    order = (0, 2, *range(3, len(split)), 1)
    return Axes(order, row_dims=2, split=split, reason=_DEPTHWISE if depthwise else None)
