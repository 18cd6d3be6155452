"""Checks of everything that describes a sparse matrix, made before any kernel reads it.

Data may come from a stranger's file: a wrong code or row pointer would be an index out of bounds. Contents are checked
where they exist; on the meta device only dtypes and shapes are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)
"""Dtypes that kept values may have."""

FLOAT_DTYPES = VALUE_DTYPES[:4]
"""Dtypes of CSR values and of convolutions."""

MAX_M = 64
MAX_INT32 = 2**31 - 1


def code_bits(m: int) -> int:
    """Bits of one code: where in its group of `m` a kept entry stands."""
    return 2 if m <= 4 else (m - 1).bit_length()


def code_bytes(cols: int, n: int, m: int) -> int:
    """Bytes that the codes of one row of `cols` entries take."""
    return -(-(cols // m * n * code_bits(m)) // 8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """(rows, bytes) uint8 -> (rows, count) uint8: a row is one bit string, the lowest bits of a byte first."""
    if 8 % bits:
        split = unpack_codes(packed, 1, count * bits).reshape(packed.shape[0], count, bits)
        return (split << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(2, dtype=torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields = (packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)  # (rows, bytes, 8 / bits)
    return fields.flatten(1)[:, :count]


def check_nm(n: int, m: int) -> None:
    """Raise ValueError unless 1 <= n < m <= 64."""
    if not (isinstance(n, int) and isinstance(m, int) and 1 <= n < m <= MAX_M):
        raise ValueError(f"expected 1 <= n < m <= {MAX_M}, got n = {n!r}, m = {m!r}")


def check_shape(shape: Sequence[int]) -> None:
    """Raise ValueError unless `shape` is two sizes of at least 0."""
    if len(shape) != 2 or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"expected shape (rows, cols), two integers of at least 0, got {shape!r}")


def check_packed_layout(values: Tensor, codes: Tensor, shape: Sequence[int], n: int, m: int) -> None:
    """Raise ValueError unless dtypes, shapes and devices of `values` and `codes` suit an N:M matrix of `shape`."""
    check_nm(n, m)
    check_shape(shape)
    rows, cols = shape
    if cols % m:
        raise ValueError(f"{n}:{m} needs a multiple of {m} columns, got shape {tuple(shape)}")
    if values.dtype not in VALUE_DTYPES:
        raise ValueError(f"values: expected one of {[str(d) for d in VALUE_DTYPES]}, got {values.dtype}")
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes: expected torch.uint8, got {codes.dtype}")
    if tuple(values.shape) != (rows, cols // m * n):
        raise ValueError(f"values: expected shape {(rows, cols // m * n)}, got {tuple(values.shape)}")
    if tuple(codes.shape) != (rows, code_bytes(cols, n, m)):
        raise ValueError(f"codes: expected shape {(rows, code_bytes(cols, n, m))}, got {tuple(codes.shape)}")
    if values.device != codes.device:
        raise ValueError(f"values are on {values.device}, codes on {codes.device}; move them to one device")


def check_codes(codes: Tensor, shape: Sequence[int], n: int, m: int) -> None:
    """Raise ValueError naming the first (row, group) whose codes are not ascending and below m, or stray pad bits."""
    if codes.is_meta or codes.numel() == 0:
        return
    rows, cols = shape
    kept, bits = cols // m * n, code_bits(m)
    places = unpack_codes(codes, bits, kept).reshape(rows, cols // m, n)
    bad = (places >= m).any(2)
    bad |= (places[:, :, 1:] <= places[:, :, :-1]).any(2)  # (rows, groups)
    if bool(bad.any()):
        row, group = (int(i) for i in bad.nonzero()[0])
        found = places[row, group].tolist()
        raise ValueError(f"codes: row {row}, group {group}: expected {n} ascending places below {m}, got {found}")
    used = kept * bits - 8 * (codes.shape[1] - 1)  # bits in the last byte
    stray = (codes[:, -1] >> used).nonzero() if used < 8 else codes[:0, -1]
    if stray.numel():
        row = int(stray[0])
        raise ValueError(f"codes: row {row}: expected zero bits after the last code, got {int(codes[row, -1])}")


def check_csr(rowptr: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless the parts are a canonical CSR matrix: sorted columns, no duplicates, all in range."""
    check_shape(shape)
    rows, cols = shape
    for name, part in (("rowptr", rowptr), ("col", col)):
        if part.dtype != torch.int32:
            raise ValueError(f"{name}: expected torch.int32, got {part.dtype}; convert with .to(torch.int32)")
    if values.dtype not in FLOAT_DTYPES:
        raise ValueError(f"values: expected one of {[str(d) for d in FLOAT_DTYPES]}, got {values.dtype}")
    if max(rows, cols, values.numel()) > MAX_INT32:
        raise ValueError(f"{tuple(shape)} with {values.numel()} entries is beyond 32-bit indices; split the matrix")
    if tuple(rowptr.shape) != (rows + 1,):
        raise ValueError(f"rowptr: expected shape {(rows + 1,)}, got {tuple(rowptr.shape)}")
    if values.ndim != 1 or col.shape != values.shape:
        raise ValueError(f"expected col and values of shape (nnz,), got {tuple(col.shape)} and {tuple(values.shape)}")
    if not rowptr.device == col.device == values.device:
        places = f"{rowptr.device}, {col.device}, {values.device}"
        raise ValueError(f"rowptr, col, values are on {places}; move them to one device")
    if values.is_meta:
        return
    nnz = values.numel()
    if int(rowptr[0]) != 0 or int(rowptr[-1]) != nnz:
        raise ValueError(f"rowptr: expected to run from 0 to nnz = {nnz}, got {int(rowptr[0])} to {int(rowptr[-1])}")
    falling = (rowptr[1:] < rowptr[:-1]).nonzero()
    if falling.numel():
        raise ValueError(f"rowptr: expected ascending, row {int(falling[0])} ends before it starts")
    outside = ((col < 0) | (col >= cols)).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise ValueError(f"col: expected 0 <= column < {cols}, got {int(col[at])} at entry {at}")
    if nnz < 2:
        return
    ordered = col[1:] > col[:-1]
    starts = rowptr[1:-1].long()
    ordered[starts[(starts > 0) & (starts < nnz)] - 1] = True  # a row's first column owes the row before nothing
    wrong = (~ordered).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        what = "a duplicate column" if int(col[at]) == int(col[at + 1]) else "unsorted columns"
        raise ValueError(
            f"col: {what} at entries {at} and {at + 1} ({int(col[at])}, {int(col[at + 1])});"
            " sort each row and sum duplicates first, e.g. with torch's coo.coalesce().to_sparse_csr()"
        )
