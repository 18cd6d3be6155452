"""A weight that is computed from other parameters is pruned through them, or skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from asp_toolkit.views import View, labels, multiplied, place_of, views, why_not_masked


def seen(model: nn.Module) -> dict[str, View | str]:
    return {name: view for name, _, view in views(model)}


def parameter_of(model: nn.Module) -> tuple[nn.Module, str, nn.Parameter]:
    """The one parameter with a view: its module, own name and itself."""
    ((name, module),) = [(name, module) for name, module, view in views(model) if isinstance(view, View)]
    own = name.rpartition(".")[2]
    return module, own, module.get_parameter(own)


class Scaled(nn.Module):
    """w = scale * x, in a way that cannot be seen from its type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class FillsEmptyRows(nn.Module):
    """Keeps zeros, but not where a row has nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where((x == 0).all(1, keepdim=True), 1.0, x)


class ShiftedInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class Counted(nn.Module):
    """Remembers how often it was used, as spectral_norm does in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Refuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.allowed = 1  # the call that registering makes

    def forward(self, x: Tensor) -> Tensor:
        self.allowed -= 1
        if self.allowed < 0:
            raise ValueError("not\nnow")
        return x


class SumOfTwo(nn.Module):
    """w = a + b: a zero in one of them is no zero of w."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w / 2, w / 2


class LowRank(nn.Module):
    """w = x + b a, with parameters of its own, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b @ self.a


