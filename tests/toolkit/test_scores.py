"""What every score promises, and what each one computes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM
from asp_toolkit.scores import SCORES, activation_norm, fisher, magnitude, movement, needs, needs_of, taylor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def statistics(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random statistics of every name that scores know."""
    draws = torch.Generator().manual_seed(1)
    full = {name: torch.randn(shape, generator=draws, dtype=torch.float64) for name in ("a", "b", "c")}
    found = {"gradient_abs": full["a"].abs(), "gradient_square": full["b"].square(), "movement": full["c"]}
    found["input_norm"] = torch.rand(shape[1:], generator=draws, dtype=torch.float64)
    return {name: one.to(torch.float64 if dtype == torch.float64 else torch.float32) for name, one in found.items()}


def test_magnitude_is_the_absolute_value() -> None:
    weight = torch.tensor([[-3.0, 2.0, -0.0, 0.5]])
    assert magnitude(weight).tolist() == [[3.0, 2.0, 0.0, 0.5]]
    assert not torch.signbit(magnitude(weight)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCORES)
def test_every_score_keeps_shape_and_weight_and_has_no_nan(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    weight.data[0] = 0
    weight.data[1, 0] = torch.finfo(dtype).max
    weight.data[1, 1] = torch.finfo(dtype).min
    stats = {name: one * 100 for name, one in statistics((6, 8), dtype).items()}
    before, stats_before = weight.detach().clone(), {name: one.clone() for name, one in stats.items()}
    scores = SCORES[name](weight, stats)
    assert scores.shape == weight.shape
    assert torch.isfinite(scores).all()
    assert not scores.requires_grad
    scores += 1  # which must be nobody else's
    assert torch.equal(weight.detach(), before)
    assert all(torch.equal(stats[name], stats_before[name]) for name in stats)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_the_formulas_in_the_wide_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    stats = statistics((4, 8), dtype)
    w, s = weight.double(), {name: one.double() for name, one in stats.items()}
    right = {
        taylor: w.abs() * s["gradient_abs"],
        movement: s["movement"],
        fisher: w**2 * s["gradient_square"] / 2,
        activation_norm: w.abs() * s["input_norm"][None],
    }
    for score, expected in right.items():
        scores = score(weight, stats)
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(scores.double(), expected, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=0)


def test_a_half_precision_weight_is_not_scored_in_half_precision() -> None:
    weight = torch.full((1, 4), 300.0, dtype=torch.float16)
    stats = {"input_norm": torch.tensor([1000.0, 1000.0, 1001.0, 1002.0])}  # 3e5 is infinite in float16
    assert NM(2, 4).mask(activation_norm(weight, stats)).tolist() == [[False, False, True, True]]


def test_input_norm_may_differ_by_row() -> None:
    norms = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert activation_norm(torch.full((2, 2), -2.0), {"input_norm": norms}).tolist() == [[2.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize("name", SCORES)
def test_every_score_can_prune(name: str) -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    pattern = NM(2, 4)
    mask = pattern.mask(SCORES[name](weight, statistics((6, 8))))
    assert pattern.holds(mask)
    assert int(mask.sum()) == 24


def test_movement_is_signed_and_ignores_size() -> None:
    stats = {"movement": torch.tensor([[-5.0, 0.1, 0.2, -0.1]])}
    assert NM(2, 4).mask(movement(torch.tensor([[9.0, 0.0, 0.0, 9.0]]), stats)).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("name", [name for name, score in SCORES.items() if needs_of(score)])
def test_a_missing_statistic_is_named_with_the_way_to_get_it(name: str) -> None:
    (need,) = needs_of(SCORES[name])
    for stats in (None, {}):
        with pytest.raises(AspError, match=rf"'{need}'.*calibrate\(model.*prune\.calibration"):
            SCORES[name](torch.ones(2, 4), stats)
    with pytest.raises(AspError, match=rf"'{need}': expected shape \(2, 4\), got \(4, 2\)"):
        SCORES[name](torch.ones(2, 4), {need: torch.ones(4, 2)})


def test_only_input_norm_may_be_one_per_column() -> None:
    with pytest.raises(AspError, match=r"'gradient_abs': expected shape \(2, 4\), got \(4,\)"):
        taylor(torch.ones(2, 4), {"gradient_abs": torch.ones(4)})


def test_needs_are_seen_through_partial_and_empty_for_a_plain_function() -> None:
    @needs("gradient_abs", "input_norm")
    def own(weight: Tensor, stats: object, power: int = 1) -> Tensor:
        return weight.abs() ** power

    assert needs_of(own) == ("gradient_abs", "input_norm")
    assert needs_of(partial(own, power=2)) == ("gradient_abs", "input_norm")
    assert needs_of(magnitude) == needs_of(lambda weight, stats: weight) == ()
    assert own(torch.tensor([[-2.0]]), None).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_magnitude_does_not_round_half_precision(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    weight = bits[torch.isfinite(bits)].reshape(1, -1)
    assert torch.equal(magnitude(weight).double(), weight.double().abs())
