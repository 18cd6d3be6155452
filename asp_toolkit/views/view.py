"""View: one parameter seen as a matrix. Axes: what a layer view says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class View:
    """How one parameter is a matrix.

    name:    the parameter's name in the model, e.g. "layer1.0.conv1.weight"
    layer:   class name of the layer that multiplies with it
    kinds:   class names of that layer and its bases, for rules by layer type
    shape:   the parameter's shape
    order:   permutation of the dimensions of `split` that puts the rows first and the contraction dimensions last
    row_dims: how many of the permuted dimensions are rows
    run:     entries of the contraction that are consecutive: groups must not cross a multiple of it
    reason:  why it is left dense unless a rule names it, or None
    split:   the shape that `order` speaks of: `shape`, or `shape` with dimensions split in two
    """

    name: str
    layer: str
    kinds: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    row_dims: int
    run: int
    reason: str | None = None
    split: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.split:
            object.__setattr__(self, "split", self.shape)

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return int(torch.Size(self.split[d] for d in self.order[: self.row_dims]).numel())

    @property
    def cols(self) -> int:
        """Length of the contraction."""
        return int(torch.Size(self.split[d] for d in self.order[self.row_dims :]).numel())

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape -> (rows, cols); a view where strides allow."""
        return tensor.reshape(self.split).permute(self.order).reshape(self.rows, self.cols)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """(rows, cols) -> the parameter's shape; the inverse of `matrix`."""
        permuted = matrix.reshape([self.split[d] for d in self.order])
        return permuted.permute([self.order.index(d) for d in range(len(self.order))]).reshape(self.shape)


@dataclass(frozen=True)
class Axes:
    """What a layer view says: matrix = parameter.reshape(split).permute(order).reshape(rows, cols).

    order:    permutation of the dimensions of `split`, rows first, contraction dimensions last
    row_dims: how many of the permuted dimensions are rows, at least 1
    run:      entries of the contraction that groups must not cross; None: the length of the last dimension of `order`
    split:    the parameter's shape with dimensions split in two; () where none is
    reason:   why it is left dense unless a rule names it
    """

    order: tuple[int, ...]
    row_dims: int = 1
    run: int | None = None
    split: tuple[int, ...] = ()
    reason: str | None = None


LayerView = Callable[[nn.Module, str], Axes | str]
"""(module, the parameter's own name) -> its axes, or a text: why it has no matrix."""


def shape_of(module: nn.Module, own: str) -> tuple[int, ...]:
    """Shape of the module's own parameter, without asking the module's attributes, which may do anything."""
    parameter = module._parameters[own]
    assert parameter is not None
    return tuple(parameter.shape)


def no_view(module: nn.Module, own: str) -> str:
    """The text for a parameter that nobody knows to be a matrix."""
    layer = type(module).__name__
    return (
        f"no matrix view for parameter '{own}' of layer type {layer}; LAYER_VIEWS[{layer}] = your function gives it one"
    )
