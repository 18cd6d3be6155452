"""Transposable N:M: the exact mask against all masks of a tile in exact arithmetic, the greedy one against Python."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM, TransposableNM

SMALL = [(1, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 4)]


@cache
def tile_masks(n: int, m: int) -> list[list[int]]:
    """All m x m masks with n kept in every row and column, as flat indices, in lexicographic order."""
    rows = product(combinations(range(m), n), repeat=m)
    fitting = [mask for mask in rows if all(sum(col in row for row in mask) == n for col in range(m))]
    return sorted([m * i + col for i, row in enumerate(mask) for col in row] for mask in fitting)


def tiles(matrix: Tensor, m: int) -> Tensor:
    """(rows, cols) -> (T, m * m)."""
    rows, cols = matrix.shape
    return matrix.reshape(rows // m, m, cols // m, m).transpose(1, 2).reshape(-1, m * m)


def best_by_enumeration(tile: list[float], n: int, m: int) -> list[int]:
    """Of all masks the first, in lexicographic order, whose exact sum is the largest."""
    exact = [Fraction(value) for value in tile]
    return max(tile_masks(n, m), key=lambda kept: sum(exact[i] for i in kept))  # max gives the first of equals


def greedy_by_python(tile: list[float], n: int, m: int) -> list[int]:
    """From the highest score down what still has room, then moves of the highest gain until no row is short."""
    kept: set[tuple[int, int]] = set()
    scores = {(i, j): tile[m * i + j] for i in range(m) for j in range(m)}
    row = lambda i: sum(a == i for a, _ in kept)  # noqa: E731
    col = lambda j: sum(b == j for _, b in kept)  # noqa: E731
    for i, j in sorted(scores, key=lambda at: (-scores[at], at)):
        if row(i) < n and col(j) < n:
            kept.add((i, j))
    while len(kept) < n * m:
        i = next(i for i in range(m) if row(i) < n)
        j = next(j for j in range(m) if col(j) < n)
        movable = [(r, c) for r, c in sorted(kept) if (i, c) not in kept and (r, j) not in kept]
        r, c = max(movable, key=lambda at: (scores[i, at[1]] + scores[at[0], j]) - scores[at])
        kept = kept - {(r, c)} | {(i, c), (r, j)}
    return sorted(m * i + j for i, j in kept)


def kept_of(mask: Tensor, m: int) -> list[list[int]]:
    return [tile.nonzero().flatten().tolist() for tile in tiles(mask, m)]


def test_a_2_4_tile_has_90_masks() -> None:
    assert len(tile_masks(2, 4)) == 90


few = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 3.0])  # ties
wide = st.floats(0, 2.0**20).map(lambda value: round(value * 2**20) / 2**20)  # sums of these are exact in float64
signed = st.integers(-(2**30), 2**30).map(float)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(SMALL), st.sampled_from([few, wide, signed]))
def test_the_exact_mask_is_the_best_of_all_masks(
    data: st.DataObject, counts: tuple[int, int], entry: st.SearchStrategy[float]
) -> None:
    n, m = counts
    tile = data.draw(st.lists(entry, min_size=m * m, max_size=m * m))
    mask = TransposableNM(n, m).mask(torch.tensor(tile, dtype=torch.float64).view(m, m))
    assert kept_of(mask, m) == [best_by_enumeration(tile, n, m)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "m"), SMALL)
def test_every_tile_of_a_matrix_is_the_best(n: int, m: int, dtype: torch.dtype) -> None:
    scores = torch.randn(4 * m, 6 * m, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    scores[: 2 * m] = scores[: 2 * m].round()
    mask = TransposableNM(n, m).mask(scores)
    expected = [best_by_enumeration(tile, n, m) for tile in tiles(scores, m).double().tolist()]
    assert kept_of(mask, m) == expected


def test_equal_scores_keep_the_mask_that_comes_first() -> None:
    first = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    for value in (0.0, -0.0, 7.0, torch.inf):
        assert TransposableNM(2, 4).mask(torch.full((4, 4), value)).int().tolist() == first
        assert TransposableNM(2, 4, greedy=True).mask(torch.full((4, 4), value)).int().tolist() == first


@pytest.mark.parametrize("greedy", [False, True])
def test_infinite_scores_are_kept(greedy: bool) -> None:
    scores = torch.ones(4, 4)
    scores[0, 3] = scores[0, 1] = scores[2, 3] = torch.inf
    mask = TransposableNM(2, 4, greedy).mask(scores)
    assert mask[scores.isinf()].all()
    assert (mask.sum(0) == 2).all()
    assert (mask.sum(1) == 2).all()


def test_kept_magnitude_on_normal_weights() -> None:
    scores = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).abs()
    exact, greedy = (TransposableNM(2, 4, greedy).mask(scores) for greedy in (False, True))
    best = sum(max(sum(tile[i] for i in kept) for kept in tile_masks(2, 4)) for tile in tiles(scores, 4).tolist())
    assert scores[exact].double().sum().item() == pytest.approx(best, rel=1e-6)
    shares = [(scores[mask].sum() / scores.sum()).item() for mask in (exact, greedy)]
    assert shares[0] > 0.70
    assert 0.69 < shares[1] < shares[0]
    assert exact.float().mean() == greedy.float().mean() == 0.5


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([*SMALL, (2, 5), (3, 6), (4, 8)]), st.sampled_from([few, wide, signed]))
def test_the_greedy_mask_is_what_one_tile_at_a_time_gives(
    data: st.DataObject, counts: tuple[int, int], entry: st.SearchStrategy[float]
) -> None:
    n, m = counts
    scores = torch.tensor(data.draw(st.lists(entry, min_size=2 * m * m, max_size=2 * m * m)), dtype=torch.float64)
    mask = TransposableNM(n, m, greedy=True).mask(scores.view(m, 2 * m))
    expected = [greedy_by_python(tile, n, m) for tile in tiles(scores.view(m, 2 * m), m).tolist()]
    assert kept_of(mask, m) == expected


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (3, 7), (8, 16), (5, 12)])
def test_many_greedy_tiles_at_once(n: int, m: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.cat([torch.rand(3 * m, 4 * m, generator=generator), torch.rand(m, 4 * m, generator=generator) ** 9])
    scores[:m] = (4 * scores[:m]).round()
    expected = [greedy_by_python(tile, n, m) for tile in tiles(scores, m).double().tolist()]
    assert kept_of(TransposableNM(n, m, greedy=True).mask(scores), m) == expected


@pytest.mark.parametrize(("n", "m"), [(2, 3), (2, 4), (3, 4), (2, 5)])
def test_the_greedy_mask_has_half_of_the_largest_sum(n: int, m: int) -> None:
    """Climbs from random tiles to worse ones."""
    generator = torch.Generator().manual_seed(0)
    every = torch.zeros(len(tile_masks(n, m)), m * m, dtype=torch.float64)
    for row, kept in zip(every, tile_masks(n, m), strict=True):
        row[kept] = 1

    def share(scores: Tensor) -> Tensor:  # (T, m * m) -> (T,)
        mask = TransposableNM(n, m, greedy=True).mask(scores.view(-1, m)).view(-1, m * m)
        return (scores * mask).sum(1) / (scores @ every.t()).amax(1).clamp_min(1e-9)

    scores = torch.rand(500, m * m, generator=generator, dtype=torch.float64)
    worst = share(scores)
    for _ in range(30):
        moved = torch.randint(0, 3, scores.shape, generator=generator).double() / 2
        changed = torch.rand(scores.shape, generator=generator) < 0.15
        tried = torch.where(changed, moved, scores)
        found = share(tried)
        scores[found < worst] = tried[found < worst]
        worst = torch.minimum(worst, found)
    assert worst.min() < 0.9  # the climb works
    assert worst.min() >= 0.5 - 1e-9


@pytest.mark.parametrize("pattern", [TransposableNM(2, 4), TransposableNM(2, 4, True), TransposableNM(4, 8)])
def test_the_mask_and_its_transpose_are_n_m(pattern: TransposableNM) -> None:
    scores = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).abs()
    mask = pattern.mask(scores)
    assert (mask.view(32, -1, pattern.m).sum(2) == pattern.n).all()
    assert (mask.t().reshape(48, -1, pattern.m).sum(2) == pattern.n).all()
    assert pattern.holds(mask)
    assert pattern.holds(mask.t())
    assert NM(pattern.n, pattern.m).holds(mask.t())
    turned = pattern.mask(scores.t())
    assert scores.t()[turned].double().sum().item() == pytest.approx(scores[mask].double().sum().item(), rel=1e-6)


def test_a_mask_that_is_2_4_one_way_only_does_not_hold() -> None:
    mask = torch.tensor([[1, 1, 0, 0]] * 4, dtype=torch.bool)
    assert NM(2, 4).holds(mask)
    assert not TransposableNM(2, 4).holds(mask)
    assert not TransposableNM(2, 4).holds(mask.t())
    assert not TransposableNM(2, 4).holds(mask[:3])
    assert TransposableNM(2, 4).holds(torch.tensor([[1, 1, 0, 0]] * 2 + [[0, 0, 0, 1]] * 2, dtype=torch.bool))


def test_where_it_does_not_fit() -> None:
    pattern = TransposableNM(2, 4)
    assert pattern.why_not(8, 36, 4) is None
    assert pattern.why_not(6, 8, 8) == "6 rows are not a multiple of 4"
    assert pattern.why_not(8, 30, 30) == "contraction length 30 is not a multiple of 4"
    for shape in [(6, 8), (8, 6), (4, 4, 4)]:
        with pytest.raises(ValueError, match=r"expected \(multiple of 4, multiple of 4\) scores"):
            pattern.mask(torch.zeros(shape))
    with pytest.raises(AspError, match="pattern 0:4"):
        TransposableNM(0, 4)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("greedy", [False, True])
def test_an_empty_matrix_has_an_empty_mask(shape: tuple[int, int], greedy: bool) -> None:
    assert TransposableNM(2, 4, greedy).mask(torch.zeros(shape)).shape == shape


def test_easing() -> None:
    pattern = TransposableNM(2, 4, greedy=True)
    assert [pattern.towards(share) for share in (0, 0.49, 0.5, 1)] == [
        None, None, TransposableNM(3, 4, greedy=True), pattern,
    ]  # fmt: skip
