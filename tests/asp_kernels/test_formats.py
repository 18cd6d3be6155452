"""PackedNM and CSR: bit-exact round trips, and refusals of everything that is not what it claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_kernels import CSR, Packed24, PackedNM
from asp_kernels.formats import columns, pack_codes
from asp_kernels.validate import code_bits, code_bytes, unpack_codes

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
FLOATS = list(BITS)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.dtype])


def sparse(rows: int, cols: int, n: int, m: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bit patterns, so NaN payloads, infinities, subnormals and both zeros; at most n of m bits not all zero."""
    draw = torch.Generator().manual_seed(seed)
    whole = BITS[dtype]
    info = torch.iinfo(whole)
    raw = torch.randint(info.min, info.max, (rows * cols // m, m), generator=draw, dtype=whole)
    raw[torch.rand(raw.shape, generator=draw) < 0.1] = info.min  # -0.0
    order = torch.rand(raw.shape, generator=draw).argsort(1)
    kept = torch.randint(0, n + 1, (raw.shape[0], 1), generator=draw)
    return raw.masked_fill(order >= kept, 0).view(dtype).reshape(rows, cols)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([(2, 4), (1, 4), (1, 2), (2, 3), (4, 8), (3, 5), (5, 6), (8, 16), (1, 16), (16, 32), (7, 64)]),
    st.sampled_from(FLOATS),
    st.integers(0, 2**31),
)
def test_round_trip_is_bit_exact(rows: int, groups: int, nm: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    n, m = nm
    dense = sparse(rows, groups * m, n, m, dtype, seed)
    packed = PackedNM.from_dense(dense, n, m)
    assert packed.values.shape == (rows, groups * n)
    assert packed.codes.shape == (rows, -(-groups * n * code_bits(m) // 8))
    assert torch.equal(bits(packed.to_dense()), bits(dense))
    assert torch.equal(bits(dense).gather(1, columns(packed.codes, n, m, groups * m)), bits(packed.values))
    strided = torch.empty(groups * m, rows, dtype=BITS[dtype]).copy_(bits(dense).t()).view(dtype).t()
    assert torch.equal(bits(PackedNM.from_dense(strided, n, m).values), bits(packed.values))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 40), st.integers(0, 2**31))
def test_codes_round_trip(width: int, rows: int, count: int, seed: int) -> None:
    places = torch.randint(0, 2**width, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(places, width), width, count), places)


def test_codes_by_hand() -> None:
    packed = Packed24.from_dense(torch.tensor([[0.0, 5.0, 0.0, 7.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    assert packed.values.tolist() == [[5.0, 7.0, 3.0, 0.0, 0.0, 0.0]]
    assert packed.codes.tolist() == [[0b01_00_11_01, 0b0000_01_00]]  # places 1 3 | 0 1 | 0 1, first lowest
    three = PackedNM.from_dense(torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 1]]), 2, 8)
    assert three.codes.tolist() == [[0b111_010]]


def test_size_of_3072x768_and_int8() -> None:
    dense = torch.randn(3072, 768, dtype=torch.bfloat16)
    dense.view(-1, 4)[:, ::2] = 0
    packed = Packed24.from_dense(dense)
    assert torch.equal(packed.to_dense(), dense)
    assert packed.nbytes <= 0.6 * dense.nbytes
    whole = torch.tensor([[0, -128, 127, 0]], dtype=torch.int8)
    assert torch.equal(Packed24.from_dense(whole).to_dense(), whole)


def test_mask_keeps_zero_entries_and_dropped_negative_zeros_become_positive() -> None:
    dense = torch.tensor([[0.0, -0.0, 2.0, -0.0]])
    mask = torch.tensor([[True, False, True, False]])
    packed = Packed24.from_dense(dense, mask=mask)
    assert columns(packed.codes, 2, 4, 4).tolist() == [[0, 2]]
    assert bits(packed.to_dense()).tolist() == bits(torch.tensor([[0.0, 0.0, 2.0, 0.0]])).tolist()
    unmasked = Packed24.from_dense(torch.tensor([[-0.0, -1.0, 2.0, -0.0]])).to_dense()
    assert bits(unmasked).tolist() == bits(torch.tensor([[0.0, -1.0, 2.0, 0.0]])).tolist()


def test_packing_names_the_first_bad_group_and_never_prunes() -> None:
    dense = torch.zeros(5, 12)
    dense[3, 4:7] = 1
    dense[4, :4] = 1
    with pytest.raises(ValueError, match=r"not 2:4: row 3, group 1 keeps 3 of 4"):
        Packed24.from_dense(dense)
    with pytest.raises(ValueError, match="row 3, column 6: the mask drops"):
        Packed24.from_dense(dense[:4], mask=torch.arange(12).expand(4, 12) % 4 < 2)
    with pytest.raises(ValueError, match=r"multiple of 4\) matrix, got shape \(3, 6\)"):
        Packed24.from_dense(torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"mask: expected torch.bool"):
        Packed24.from_dense(dense, mask=torch.ones(5, 12))
    with pytest.raises(ValueError, match="use PackedNM"):
        Packed24.from_dense(dense, 1, 4)


def good(**other: Any) -> dict[str, Any]:
    packed = PackedNM.from_dense(torch.tensor([[0.0, 1, 2, 0], [3, 0, 0, 4]]), 2, 4)
    return {"values": packed.values, "codes": packed.codes, "shape": (2, 4), "n": 2, "m": 4, **other}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"codes": torch.tensor([[0b0101], [0b1100]], dtype=torch.uint8)}, "row 0, group 0: expected 2 ascending"),
        ({"codes": torch.tensor([[0b1001], [0b0011]], dtype=torch.uint8)}, "row 1, group 0: expected 2 ascending"),
        ({"codes": torch.tensor([[0b1001], [0b11100]], dtype=torch.uint8)}, "zero bits after the last code"),
        ({"codes": torch.zeros(2, 1, dtype=torch.int8)}, "codes: expected torch.uint8"),
        ({"codes": torch.zeros(2, 0, dtype=torch.uint8)}, r"codes: expected shape \(2, 1\)"),
        ({"values": torch.zeros(2, 3)}, r"values: expected shape \(2, 2\)"),
        ({"values": torch.zeros(2, 2, dtype=torch.int64)}, "values: expected one of"),
        ({"shape": (2, 6)}, "multiple of 4"),
        ({"shape": (2, -4)}, "at least 0"),
        ({"shape": (2, 4.0)}, "integers"),
        ({"n": 5}, "1 <= n < m"),
        ({"n": 0}, "1 <= n < m"),
        ({"m": 1 << 40}, "1 <= n < m"),
    ],
)
def test_packed_refuses(other: dict[str, Any], message: str) -> None:
    PackedNM(**good())
    with pytest.raises(ValueError, match=message):
        PackedNM(**good(**other))


