"""Every operation in plain torch, on any device: slow, and right by definition.

A NaN or infinity reaches an output only through a kept entry: what stands against a dropped entry is never read as
0 * inf = NaN. 16-bit sums are accumulated in fp32 here, or as torch's dense product does where that is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asp_kernels.formats import CSR, columns, unpack

_BUDGET = 1 << 22  # products held at a time, which bounds the extra memory to 16 MB in fp32


def why_not(op: str) -> str | None:
    """None: the reference does every operation."""
    return None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _finite(x: Tensor) -> bool:
    """Whether x has no NaN and no infinity. A finite sum, the cheaper question, settles it in all but rare cases."""
    return math.isfinite(float(x.detach().sum())) or bool(torch.isfinite(x).all())


def linear_kept(x: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """(B, cols) times the kept values (rows, kept) at columns `index` -> (B, rows), term by term."""
    wide = _wide(values.dtype)
    out = x.new_empty(x.shape[0], values.shape[0], dtype=wide)
    step = max(1, _BUDGET // max(1, x.shape[0] * values.shape[1]))
    for start in range(0, values.shape[0], step):
        part = slice(start, start + step)
        out[:, part] = (x[:, index[part]].to(wide) * values[part].to(wide)).sum(2)  # (B, step, kept) -> (B, step)
    return out


@torch.no_grad()
def _mend_(out: Tensor, x: Tensor, values: Tensor, codes: Tensor, bias: Tensor | None, n: int, m: int) -> None:
    """Overwrite the rows of `out` whose input row has NaN or infinities by the sum over kept entries alone."""
    bad = (~torch.isfinite(x).all(1)).nonzero()[:, 0]
    fresh = linear_kept(x[bad], values, columns(codes, n, m, x.shape[1]))
    out[bad] = (fresh if bias is None else fresh + bias).to(out.dtype)


def linear(x: Tensor, values: Tensor, codes: Tensor, bias: Tensor | None, n: int, m: int) -> Tensor:
    """(..., cols) -> (..., rows): x times the packed matrix's transpose, plus bias.

    For finite x this is bit for bit `F.linear` with the dense matrix. int8 gives exact int32.
    """
    cols = x.shape[-1]
    weight = unpack(values, codes, n, m, cols)
    if values.dtype == torch.int8:
        exact = torch.int32 if x.device.type == "cpu" else torch.float64  # CUDA has no int32 product
        product = F.linear(x.to(exact), weight.to(exact)).to(torch.int32)
        return product if bias is None else product + bias
    out = F.linear(x, weight, bias)
    if not _finite(x):
        _mend_(out.detach().view(-1, values.shape[0]), x.detach().reshape(-1, cols), values, codes, bias, n, m)
    return out


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
    """(B, C, H, W) or (C, H, W) -> as `F.conv2d` with the unpacked (K, C/g, R, S) weight; padding is two integers."""
    weight = conv_weight(values, codes, kernel, x.shape[-3] // groups, n, m)
    out = F.conv2d(x, weight, bias, list(stride), list(padding), list(dilation), groups)
    if _finite(x):
        return out
    exact = _conv_kept(x.detach(), values, codes, stride, padding, dilation, groups, kernel, n, m)  # (B, K, L)
    exact = exact if bias is None else exact + bias.detach().unsqueeze(1)
    mended, bad = out.detach(), ~torch.isfinite(out.detach())
    mended[bad] = exact.reshape(out.shape)[bad].to(out.dtype)
    return out


@torch.no_grad()
def _conv_kept(
    x: Tensor,
    values: Tensor,
    codes: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: Sequence[int],
    n: int,
    m: int,
) -> Tensor:
    """The convolution term by term over kept entries: (B, K, output pixels), accumulated wide."""
    taps, rows = kernel[0] * kernel[1], values.shape[0] // groups
    batch = x.reshape(-1, *x.shape[-3:]).to(_wide(x.dtype))
    pieces = []
    for g, part in enumerate(batch.chunk(groups, 1)):
        channels = part.shape[1]
        patches = F.unfold(part, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))  # (B, C/g R S, L)
        split = patches.reshape(batch.shape[0], channels, taps, patches.shape[2])
        flat = split.permute(0, 3, 2, 1).reshape(-1, taps * channels)  # (B L, R S C/g)
        own = slice(g * rows, (g + 1) * rows)
        summed = linear_kept(flat, values[own], columns(codes[own], n, m, taps * channels))
        pieces.append(summed.reshape(batch.shape[0], -1, rows))
    return torch.cat(pieces, 2).transpose(1, 2)


def conv_weight(values: Tensor, codes: Tensor, kernel: Sequence[int], channels: int, n: int, m: int) -> Tensor:
    """Packed (K, R * S * C/g) -> the contiguous (K, C/g, R, S) weight of a convolution."""
    matrix = unpack(values, codes, n, m, kernel[0] * kernel[1] * channels)
    weight = matrix.reshape(-1, kernel[0], kernel[1], channels).permute(0, 3, 1, 2)
    # A 1x1 kernel is contiguous in several strides at once, by which torch picks its algorithm: copy into plain ones.
    return weight.clone(memory_format=torch.contiguous_format)


def _pieces(rowptr: Tensor, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of rows with about _BUDGET products: (first row, end row, first entry, end entry)."""
    ends = rowptr.tolist()
    rows, start = len(ends) - 1, 0
    while start < rows:
        end = start + 1
        while end < rows and (ends[end + 1] - ends[start]) * width <= _BUDGET:
            end += 1
        yield start, end, ends[start], ends[end]
        start = end


