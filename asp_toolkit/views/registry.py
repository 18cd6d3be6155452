"""LAYER_VIEWS: layer type -> its view. The one table that a new layer type goes into."""

from __future__ import annotations

from torch import nn

from asp_toolkit.views.attention import multihead
from asp_toolkit.views.conv import conv, conv_transpose
from asp_toolkit.views.experts import fused, fused_transposed, is_router, recognised, router, stacked
from asp_toolkit.views.linear import bilinear, linear, transposed
from asp_toolkit.views.recurrent import recurrent
from asp_toolkit.views.tables import embedding, norm, standardized
from asp_toolkit.views.view import LayerView

LAYER_VIEWS: dict[type[nn.Module] | str, LayerView] = {
    nn.Linear: linear,
    nn.Bilinear: bilinear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.ConvTranspose1d: conv_transpose,
    nn.ConvTranspose2d: conv_transpose,
    nn.ConvTranspose3d: conv_transpose,
    nn.MultiheadAttention: multihead,
    nn.RNNBase: recurrent,
    nn.RNNCellBase: recurrent,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding,
    nn.LayerNorm: norm,
    nn.RMSNorm: norm,
    "torchvision.ops.deform_conv.DeformConv2d": conv,
    "transformers.pytorch_utils.Conv1D": transposed,
    "transformers.models.dbrx.modeling_dbrx.DbrxExpertGLU": stacked,
    "transformers.models.inkling.modeling_inkling.InklingSharedExperts": fused,
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": fused,
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": fused,
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts": fused,
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": fused_transposed,
    "transformers.models.bit.modeling_bit.WeightStandardizedConv2d": standardized,
    "timm.layers.std_conv.StdConv2d": standardized,
    "timm.layers.std_conv.ScaledStdConv2d": standardized,
}
"""Layer type -> its view: a class, or the dotted name of a class whose library is not imported here.

Asked for every parameter of two or more dimensions that the layer has. Subclasses are found through their bases, the
most derived entry first. `LAYER_VIEWS[MyLayer] = my_view` adds one.
"""


def layer_view(module: nn.Module) -> LayerView | None:
    """The view of the module's type, of its nearest base that has one, or of what it looks like."""
    for kind in type(module).__mro__:
        if kind is nn.Linear and is_router(module):
            return router
        found = LAYER_VIEWS.get(kind) or LAYER_VIEWS.get(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            return found
    return recognised(module)
