"""swap_ and unswap_: the layers of a model become sparse ones, in place, and ordinary ones again."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import nn

from asp_kernels.dispatch import choose, form_24
from asp_kernels.formats import PackedNM
from asp_kernels.layers import SparseConv2d, SparseLinear
from asp_kernels.packed_layer import why_not_swap


def _replace_(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Put replacements[id(child)] in place of each child, under every name it has."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in replacements:
                parent._modules[name] = replacements[id(child)]


def _sparse(module: nn.Module, packed: PackedNM) -> nn.Module:
    if isinstance(module, nn.Conv2d):
        return SparseConv2d.from_packed(packed, module)
    assert isinstance(module, nn.Linear)
    if packed.shape != (module.out_features, module.in_features):
        raise ValueError(f"expected a packed matrix of shape {tuple(module.weight.shape)}, got {packed.shape}")
    return SparseLinear.from_packed(packed, module.bias).train(module.training)


def swap_(model: nn.Module, packed: Mapping[str, PackedNM]) -> list[str]:
    """Replace layers of `model` by SparseLinear and SparseConv2d, in place; all of them or, on an error, none.

    packed: parameter name, e.g. "layer1.0.conv1.weight" -> its matrix: (out, in), or (K, R * S * C/g) of a convolution

    Returns:
        The names, in the order given. The dense weights are let go; biases stay the same parameters.

    Raises:
        ValueError: a name is not a weight of `model`, its layer cannot be swapped, or the shapes differ.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    replacements: dict[int, nn.Module] = {}
    for name, matrix in packed.items():
        owner, _, own = name.rpartition(".")
        module = modules.get(owner)
        if own != "weight" or module is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
            known = [n for n, _ in model.named_parameters(remove_duplicate=False)]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"swap_: '{name}' is not the weight of a layer of {type(model).__name__}{hint}")
        reason = why_not_swap(module)
        if module is model:
            reason = "it is the model itself, which cannot be replaced in place; use SparseLinear.from_packed"
        if reason:
            raise ValueError(f"swap_: '{name}': {reason}")
        try:
            replacements[id(module)] = _sparse(module, matrix)
        except ValueError as error:
            raise ValueError(f"swap_: '{name}': {error}") from error
    _replace_(model, replacements)
    return list(packed)


def unswap_(model: nn.Module) -> list[str]:
    """Replace every sparse layer of `model` by the ordinary one with the same bits, in place.

    Returns:
        Their weights' names.
    """
    replacements: dict[int, nn.Module] = {}
    names = []
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear | SparseConv2d):
            if not name:
                raise ValueError("unswap_: the model itself is a sparse layer; use its to_dense()")
            replacements[id(module)] = module.to_dense()
            names.append(f"{name}.weight")
    _replace_(model, replacements)
    return names


def layer_backends(model: nn.Module) -> dict[str, str]:
    """The backend that each sparse layer of `model` runs with, given one sample and no gradients: name -> backend."""
    found = {}
    for name, module in model.named_modules():
        if type(module) is SparseConv2d:
            found[name] = choose("conv_24").backend
        if type(module) is SparseLinear:
            values = module.values
            with torch.no_grad():
                form, _ = form_24(values.new_empty(1, module.in_features), values, module.n, module.m)
            found[name] = "reference" if form is None else "cpu"
    return found
