"""Weights that a layer computes from other parameters: torch's parametrizations and the hooks before them.

An original of the weight's shape is pruned through where a zero in it is a zero of the weight: weight_norm's
g v/||v|| (arXiv 1602.07868) and spectral_norm (arXiv 1802.05957) only scale; orthogonal mixes. Others are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_TORCH = "torch.nn.utils.parametrizations"
_KEEP_ZEROS = {"_WeightNorm": True, "_SpectralNorm": True, "_Orthogonal": False}  # orthogonal takes minutes to try
_SCALE = "scale of weight_norm: one number for each row"
_FAILURE = 200  # characters of a foreign error that are quoted


@dataclass(frozen=True)
class Place:
    """Where a parameter works: `layer`, called `prefix` in the model, multiplies with its own `weight`.

    They differ from the parameter's own module and name where the weight is computed from it:
    "fc.parametrizations.weight.original1" works in layer "fc", as its "weight".
    """

    prefix: str
    layer: nn.Module
    weight: str


def place_of(model: nn.Module, name: str) -> Place:
    """The layer that the parameter called `name` works in, and as what."""
    prefix, _, own = name.rpartition(".")
    module = model.get_submodule(prefix)
    if isinstance(module, ParametrizationList):
        outer, _, weight = prefix.rpartition(".")  # "fc.parametrizations", "weight"
        prefix = outer.rpartition(".")[0]
        return Place(prefix, model.get_submodule(prefix), weight)
    return place_in(prefix, module, own)


def place_in(prefix: str, module: nn.Module, own: str) -> Place:
    """`place_of` a parameter whose own module, called `prefix`, is the layer."""
    hook = _hook(module, own)
    return Place(prefix, module, own if hook is None else _computed(hook))


def layer_kind(module: nn.Module) -> type[nn.Module]:
    """The layer's class as its author wrote it: a parametrized layer has a class of its own, made by torch."""
    kind = type(module)
    if isinstance(vars(module).get("_modules", {}).get("parametrizations"), nn.ModuleDict):
        return next((base for base in kind.__mro__[1:] if issubclass(base, nn.Module)), kind)
    return kind


def plain(place: Place, parameter: nn.Parameter) -> nn.Module:
    """The layer as it would be if `parameter` were its weight. The layer itself is neither asked nor changed."""
    kind = layer_kind(place.layer)
    twin: nn.Module = object.__new__(kind)
    vars(twin).update(vars(place.layer))
    vars(twin)["_parameters"] = {**place.layer._parameters, place.weight: parameter}
    vars(twin).pop(place.weight, None)
    return twin


def is_computed_from(module: nn.Module, own: str) -> bool:
    """Whether `own` of `module` is something that a weight is computed from."""
    return isinstance(module, ParametrizationList) or _hook(module, own) is not None


def why_not_through(module: nn.Module, own: str) -> str | None:
    """Why a parameter that a weight is computed from cannot be pruned in its place, or None."""
    if not isinstance(module, ParametrizationList):
        scale = isinstance(_hook(module, own), WeightNorm) and own.endswith("_g")
        return _SCALE if scale else None
    kinds = [type(one) for one in module]
    names = ", ".join(kind.__name__.lstrip("_") for kind in kinds)
    keeps = [_KEEP_ZEROS.get(kind.__name__) if kind.__module__ == _TORCH else None for kind in kinds]
    if False in keeps:
        return f"parametrized by {names}, which does not keep zeros"
    if None not in keeps:
        scale = kinds[0].__name__ == "_WeightNorm" and own == "original0"
        return _SCALE if scale else None
    try:
        return _tried(module, own, names)
    except Exception as error:  # somebody else's code: whatever it raises is the reason
        what = " ".join(f"{type(error).__name__}: {error}".split())[:_FAILURE]
        return f"parametrized by {names}, which failed when tried: {what}"


def multiplied(module: nn.Module, own: str) -> Tensor:
    """The tensor that the layer multiplies with, in the shape of its parameter `own`; nothing is changed.

    The parameter itself, unless the weight is computed from it: then the weight, without gradient, as in eval mode.
    """
    parameter: Tensor = module.get_parameter(own)
    return _computed_weight(module, own, parameter) if is_computed_from(module, own) else parameter


