"""Every parameter of a model, once, with its view or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from asp_toolkit.errors import AspError
from asp_toolkit.views.experts import ROUTER, is_router
from asp_toolkit.views.parametrized import (
    Place,
    is_computed_from,
    layer_kind,
    place_in,
    place_of,
    plain,
    why_not_through,
)
from asp_toolkit.views.registry import layer_view
from asp_toolkit.views.tables import NOT_MULTIPLIED, known
from asp_toolkit.views.view import Axes, View, no_view


def view_of(module: nn.Module, own: str, name: str, place: Place | None = None) -> View | str:
    """The view of parameter `own` of `module`, called `name` in the model; or why there is none.

    `place` is the layer that multiplies, where that is not `module`: `views` knows it.

    Raises:
        AspError: a layer view fails, or says axes that its parameter does not have.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted layer: prune the model, then script it"
    if place is None and isinstance(module, ParametrizationList):
        return "part of a parametrization: views(model) knows the layer that multiplies with it"
    place = place or place_in(name.rpartition(".")[0], module, own)
    parameter = module._parameters[own]
    assert parameter is not None
    if isinstance(parameter, UninitializedParameter):
        return "lazy layer: it has no shape before its first forward pass"
    if parameter.ndim < 2:
        return "vector (bias, norm or scale)"
    layer = place.layer
    if is_computed_from(module, own) and not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if reason := why_not_through(module, own):
            return reason
        layer = plain(place, parameter)
    axes = _axes(layer, place.weight, name, tuple(parameter.shape))
    if isinstance(axes, str):
        return axes
    return _view(name, layer_kind(place.layer), tuple(parameter.shape), axes)


def _axes(layer: nn.Module, own: str, name: str, shape: tuple[int, ...]) -> Axes | str:
    find = layer_view(layer)
    if find is None:
        if reason := known(layer, own):
            return reason
        if max(shape) == torch.Size(shape).numel():
            return f"vector (bias, norm or scale) of shape {shape}"
        return no_view(layer, own)
    try:
        return find(layer, own)
    except Exception as error:
        raise AspError(f"layer view of {type(layer).__name__} for '{name}': {type(error).__name__}: {error}") from error


def _view(name: str, kind: type[nn.Module], shape: tuple[int, ...], axes: Axes) -> View:
    split = tuple(axes.split) or shape
    place = f"layer view of {kind.__name__} for '{name}'"
    if torch.Size(split).numel() != torch.Size(shape).numel():
        raise AspError(f"{place}: split {split} has not as many entries as the parameter's shape {shape}")
    if sorted(axes.order) != list(range(len(split))):
        raise AspError(f"{place}: expected order to be a permutation of 0..{len(split) - 1}, got {axes.order}")
    if not 1 <= axes.row_dims < len(split):
        raise AspError(f"{place}: expected 1 <= row_dims < {len(split)}, got {axes.row_dims}")
    run = split[axes.order[-1]] if axes.run is None else axes.run
    kinds = tuple(one.__name__ for one in kind.__mro__ if issubclass(one, nn.Module) and one is not nn.Module)
    view = View(name, kind.__name__, kinds, shape, tuple(axes.order), axes.row_dims, run, axes.reason, split)
    if view.cols and (run < 1 or view.cols % run):
        raise AspError(f"{place}: expected a run that divides the {view.cols} columns, got {run}")
    return view


def views(model: nn.Module) -> Iterator[tuple[str, nn.Module, View | str]]:
    """Every parameter of `model` once, in order: (name, owning module, its view or why it has none).

    A tensor that stands under several names appears under the first. Where another of its owners looks it up (an
    embedding tied to the output layer), it has the view of the layers that multiply, with that as the reason to
    leave it dense; where its owners multiply along different axes, it has none.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            owners.setdefault(id(parameter), []).append((name, module, own))
    for places in owners.values():
        name, module, own = places[0]
        found = [_seen(model, *place) for place in places]
        yield name, module, found[0] if len(found) == 1 else _tied([n for n, _, _ in places], found)


def _seen(model: nn.Module, name: str, module: nn.Module, own: str) -> View | str:
    place = place_of(model, name)
    found = view_of(module, own, name, place)
    if isinstance(found, View) and found.reason is None and place.prefix:
        parent = model.get_submodule(place.prefix.rpartition(".")[0])
        if is_router(parent):  # a router whose matrix is a Linear of its own
            return replace(found, reason=ROUTER)
    return found


def _tied(names: list[str], found: list[View | str]) -> View | str:
    """One view for a tensor with several owners: that of those who multiply, where they agree."""
    also = f"tied with {', '.join(names[1:])}"
    multiplying = [one for one in found if isinstance(one, View)]
    texts = [one for one in found if isinstance(one, str)]
    if not multiplying or any(text not in NOT_MULTIPLIED for text in texts):
        return f"{also}: {next((text for text in texts if text not in NOT_MULTIPLIED), texts[0])}"
    first = multiplying[0]
    axes = {(one.split, one.order, one.row_dims, one.run) for one in multiplying}
    if len(axes) > 1:
        return f"{also}: its layers multiply along different axes"
    reason = f"{also}: {texts[0]}" if texts else next((one.reason for one in multiplying if one.reason), None)
    return replace(first, name=names[0], reason=reason)


def own_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """What a rule may call, alone, the parameter that stands under `names`: its names and those of its layers.

    A weight that is computed from it counts too: "fc.parametrizations.weight.original" is "fc" and "fc.weight".
    """
    found: set[str] = set()
    for name in names:
        place = place_of(model, name)
        found |= {name, place.prefix, f"{place.prefix}.{place.weight}" if place.prefix else place.weight}
    return found - {""}


def labels(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Everything a rule may call the parameter by that stands under `names`: `own_names`, layer types, their bases."""
    found = own_names(model, names)
    for name in names:
        kinds = layer_kind(place_of(model, name).layer).__mro__
        found |= {kind.__name__ for kind in kinds if issubclass(kind, nn.Module) and kind is not nn.Module}
    return found
