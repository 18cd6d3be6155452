"""Every parameter is seen once, along the right axis or with the reason why it has none."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.views import (
    LAYER_VIEWS,
    Axes,
    LayerView,
    View,
    labels,
    multiplied,
    view_of,
    views,
    why_not_masked,
)


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


class Unknown(nn.Module):
    """A parameter of three dimensions that nobody knows the use of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8, 8))
        self.scale = nn.Parameter(torch.ones(8, 1, 1))


class LinearOfThree(nn.Linear):
    """Derives from Linear but keeps all experts in one 3-D weight."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.ones(3, 8, 8))


class Adapted(nn.Linear):
    """A Linear with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.low = nn.Parameter(torch.ones(8, 2))


class Conv1D(nn.Module):
    """As GPT-2's by name, but not that class."""

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
        (nn.LayerNorm((4, 8)), "weight", "entry by entry"),
        (nn.RMSNorm((4, 8)), "weight", "entry by entry"),
        (nn.BatchNorm2d(8), "bias", "vector"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "bias_k", "one more key of the sequence"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "bias_v", "one more value of the sequence"),
        (nn.LSTM(8, 8), "bias_hh_l0", "vector"),
        (nn.ParameterList([torch.ones(4, 4)]), "0", "no matrix view for parameter '0' of layer type ParameterList"),
        (nn.ParameterDict({"a": torch.ones(4, 4)}), "a", "no matrix view for parameter 'a' of layer type Para"),
        (Unknown(), "weight", "of layer type Unknown; LAYER_VIEWS[Unknown] = your function gives it one"),
        (Unknown(), "scale", "vector (bias, norm or scale) of shape (8, 1, 1)"),
        (Conv1D(), "weight", "no matrix view for parameter 'weight' of layer type Conv1D"),
        (LinearOfThree(), "weight", "expected a weight of shape (out, in), got (3, 8, 8)"),
        (Adapted(), "low", "no matrix view for parameter 'low' of layer type Adapted"),
    ],
)
def test_what_has_no_matrix_says_why(module: nn.Module, own: str, reason: str) -> None:
    assert reason in reason_of(module, own)


def test_a_lazy_layer_says_that_it_has_no_shape_yet() -> None:
    assert "before its first forward pass" in reason_of(nn.LazyLinear(8), "weight")


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


def tied(first: nn.Module, second: nn.Module) -> View | str:
    (name, module, found), *others = views(Tied(first, second))
    assert name == "first.weight"
    assert "second.weight" not in [other for other, _, _ in others]
    assert module is first
    return found


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_embedding_is_left_dense_unless_named(head_first: bool) -> None:
    table, head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
    found = tied(head, table) if head_first else tied(table, head)
    assert isinstance(found, View)  # so that a rule that names it can prune it
    assert found.name == "first.weight"
    assert (found.layer, found.rows, found.cols) == ("Linear", 6, 8)
    assert found.reason == "tied with second.weight: embedding: a table that is looked up, not multiplied"


def test_two_tied_linear_layers_are_one_parameter() -> None:
    found = tied(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert isinstance(found, View)
    assert found.reason is None


def test_tied_layers_that_multiply_along_different_axes_have_no_view() -> None:
    from transformers.pytorch_utils import Conv1D

    found = tied(nn.Linear(8, 8, bias=False), Conv1D(8, 8))
    assert found == "tied with second.weight: its layers multiply along different axes"


def test_a_weight_tied_with_a_layer_that_nobody_knows_has_no_view() -> None:
    found = tied(nn.Linear(8, 8, bias=False), Unknown())
    assert "tied with second.weight: no matrix view for parameter 'weight' of layer type Unknown" in str(found)


def test_two_tied_embeddings_are_a_table() -> None:
    assert "embedding" in str(tied(nn.Embedding(8, 8), nn.Embedding(8, 8)))


def test_a_layer_in_two_places_is_one_layer() -> None:
    layer = nn.Linear(8, 8)
    found = [(name, view) for name, _, view in views(nn.ModuleDict({"a": layer, "b": layer}))]
    assert [name for name, _ in found] == ["a.weight", "a.bias"]
    assert isinstance(found[0][1], View)
    assert found[0][1].reason is None


def test_a_new_layer_type_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def stacked(module: nn.Module, own: str) -> Axes | str:
        return Axes((0, 2, 1), row_dims=2) if own == "weight" else "a scale"

    monkeypatch.setitem(LAYER_VIEWS, Unknown, stacked)
    view = only_view(Unknown())
    assert (view.layer, view.rows, view.cols, view.run) == ("Unknown", 24, 8, 8)
    assert reason_of(Unknown(), "scale") == "a scale"


def test_the_most_derived_layer_type_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(Sub):
        pass

    monkeypatch.setitem(LAYER_VIEWS, Sub, lambda module, own: Axes((1, 0)))
    assert only_view(Turned(8, 4)).cols == 4
    assert only_view(nn.Linear(8, 4)).cols == 8


def test_a_layer_type_can_be_named_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_VIEWS, f"{Unknown.__module__}.Unknown", lambda module, own: Axes((0, 1, 2), row_dims=2))
    assert only_view(Unknown()).rows == 24