def test_codes_beyond_the_group_are_refused() -> None:
    with pytest.raises(ValueError, match="places below 3"):
        PackedNM(torch.ones(1, 2), torch.tensor([[0b1101]], dtype=torch.uint8), (1, 3), 2, 3)


def test_meta_device_is_checked_by_layout_alone() -> None:
    with torch.device("meta"):
        codes = torch.zeros(8, code_bytes(16, 2, 4), dtype=torch.uint8)
        assert PackedNM(torch.zeros(8, 8), codes, (8, 16), 2, 4).shape == (8, 16)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.floats(0, 1), st.sampled_from(FLOATS), st.integers(0, 2**31))
def test_csr_round_trip(rows: int, cols: int, density: float, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, cols, generator=draw, dtype=torch.float64).to(dtype)
    dense[torch.rand(rows, cols, generator=draw) >= density] = 0
    csr = CSR.from_dense(dense)
    assert csr.nnz == int((dense != 0).sum())
    assert torch.equal(csr.to_dense(), dense)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("rowptr", "col", "shape", "message"),
    [
        (int32(0, 0, 0, 1), int32(0), (3, 0), "expected 0 <= column < 0"),
        (int32(0, 1), int32(4), (1, 4), "got 4 at entry 0"),
        (int32(0, 1), int32(-1), (1, 4), "got -1 at entry 0"),
        (int32(0, 2, 1, 2), int32(0, 1), (3, 4), "row 1 ends before"),
        (int32(1, 2), int32(0, 1), (1, 4), "to run from 0"),
        (int32(0, 1), int32(0, 1), (1, 4), "to nnz = 2"),
        (int32(0, 2), int32(1, 0), (1, 4), "unsorted"),
        (int32(0, 1, 3), int32(3, 2, 2), (2, 4), "duplicate column at entries 1 and 2"),
        (int32(0, 1, 1), int32(0), (1, 4), r"rowptr: expected shape \(2,\)"),
        (torch.tensor([0, 1]), int32(0), (1, 4), "rowptr: expected torch.int32"),
        (int32(0, 1), int32(0), (1, 2**31), "beyond 32-bit"),
    ],
)
def test_csr_refuses(rowptr: Tensor, col: Tensor, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CSR(rowptr, col, torch.ones(col.shape), shape)


def test_csr_nnz_beyond_32_bits_is_a_clear_error() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="beyond 32-bit"):
        CSR(int32(0, 0), torch.empty(2**31, dtype=torch.int32), torch.empty(2**31, dtype=torch.float16), (1, 4))


def test_csr_accepts_falling_columns_between_rows() -> None:
    csr = CSR(int32(0, 0, 2, 2, 3, 3), int32(1, 3, 0), torch.tensor([1.0, 2, 3]), (5, 4))
    assert csr.to_dense().nonzero().tolist() == [[1, 1], [1, 3], [3, 0]]


def test_packing_leaves_weight_and_mask_alone() -> None:
    dense, mask = torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bool)
    Packed24.from_dense(dense, mask=mask)
    assert not mask.any()
