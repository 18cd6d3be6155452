"""linear_24 and conv_24 as `torch.library` operations on plain tensors: fake kernels and gradients.

Called by `ops` and `layers`, which have checked their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asp_kernels.backends import cpu, reference
from asp_kernels.dispatch import form_24
from asp_kernels.formats import columns, unpack


@torch.library.custom_op("asp_kernels::linear_24", mutates_args=())
def _linear(x: Tensor, values: Tensor, codes: Tensor, bias: Tensor | None, n: int, m: int) -> Tensor:
    form, _ = form_24(x, values, n, m)
    if form is None:
        return reference.linear(x, values, codes, bias, n, m)
    return cpu.linear_24(x, values, codes, bias, form == "batch")


@_linear.register_fake
def _(x: Tensor, values: Tensor, codes: Tensor, bias: Tensor | None, n: int, m: int) -> Tensor:
    dtype = torch.int32 if values.dtype == torch.int8 else x.dtype
    return x.new_empty((*x.shape[:-1], values.shape[0]), dtype=dtype)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, codes, bias, ctx.n, ctx.m = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, values, codes)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, codes = ctx.saved_tensors
    rows, cols = values.shape[0], x.shape[-1]
    needs_x, needs_values = ctx.needs_input_grad[:2]
    flat = grad.reshape(-1, rows)  # (B, rows)
    for_x = grad @ unpack(values, codes, ctx.n, ctx.m, cols) if needs_x else None
    for_values = None
    if needs_values:
        for_values = (flat.t() @ x.reshape(-1, cols)).gather(1, columns(codes, ctx.n, ctx.m, cols))
    return for_x, for_values, None, flat.sum(0) if ctx.has_bias else None, None, None


_linear.register_autograd(_linear_backward, setup_context=_save_linear)


@torch.library.custom_op("asp_kernels::conv_24", mutates_args=())
def _conv(
    x: Tensor,
    values: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: Sequence[int],
    n: int,
    m: int,
) -> Tensor:
    return reference.conv(x, values, codes, bias, stride, padding, dilation, groups, kernel, n, m)


@_conv.register_fake
def _(
    x: Tensor,
    values: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: Sequence[int],
    n: int,
    m: int,
) -> Tensor:
    weight = values.new_empty(values.shape[0], x.shape[-3] // groups, *kernel)
    return F.conv2d(x, weight, bias, list(stride), list(padding), list(dilation), groups)


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, codes, bias, *ctx.geometry = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, values, codes)


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, codes = ctx.saved_tensors
    stride, padding, dilation, groups, kernel, n, m = ctx.geometry
    needs_x, needs_values = ctx.needs_input_grad[:2]
    channels = x.shape[-3] // groups
    weight = reference.conv_weight(values, codes, kernel, channels, n, m)
    batch, grads = x.reshape(-1, *x.shape[-3:]), grad.reshape(-1, *grad.shape[-3:])
    for_x, for_weight, for_bias = torch.ops.aten.convolution_backward(
        grads,
        batch,
        weight,
        [values.shape[0]],
        list(stride),
        list(padding),
        list(dilation),
        False,
        [0, 0],
        groups,
        [needs_x, needs_values, ctx.has_bias],
    )
    for_values = None
    if needs_values:
        matrix = for_weight.permute(0, 2, 3, 1).flatten(1)  # (K, C/g, R, S) -> (K, R S C/g)
        for_values = matrix.gather(1, columns(codes, n, m, matrix.shape[1]))
    first = for_x.reshape(x.shape) if needs_x else None
    return (first, for_values, None, for_bias if ctx.has_bias else None, *[None] * 7)


_conv.register_autograd(_conv_backward, setup_context=_save_conv)


def _autocast(tensor: Tensor) -> Tensor:
    """The tensor as torch's own linear and convolution take it: in autocast's dtype where that is on."""
    device = tensor.device.type
    narrow = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return tensor.to(torch.get_autocast_dtype(device)) if narrow and torch.is_autocast_enabled(device) else tensor


def linear(x: Tensor, values: Tensor, codes: Tensor, bias: Tensor | None, n: int, m: int) -> Tensor:
    """x (..., cols), values (rows, cols * n / m), codes, bias (rows,) -> (..., rows)."""
    offset = None if bias is None else _autocast(bias)
    return _linear(_autocast(x), _autocast(values), codes, offset, n, m)  # type: ignore[no-any-return]


def conv(
    x: Tensor,
    values: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: Sequence[int],
    n: int,
    m: int,
) -> Tensor:
    """x (B, C, H, W) or (C, H, W), values (K, R * S * C/g * n / m) -> as `F.conv2d`; all geometry in pairs."""
    offset = None if bias is None else _autocast(bias)
    geometry = (list(stride), list(padding), list(dilation), groups, list(kernel))
    return _conv(_autocast(x), _autocast(values), codes, offset, *geometry, n, m)  # type: ignore[no-any-return]