class Halved(nn.Module):
    """Another shape than the original's."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:4]


def with_own(*made: nn.Module, unsafe: bool = False) -> nn.Module:
    layer = nn.Linear(8, 8)
    for one in made:
        parametrize.register_parametrization(layer, "weight", one, unsafe=unsafe)
    return layer


KEEP: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 6)),
    "weight_norm of columns": lambda: parametrizations.weight_norm(nn.Linear(8, 6), dim=1),
    "weight_norm of all": lambda: parametrizations.weight_norm(nn.Linear(8, 6), dim=None),
    "weight_norm of Conv2d": lambda: parametrizations.weight_norm(nn.Conv2d(8, 6, 3)),
    "weight_norm of ConvTranspose2d": lambda: parametrizations.weight_norm(nn.ConvTranspose2d(8, 6, 3, groups=2)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 6)),
    "weight_norm, then spectral_norm": lambda: parametrizations.spectral_norm(
        parametrizations.weight_norm(nn.Linear(8, 6))
    ),
    "own": lambda: with_own(Scaled()),
    "own, twice": lambda: with_own(Scaled(), Counted()),
    "own, after weight_norm": lambda: parametrize.register_parametrization(
        parametrizations.weight_norm(nn.Linear(8, 6)), "weight", Scaled()
    ),
}


OLDER: dict[str, Callable[[], nn.Module]] = {
    "older weight_norm": lambda: nn.utils.weight_norm(nn.Linear(8, 6)),
    "older spectral_norm": lambda: nn.utils.spectral_norm(nn.Conv2d(8, 6, 3)),
    "prune": lambda: prune.l1_unstructured(nn.Linear(8, 6), "weight", 0.25),
    "prune, twice": lambda: prune.random_unstructured(
        prune.l1_unstructured(nn.Linear(8, 6), "weight", 0.25), "weight", 0.25
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*KEEP, *OLDER])
def test_zeros_of_the_original_are_zeros_of_the_weight(name: str) -> None:
    layer = {**KEEP, **OLDER}[name]().eval()
    features = torch.randn(1, 8) if isinstance(layer, nn.Linear) else torch.randn(1, 8, 5, 5)
    before = layer(features)
    module, own, original = parameter_of(layer)
    assert torch.equal(multiplied(module, own), layer.weight)
    assert torch.equal(layer(features), before)
    mask = torch.rand(original.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0], mask[:, 0] = True, True  # a slice that is dropped altogether is another test's
    with torch.no_grad():
        original.masked_fill_(~mask, 0)
    layer(features)  # older hooks compute the weight before each forward pass
    assert (layer.weight[~mask] == 0).all()
    assert torch.equal(multiplied(module, own), layer.weight)
    assert torch.isfinite(layer.weight).all()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*KEEP, *OLDER])
def test_the_view_is_that_of_the_layer(name: str) -> None:
    layer = {**KEEP, **OLDER}[name]()
    model = nn.Sequential(nn.ReLU(), layer)
    found = seen(model)
    assert set(found) == dict(model.named_parameters()).keys()
    (view,) = [view for view in found.values() if isinstance(view, View)]
    plain = {"Linear": nn.Linear, "Conv2d": nn.Conv2d, "ConvTranspose2d": nn.ConvTranspose2d}[view.layer]
    assert isinstance(layer, plain)
    assert view.kinds[0] == view.layer
    assert view.cols > 1
    assert view.matrix(layer.weight.detach()).shape == (view.rows, view.cols)
    assert {"1", "1.weight", view.name, view.layer} <= labels(model, [view.name])
    assert not {label for label in labels(model, [view.name]) if "Parametriz" in label}
    place = place_of(model, view.name)
    assert (place.prefix, place.layer, place.weight) == ("1", layer, "weight")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*KEEP, "random"])
def test_looking_changes_nothing(name: str, training: bool) -> None:
    layer = (with_own(Dropped()) if name == "random" else KEEP[name]()).train(training)
    module, own, original = parameter_of(layer)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    random, modes = torch.get_rng_state(), [one.training for one in layer.modules()]
    seen(layer)
    multiplied(module, own)
    why_not_masked(module, own, torch.ones_like(original, dtype=torch.bool))
    assert torch.equal(torch.get_rng_state(), random)
    assert [one.training for one in layer.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert original.grad is None


def test_spectral_norm_in_training_is_not_moved_by_asking_for_its_weight() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(8, 8)).train()
    vector = layer.parametrizations.weight[0]._u.clone()
    module, own, _ = parameter_of(layer)
    first = multiplied(module, own)
    assert torch.equal(multiplied(module, own), first)
    assert torch.equal(layer.parametrizations.weight[0]._u, vector)
    assert layer.weight is not None  # while the layer's own look does move it
    assert not torch.equal(layer.parametrizations.weight[0]._u, vector)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), "parametrized by Orthogonal, which does not keep zeros"),
        (lambda: with_own(Symmetric()), "parametrized by Symmetric, which does not keep zeros"),
        (lambda: with_own(Shifted()), "parametrized by Shifted, which does not keep zeros"),
        (lambda: with_own(FillsEmptyRows()), "parametrized by FillsEmptyRows, which does not keep zeros"),
        (lambda: with_own(ShiftedInTraining()), "parametrized by ShiftedInTraining, which does not keep zeros"),
        (lambda: with_own(Scaled(), Shifted()), "parametrized by Scaled, Shifted, which does not keep zeros"),
        (lambda: with_own(Refuses()), "parametrized by Refuses, which failed when tried: ValueError: not now"),
        (lambda: with_own(Halved(), unsafe=True), "the weight has another shape, (4, 8)"),
    ],
)
def test_what_does_not_keep_zeros_is_skipped_with_the_reason(layer: Callable[[], nn.Module], reason: str) -> None:
    found = seen(nn.Sequential(layer()))["0.parametrizations.weight.original"]
    assert reason in str(found)
    assert isinstance(found, str)


def test_a_sum_of_two_is_pruned_through_neither() -> None:
    found = seen(with_own(SumOfTwo()))
    assert "does not keep zeros" in str(found["parametrizations.weight.original0"])
    assert "does not keep zeros" in str(found["parametrizations.weight.original1"])


def test_the_other_original_of_weight_norm_is_its_scale() -> None:
    for layer in (nn.Linear(8, 6), nn.Conv2d(8, 6, 3), nn.Linear(1, 6)):  # of the last the two have one shape
        found = seen(parametrizations.weight_norm(layer))
        assert found["parametrizations.weight.original0"] == "scale of weight_norm: one number for each row"
        assert isinstance(found["parametrizations.weight.original1"], View)


def test_a_parametrized_embedding_is_still_a_table() -> None:
    found = seen(parametrizations.weight_norm(nn.Embedding(8, 6)))
    assert "embedding" in str(found["parametrizations.weight.original1"])


def test_parameters_of_a_parametrization_are_its_own() -> None:
    found = seen(with_own(LowRank()))
    assert "parametrized by LowRank, which does not keep zeros" in str(found["parametrizations.weight.original"])
    assert "layer type LowRank" in str(found["parametrizations.weight.0.a"])


def test_other_parameters_of_other_layers_are_parametrized_too() -> None:
    model = nn.ModuleDict(
        {
            "lstm": parametrizations.weight_norm(nn.LSTM(8, 4), "weight_hh_l0"),
            "heads": parametrizations.spectral_norm(nn.MultiheadAttention(8, 2), "in_proj_weight"),
            "bias": parametrize.register_parametrization(nn.Linear(8, 4), "bias", Shifted()),
        }
    )
    found = seen(model)
    hidden = found["lstm.parametrizations.weight_hh_l0.original1"]
    heads = found["heads.parametrizations.in_proj_weight.original"]
    assert isinstance(hidden, View)
    assert isinstance(heads, View)
    assert (hidden.layer, hidden.rows, hidden.cols) == ("LSTM", 16, 4)
    assert (heads.layer, heads.rows, heads.cols) == ("MultiheadAttention", 24, 8)
    assert isinstance(found["bias.weight"], View)
    assert found["bias.weight"].layer == "Linear"
    assert "vector" in str(found["bias.parametrizations.bias.original"])
    assert "lstm.weight_hh_l0" in labels(model, ["lstm.parametrizations.weight_hh_l0.original1"])


def test_a_layer_type_of_ones_own_is_asked_about_the_weight_not_about_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asp_toolkit.views import LAYER_VIEWS, Axes

    asked = []

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

    def turned(module: nn.Module, own: str) -> Axes | str:
        asked.append((type(module), own, tuple(getattr(module, own).shape)))
        return Axes((1, 0))

    monkeypatch.setitem(LAYER_VIEWS, Turned, turned)
    layer = parametrizations.spectral_norm(Turned()).train()
    vector = layer.parametrizations.weight[0]._u.clone()
    found = seen(layer)["parametrizations.weight.original"]
    assert isinstance(found, View)
    assert (found.layer, found.kinds, found.cols) == ("Turned", ("Turned",), 8)
    assert asked == [(Turned, "weight", (8, 4))]
    assert torch.equal(layer.parametrizations.weight[0]._u, vector)  # a look at the weight would have moved it


def test_parametrized_weights_without_data_are_seen() -> None:
    for layer in (parametrizations.weight_norm(nn.Linear(8, 8)), with_own(Scaled()), with_own(Symmetric())):
        found = seen(layer.to("meta"))
        kept = [name for name, view in found.items() if isinstance(view, View)]
        assert len(kept) == (0 if isinstance(layer.parametrizations.weight[0], Symmetric) else 1)


def test_a_mask_that_drops_whole_rows_of_a_normed_weight_is_refused() -> None:
    module, own, original = parameter_of(parametrizations.weight_norm(nn.Linear(8, 6)))
    mask = torch.ones_like(original, dtype=torch.bool)
    mask[:, ::2] = False
    assert why_not_masked(module, own, mask) is None
    mask[3] = False
    assert "the mask drops a whole slice of a normed weight" in str(why_not_masked(module, own, mask))
    module, own, original = parameter_of(with_own(Scaled()))
    assert why_not_masked(module, own, torch.zeros_like(original, dtype=torch.bool)) is None


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_the_older_weight_norm_is_refused_such_masks_too() -> None:
    module, own, original = parameter_of(nn.utils.weight_norm(nn.Linear(8, 6)))
    mask = torch.ones_like(original, dtype=torch.bool)
    mask[3] = False
    before = original.clone()
    assert "whole slice" in str(why_not_masked(module, own, mask))
    assert torch.equal(original, before)


def test_a_parametrized_layer_tied_with_another_place_stays_one() -> None:
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    found = seen(nn.ModuleDict({"a": layer, "b": layer}))
    assert isinstance(found["a.parametrizations.weight.original1"], View)
    assert not any(name.startswith("b") for name in found)
