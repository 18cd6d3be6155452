"""What prune does to weights: exact masks, +0.0, nothing else touched."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM
from asp_toolkit.pruning import Rule, choose, masks_from_zeros, prune
from tests.toolkit.made_models import LanguageModel


def bits(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, to the bit (NaN and -0.0 included)."""
    return {name: tensor.detach().clone().contiguous().view(torch.uint8) for name, tensor in model.state_dict().items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def no_minus_zero(model: nn.Module) -> bool:
    return not any(bool((torch.signbit(p) & (p == 0)).any()) for p in model.parameters())


def test_density_is_half_right_after_pruning() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    assert prune(model).density() == {"0.weight": 0.5, "2.weight": 0.5}
    assert all(int((p == 0).sum()) * 2 == p.numel() for p in (model[0].weight, model[2].weight))


def test_one_of_four_drops_three_quarters() -> None:
    model = nn.Linear(64, 32)
    prune(model, "1:4")
    assert float((model.weight == 0).double().mean()) == 0.75


def test_two_models_in_one_process_have_two_mask_sets() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    first = prune(one)
    kept = {name: mask.clone() for name, mask in first.masks.items()}
    second = prune(other, "1:4")
    assert torch.equal(first.masks["weight"], kept["weight"])
    assert first.density() == {"weight": 0.5}
    assert second.density() == {"weight": 0.25}
    assert not first.violations(one)
    assert not second.violations(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_shape_rule_is_the_same_for_every_dtype(dtype: torch.dtype) -> None:
    layers = nn.Linear(30, 30), nn.Linear(32, 30), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 10, 3), nn.Linear(16, 10)
    model = nn.Sequential(*layers).to(dtype)
    masks = prune(model)
    assert set(masks.masks) == {"1.weight", "3.weight", "4.weight"}
    assert masks.skipped["0.weight"] == "2:4 does not fit: contraction length 30 is not a multiple of 4"
    assert masks.skipped["2.weight"] == "2:4 does not fit: contraction length 3 is not a multiple of 4"
    assert set(masks.masks) | set(masks.skipped) == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("into", "out"), [(30, 6), (3, 8)])
def test_lengths_that_do_not_divide_are_skipped_by_name(into: int, out: int) -> None:
    model = nn.Sequential(nn.Linear(into, out), nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    assert f"contraction length {into}" in prune(model).skipped["0.weight"]
    assert torch.equal(model[0].weight.detach(), before)


def test_rows_need_not_divide() -> None:
    with torch.device("meta"):
        model = nn.Linear(768, 30522)
    assert set(choose(model, [Rule()]).chosen) == {"weight"}  # 30522 is even, and no multiple of 4


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_pruned_along_input_channels(groups: int) -> None:
    layer = nn.Conv2d(16, 8, 3, groups=groups)
    prune(layer)
    for r in range(3):
        for s in range(3):
            for k in range(8):
                nonzero = (layer.weight[k, :, r, s] != 0).reshape(-1, 4).sum(1)
                assert nonzero.tolist() == [2] * (16 // groups // 4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_does_not_change_the_mask(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3)
    expected = prune(copy.deepcopy(layer)).masks["weight"]
    layer = layer.to(memory_format=memory_format)
    masks = prune(layer)
    assert torch.equal(masks.masks["weight"], expected)
    assert torch.equal(layer.weight != 0, expected)
    assert layer.weight.is_contiguous(memory_format=memory_format)


def test_a_grouped_convolution_that_does_not_fit_is_skipped_with_the_reason() -> None:
    model = nn.Sequential(nn.Conv2d(12, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    skipped = prune(model).skipped
    assert skipped["0.weight"] == "2:4 does not fit: contraction length 6 is not a multiple of 4"
    assert "depthwise" in skipped["1.weight"]


class Sub(nn.Linear):
    pass


@pytest.mark.parametrize("layer", [Sub(8, 8), nn.Conv3d(8, 4, 2), nn.Conv1d(8, 4, 3)])
def test_further_layer_types_are_pruned(layer: nn.Module) -> None:
    assert prune(layer).density() == {"weight": 0.5}


def test_a_weight_normed_layer_is_pruned_through_its_parametrization() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    masks = prune(model, include=["0"])
    name = "0.parametrizations.weight.original1"
    assert set(masks.masks) == {name}
    assert torch.equal(model[0].weight.detach() != 0, masks.masks[name])
    assert NM(2, 4).holds(model[0].weight.detach() != 0)


def test_an_orthogonal_layer_is_skipped_since_its_weight_would_not_be_sparse() -> None:
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 8))
    masks = prune(model)
    assert set(masks.masks) == {"1.weight"}
    assert "does not keep zeros" in masks.skipped["0.parametrizations.weight.original"]


def test_a_tied_head_stays_tied_and_dense() -> None:
    model = LanguageModel()
    before = model.table.weight.detach().clone()
    masks = prune(model)
    assert set(masks.masks) == {"body.weight"}
    assert model.head.weight is model.table.weight
    assert torch.equal(model.head.weight.detach(), before)
    assert "tied with head.weight" in masks.skipped["table.weight"]
    assert model(torch.tensor([1, 2]))["logits"].shape == (2, 12)


def test_zeros_of_an_unstructured_sparse_model_stay_zero() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[torch.rand(64, 64) < 0.7] = 0
    old = layer.weight.detach() == 0
    prune(layer)
    new = layer.weight.detach() == 0
    assert (new | ~old).all()
    assert (new.reshape(-1, 4).sum(1) >= 2).all()
    assert int(new.sum()) > int(old.sum())


def test_pruning_twice_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    first = prune(model)
    after = bits(model)
    second = prune(model)
    assert same_bits(bits(model), after)
    assert all(torch.equal(first.masks[name], second.masks[name]) for name in first.masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_minus_zero_anywhere(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 2, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-1.0, -3.0, 2.0, -0.5], [-0.0, -0.0, -1.0, -2.0]]))
    prune(layer)
    assert layer.weight.tolist() == [[0, -3, 2, 0], [0, 0, -1, -2]]
    assert no_minus_zero(layer)