def spmm(csr: CSR, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    """alpha * csr @ b + beta * c, b of shape (cols, N) -> (rows, N); the sum runs over stored entries in order."""
    wide = _wide(csr.values.dtype)
    lengths = csr.rowptr.diff().long()
    pieces = []
    for start, end, first, last in _pieces(csr.rowptr, b.shape[1]):
        if first == last:
            pieces.append(b.new_zeros(end - start, b.shape[1], dtype=wide))
            continue
        terms = csr.values[first:last].to(wide).unsqueeze(1) * b[csr.col[first:last].long()].to(wide)  # (nnz, N)
        pieces.append(torch.segment_reduce(terms, "sum", lengths=lengths[start:end], axis=0, initial=0.0))
    out = torch.cat(pieces) if pieces else b.new_zeros(0, b.shape[1], dtype=wide)
    out = alpha * out
    if c is not None and beta != 0:
        out = out + beta * c.to(wide)
    return out.to(csr.values.dtype)


def sddmm(pattern: CSR, a: Tensor, b: Tensor, alpha: float, beta: float) -> Tensor:
    """(nnz,) values: alpha * (a @ b) at the stored entries + beta * the stored values; a (rows, K), b (K, cols)."""
    wide = _wide(pattern.values.dtype)
    rows, cols = pattern.rows(), pattern.col.long()
    step = max(1, _BUDGET // max(1, a.shape[1]))
    across = b.t()
    pieces = [
        (a[r].to(wide) * across[c].to(wide)).sum(1)  # (step, K) -> (step,)
        for r, c in zip(torch.split(rows, step), torch.split(cols, step), strict=True)
    ]
    out = alpha * torch.cat(pieces)
    if beta != 0:
        out = out + beta * pattern.values.to(wide)
    return out.to(pattern.values.dtype)


def softmax(csr: CSR) -> Tensor:
    """(nnz,) values: the softmax of each row over its stored entries; a row that is all -inf becomes zeros."""
    if csr.nnz == 0:
        return csr.values.clone()
    values, rows = csr.values.to(_wide(csr.values.dtype)), csr.rows()
    lengths = csr.rowptr.diff().long()
    highest = torch.segment_reduce(values.detach(), "max", lengths=lengths, axis=0, initial=-torch.inf)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    powers = (values - highest[rows]).exp()
    sums = torch.segment_reduce(powers, "sum", lengths=lengths, axis=0, initial=0.0)
    return (powers / sums.masked_fill(sums == 0, 1)[rows]).to(csr.values.dtype)
