"""Unstructured patterns against a stable sort in Python."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_toolkit.patterns import Unstructured, masks_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def top_by_python(values: list[float], kept: int) -> list[bool]:
    """The `kept` highest, ties to the lower index."""
    best = set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:kept])
    return [i in best for i in range(len(values))]


def kept_of(text: str, entries: int) -> int:
    return entries - round(Fraction(text) * entries)


entries = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e308, float("inf"), float("-inf")]),
    st.floats(allow_nan=False),
)


@settings(deadline=None)
@given(st.lists(entries, min_size=1, max_size=40), st.integers(1, 99))
def test_the_highest_of_a_layer_stay(values: list[float], percent: int) -> None:
    pattern = Unstructured(percent / 100)
    mask = pattern.mask(torch.tensor([values], dtype=torch.float64))
    assert mask[0].tolist() == top_by_python(values, kept_of(f"{percent}e-2", len(values)))
    assert pattern.holds(mask)


@settings(deadline=None)
@given(st.lists(st.lists(entries, min_size=7, max_size=7), min_size=1, max_size=5), st.integers(1, 99))
def test_the_highest_of_each_row_stay(rows: list[list[float]], percent: int) -> None:
    pattern = Unstructured(percent / 100, "row")
    mask = pattern.mask(torch.tensor(rows, dtype=torch.float64))
    kept = kept_of(f"{percent}e-2", 7)
    assert mask.tolist() == [top_by_python(row, kept) for row in rows]
    assert pattern.holds(mask)


@settings(deadline=None)
@given(st.lists(st.lists(entries, min_size=1, max_size=12), min_size=1, max_size=4), st.integers(1, 99))
def test_the_highest_of_all_layers_stay(layers: list[list[float]], percent: int) -> None:
    pattern = Unstructured(percent / 100, "global")
    masks = masks_of(pattern, [torch.tensor([values], dtype=torch.float64) for values in layers])
    everything = list(chain(*layers))
    kept = list(chain(*(mask[0].tolist() for mask in masks)))
    assert kept == top_by_python(everything, kept_of(f"{percent}e-2", len(everything)))
    assert pattern.holds_together(masks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scope", ["layer", "row", "global"])
@pytest.mark.parametrize("sparsity", [0.001, 0.3, 0.5, 0.9, 0.999])
def test_any_dtype_and_share_is_exact(dtype: torch.dtype, scope: str, sparsity: float) -> None:
    scores = torch.randn(20, 130, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[:5] = scores[:5].round()
    scores[5] = 0
    mask = Unstructured(sparsity, scope).mask(scores)  # type: ignore[arg-type]
    values = scores.double()
    if scope == "row":
        expected = [top_by_python(row, kept_of(str(sparsity), 130)) for row in values.tolist()]
    else:
        flat = top_by_python(values.flatten().tolist(), kept_of(str(sparsity), 2600))
        expected = torch.tensor(flat).view(20, 130).tolist()
    assert mask.tolist() == expected


def test_several_pieces_and_ties_across_them() -> None:
    scores = torch.randint(0, 5, (700, 1001), generator=torch.Generator().manual_seed(0)).float()
    flat = scores.flatten()
    kept = kept_of("0.7", flat.numel())
    order = flat.sort(descending=True, stable=True).indices
    expected = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, order[:kept], True)
    assert torch.equal(Unstructured(0.7).mask(scores).flatten(), expected)
    parts = masks_of(Unstructured(0.7, "global"), list(scores.split(123)))
    assert torch.equal(torch.cat(parts).flatten(), expected)


def test_layers_of_different_dtypes_are_compared_by_value() -> None:
    layers = [torch.tensor([[1.0, 3.0]], dtype=dtype) + i for i, dtype in enumerate(DTYPES)]
    masks = Unstructured(0.5, "global").masks(layers)
    # values 1 3 | 2 4 | 3 5 | 4 6: 4 stay, and of the two 4s and one 3 more than fit the earlier
    assert [mask.tolist() for mask in masks] == [[[False, False]], [[False, True]], [[False, True]], [[True, True]]]


def test_the_earlier_layer_keeps_its_ties() -> None:
    masks = Unstructured(0.5, "global").masks([torch.ones(1, 3), torch.ones(2, 2), torch.ones(1, 1)])
    assert [mask.flatten().tolist() for mask in masks] == [[True] * 3, [True, False, False, False], [False]]


@pytest.mark.parametrize(
    ("sparsity", "entries", "kept"),
    [
        (0.9, 10, 1),
        (0.7, 10, 3),
        (0.29, 100, 71),
        (0.5, 3, 1),
        (0.5, 5, 3),
        (0.1, 5, 5),
        (0.1, 15, 13),
        (1e-05, 10, 10),
    ],
)
def test_counts_are_those_of_the_decimal(sparsity: float, entries: int, kept: int) -> None:
    # int(0.29 * 100) is 28, and 0.7 * 10 is above 7; a half rounds to even
    pattern = Unstructured(sparsity)
    assert pattern.mask(torch.arange(entries)[None].float()).sum() == kept
    assert pattern.density(1, entries) == kept / entries
    assert Unstructured(sparsity, "row").density(7, entries) == kept / entries
    assert Unstructured(sparsity, "global").density(1, entries) == float(1 - Fraction(str(sparsity)))
    assert pattern.density(0, entries) == 0


def test_a_sparser_mask_keeps_the_zeros() -> None:
    scores = torch.rand(30, 30, generator=torch.Generator().manual_seed(0))
    masks = [Unstructured(share).mask(scores) for share in (0.3, 0.5, 0.9)]
    assert all((later <= earlier).all() for earlier, later in pairwise(masks))


def test_rows_do_not_see_each_other() -> None:
    scores = torch.randint(0, 5, (6, 40), generator=torch.Generator().manual_seed(0)).float()
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    pattern = Unstructured(0.6, "row")
    assert torch.equal(pattern.mask(scores[order]), pattern.mask(scores)[order])


def test_strided_scores_are_read_right() -> None:
    scores = torch.randn(16, 24, generator=torch.Generator().manual_seed(2))
    for pattern in (Unstructured(0.4), Unstructured(0.4, "row")):
        part = scores.t()[:, ::2]
        assert torch.equal(pattern.mask(part), pattern.mask(part.contiguous()))


def test_holds() -> None:
    def row(kept: int) -> Tensor:
        return torch.tensor([[True] * kept + [False] * (10 - kept)])

    assert Unstructured(0.7).holds(row(3))
    assert Unstructured(0.7).holds(row(0))
    assert not Unstructured(0.7).holds(row(4))
    uneven = torch.cat([row(4), row(2)])
    assert Unstructured(0.7).holds(uneven)
    assert not Unstructured(0.7, "row").holds(uneven)
    together = Unstructured(0.7, "global")
    assert together.holds(row(10))  # which only its companions can tell
    assert together.holds_together([row(5), row(1)])
    assert not together.holds_together([row(5), row(2)])
    assert Unstructured(0.7).holds_together([row(3), row(3)])
    assert not Unstructured(0.7).holds_together([row(4), row(2)])


def test_where_it_does_not_fit() -> None:
    assert Unstructured(0.9).why_not(1, 3, 3) == "0.9 of 3 entries would drop all of them"
    assert Unstructured(0.9).why_not(3, 3, 3) is None
    assert Unstructured(0.9, "row").why_not(3, 3, 3) == "0.9 of 3 entries a row would drop all of them"
    assert Unstructured(0.9, "global").why_not(1, 3, 3) is None
    assert Unstructured(0.9).why_not(0, 3, 3) == "empty"


@pytest.mark.parametrize("scope", ["layer", "row", "global"])
def test_empty_and_tiny_matrices(scope: str) -> None:
    pattern = Unstructured(0.9, scope)  # type: ignore[arg-type]
    for shape in [(0, 4), (4, 0), (0, 0)]:
        assert pattern.mask(torch.zeros(shape)).shape == shape
    assert pattern.masks([]) == []
    assert pattern.mask(torch.ones(1, 2)).sum() == 0
    assert Unstructured(0.1, scope).mask(torch.ones(1, 2)).sum() == 2  # type: ignore[arg-type]


def test_easing_keeps_names_readable_and_grows() -> None:
    pattern = Unstructured(0.9, "row")
    steps = [pattern.towards(1 - (1 - step / 8) ** 3) for step in range(9)]
    shares = [0.0 if step is None else step.sparsity for step in steps]
    assert shares == [0.0, 0.2971, 0.5203, 0.6803, 0.7875, 0.8525, 0.8859, 0.8982, 0.9]
    assert list(accumulate(shares, max)) == shares
    assert steps[4] == Unstructured(0.7875, "row")
    assert Unstructured(0.99999).towards(0.9999999) == Unstructured(0.99999)
    assert Unstructured(0.00001).towards(0.5) is None
