"""Layer type -> how its parameter is a (rows, contraction) matrix. The one place that knows axes.

N:M runs along the contraction axis of the layer's matrix product: the axis whose entries are multiplied with
activations and summed. For a convolution that is the input channels of each kernel pixel (arXiv 2104.08378, sec. 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class View:
    """How one parameter is a matrix.

    name:    the parameter's name in the model, e.g. "layer1.0.conv1.weight"
    layer:   class name of the module that owns it
    kinds:   class names of that module and its bases, for rules by layer type
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


LayerView = Callable[[nn.Module, str], tuple[tuple[int, ...], int, int, str | None] | str]
"""(module, the parameter's own name) -> (order, row_dims, run, reason), or a text: why it has no matrix."""


def _linear(module: nn.Module, name: str) -> tuple[tuple[int, ...], int, int, str | None] | str:
    weight = getattr(module, name)
    if weight.ndim != 2:
        return f"expected a weight of shape (out, in), got {tuple(weight.shape)}"
    return (0, 1), 1, weight.shape[1], None  # (out, in): groups along in


def _conv(module: nn.Module, name: str) -> tuple[tuple[int, ...], int, int, str | None] | str:
    weight = getattr(module, name)
    channels = weight.shape[1]  # input channels per group
    reason = None
    if channels == 1 and getattr(module, "groups", 1) > 1:
        reason = "depthwise convolution: one input channel per group"
    return (0, *range(2, weight.ndim), 1), 1, channels, reason  # (K, C/g, R, S) -> (K, R S C/g)


LAYER_VIEWS: dict[type[nn.Module], LayerView] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
}
"""Layer types whose `weight` takes part in a matrix product; subclasses are found through their bases."""


def _layer_view(module: nn.Module) -> LayerView | None:
    for kind in type(module).__mro__:
        if kind in LAYER_VIEWS:
            return LAYER_VIEWS[kind]
    return None


def view_of(module: nn.Module, own: str, name: str) -> View | str:
    """The view of parameter `own` of `module`, called `name` in the model; or why there is none."""
    parameter = getattr(module, own)
    layer = type(module).__name__
    if isinstance(module, parametrize.ParametrizationList):
        return "parametrized weight: remove the parametrization, then prune"
    if isinstance(parameter, UninitializedParameter):
        return "lazy layer: it has no shape before its first forward pass"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding: a table that is looked up, not multiplied"
    if parameter.ndim < 2:
        return "vector (bias, norm or scale)"
    find = _layer_view(module)
    if find is None or own != "weight":
        return f"no matrix view for parameter '{own}' of layer type {layer}"
    found = find(module, own)
    if isinstance(found, str):
        return found
    order, row_dims, run, reason = found
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    names = tuple(kind.__name__ for kind in kinds)
    return View(name, layer, names, tuple(parameter.shape), order, row_dims, run, reason)


def views(model: nn.Module) -> Iterator[tuple[str, nn.Module, View | str]]:
    """Every parameter of `model` once, in order: (name, owning module, its view or why it has none).

    A tensor that stands under several names appears under the first; where one of its owners looks it up (an
    embedding tied to the output layer), it is left dense.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            owners.setdefault(id(parameter), []).append((name, module, own))
    for places in owners.values():
        name, module, own = places[0]
        found = view_of(module, own, name)
        if len(places) > 1:
            others = [view_of(m, o, n) for n, m, o in places]
            if any(isinstance(other, str) for other in others):
                also = ", ".join(n for n, _, _ in places[1:])
                found = f"tied with {also}: {next(o for o in others if isinstance(o, str))}"
        yield name, module, found
