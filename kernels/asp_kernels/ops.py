"""The operations: checks at the door, then the backend that `dispatch` chooses.

linear_24 and conv_24 are `torch.library` operations with fake kernels and gradients, so that `torch.compile` and
`torch.export` go through them; the CSR operations are compositions of differentiable torch operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asp_kernels import library
from asp_kernels.backends import reference
from asp_kernels.dispatch import Choice, choose, operation
from asp_kernels.formats import CSR, PackedNM
from asp_kernels.validate import FLOAT_DTYPES

_EXACT_TERMS = (2**31 - 1) // (128 * 128)  # int8 products that an int32 sum surely holds


def _check_operands(op: str, x: Tensor, packed: PackedNM, bias: Tensor | None) -> None:
    if x.device != packed.values.device:
        raise ValueError(f"{op}: x is on {x.device}, the weight on {packed.values.device}; move one of them")
    if x.dtype != packed.values.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{op}: x is {x.dtype}, the weight {packed.values.dtype}; convert one of them")
    if bias is None:
        return
    if tuple(bias.shape) != (packed.shape[0],):
        raise ValueError(f"{op}: bias: expected shape {(packed.shape[0],)}, got {tuple(bias.shape)}")
    wanted = torch.int32 if packed.values.dtype == torch.int8 else packed.values.dtype
    if bias.dtype != wanted and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{op}: bias: expected {wanted}, got {bias.dtype}")


def linear_24(x: Tensor, packed: PackedNM, bias: Tensor | None = None) -> Tensor:
    """x @ packed.T + bias: (..., cols) -> (..., rows), x of one dimension or more, any strides, any of them empty.

    Where the dense product serves (see `explain`), finite inputs give the bits of `torch.nn.functional.linear` with the
    dense weight; a kernel sums in fp32 in another order. NaN and infinities reach an output only through kept entries.
    int8 times int8 gives exact int32. Gradients: x, packed.values, bias.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    if x.ndim == 0 or x.shape[-1] != packed.shape[1]:
        raise ValueError(f"linear_24: x: expected shape (..., {packed.shape[1]}), got {tuple(x.shape)}")
    _check_operands("linear_24", x, packed, bias)
    if x.dtype == torch.int8 and packed.values.shape[1] > _EXACT_TERMS:
        terms = packed.values.shape[1]
        raise ValueError(f"linear_24: {terms} int8 terms can exceed int32 (at most {_EXACT_TERMS}); split the columns")
    return library.linear(x, packed.values, packed.codes, bias, packed.n, packed.m)


def _pair(name: str, value: int | Sequence[int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(not isinstance(v, int) or v < least for v in pair):
        raise ValueError(f"conv_24: {name}: expected one or two integers of at least {least}, got {value!r}")
    return pair[0], pair[1]


def conv_24(
    x: Tensor,
    packed: PackedNM,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    kernel: int | Sequence[int] = 1,
) -> Tensor:
    """2-D convolution of (B, C, H, W) or (C, H, W); `packed` is (K, R * S * C / groups), input channels innermost.

    kernel is (R, S); the other arguments are those of `torch.nn.functional.conv2d`, whose bits finite inputs give.
    Gradients: x, packed.values, bias.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    window, steps, spread = _pair("kernel", kernel, 1), _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    rows, cols = packed.shape
    taps = window[0] * window[1]
    if groups < 1 or rows % groups or cols % taps:
        raise ValueError(f"conv_24: packed shape {packed.shape} does not suit kernel {window} and {groups} groups")
    channels = cols // taps * groups
    if x.ndim not in (3, 4) or x.shape[-3] != channels:
        raise ValueError(f"conv_24: x: expected (B, {channels}, H, W) or ({channels}, H, W), got {tuple(x.shape)}")
    if packed.values.dtype not in FLOAT_DTYPES:
        raise ValueError(f"conv_24: expected floating weights, got {packed.values.dtype}")
    _check_operands("conv_24", x, packed, bias)
    if isinstance(padding, str):
        if padding not in ("same", "valid") or (padding == "same" and steps != (1, 1)):
            raise ValueError(f"conv_24: padding: expected integers, 'valid', or 'same' with stride 1, got {padding!r}")
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(spread, window, strict=True)]
        if any(t % 2 for t in total):  # the odd row or column goes to the end, as in torch
            x = F.pad(x, (0, total[1] % 2, 0, total[0] % 2))
        padding = [t // 2 for t in total]
    around = _pair("padding", padding, 0)
    return library.conv(x, packed.values, packed.codes, bias, steps, around, spread, groups, window, packed.n, packed.m)


def _check_dense(op: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], csr: CSR) -> None:
    fits = tensor.ndim == len(shape) and all(w in (None, s) for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name}: expected shape ({wanted}), got {tuple(tensor.shape)}")
    if tensor.dtype != csr.values.dtype or tensor.device != csr.values.device:
        raise ValueError(
            f"{op}: {name}: expected {csr.values.dtype} on {csr.values.device}, got {tensor.dtype} on {tensor.device}"
        )


def spmm(csr: CSR, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha * csr @ b + beta * c: b (cols, N) -> (rows, N), or (cols,) -> (rows,). With beta = 0, `c` is not read.

    Sums run in fp32 (fp64 for fp64) over stored entries alone, in order. Gradients: csr.values, b, c.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    rows, cols = csr.shape
    if b.ndim == 1:
        column = None if c is None else c.unsqueeze(-1)
        return spmm(csr, b.unsqueeze(1), column, alpha=alpha, beta=beta).squeeze(1)
    _check_dense("spmm", "b", b, (cols, None), csr)
    if c is not None:
        _check_dense("spmm", "c", c, (rows, b.shape[1]), csr)
    return reference.spmm(csr, b, c, alpha, beta)


def sddmm(pattern: CSR, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> CSR:
    """alpha * (a @ b) at the stored entries of `pattern`, + beta * its values: a (rows, K), b (K, cols).

    With beta = 0 the values of `pattern` are not read. Gradients: a, b, pattern.values.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    _check_dense("sddmm", "a", a, (pattern.shape[0], None), pattern)
    _check_dense("sddmm", "b", b, (a.shape[1], pattern.shape[1]), pattern)
    return CSR(pattern.rowptr, pattern.col, reference.sddmm(pattern, a, b, alpha, beta), pattern.shape)


def sparse_softmax(csr: CSR) -> CSR:
    """The softmax of each row over its stored entries; a row whose stored entries are all -inf becomes zeros."""
    return CSR(csr.rowptr, csr.col, reference.softmax(csr), csr.shape)


def explain(x: Tensor, weight: PackedNM | CSR) -> Choice:
    """What would multiply `x` (..., cols) by `weight`, and why nothing else: print it.

    Raises:
        ValueError: the shapes do not match.
    """
    op = operation(weight)
    inner = x.shape[0] if isinstance(weight, CSR) and x.ndim else x.shape[-1] if x.ndim else None
    if inner != weight.shape[1]:
        raise ValueError(f"explain: x of shape {tuple(x.shape)} cannot meet a weight of shape {weight.shape}")
    return choose(op, x, weight)
