"""Exports of layers without a sparse twin, and of weights that somebody else reads: same bits, everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from asp_kernels import SparseLinear
from asp_toolkit.exporters import export, load_dense, load_packed, read_manifest
from asp_toolkit.inspection import inspect
from asp_toolkit.masks import MaskSet
from asp_toolkit.patterns import NM
from asp_toolkit.pruning import prune
from asp_toolkit.verification import same_outputs, verify
from asp_toolkit.views import LAYER_VIEWS, Axes, View, views


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


class Around(nn.Module):
    """`layer` between two Linear layers, or called on what is given."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]  # type: ignore[no-any-return]


def recur(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]  # type: ignore[no-any-return]


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


SEQUENCE = draw(2, 5, 16)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], Tensor, set[str]]] = {
    "attention": (
        lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        attend,
        SEQUENCE,
        {"in_proj_weight", "out_proj.weight"},
    ),
    "attention with projections of their own": (
        lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=12, batch_first=True),
        lambda layer, x: layer(x, x[..., :8], x[..., :12])[0],
        SEQUENCE,
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
    ),
    "lstm": (
        lambda: nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True),
        recur,
        SEQUENCE,
        {f"weight_{kind}_l{i}{end}" for kind in ("ih", "hh") for i in (0, 1) for end in ("", "_reverse")},
    ),
    "gru": (lambda: nn.GRU(16, 8, batch_first=True), recur, SEQUENCE, {"weight_ih_l0", "weight_hh_l0"}),
    "transposed convolution": (lambda: nn.ConvTranspose2d(8, 12, 3, groups=2), plainly, draw(2, 8, 4, 4), {"weight"}),
    "bilinear": (
        lambda: nn.Bilinear(16, 8, 8),
        lambda layer, x: layer(x, x[..., :8].contiguous()),
        SEQUENCE,
        {"weight"},
    ),
    "weight_norm": (
        lambda: weight_norm(nn.Linear(16, 8)),
        plainly,
        SEQUENCE,
        {"parametrizations.weight.original1"},
    ),
    "spectral_norm": (
        lambda: spectral_norm(nn.Conv2d(8, 8, 3)),
        plainly,
        draw(2, 8, 5, 5),
        {"parametrizations.weight.original"},
    ),
}


def made(case: str, seed: int) -> tuple[nn.Module, Tensor]:
    build, call, x, _ = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Around(build(), call).eval(), x


def kinds(model: nn.Module) -> list[str]:
    return [type(part).__name__ for part in model.modules()]


@pytest.mark.parametrize("case", list(CASES))
def test_same_bits_from_both_formats(tmp_path: Path, case: str) -> None:
    model, x = made(case, 0)
    masks = prune(model, "2:4")
    assert set(masks.masks) == {f"layer.{name}" for name in CASES[case][3]}
    dense = export(model, masks, tmp_path / "dense")
    packed = export(model, masks, tmp_path / "packed", "packed")
    same_outputs(model, load_dense(dense, made(case, 1)[0]), x)
    for layers in ("sparse", "dense"):
        loaded = load_packed(packed, made(case, 1)[0], layers=layers)
        same_outputs(model, loaded, x)
        assert kinds(loaded) == kinds(model)
    for folder in (dense, packed):
        found = verify(folder, masks)
        assert (found.problems, found.checked) == ([], len(masks.masks))
        assert {row.name for row in inspect(folder) if row.pattern == "2:4"} == set(masks.masks)
        assert set(read_manifest(folder).parameters) == set(masks.masks) <= set(model.state_dict())
    assert {row.name for row in inspect(model) if row.pattern == "2:4"} == set(masks.masks)


@pytest.mark.parametrize("case", ["lstm", "attention", "transposed convolution", "weight_norm"])
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_into_a_model_without_memory(tmp_path: Path, case: str, format: str) -> None:
    model, x = made(case, 0)
    folder = export(model, prune(model, "2:4"), tmp_path / "out", format)
    with torch.device("meta"):
        empty = Around(CASES[case][0](), CASES[case][1]).eval()
    loaded = load_dense(folder, empty) if format == "dense" else load_packed(folder, empty)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    same_outputs(model, loaded, x)


