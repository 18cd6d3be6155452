"""N:M: masks against all C(M, N) masks, and against worked-out ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def best_by_enumeration(row: list[float], n: int, m: int) -> list[bool]:
    """Of all masks that keep n of every m: the largest exact sum, and of those the first in index order."""
    keep: list[bool] = []
    for start in range(0, len(row), m):
        group = [Fraction(value) for value in row[start : start + m]]
        best = max(combinations(range(m), n), key=lambda kept: (sum(group[i] for i in kept), [-i for i in kept]))
        keep += [i in best for i in range(m)]
    return keep


def top_by_python(scores: Tensor, n: int, m: int) -> Tensor:
    """The n highest of every m, ties to the lower index, one group at a time."""
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    for row, values in enumerate(scores.double().tolist()):
        for start in range(0, len(values), m):
            for i in sorted(range(start, start + m), key=lambda i: (-values[i], i))[:n]:
                keep[row, i] = True
    return keep


@st.composite
def rows_of_groups(draw: st.DrawFn) -> tuple[list[float], int, int]:
    m = draw(st.integers(2, 6))
    n = draw(st.integers(1, m - 1))
    entry = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 5e-324, -5e-324, 1e308]),  # ties, subnormals, zeros of both signs
        st.floats(allow_nan=False, allow_infinity=False),
    )
    groups = draw(st.integers(1, 3))
    return draw(st.lists(entry, min_size=groups * m, max_size=groups * m)), n, m


@settings(deadline=None)
@given(rows_of_groups())
def test_the_mask_is_the_best_of_all_masks(case: tuple[list[float], int, int]) -> None:
    row, n, m = case
    mask = NM(n, m).mask(torch.tensor([row], dtype=torch.float64))
    assert mask[0].tolist() == best_by_enumeration(row, n, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "m"),
    [(2, 4), (1, 4), (3, 4), (4, 8), (2, 5), (5, 9), (8, 16), (3, 24), (16, 32), (1, 2), (2, 3), (1, 64), (63, 64)],
)
def test_any_dtype_and_size_gives_the_exact_top(n: int, m: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(8, 3 * m, generator=generator).abs().to(dtype)
    scores[:2] = (scores[:2] * 2).round()  # ties
    scores[2] = 0.5
    scores[3:5, ::5] *= -1  # signed, as movement's are
    scores[5, ::7] = torch.inf
    scores[6, ::3] = -torch.inf
    mask = NM(n, m).mask(scores)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, top_by_python(scores, n, m))
    assert (mask.reshape(-1, m).sum(1) == n).all()


def test_every_width_and_count_is_exact() -> None:
    generator = torch.Generator().manual_seed(3)
    for m in range(2, 65):
        scores = torch.randint(0, m, (2, 2 * m), generator=generator).float()  # about as many values as entries: ties
        for n in {1, m // 3, m // 2, m - 1} - {0}:
            assert torch.equal(NM(n, m).mask(scores), top_by_python(scores, n, m)), f"{n}:{m}"


@pytest.mark.parametrize(("n", "m"), [(8, 16), (16, 32)])
def test_wide_groups_are_exact_and_take_no_time(n: int, m: int) -> None:
    scores = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).abs()
    started = time.perf_counter()
    mask = NM(n, m).mask(scores)
    assert time.perf_counter() - started < 1  # enumerating all masks would take hours
    assert torch.equal(mask, top_by_python(scores, n, m))


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_and_zeros_of_both_signs_are_ordered_by_value(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 2  # 0.0 where subnormals are flushed
    scores = torch.tensor([[0.0, tiny, -0.0, tiny / 2], [-0.0, 0.0, -0.0, 0.0]], dtype=dtype)
    assert NM(2, 4).mask(scores).tolist() == [[False, True, False, True], [True, True, False, False]]
    signed = torch.tensor([[-tiny, -0.0, 0.0, -tiny / 2], [-1, -0.0, -tiny, tiny]], dtype=dtype)
    assert NM(2, 4).mask(signed).tolist() == [[False, True, True, False], [False, True, False, True]]
    wide = torch.cat([scores] * 8, dim=1)
    assert torch.equal(NM(16, 32).mask(wide), top_by_python(wide, 16, 32))


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1e8, 1, 2, 3], [0, 3]),  # in fp32 1e8 + 1 == 1e8 + 3: sums of pairs lose the small ones
        ([1e-30, 1e8, 1e-29, 1e-31], [1, 2]),
        ([0, 0, 0, 0], [0, 1]),
        ([7, 7, 7, 7], [0, 1]),
        ([1, 2, 2, 2], [1, 2]),
        ([0, 0, 0, 5], [0, 3]),
    ],
)
def test_worked_out_groups(scores: list[float], kept: list[int]) -> None:
    mask = NM(2, 4).mask(torch.tensor([scores]))
    assert mask[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (8, 16), (16, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_and_two_threads_give_the_same_bits(two_threads: None, n: int, m: int, dtype: torch.dtype) -> None:
    # More than one piece, and a last piece that is not full.
    scores = torch.randn(515, 1024, generator=torch.Generator().manual_seed(1)).abs().to(dtype)
    scores[:64] = scores[:64].round()
    many = NM(n, m).mask(scores)
    torch.set_num_threads(1)
    assert torch.equal(NM(n, m).mask(scores), many)
    assert torch.equal(many[500:], top_by_python(scores[500:], n, m))


def test_strided_scores_are_read_right() -> None:
    scores = torch.randn(16, 24, generator=torch.Generator().manual_seed(2))
    assert torch.equal(NM(2, 4).mask(scores.t()[:, ::2]), NM(2, 4).mask(scores.t()[:, ::2].contiguous()))


def test_the_scores_stay_as_they_are_and_carry_no_gradient() -> None:
    scores = torch.randn(4, 8, requires_grad=True)
    before = scores.detach().clone()
    assert not NM(2, 4).mask(scores).requires_grad
    assert torch.equal(scores.detach(), before)


@pytest.mark.parametrize("shape", [(8,), (2, 6), (2, 2, 4)])
def test_scores_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(rows, multiple of 4\) scores, got"):
        NM(2, 4).mask(torch.zeros(shape))


@pytest.mark.parametrize(("n", "m"), [(5, 4), (0, 4), (4, 4), (0, 0), (-1, 4), (2, 128)])
def test_impossible_counts_are_refused(n: int, m: int) -> None:
    with pytest.raises(AspError, match=f"pattern {n}:{m}: N:M keeps N of every M entries"):
        NM(n, m)


def test_why_not_names_the_length() -> None:
    assert NM(2, 4).why_not(6, 32, 32) is None
    assert NM(2, 4).why_not(1, 4, 4) is None
    assert NM(2, 4).why_not(6, 30, 30) == "contraction length 30 is not a multiple of 4"
    assert NM(8, 16).why_not(6, 24, 24) == "contraction length 24 is not a multiple of 16"
    assert NM(2, 4).why_not(0, 8, 8) == "empty"
    assert NM(2, 4).why_not(8, 0, 0) == "empty"


def test_holds_allows_fewer_and_refuses_more() -> None:
    pattern = NM(2, 4)
    assert pattern.holds(torch.tensor([[True, True, False, False, False, False, False, True]]))
    assert not pattern.holds(torch.tensor([[True, True, False, False, True, True, True, False]]))
    assert not pattern.holds(torch.tensor([[True, False, False, False, True]]))
    # Two kept on either side of a group's border are allowed, three inside one are not.
    assert pattern.holds(torch.tensor([[False, False, True, True, True, True, False, False]]))


@settings(deadline=None)
@given(rows_of_groups())
def test_a_mask_obeys_its_own_pattern_and_pruning_again_keeps_it(case: tuple[list[float], int, int]) -> None:
    row, n, m = case
    scores, pattern = torch.tensor([row], dtype=torch.float64).abs(), NM(n, m)
    mask = pattern.mask(scores)
    assert pattern.holds(mask)
    assert torch.equal(pattern.mask(scores.masked_fill(~mask, 0)), mask)
    assert pattern.density(*mask.shape) == mask.float().mean()


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 16)])
def test_flushing_subnormals_changes_nothing(flushing: None, n: int, m: int) -> None:
    bits = torch.arange(m, dtype=torch.int32).repeat(2, 1)  # as floats: 0 and the lowest subnormals
    assert NM(n, m).mask(bits.view(torch.float32)).tolist() == [[i >= m - n for i in range(m)]] * 2


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(2, 20))
def test_rows_do_not_see_each_other(data: st.DataObject, m: int) -> None:
    n, rows = data.draw(st.integers(1, m - 1)), data.draw(st.permutations(range(5)))
    scores = torch.randint(0, 4, (5, 3 * m), generator=torch.Generator().manual_seed(m)).float()
    assert torch.equal(NM(n, m).mask(scores[rows]), NM(n, m).mask(scores)[rows])


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (8, 16)])
def test_an_empty_matrix_has_an_empty_mask(shape: tuple[int, int], n: int, m: int) -> None:
    shape = (shape[0], shape[1] * m)
    assert NM(n, m).mask(torch.zeros(shape)).shape == shape


def test_easing_drops_whole_entries_and_ends_at_itself() -> None:
    assert [NM(2, 8).towards(share) for share in (0, 0.16, 0.17, 0.5, 0.99, 1)] == [
        None, None, NM(7, 8), NM(5, 8), NM(3, 8), NM(2, 8),
    ]  # fmt: skip
    assert NM(3, 4).towards(0.999) is None
    assert NM(2, 4).nm == NM(2, 4)
