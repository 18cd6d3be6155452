"""Layer type -> how its parameters are (rows, contraction) matrices. The one place that knows axes.

N:M runs along the contraction axis of the layer's matrix product: the axis whose entries are multiplied with
activations and summed. For a convolution that is the input channels of each kernel pixel (arXiv 2104.08378, sec. 3).
"""

from __future__ import annotations

from asp_toolkit.views.parametrized import Place, multiplied, place_of, why_not_masked
from asp_toolkit.views.registry import LAYER_VIEWS
from asp_toolkit.views.view import Axes, LayerView, View
from asp_toolkit.views.walk import labels, own_names, view_of, views

__all__ = [
    "LAYER_VIEWS",
    "Axes",
    "LayerView",
    "Place",
    "View",
    "labels",
    "multiplied",
    "own_names",
    "place_of",
    "view_of",
    "views",
    "why_not_masked",
]
