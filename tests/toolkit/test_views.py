"""Every parameter is seen once, along the right axis or with the reason why it has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asp_toolkit.views import View, view_of, views


def only_view(module: nn.Module) -> View:
    found = view_of(module, "weight", "weight")
    assert isinstance(found, View), found
    return found


def reason_of(module: nn.Module, own: str) -> str:
    found = view_of(module, own, own)
    assert isinstance(found, str), found
    return found


def test_a_linear_weight_is_its_own_matrix() -> None:
    layer = nn.Linear(12, 5)
    view = only_view(layer)
    assert (view.rows, view.cols, view.run) == (5, 12, 12)
    assert torch.equal(view.matrix(layer.weight), layer.weight)


def test_a_convolution_runs_over_input_channels_of_one_pixel() -> None:
    layer = nn.Conv2d(8, 6, (3, 2))
    view = only_view(layer)
    matrix = view.matrix(layer.weight.detach())
    assert (view.rows, view.cols, view.run) == (6, 3 * 2 * 8, 8)
    for k, r, s in [(0, 0, 0), (5, 2, 1), (3, 1, 0)]:
        start = (r * 2 + s) * 8
        assert torch.equal(matrix[k, start : start + 8], layer.weight.detach()[k, :, r, s])


@pytest.mark.parametrize(
    ("layer", "rows", "cols", "run"),
    [
        (nn.Conv1d(8, 6, 3), 6, 24, 8),
        (nn.Conv3d(8, 6, 3), 6, 216, 8),
        (nn.Conv2d(8, 6, 3, groups=2), 6, 36, 4),
        (nn.Conv2d(8, 6, 1), 6, 8, 8),
    ],
)
def test_other_convolutions(layer: nn.Module, rows: int, cols: int, run: int) -> None:
    view = only_view(layer)
    assert (view.rows, view.cols, view.run) == (rows, cols, run)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 5),
        nn.Conv1d(4, 6, 3),
        nn.Conv2d(4, 6, (3, 2)),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv3d(4, 6, (1, 2, 3)),
    ],
)
def test_unmatrix_undoes_matrix(layer: nn.Module) -> None:
    view, weight = only_view(layer), layer.get_parameter("weight").detach()
    matrix = view.matrix(weight)
    assert matrix.shape == (view.rows, view.cols)
    assert torch.equal(view.unmatrix(matrix), weight)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_every_dimension_order_round_trips(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    view = View("w", "Layer", ("Layer",), tuple(shape), tuple(order), 1, 1)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    matrix = view.matrix(tensor)
    assert matrix.shape == (view.rows, view.cols)
    assert torch.equal(view.unmatrix(matrix), tensor)


def test_a_channels_last_weight_is_not_copied() -> None:
    weight = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last).weight.detach()
    layer = nn.Conv2d(8, 6, 3)
    assert only_view(layer).matrix(weight).data_ptr() == weight.data_ptr()


class Sub(nn.Linear):
    pass


def test_a_subclass_is_seen_as_its_base_and_named_as_itself() -> None:
    view = only_view(Sub(8, 4))
    assert view.layer == "Sub"
    assert view.kinds == ("Sub", "Linear")
    assert (view.rows, view.cols) == (4, 8)


class Experts(nn.Module):
    """A fused expert parameter: (experts, out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8, 8))


class LinearOfThree(nn.Linear):
    """Derives from Linear but keeps all experts in one 3-D weight."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.ones(3, 8, 8))


class Conv1D(nn.Module):
    """As in GPT-2: weight is (in, out), and the class is no Conv1d."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 12))


@pytest.mark.parametrize(
    ("module", "own", "reason"),
    [
        (nn.Embedding(8, 8), "weight", "embedding"),
        (nn.EmbeddingBag(8, 8), "weight", "embedding"),
        (nn.Linear(8, 8), "bias", "vector"),
        (nn.LayerNorm(8), "weight", "vector"),
        (nn.BatchNorm2d(8), "bias", "vector"),
        (nn.ConvTranspose2d(8, 8, 3), "weight", "no matrix view for parameter 'weight' of layer type ConvTranspose2d"),
        (nn.MultiheadAttention(8, 2), "in_proj_weight", "no matrix view for parameter 'in_proj_weight'"),
        (nn.LSTM(8, 8), "weight_hh_l0", "no matrix view"),
        (Experts(), "weight", "no matrix view for parameter 'weight' of layer type Experts"),
        (Conv1D(), "weight", "no matrix view for parameter 'weight' of layer type Conv1D"),
        (LinearOfThree(), "weight", "expected a weight of shape (out, in), got (3, 8, 8)"),
    ],
)
def test_what_has_no_matrix_says_why(module: nn.Module, own: str, reason: str) -> None:
    assert reason in reason_of(module, own)


def test_a_lazy_layer_says_that_it_has_no_shape_yet() -> None:
    assert "before its first forward pass" in reason_of(nn.LazyLinear(8), "weight")


def test_a_weight_normed_layer_is_refused_not_a_crash() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    found = {name: view for name, _, view in views(model)}
    assert set(found) == dict(model.named_parameters()).keys()
    assert "parametrized" in str(found["0.parametrizations.weight.original1"])


def test_a_depthwise_convolution_is_seen_and_left_dense() -> None:
    assert "depthwise" in str(only_view(nn.Conv2d(8, 8, 3, groups=8)).reason)
    assert only_view(nn.Conv2d(1, 8, 3)).reason is None  # one input channel, but not depthwise


def test_every_parameter_appears_once_in_order() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    assert [name for name, _, _ in views(model)] == [name for name, _ in model.named_parameters()]


class Tied(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        second.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_embedding_is_left_dense_whoever_comes_first(head_first: bool) -> None:
    table, head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
    model = Tied(head, table) if head_first else Tied(table, head)
    found = list(views(model))
    assert [name for name, _, _ in found] == ["first.weight"]
    assert "tied with second.weight" in str(found[0][2])
    assert "embedding" in str(found[0][2])


def test_two_tied_linear_layers_are_one_parameter() -> None:
    ((name, _, found),) = views(Tied(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    assert name == "first.weight"
    assert isinstance(found, View)