def test_loaded_recurrent_layers_train(tmp_path: Path) -> None:
    model, x = made("lstm", 0)
    folder = export(model, prune(model, "2:4"), tmp_path / "p", "packed")
    loaded = load_packed(folder, made("lstm", 1)[0]).train()
    loaded(x).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def encoder(seed: int) -> nn.TransformerEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_encoder_that_reads_its_layers_weights(tmp_path: Path, training: bool, mode: Callable[[], object]) -> None:
    """Without gradients in eval mode, TransformerEncoderLayer hands linear1.weight itself to a fused function."""
    model = encoder(0)
    folder = export(model, prune(model, "2:4"), tmp_path / "p", "packed")
    loaded = load_packed(folder, encoder(1), layers="sparse")
    assert sum(isinstance(part, SparseLinear) for part in loaded.modules()) == 4
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    model.train(training)
    loaded.train(training)
    with mode():  # type: ignore[attr-defined]
        for options in ({}, {"src_key_padding_mask": padding}):
            assert torch.equal(model(SEQUENCE, **options), loaded(SEQUENCE, **options))
    if training and mode is torch.enable_grad:
        loaded(SEQUENCE).sum().backward()
        assert loaded.layers[0].linear1.bias.grad is not None


def test_manifest_has_a_split_only_where_dimensions_are_split(tmp_path: Path) -> None:
    net = nn.Sequential(nn.ConvTranspose2d(8, 12, 3, groups=2), nn.Conv2d(12, 8, 3))
    folder = export(net, prune(net, "2:4"), tmp_path / "d")
    entries = json.loads((folder / "asp_manifest.json").read_text())["parameters"]
    up, conv = entries["0.weight"], entries["1.weight"]
    assert (up["shape"], up["split"]) == ([8, 6, 3, 3], [2, 4, 6, 3, 3])
    assert (up["order"], up["row_dims"], up["axis"]) == ([0, 2, 3, 4, 1], 2, 1)
    assert "split" not in conv
    assert not {"run", "also"} & (set(up) | set(conv))
    entry = read_manifest(folder).parameters["0.weight"]
    view = {name: found for name, _, found in views(net)}["0.weight"]
    assert isinstance(view, View)
    assert torch.equal(entry.matrix(net[0].weight), view.matrix(net[0].weight))
    assert torch.equal(entry.unmatrix(entry.matrix(net[0].weight)), net[0].weight)


class Mixer(nn.Module):
    """A layer type of somebody's own: (heads, out, in) with the contraction over all of heads and in."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(draw(4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhi,hoi->bo", x, self.mix)


def test_layer_of_ones_own_loads_where_it_is_not_registered(tmp_path: Path) -> None:
    model = nn.Sequential(Mixer())
    LAYER_VIEWS[Mixer] = lambda module, own: Axes((1, 0, 2), run=32)  # groups of 16 may cross heads
    try:
        folder = export(model, prune(model, "8:16"), tmp_path / "p", "packed")
    finally:
        del LAYER_VIEWS[Mixer]
    assert read_manifest(folder).parameters["0.mix"].run == 32
    assert verify(folder).ok
    fresh = nn.Sequential(Mixer())
    nn.init.zeros_(fresh[0].mix)
    same_outputs(model, load_packed(folder, fresh), draw(3, 4, 8))


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.table = nn.Embedding(8, 16)
            self.head = nn.Linear(16, 8, bias=False)
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_pruned_weight_stays_tied(tmp_path: Path, format: str) -> None:
    model = Tied()
    view = {name: found for name, _, found in views(model)}["table.weight"]
    assert isinstance(view, View)
    mask = view.unmatrix(NM(2, 4).mask(view.matrix(model.table.weight).abs()))
    masks = MaskSet({"table.weight": mask}, {}, {"table.weight": "2:4"})
    masks.apply_(model)
    folder = export(model, masks, tmp_path / "out", format)
    assert verify(folder, masks).ok
    apart = Tied(1)
    apart.head.weight = nn.Parameter(torch.zeros(8, 16))
    for fresh in (Tied(1), apart):
        loaded = load_dense(folder, fresh) if format == "dense" else load_packed(folder, fresh)
        assert loaded.head.weight is loaded.table.weight
        same_outputs(model, loaded, torch.arange(8))
    (row,) = [row for row in inspect(model) if row.name == "table.weight"]
    assert (row.pattern, row.skipped) == ("2:4", None)
