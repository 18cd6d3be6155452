"""Axes of recurrent layers and cells."""

from __future__ import annotations

from torch import nn

from asp_toolkit.views.linear import matrix
from asp_toolkit.views.view import Axes, no_view


def recurrent(module: nn.Module, own: str) -> Axes | str:
    """weight_ih (gates*hidden, in), weight_hh (gates*hidden, hidden or proj), weight_hr (proj, hidden): all y = x W^T.

    Every layer and direction has its own, e.g. weight_hh_l1_reverse; cells have one without a suffix.
    """
    if not own.startswith(("weight_ih", "weight_hh", "weight_hr")):
        return no_view(module, own)
    return matrix(module, own)
