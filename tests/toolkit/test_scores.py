"""What every score promises, and what each one computes."""

from __future__ import annotations

import pytest
import torch

from asp_toolkit.scores import SCORES, magnitude


def test_magnitude_is_the_absolute_value() -> None:
    weight = torch.tensor([[-3.0, 2.0, -0.0, 0.5]])
    assert magnitude(weight).tolist() == [[3.0, 2.0, 0.0, 0.5]]
    assert not torch.signbit(magnitude(weight)).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCORES)
def test_every_score_keeps_shape_and_weight_and_has_no_nan(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    weight.data[0] = 0
    weight.data[1, 0] = torch.finfo(dtype).max
    before = weight.detach().clone()
    scores = SCORES[name](weight, None)
    assert scores.shape == weight.shape
    assert torch.isfinite(scores).all()
    assert not scores.requires_grad
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_magnitude_does_not_round_half_precision(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    weight = bits[torch.isfinite(bits)].reshape(1, -1)
    assert torch.equal(magnitude(weight).double(), weight.double().abs())
