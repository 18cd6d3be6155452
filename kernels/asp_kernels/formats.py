"""Sparse matrices as values: PackedNM (Packed24 is its 2:4 case) and CSR. Every object of these classes is valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from asp_kernels.validate import (
    FLOAT_DTYPES,
    MAX_INT32,
    VALUE_DTYPES,
    check_codes,
    check_csr,
    check_nm,
    check_packed_layout,
    code_bits,
    unpack_codes,
)


def pack_codes(places: Tensor, bits: int) -> Tensor:
    """(rows, count) uint8 below 2**bits -> (rows, bytes) uint8, padded with zero bits: undoes `unpack_codes`."""
    if 8 % bits:
        places = ((places.unsqueeze(2) >> torch.arange(bits, dtype=torch.uint8, device=places.device)) & 1).flatten(1)
        bits = 1
    per = 8 // bits
    size = -(-places.shape[1] // per)
    padded = torch.nn.functional.pad(places, (0, size * per - places.shape[1]))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=places.device)
    return (padded.reshape(places.shape[0], size, per) << shifts).sum(2, dtype=torch.uint8)


def unpack(values: Tensor, codes: Tensor, n: int, m: int, cols: int) -> Tensor:
    """Kept values (rows, cols * n / m) and codes -> the dense (rows, cols) matrix, dropped entries +0.0.

    Differentiable in `values`. Memory-safe for any codes; right for valid ones.
    """
    rows = values.shape[0]
    places = unpack_codes(codes, code_bits(m), cols // m * n).reshape(-1, n)  # (rows * cols / m, n)
    within = torch.arange(m, dtype=torch.uint8, device=values.device)
    keep = torch.zeros(places.shape[0], m, dtype=torch.bool, device=values.device)
    for j in range(n):
        keep |= places[:, j : j + 1] == within
    return values.new_zeros(rows, cols).masked_scatter(keep.reshape(rows, cols), values)


def columns(codes: Tensor, n: int, m: int, cols: int) -> Tensor:
    """Codes -> int64 (rows, cols * n / m): the column of each kept value; always in range."""
    rows = codes.shape[0]
    places = unpack_codes(codes, code_bits(m), cols // m * n).clamp_(max=m - 1).reshape(rows, cols // m, n)
    starts = torch.arange(0, cols, m, device=codes.device).unsqueeze(1)
    return (places + starts).reshape(rows, cols // m * n)


def _fill(keep: Tensor, candidates: Tensor, n: int) -> Tensor:
    """(G, m) bool: `keep` and the first of `candidates`, up to n in a group."""
    room = n - keep.sum(1, keepdim=True, dtype=torch.int8)
    return keep | (candidates & (candidates.cumsum(1, dtype=torch.int8) <= room))


@dataclass(frozen=True, eq=False)
class PackedNM:
    """A (rows, cols) matrix of which every `m` consecutive entries of a row hold at most `n` that are not zero.

    values: (rows, cols * n / m), the dense dtype (fp16, bf16, fp32, fp64, int8): the kept entries, group by group
    codes:  (rows, ceil(cols / m * n * bits / 8)) uint8: each kept entry's place in its group, ascending inside the
            group, `bits` = 2 up to m = 4, else ceil(log2 m); first entry in the lowest bits, rows padded to whole bytes
    shape:  (rows, cols)

    Raises:
        ValueError: dtypes, shapes or codes are not as above.
    """

    values: Tensor
    codes: Tensor
    shape: tuple[int, int]
    n: int
    m: int

    def __post_init__(self) -> None:
        check_packed_layout(self.values, self.codes, self.shape, self.n, self.m)
        check_codes(self.codes, self.shape, self.n, self.m)

    @classmethod
    def from_dense(cls, w: Tensor, n: int, m: int, mask: Tensor | None = None) -> Self:
        """Pack a (rows, cols) matrix that is N:M. Checks and never prunes.

        mask: (rows, cols) bool, True keeps; without one, the entries that are not zero are kept. Groups that keep
        fewer than n are filled with -0.0 entries, then with the lowest free places. So `to_dense` gives `w` back bit
        for bit, except that a -0.0 which finds no room, or which the mask drops, returns as +0.0.

        Raises:
            ValueError: names the first (row, group) with more than n entries, or the first entry that `mask` drops
                though it is not zero.
        """
        check_nm(n, m)
        if w.ndim != 2 or w.shape[1] % m:
            raise ValueError(f"{n}:{m} packing: expected a (rows, multiple of {m}) matrix, got shape {tuple(w.shape)}")
        if w.dtype not in VALUE_DTYPES:
            raise ValueError(f"packing: expected one of {[str(d) for d in VALUE_DTYPES]}, got {w.dtype}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != w.shape or mask.device != w.device):
            raise ValueError(
                f"mask: expected torch.bool {tuple(w.shape)} on {w.device},"
                f" got {mask.dtype} {tuple(mask.shape)} on {mask.device}"
            )
        w = w.detach()
        rows, cols = w.shape
        groups = w.reshape(-1, m)  # (rows * cols / m, m)
        keep = groups != 0  # NaN is not zero
        if mask is not None:
            lost = keep & ~mask.reshape(-1, m)
            if bool(lost.any()):
                at = int(lost.reshape(-1).nonzero()[0])
                raise ValueError(
                    f"packing: row {at // cols}, column {at % cols}: the mask drops an entry that is"
                    f" {float(w.reshape(-1)[at])}; apply the mask first"
                )
            keep = mask.reshape(-1, m)
        counts = keep.sum(1, dtype=torch.int8)
        over = (counts > n).nonzero()
        if over.numel():
            at = int(over[0])
            raise ValueError(
                f"not {n}:{m}: row {at // (cols // m)}, group {at % (cols // m)} keeps {int(counts[at])} of {m} entries"
                f" (columns {at % (cols // m) * m} to {at % (cols // m) * m + m - 1}); prune before packing"
            )
        short = (counts < n).nonzero()[:, 0]
        if short.numel():
            found = keep[short]
            if mask is None and w.is_floating_point():
                found = _fill(found, torch.signbit(groups[short]) & ~found, n)
            keep = keep.index_copy(0, short, _fill(found, ~found, n))  # a copy: `keep` may be the caller's mask
        places = torch.arange(m, dtype=torch.uint8, device=w.device).expand(groups.shape).masked_select(keep)
        values = groups.masked_select(keep).reshape(rows, cols // m * n)
        return cls(values, pack_codes(places.reshape(rows, cols // m * n), code_bits(m)), (rows, cols), n, m)

    def to_dense(self) -> Tensor:
        """The (rows, cols) matrix, dropped entries +0.0; differentiable in `values`."""
        return unpack(self.values, self.codes, self.n, self.m, self.shape[1])

    def to(self, device: torch.device | str) -> Self:
        """The same matrix on another device."""
        return type(self)(self.values.to(device), self.codes.to(device), self.shape, self.n, self.m)

    @property
    def nbytes(self) -> int:
        """Bytes of values and codes."""
        return self.values.nbytes + self.codes.nbytes


@dataclass(frozen=True, eq=False)
class Packed24(PackedNM):
    """PackedNM with n = 2, m = 4: half of the values and 2 bits for each (9/16 of the dense bytes in 16 bit)."""

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        if (self.n, self.m) != (2, 4):
            raise ValueError(f"Packed24 is 2:4, got {self.n}:{self.m}; use PackedNM")
        super().__post_init__()

    @classmethod
    def from_dense(cls, w: Tensor, n: int = 2, m: int = 4, mask: Tensor | None = None) -> Self:
        """As `PackedNM.from_dense` with n = 2, m = 4."""
        if (n, m) != (2, 4):
            raise ValueError(f"Packed24 is 2:4, got {n}:{m}; use PackedNM.from_dense")
        return super().from_dense(w, n, m, mask)


@dataclass(frozen=True, eq=False)
class CSR:
    """A (rows, cols) matrix by its stored entries: row i has entries rowptr[i] to rowptr[i + 1] - 1.

    rowptr: (rows + 1,) int32, ascending from 0 to nnz
    col:    (nnz,) int32, strictly ascending inside a row (canonical)
    values: (nnz,) fp16, bf16, fp32 or fp64

    The parts may be slices of larger tensors.

    Raises:
        ValueError: the parts are not as above; duplicates and unsorted columns are refused.
    """

    rowptr: Tensor
    col: Tensor
    values: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        check_csr(self.rowptr, self.col, self.values, self.shape)

    @classmethod
    def from_dense(cls, w: Tensor, mask: Tensor | None = None) -> Self:
        """Store the entries of a (rows, cols) matrix that are not zero, or those where `mask` (bool) is True."""
        if w.ndim != 2 or w.dtype not in FLOAT_DTYPES:
            raise ValueError(f"expected a floating (rows, cols) matrix, got {w.dtype} {tuple(w.shape)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != w.shape):
            raise ValueError(f"mask: expected torch.bool {tuple(w.shape)}, got {mask.dtype} {tuple(mask.shape)}")
        keep = w.detach() != 0 if mask is None else mask
        counts = keep.sum(1)
        if int(counts.sum()) > MAX_INT32:
            raise ValueError(f"{int(counts.sum())} entries are beyond 32-bit indices; split the matrix")
        rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        return cls(rowptr, keep.nonzero()[:, 1].to(torch.int32), w.masked_select(keep), (w.shape[0], w.shape[1]))

    def to_dense(self) -> Tensor:
        """The (rows, cols) matrix; entries not stored are +0.0. Differentiable in `values`."""
        flat = self.values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.rows() * self.shape[1] + self.col,), self.values).reshape(self.shape)

    def rows(self) -> Tensor:
        """(nnz,) int64: the row of each stored entry."""
        rows = torch.arange(self.shape[0], device=self.values.device)
        return rows.repeat_interleave(self.rowptr.diff(), output_size=self.nnz)

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the three parts."""
        return self.rowptr.nbytes + self.col.nbytes + self.values.nbytes
