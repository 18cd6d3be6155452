"""Axes of mixtures of experts: fused weights of all experts, and the router that chooses among them."""

from __future__ import annotations

import re

from torch import nn

from asp_toolkit.views.linear import linear, matrix
from asp_toolkit.views.view import Axes, LayerView, no_view, shape_of

ROUTER = "router of experts: small, and it decides everything"

_FUSED = ("gate_up_proj", "up_proj", "gate_proj", "down_proj", "weight")
_ROUTER = re.compile(r"(Router|RouterMLP|MoE\w*Gate|TopKGating)$")


def fused(module: nn.Module, own: str) -> Axes | str:
    """(E, out, in), or (E, in, out) where the module says `is_transposed`: one row per (expert, output)."""
    if own.endswith("_bias"):
        return f"vectors of {own.removesuffix('_bias')}, one per expert: added, not multiplied"
    if own not in _FUSED or len(shape_of(module, own)) != 3:
        return no_view(module, own)
    return Axes((0, 2, 1) if vars(module).get("is_transposed") else (0, 1, 2), row_dims=2)


def fused_transposed(module: nn.Module, own: str) -> Axes | str:
    """(E, in, out), as Llama 4's bmm(x, W)."""
    if own not in _FUSED or len(shape_of(module, own)) != 3:
        return no_view(module, own)
    return Axes((0, 2, 1), row_dims=2)


def stacked(module: nn.Module, own: str) -> Axes | str:
    """DBRX stacks its experts, all of shape (E*ffn, hidden): x w1^T and x v1^T, but then y w2, along ffn."""
    if own in ("w1", "v1"):
        return matrix(module, own)
    experts = vars(module)["moe_num_experts"]
    if own != "w2":
        return no_view(module, own)
    entries, hidden = shape_of(module, own)
    return Axes((0, 2, 1), row_dims=2, split=(experts, entries // experts, hidden))


def is_router(module: nn.Module) -> bool:
    """Whether a module of transformers, or of code it loaded for a model, is a router of experts."""
    kind = type(module)
    return kind.__module__.startswith("transformers") and _ROUTER.search(kind.__name__) is not None


def router(module: nn.Module, own: str) -> Axes | str:
    """weight (experts, hidden), used as a Linear's."""
    found = linear(module, own)
    return found if isinstance(found, str) else Axes(found.order, reason=ROUTER)


def recognised(module: nn.Module) -> LayerView | None:
    """The view of a module that is known by what it is like, not by its class."""
    if {"is_transposed", "has_gate", "has_bias"} <= vars(module).keys():
        return fused  # every class that transformers.integrations.use_experts_implementation decorates
    return router if is_router(module) else None
