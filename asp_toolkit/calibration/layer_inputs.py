"""LAYER_INPUTS: layer type -> what the entries of its weight are multiplied with. One function a layer type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asp_toolkit.views.parametrized import layer_kind

Squares = Callable[[tuple[Any, ...], Mapping[str, Any], Any], Tensor]
"""(args, kwargs, output) of one call of the layer -> squares, summed over samples and positions, of what each entry of
the weight is multiplied with: float64, of a shape that broadcasts to the weight's."""

LayerInputs = Callable[[nn.Module, str], Squares | str]
"""(layer, its own name of the weight) -> how to read one call, or a text: why its inputs cannot be known."""

_PIECE = 1 << 20  # entries that are widened at a time


def sum_of_squares(entries: Tensor) -> Tensor:
    """(n, k) -> (k,): column sums of squares, in float64 (float32 on a device without it), a piece at a time."""
    to = _double(entries.device)
    total = torch.zeros(entries.shape[1], dtype=to, device=entries.device)
    for part in torch.split(entries.detach(), max(1, _PIECE // max(1, entries.shape[1]))):
        total += part.to(to).square().sum(0)
    return total


def linear(layer: nn.Module, own: str) -> Squares | str:
    """y = x W^T, W (out, in): (in,)."""
    return _inside(layer, own) if own != "weight" else lambda args, kwargs, _: _last(_first(args, kwargs))


def transposed(layer: nn.Module, own: str) -> Squares | str:
    """y = x W, W (in, out): (in, 1)."""
    return _inside(layer, own) if own != "weight" else lambda args, kwargs, _: _last(_first(args, kwargs)).unsqueeze(1)


def bilinear(layer: nn.Module, own: str) -> Squares | str:
    """y_o = x1^T W_o x2, W (out, in1, in2): the entry at (o, i, j) is multiplied with x1_i x2_j; (in1, in2)."""

    def products(input1: Tensor, input2: Tensor) -> Tensor:
        one, two = (x.detach().flatten(0, -2).to(_double(x.device)).square() for x in (input1, input2))
        return one.mT @ two

    return _inside(layer, own) if own != "weight" else lambda args, kwargs, _: products(*args, **kwargs)


def conv(layer: Any, own: str) -> Squares | str:
    """W (K, C/g, *kernel): of each channel the positions that the kernel pixel meets, padding included."""

    def squares(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        x = _first(args, kwargs)
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
        before = _padding_before(layer)
        if layer.padding_mode != "zeros":
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
            before = [0] * len(kernel)

        def met(d: int, pixel: Tensor, at: Tensor) -> Tensor:
            start = at + before[d] - pixel * dilation[d]  # stride * (the output position that needs this input)
            meets: Tensor = (
                (start >= 0) & (start % stride[d] == 0) & (start < stride[d] * output.shape[d - len(kernel)])
            )
            return meets

        totals = _by_pixel(x, kernel, met)  # (C, *kernel)
        if layer.groups == 1:
            return totals
        grouped = totals.reshape(layer.groups, -1, *kernel)  # (g, C/g, *kernel)
        return grouped.repeat_interleave(layer.out_channels // layer.groups, 0)  # (K, C/g, *kernel)

    return _inside(layer, own) if own != "weight" else squares


def conv_transpose(layer: Any, own: str) -> Squares | str:
    """W (C, K/g, *kernel): of each channel the positions that reach the output through the kernel pixel."""

    def squares(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        kernel, stride, dilation, padding = layer.kernel_size, layer.stride, layer.dilation, layer.padding

        def met(d: int, pixel: Tensor, at: Tensor) -> Tensor:
            reached = at * stride[d] - padding[d] + pixel * dilation[d]
            meets: Tensor = (reached >= 0) & (reached < output.shape[d - len(kernel)])
            return meets

        return _by_pixel(_first(args, kwargs), kernel, met).unsqueeze(1)  # (C, 1, *kernel)

    return _inside(layer, own) if own != "weight" else squares


def multihead(layer: Any, own: str) -> Squares | str:
    """in_proj_weight (3*embed, embed): rows of queries, keys, values; or the three matrices apart."""
    apart = ("q_proj_weight", "k_proj_weight", "v_proj_weight")

    def squares(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if own in apart:
            return _last((query, key, value)[apart.index(own)])
        return torch.cat([_last(x).expand(layer.embed_dim, -1) for x in (query, key, value)])

    known = own == "in_proj_weight" or own in apart
    return (lambda args, kwargs, _: squares(*args, **kwargs)) if known else _inside(layer, own)


@torch.no_grad()
def attended(layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """(embed,): squares of what the output projection of `layer` is multiplied with. It attends once more for that.

    nn.MultiheadAttention never calls its out_proj. A twin whose out_proj is the identity returns what goes into it.
    """
    weight = layer.out_proj.weight
    identity = nn.Linear(1, 1, bias=False, device="meta")  # which draws no random numbers
    identity.weight = nn.Parameter(torch.eye(layer.embed_dim, dtype=weight.dtype, device=weight.device), False)
    twin = copy(layer)
    vars(twin)["_modules"] = {**layer._modules, "out_proj": identity}
    return _last(twin.forward(*args, **kwargs)[0])


def recurrent(layer: nn.Module, own: str) -> Squares | str:
    """weight_ih of the first layer, in both directions: (in,). What the others are multiplied with is inside."""
    known = own in ("weight_ih_l0", "weight_ih_l0_reverse")
    return (lambda args, kwargs, _: _last(_first(args, kwargs).data)) if known else _inside(layer, own)  # or packed


def recurrent_cell(layer: Any, own: str) -> Squares | str:
    """weight_ih: (in,), of the input; weight_hh: (hidden,), of the state before, which is 0 where none is given."""

    def squares(input: Tensor, hx: Any = None) -> Tensor:
        if own == "weight_ih":
            return _last(input)
        state = hx[0] if isinstance(hx, tuple) else hx
        return _last(input.new_zeros(layer.hidden_size) if state is None else state)

    known = own in ("weight_ih", "weight_hh")
    return (lambda args, kwargs, _: squares(*args, **kwargs)) if known else _inside(layer, own)


LAYER_INPUTS: dict[type[nn.Module] | str, LayerInputs] = {
    nn.Linear: linear,
    nn.Bilinear: bilinear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.ConvTranspose1d: conv_transpose,
    nn.ConvTranspose2d: conv_transpose,
    nn.ConvTranspose3d: conv_transpose,
    nn.MultiheadAttention: multihead,
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNNCell: recurrent_cell,
    nn.LSTMCell: recurrent_cell,
    nn.GRUCell: recurrent_cell,
    "transformers.pytorch_utils.Conv1D": transposed,
    "transformers.models.falcon.modeling_falcon.FalconLinear": linear,
    "transformers.models.llama4.modeling_llama4.Llama4Router": linear,
}
"""Layer type -> its inputs: a class, or the dotted name of a class whose library is not imported here.

Subclasses are found through their bases, the most derived entry first, but only where they have their base's forward.
`LAYER_INPUTS[MyLayer] = linear`, or a function of one's own, adds one.
"""


def layer_inputs(layer: nn.Module, own: str) -> Squares | str:
    """How to read what `own` of `layer` is multiplied with from a call of the layer, or why that cannot be known."""
    kind = layer_kind(layer)
    for base in kind.__mro__:
        find = LAYER_INPUTS.get(base) or LAYER_INPUTS.get(f"{base.__module__}.{base.__qualname__}")
        if find is None:
            continue
        if getattr(kind, "forward", None) is getattr(base, "forward", None):
            return find(layer, own)
        return (
            f"{kind.__name__} has a forward of its own, which may change the input before the product; if it does not, "
            f"LAYER_INPUTS[{kind.__name__}] = {find.__name__} says so (asp_toolkit.calibration.layer_inputs)"
        )
    return _inside(layer, own)


def _inside(layer: nn.Module, own: str) -> str:
    kind = layer_kind(layer).__name__
    return f"what {own} of a {kind} is multiplied with is known only inside the layer"


def _double(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _last(x: Tensor) -> Tensor:
    """(..., k) -> (k,)."""
    return sum_of_squares(x.reshape(-1, x.shape[-1]))


def _padding_before(layer: Any) -> list[int]:
    """Zeros before the first position of each dimension. `same` puts the odd one behind."""
    if isinstance(layer.padding, str):
        same = layer.padding == "same"
        return [d * (k - 1) // 2 if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return list(layer.padding)


def _by_pixel(x: Tensor, kernel: tuple[int, ...], met: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """(B, C, *length) or (C, *length) -> (C, *kernel): squares of the positions that each kernel pixel meets.

    met(d, pixel, at): whether kernel pixel `pixel` meets input position `at` in dimension d. Whether all dimensions
    meet is the product over them, so one small matrix product for each replaces unfolding.
    """
    x = x if x.ndim == len(kernel) + 2 else x.unsqueeze(0)
    totals = sum_of_squares(x.flatten(1)).reshape(x.shape[1:])  # (C, *length)
    for d, (size, length) in enumerate(zip(kernel, x.shape[2:], strict=True)):
        pixel, at = (torch.arange(n, device=x.device) for n in (size, length))
        meets = met(d, pixel.unsqueeze(1), at).to(totals.dtype)  # (kernel_d, length_d)
        totals = torch.tensordot(totals, meets, dims=([1], [1]))  # drops the dimension, appends its kernel's
    return totals
