"""Block and V:N:M patterns against sums in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_toolkit.patterns import NM, VNM, Block

few = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0])
exact = st.integers(-(2**30), 2**30).map(float)  # their sums are exact in float64


def top(values: list[Fraction], kept: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:kept])


def matrices(rows: int, cols: int) -> st.SearchStrategy[list[list[float]]]:
    return st.sampled_from([few, exact]).flatmap(
        lambda entry: st.lists(st.lists(entry, min_size=cols, max_size=cols), min_size=rows, max_size=rows)
    )


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 99))
def test_the_blocks_with_the_largest_sums_stay(data: st.DataObject, b_rows: int, b_cols: int, percent: int) -> None:
    matrix = data.draw(matrices(3 * b_rows, 4 * b_cols))
    pattern = Block(b_rows, b_cols, percent / 100)
    mask = pattern.mask(torch.tensor(matrix, dtype=torch.float64))
    sums = [
        sum(Fraction(matrix[i * b_rows + r][j * b_cols + c]) for r in range(b_rows) for c in range(b_cols))
        for i in range(3)
        for j in range(4)
    ]
    kept = top(sums, 12 - round(Fraction(percent, 100) * 12))  # type: ignore[arg-type]
    blocks = torch.tensor([number in kept for number in range(12)]).view(3, 4)
    assert torch.equal(mask, blocks.repeat_interleave(b_rows, 0).repeat_interleave(b_cols, 1))
    assert pattern.holds(mask)
    assert pattern.density(*mask.shape) == mask.double().mean().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_any_dtype(dtype: torch.dtype) -> None:
    scores = torch.rand(32, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = scores.double().view(8, 4, 6, 8).sum((1, 3))
    least = sums.flatten().sort().values[23]
    expected = (sums > least).repeat_interleave(4, 0).repeat_interleave(8, 1)
    assert torch.equal(Block(4, 8, 0.5).mask(scores), expected)


def test_blocks_in_several_pieces() -> None:
    scores = torch.randint(0, 2, (1024, 520), generator=torch.Generator().manual_seed(0)).float()
    sums = scores.view(64, 16, 65, 8).sum((1, 3)).flatten()
    kept = sums.sort(descending=True, stable=True).indices[: 4160 - 3744]
    blocks = torch.zeros(4160, dtype=torch.bool).index_fill_(0, kept, True).view(64, 65)
    expected = blocks.repeat_interleave(16, 0).repeat_interleave(8, 1)
    assert torch.equal(Block(16, 8, 0.9).mask(scores), expected)
    assert torch.equal(Block(16, 8, 0.9).mask(scores.t().contiguous().t()), expected)


def test_a_block_with_one_entry_kept_is_kept() -> None:
    pattern = Block(2, 2, 0.5)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, 0] = mask[3, 3] = True
    assert pattern.holds(mask)
    mask[0, 2] = True
    assert not pattern.holds(mask)  # three of four blocks, though only 3 of 16 entries
    assert not pattern.holds(mask[:3])
    assert not pattern.holds(mask[:, :3])


def test_where_blocks_do_not_fit() -> None:
    pattern = Block(16, 8, 0.8)
    assert pattern.why_not(32, 72, 8) is None  # a 3x3 convolution with 8 channels
    assert pattern.why_not(24, 16, 16) == "24 rows are not a multiple of 16"
    assert pattern.why_not(32, 36, 4) == "contraction length 4 is not a multiple of 8"
    assert pattern.why_not(16, 8, 8) == "0.8 of 1 blocks would drop all of them"
    assert pattern.why_not(16, 0, 0) == "empty"
    for shape in [(24, 16), (16, 12), (16,)]:
        with pytest.raises(ValueError, match=r"expected \(multiple of 16, multiple of 8\) scores"):
            pattern.mask(torch.zeros(shape))
    assert pattern.mask(torch.zeros(0, 8)).shape == (0, 8)
    assert pattern.mask(torch.ones(16, 8)).sum() == 0
    assert pattern.density(0, 8) == 0


def test_infinite_scores_count_as_large_ones() -> None:
    scores = torch.zeros(2, 8)
    scores[0, 0] = scores[0, 4] = scores[1, 5] = torch.inf
    scores[:, 2] = 1e30
    assert Block(2, 2, 0.75).mask(scores).nonzero()[:, 1].unique().tolist() == [4, 5]  # two infinities against one
    scores[1, 4] = -torch.inf
    assert Block(2, 2, 0.75).mask(scores).nonzero()[:, 1].unique().tolist() == [0, 1]


def test_easing_blocks() -> None:
    assert Block(4, 4, 0.8).towards(0.5) == Block(4, 4, 0.4)
    assert Block(4, 4, 0.8).towards(0.00001) is None
    assert Block(4, 4, 0.8).towards(1) == Block(4, 4, 0.8)


def vnm_by_python(scores: Tensor, v: int, n: int, m: int) -> Tensor:
    rows, cols = scores.shape
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    values = [[Fraction(value) for value in row] for row in scores.double().tolist()]
    for i in range(0, rows, v):
        for j in range(0, cols, m):
            columns = top([sum(values[i + r][j + c] for r in range(v)) for c in range(m)], 2 * n)  # type: ignore[misc]
            for r in range(i, i + v):
                for at in top([values[r][j + c] for c in columns], n):
                    keep[r, j + columns[at]] = True
    return keep


@settings(deadline=None)
@given(st.data(), st.sampled_from([(1, 1, 3), (2, 1, 3), (2, 2, 5), (3, 2, 8), (2, 4, 9)]))
def test_v_n_m_is_columns_first_then_rows(data: st.DataObject, counts: tuple[int, int, int]) -> None:
    v, n, m = counts
    scores = torch.tensor(data.draw(matrices(2 * v, 2 * m)), dtype=torch.float64)
    mask = VNM(v, n, m).mask(scores)
    assert torch.equal(mask, vnm_by_python(scores, v, n, m))
    assert VNM(v, n, m).holds(mask)
    assert (mask.view(2 * v, 2, m).sum(2) == n).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_v_n_m_of_any_dtype(dtype: torch.dtype) -> None:
    scores = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[:8] = -scores[:8].abs()
    scores[8:12] = 0
    assert torch.equal(VNM(4, 2, 8).mask(scores), vnm_by_python(scores, 4, 2, 8))


def test_v_n_m_in_several_pieces() -> None:
    scores = torch.randn(2048, 320, generator=torch.Generator().manual_seed(0)).abs().to(torch.bfloat16)
    mask = VNM(64, 2, 16).mask(scores)
    for start in (0, 960, 1984):
        assert torch.equal(mask[start : start + 64], VNM(64, 2, 16).mask(scores[start : start + 64]))
    assert torch.equal(mask[1984:], vnm_by_python(scores[1984:], 64, 2, 16))
    assert torch.equal(VNM(64, 2, 16).mask(scores.t().contiguous().t()), mask)


def test_v_n_m_holds_only_where_rows_share_columns() -> None:
    pattern = VNM(2, 1, 4)
    assert pattern.nm == NM(1, 4)
    assert pattern.holds(torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.bool))
    assert not pattern.holds(torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool))
    assert not pattern.holds(torch.zeros(3, 4, dtype=torch.bool))
    three_columns = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)
    assert NM(1, 4).holds(three_columns)
    assert not VNM(3, 1, 4).holds(three_columns)


def test_where_v_n_m_does_not_fit() -> None:
    pattern = VNM(4, 2, 8)
    assert pattern.why_not(8, 72, 8) is None
    assert pattern.why_not(6, 8, 8) == "6 rows are not a multiple of 4"
    assert pattern.why_not(8, 12, 12) == "contraction length 12 is not a multiple of 8"
    for shape in [(6, 8), (8, 12), (8,)]:
        with pytest.raises(ValueError, match=r"expected \(multiple of 4, multiple of 8\) scores"):
            pattern.mask(torch.zeros(shape))
    assert pattern.mask(torch.zeros(0, 8)).shape == (0, 8)
    assert pattern.mask(torch.zeros(4, 0)).shape == (4, 0)


def test_easing_v_n_m_goes_through_n_m() -> None:
    assert [VNM(64, 2, 8).towards(share) for share in (0, 0.2, 0.7, 0.9, 1)] == [
        None, NM(7, 8), NM(4, 8), VNM(64, 3, 8), VNM(64, 2, 8),
    ]  # fmt: skip
