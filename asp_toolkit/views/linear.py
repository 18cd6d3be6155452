"""Axes of layers that are one matrix product."""

from __future__ import annotations

from torch import nn

from asp_toolkit.views.view import Axes, no_view, shape_of


def linear(module: nn.Module, own: str) -> Axes | str:
    """y = x W^T, W (out, in): groups along in."""
    if own != "weight":
        return no_view(module, own)
    return matrix(module, own)


def matrix(module: nn.Module, own: str) -> Axes | str:
    """Any parameter of shape (out, in) that is used as `linear` uses its weight."""
    shape = shape_of(module, own)
    if len(shape) != 2:
        return f"expected a {own} of shape (out, in), got {shape}"
    return Axes((0, 1))


def transposed(module: nn.Module, own: str) -> Axes | str:
    """y = x W, W (in, out), as GPT-2's Conv1D: groups along in."""
    if own != "weight":
        return no_view(module, own)
    shape = shape_of(module, own)
    if len(shape) != 2:
        return f"expected a {own} of shape (in, out), got {shape}"
    return Axes((1, 0))


def bilinear(module: nn.Module, own: str) -> Axes | str:
    """y_o = x1^T W_o x2, W (out, in1, in2): one row for each (o, entry of x1), groups along in2."""
    if own != "weight":
        return no_view(module, own)
    return Axes((0, 1, 2), row_dims=2)