def fails(module: nn.Module, own: str) -> Axes | str:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("view", "wrong"),
    [
        (lambda module, own: Axes((0, 1)), "expected order to be a permutation of 0..2, got (0, 1)"),
        (lambda module, own: Axes((0, 2, 2)), "expected order to be a permutation of 0..2, got (0, 2, 2)"),
        (lambda module, own: Axes((0, 1, 2), row_dims=3), "expected 1 <= row_dims < 3, got 3"),
        (lambda module, own: Axes((0, 1, 2), row_dims=0), "expected 1 <= row_dims < 3, got 0"),
        (lambda module, own: Axes((0, 1, 2), run=3), "expected a run that divides the 64 columns, got 3"),
        (lambda module, own: Axes((0, 1), split=(3, 8)), "split (3, 8) has not as many entries as"),
        (fails, "ValueError: no such thing"),
    ],
)
def test_a_wrong_layer_view_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, view: LayerView, wrong: str
) -> None:
    monkeypatch.setitem(LAYER_VIEWS, Unknown, view)
    with pytest.raises(AspError, match=re.escape(f"layer view of Unknown for '0.weight': {wrong}")):
        list(views(nn.Sequential(Unknown())))


class Touchy(nn.Linear):
    """Whoever asks for an attribute that it does not have, or for `size`, gets an error of its own kind."""

    @property
    def size(self) -> int:
        raise RuntimeError("do not ask")

    def __getattr__(self, name: str) -> object:
        if name not in ("weight", "bias"):
            raise RuntimeError(f"do not ask for {name}")
        return super().__getattr__(name)


def test_a_module_that_does_not_want_to_be_asked_is_seen() -> None:
    model = nn.Sequential(Touchy(8, 4))
    found = {name: view for name, _, view in views(model)}
    assert isinstance(found["0.weight"], View)
    assert labels(model, ["0.weight"]) == {"0", "0.weight", "Touchy", "Linear"}


def test_meta_parameters_have_views() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 4), nn.ConvTranspose2d(8, 4, 3, groups=2), nn.LSTM(8, 4))
    found = {name: view for name, _, view in views(model)}
    assert {name for name, view in found.items() if isinstance(view, View)} == {
        "0.weight",
        "1.weight",
        "2.weight_ih_l0",
        "2.weight_hh_l0",
    }


def test_a_parameter_that_is_no_float_is_seen_by_its_shape() -> None:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.int8), requires_grad=False)
    assert only_view(layer).cols == 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_and_traced_layers_say_so() -> None:
    layer = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    for scripted in (torch.jit.script(layer), torch.jit.trace(layer, torch.ones(1, 8))):
        found = {name: view for name, _, view in views(nn.Sequential(scripted, nn.Linear(4, 4)))}
        assert found["0.0.weight"] == "scripted layer: prune the model, then script it"
        assert isinstance(found["1.weight"], View)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantization_aware_layers_are_seen_as_what_they_derive_from() -> None:
    from torch.ao.nn import qat
    from torch.ao.quantization import get_default_qat_qconfig

    config = get_default_qat_qconfig("x86")
    for layer, kind in [
        (qat.Linear(8, 4, qconfig=config), "Linear"),
        (qat.Conv2d(8, 4, 3, qconfig=config), "Conv2d"),
    ]:
        view = only_view(layer)
        assert kind in view.kinds
        assert view.run == 8


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_a_sharded_parameter_has_the_view_of_the_whole() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = nn.Linear(8, 4)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        view = only_view(layer)
        assert (view.rows, view.cols) == (4, 8)
        assert multiplied(layer, "weight") is layer.weight
    finally:
        torch.distributed.destroy_process_group()


def test_rules_may_call_a_parameter_by_its_name_its_layer_and_its_types() -> None:
    model = nn.Sequential(nn.Sequential(Sub(8, 4)))
    assert labels(model, ["0.0.weight"]) == {"0.0.weight", "0.0", "Sub", "Linear"}
    assert labels(nn.Linear(2, 2), ["weight"]) == {"weight", "Linear"}


def test_what_a_plain_layer_multiplies_with_is_its_parameter() -> None:
    layer = nn.Linear(8, 4)
    assert multiplied(layer, "weight") is layer.weight
    assert why_not_masked(layer, "weight", torch.zeros(4, 8, dtype=torch.bool)) is None
