"""Axes of nn.MultiheadAttention's own parameters. Its out_proj is a Linear of its own."""

from __future__ import annotations

from torch import nn

from asp_toolkit.views.linear import matrix
from asp_toolkit.views.view import Axes, no_view


def multihead(module: nn.Module, own: str) -> Axes | str:
    """in_proj_weight (3*embed, embed); or q_proj_weight, k_proj_weight (embed, kdim), v_proj_weight (embed, vdim)."""
    if own in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return matrix(module, own)
    if own in ("bias_k", "bias_v"):
        return f"{own}: one more {'key' if own == 'bias_k' else 'value'} of the sequence, no matrix"
    return no_view(module, own)