@pytest.mark.parametrize("value", [0.0, -1.5])
def test_equal_entries_keep_the_lowest_index(value: float) -> None:
    layer = nn.Linear(8, 3)
    nn.init.constant_(layer.weight, value)
    assert prune(layer).masks["weight"].tolist() == [[True, True, False, False] * 2] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_an_error_and_nothing_changes(value: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[3, 2] = value
    before = bits(model)
    with pytest.raises(AspError, match=r"'1\.weight' has NaN or infinite entries; nothing was pruned"):
        prune(model)
    assert same_bits(bits(model), before)


def test_what_is_not_pruned_may_be_anything() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 4))
    nn.init.constant_(model[1].weight, float("nan"))
    assert set(prune(model).masks) == {"0.weight"}


def test_meta_weights_are_an_error() -> None:
    with pytest.raises(AspError, match="'weight' is on the meta device"):
        prune(nn.Linear(8, 8, device="meta"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_entries_that_have_no_plain_magnitude_are_skipped(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.ones(8, 8).to(dtype), requires_grad=False)
    assert f"got {dtype}" in prune(model).skipped["0.weight"]


def test_pruning_leaves_the_process_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(8, 8))

    def seen() -> list[object]:
        cudnn = torch.backends.cudnn
        flags = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cudnn.enabled)
        generators = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        other = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), dict(os.environ))
        return [flags, generators, other, Path.cwd(), torch.are_deterministic_algorithms_enabled()]

    before = seen()
    prune(model)
    assert seen() == before
    assert capsys.readouterr() == ("", "")


def test_parameters_stay_the_same_plain_objects() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 3))
    before = list(model.parameters())
    keys = list(model.state_dict())
    prune(model)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert all(type(p) is nn.Parameter and p.requires_grad and p.grad is None for p in model.parameters())
    assert list(model.state_dict()) == keys
    assert list(model.named_buffers()) == []


def test_masks_from_zeros_keeps_groups_with_three_zeros() -> None:
    layer = nn.Linear(8, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0, 0, 5, 1, 2, 0, 0], [0, 0, 0, 0, 0, 3, 0, -0.0]]))
    model = nn.ModuleList([layer, nn.Linear(8, 8)])
    before = bits(model)
    masks = masks_from_zeros(model)
    assert same_bits(bits(model), before)
    assert masks.masks["0.weight"].tolist() == [
        [False, False, False, True, True, True, False, False],
        [False, False, False, False, False, True, False, False],
    ]
    assert masks.skipped["1.weight"] == "its zeros do not obey 2:4"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with masks.held(model, optimizer):
        layer(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight != 0, masks.masks["0.weight"])


def test_masks_from_zeros_of_a_dense_model_is_an_error() -> None:
    with pytest.raises(AspError, match="no layer's zeros obey"):
        masks_from_zeros(nn.Linear(8, 8))


def test_a_wrapped_pruned_model_keeps_its_masks() -> None:
    class Observed(nn.Module):
        """As quantization-aware training wraps a layer: the same parameter, rounded on the way."""

        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, (self.layer.weight * 16).round() / 16, self.layer.bias)

    model = nn.Linear(8, 8)
    mask = prune(model).masks["weight"]
    again = prune(Observed(model))
    assert torch.equal(again.masks["layer.weight"], mask)


@pytest.mark.parametrize("pattern", [1.7, None, (2, 4), 124])
def test_what_is_no_pattern_is_refused_by_name(pattern: object) -> None:
    with pytest.raises(AspError, match="unknown pattern"):
        prune(nn.Linear(8, 4), pattern)  # type: ignore[arg-type]
