"""spmm, sddmm and sparse_softmax against float64: any shape, slices, pieces, NaN and infinity, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_kernels import CSR, sddmm, sparse_softmax, spmm

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF, NAN = float("inf"), float("nan")


def unstructured(
    rows: int, cols: int, dtype: torch.dtype = torch.float64, seed: int = 0, density: float = 0.3
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, cols, generator=draw, dtype=torch.float64)
    dense[torch.rand(rows, cols, generator=draw) >= density] = 0
    return dense.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 7),
    st.floats(0, 1),
    st.sampled_from(FLOATS),
    st.integers(0, 999),
)
def test_csr_operations(rows: int, k: int, cols: int, density: float, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    dense = unstructured(rows, k, dtype, seed, density)
    csr, eps = CSR.from_dense(dense), 8 * torch.finfo(dtype).eps
    b = torch.randn(k, 2 * cols, generator=draw).to(dtype)[:, ::2]
    torch.testing.assert_close(spmm(csr, b).double(), dense.double() @ b.double(), rtol=eps, atol=eps)
    if cols:
        assert torch.equal(spmm(csr, b[:, 0]), spmm(csr, b[:, :1])[:, 0])
    left, right = torch.randn(rows, cols, generator=draw).to(dtype), torch.randn(cols, k, generator=draw).to(dtype)
    sampled = sddmm(csr, left, right, alpha=2, beta=0.5).to_dense().double()
    exact = (2 * (left.double() @ right.double()) + 0.5 * dense.double()) * (dense != 0)
    torch.testing.assert_close(sampled, exact, rtol=4 * eps, atol=4 * eps)
    full = dense.double().masked_fill(dense == 0, -INF).softmax(1).nan_to_num(0)
    torch.testing.assert_close(sparse_softmax(csr).to_dense().double(), full, rtol=eps, atol=eps)


def test_spmm_rows_of_any_length_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = unstructured(9, 11)
    dense[2] = 0
    dense[5, :5] = torch.arange(1.0, 6.0)
    b = torch.randn(11, 3, dtype=torch.float64)
    whole = spmm(CSR.from_dense(dense), b)
    monkeypatch.setattr("asp_kernels.backends.reference._BUDGET", 7)
    assert torch.equal(spmm(CSR.from_dense(dense), b), whole)
    torch.testing.assert_close(whole, dense @ b)
    torch.testing.assert_close(sddmm(CSR.from_dense(dense), b[:9], b.t()).to_dense(), (b[:9] @ b.t()) * (dense != 0))


def test_beta_counts_once_and_zero_beta_reads_nothing() -> None:
    csr, b = CSR.from_dense(torch.tensor([[0.0, 2], [3, 0]])), torch.eye(2)
    c = torch.full((2, 2), 10.0)
    assert spmm(csr, b, c).tolist() == [[10, 12], [13, 10]]
    assert spmm(csr, b, c, alpha=2, beta=0.5).tolist() == [[5, 9], [11, 5]]
    assert spmm(csr, b, torch.full((2, 2), NAN), beta=0).tolist() == [[0, 2], [3, 0]]
    unread = CSR(csr.rowptr, csr.col, torch.full((2,), NAN), csr.shape)
    assert sddmm(unread, b, b + 1).values.tolist() == [1, 1]
    assert sddmm(csr, torch.zeros(2, 0), torch.zeros(0, 2), beta=3).values.tolist() == [6, 9]


def test_spmm_invents_no_nan() -> None:
    csr = CSR.from_dense(torch.tensor([[0.0, 2, 1], [0, 3, 0]]))
    b = torch.tensor([[INF, NAN], [1, 1], [5, INF]])
    assert spmm(csr, b).tolist() == [[7, INF], [3, 3]]


def test_softmax_row_of_minus_infinity_is_zeros() -> None:
    csr = CSR(torch.tensor([0, 2, 2, 4], dtype=torch.int32), torch.tensor([0, 1, 0, 2], dtype=torch.int32),
              torch.tensor([-INF, -INF, -INF, 1000.0]), (3, 3))  # fmt: skip
    assert sparse_softmax(csr).values.tolist() == [0, 0, 0, 1]


def test_csr_parts_as_slices() -> None:
    big = CSR.from_dense(unstructured(6, 8))
    rowptr = torch.cat([big.rowptr[:1], big.rowptr])[1:]
    col, values = torch.cat([big.col[:3], big.col])[3:], torch.stack([big.values, big.values], 1)[:, 1]
    b = torch.randn(8, 3, dtype=torch.float64)
    assert torch.equal(spmm(CSR(rowptr, col, values, (6, 8)), b), spmm(big, b))


def test_dense_operand_beyond_2_to_the_31_elements() -> None:
    csr = CSR(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5, 2**17 - 1], dtype=torch.int32),
              torch.tensor([1.0, 2.0]), (1, 2**17))  # fmt: skip
    assert spmm(csr, torch.ones(1, 1).expand(2**17, 2**15)).unique().tolist() == [3.0]  # cols * N = 2**32


@pytest.mark.parametrize("b", [torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, 2)])
def test_spmm_refuses(b: Tensor) -> None:
    with pytest.raises(ValueError, match="spmm: b: expected"):
        spmm(CSR.from_dense(torch.ones(2, 2)), b)


def test_gradients() -> None:
    csr = CSR.from_dense(unstructured(4, 5))
    weights, b = csr.values.clone().requires_grad_(), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def multiply(values: Tensor, b: Tensor) -> Tensor:
        return spmm(sparse_softmax(CSR(csr.rowptr, csr.col, values, csr.shape)), b)

    assert torch.autograd.gradcheck(multiply, (weights, b))
    a = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    across = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: sddmm(csr, a, b).values, (a, across))