def why_not_masked(module: nn.Module, own: str, mask: Tensor) -> str | None:
    """Why a mask (bool, of the parameter's shape) cannot be put on parameter `own`, or None.

    A row that is dropped altogether has norm 0 (a column, where each column has its norm): weight_norm makes NaN of it.
    """
    if not is_computed_from(module, own):
        return None
    parameter = _whole(module.get_parameter(own).detach())
    weight = _computed_weight(module, own, parameter.masked_fill(~_whole(mask).to(parameter.device), 0))
    if torch.isfinite(weight).all():
        return None
    return "the weight that is computed from it would not be finite: the mask drops a whole slice of a normed weight"


@torch.no_grad()
def _computed_weight(module: nn.Module, own: str, parameter: Tensor) -> Tensor:
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if isinstance(module, ParametrizationList):
            originals = [parameter if name == own else _whole(one.detach()) for name, one in _originals(module)]
            return _through([one.eval() for one in deepcopy(list(module))], originals)
        hook = _hook(module, own)
        twin = plain(Place("", module, own), nn.Parameter(_whole(parameter), requires_grad=False))
        if isinstance(hook, SpectralNorm):
            return hook.compute_weight(twin, do_power_iteration=False)
        masked = isinstance(hook, BasePruningMethod)
        weight: Tensor = hook.apply_mask(twin) if masked else hook.compute_weight(twin)
        return weight


def _through(modules: Sequence[nn.Module], originals: Sequence[Tensor]) -> Tensor:
    weight: Tensor = modules[0](*originals)
    for module in modules[1:]:
        weight = module(weight)
    return weight


def _originals(module: ParametrizationList) -> Iterator[tuple[str, Tensor]]:
    if module.is_tensor:
        yield "original", module.original
    else:
        yield from ((f"original{i}", getattr(module, f"original{i}")) for i in range(module.ntensors))


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)  # of one that is spread over processes
    return tensor if gather is None else gather()


def _hook(module: nn.Module, own: str) -> Any:
    """The pre-forward hook of the older weight_norm, spectral_norm or prune that computes a weight from `own`."""
    if not own.endswith(("_orig", "_v", "_g")):
        return None
    hooks = (WeightNorm, SpectralNorm, BasePruningMethod)
    weight = own.rpartition("_")[0]
    ours = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, hooks))
    return next((hook for hook in ours if _computed(hook) == weight), None)


def _computed(hook: Any) -> str:
    name: str = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
    return name


@torch.no_grad()
def _tried(module: ParametrizationList, own: str, names: str) -> str | None:
    """Zeros at random places of random originals, and a whole row of them, on copies on the CPU."""
    draws = torch.Generator().manual_seed(0)
    originals = {name: torch.randn(one.shape, generator=draws).to(one.dtype) for name, one in _originals(module)}
    shape = originals[own].shape
    with torch.random.fork_rng(devices=[]):
        for training, whole_row in ((False, False), (True, False), (False, True)):
            keep = torch.rand(shape, generator=draws) < 0.5
            if whole_row:
                keep[0] = False
            modules = [_on_cpu(one, draws).train(training) for one in deepcopy(list(module))]
            weight = _through(modules, [one * keep if name == own else one for name, one in originals.items()])
            if weight.shape != shape:
                return f"a part of the parametrization {names}: the weight has another shape, {tuple(weight.shape)}"
            dropped = weight[~keep]
            if ((dropped != 0) & ~torch.isnan(dropped)).any():  # NaN: a norm of 0, which why_not_masked refuses
                return f"parametrized by {names}, which does not keep zeros"
    return None


def _on_cpu(module: nn.Module, draws: torch.Generator) -> nn.Module:
    """A parametrization on the CPU, with random values where it has none."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(one.is_meta for one in tensors):
        return module.cpu()
    module.to_empty(device="cpu")
    for one in [*module.parameters(), *module.buffers()]:
        one.copy_(torch.randn(one.shape, generator=draws))
    return module
