"""input_norm of every layer type against products written out in float64."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asp_toolkit.calibration import LAYER_INPUTS, InputStats
from asp_toolkit.calibration.layer_inputs import linear, sum_of_squares
from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM
from asp_toolkit.pruning import Chosen
from asp_toolkit.scores import SCORES, Score, activation_norm, magnitude
from asp_toolkit.views import View, views


def chosen(model: nn.Module, only: str = "*", score: Score = activation_norm) -> dict[str, Chosen]:
    """Every parameter with a view, whatever else `choose` would say against it."""
    return {
        name: Chosen(found, module, name.rpartition(".")[2], NM(2, 4), score)
        for name, module, found in views(model)
        if isinstance(found, View) and only in ("*", name)
    }


def norms(model: nn.Module, *calls: Any, only: str = "*") -> dict[str, Tensor]:
    """input_norm of all parameters, expanded to (rows, cols) in float64, after each of `calls` of the model."""
    picked = chosen(model, only)
    stats = InputStats(model, picked)
    model.eval()
    for call in calls:
        with stats.watching(), torch.no_grad():
            model(*call) if type(call) is tuple else model(call)
    return {
        name: one["input_norm"].double().expand(picked[name].view.rows, picked[name].view.cols)
        for name, one in stats.stats().items()
    }


def by_output_variance(layer: nn.Module, x: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(rows, cols): for each weight entry alone at 1, the norm of the outputs, which is that of what it multiplies.

    `run(x, weight)` is the layer's product without bias, in float64. This needs no idea of how the product is made.
    """
    (view,) = (found for _, _, found in views(layer) if isinstance(found, View))
    found = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for at in itertools.product(*(range(n) for n in layer.weight.shape)):
        alone = torch.zeros(layer.weight.shape, dtype=torch.float64)
        alone[at] = 1
        found[at] = run(x.double(), alone).square().sum().sqrt()
    return view.matrix(found)


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_linear_by_hand() -> None:
    x = torch.tensor([[[3.0, 0.0, 1.0, -2.0]], [[4.0, 0.0, -1.0, 2.0]]])  # samples and positions count alike
    found = norms(nn.Linear(4, 2), x)["weight"]
    close(found, torch.tensor([[5.0, 0.0, 2**0.5, 8**0.5]] * 2, dtype=torch.float64))


def test_the_statistic_of_a_linear_is_one_number_a_column() -> None:
    layer = nn.Linear(4, 3)
    stats = InputStats(layer, chosen(layer))
    with stats.watching():
        layer(random(5, 4))
    assert stats.stats()["weight"]["input_norm"].shape == (4,)


CONVOLUTIONS = [
    nn.Conv2d(4, 3, 3, padding=1),
    nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)),
    nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1),
    nn.Conv2d(4, 8, 3, groups=4, padding=1),
    nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)),
    nn.Conv2d(2, 3, 3, padding="valid", stride=3),
    nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect", stride=2),
    nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
    nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="replicate"),
    nn.Conv2d(3, 2, 1, stride=2),
    nn.Conv2d(2, 2, 3, stride=5, padding=3),
    nn.Conv1d(4, 3, 3, padding=2, dilation=2),
    nn.Conv3d(2, 2, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 1)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_convolutions_against_each_entry_alone(layer: Any) -> None:
    spatial = len(layer.kernel_size)
    x = random(2, layer.in_channels, *(7, 6, 5)[:spatial])

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return layer._conv_forward(x, weight, None)

    close(norms(layer, x)["weight"], by_output_variance(layer, x, run))
    close(norms(layer, x[0])["weight"], by_output_variance(layer, x[:1], run))  # without a batch dimension


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "layer",
    [layer for layer in CONVOLUTIONS if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros"],
    ids=str,
)
def test_two_dimensional_convolutions_against_unfold(layer: Any) -> None:
    x = random(3, layer.in_channels, 8, 7)
    padding = layer.padding
    if isinstance(padding, str):
        both = [d * (k - 1) if padding == "same" else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        x_padded, padding = F.pad(x, (both[1] // 2, both[1] - both[1] // 2, both[0] // 2, both[0] - both[0] // 2)), 0
    else:
        x_padded = x
    columns = F.unfold(x_padded.double(), layer.kernel_size, layer.dilation, padding, layer.stride)  # (B, C R S, out)
    channels = columns.square().sum((0, 2)).sqrt().reshape(layer.groups, -1, *layer.kernel_size)  # (g, C/g, R, S)
    rows = channels.repeat_interleave(layer.out_channels // layer.groups, 0)  # (K, C/g, R, S)
    close(norms(layer, x)["weight"], rows.permute(0, 2, 3, 1).flatten(1))


TRANSPOSED = [
    nn.ConvTranspose2d(4, 3, 3),
    nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(2, 1), groups=2, dilation=(2, 1)),
    nn.ConvTranspose1d(2, 3, 4, stride=2, padding=3),
    nn.ConvTranspose3d(2, 2, 2, padding=1),
]


@pytest.mark.parametrize("layer", TRANSPOSED, ids=str)
def test_transposed_convolutions_against_each_entry_alone(layer: Any) -> None:
    spatial = len(layer.kernel_size)
    x = random(2, layer.in_channels, *(5, 4, 3)[:spatial])
    function = getattr(F, f"conv_transpose{spatial}d")

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return function(
            x, weight, None, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )

    close(norms(layer, x)["weight"], by_output_variance(layer, x, run))


def test_a_transposed_convolution_with_a_given_output_size() -> None:
    layer = nn.ConvTranspose1d(2, 1, 3, stride=3, padding=2)
    x = random(1, 2, 4)
    both = []
    for size in (8, 10):
        stats = InputStats(layer, chosen(layer))
        with stats.watching():
            layer(x, output_size=(size,))
        extra = size - 8
        run = lambda x, w, extra=extra: F.conv_transpose1d(x, w, None, 3, 2, extra)  # noqa: E731
        close(stats.stats()["weight"]["input_norm"].double()[None], by_output_variance(layer, x, run))
        both.append(stats.stats()["weight"]["input_norm"])
    assert not torch.equal(*both)


def test_hugging_face_conv1d_has_its_inputs_first() -> None:
    from transformers.pytorch_utils import Conv1D

    x = random(2, 5, 4)
    close(norms(Conv1D(3, 4), x)["weight"], x.double().flatten(0, 1).norm(dim=0).expand(3, 4))


def test_bilinear() -> None:
    layer, one, two = nn.Bilinear(4, 8, 3), random(5, 2, 4), random(5, 2, 8)
    products = torch.einsum("abi,abj->abij", one.double(), two.double()).flatten(0, 1)
    close(norms(layer, (one, two))["weight"], products.norm(dim=0).expand(3, 4, 8).reshape(12, 8))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_attention_has_queries_keys_and_values(apart: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, **({"kdim": 4, "vdim": 12} if apart else {}))
    query, key, value = random(5, 3, 8), random(5, 3, 4 if apart else 8), random(5, 3, 12 if apart else 8) * 3
    found = norms(layer, (query, key, value))
    q, k, v = (x.double().flatten(0, 1).norm(dim=0).expand(8, -1) for x in (query, key, value))
    if apart:
        for name, right in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (q, k, v), strict=True):
            close(found[name], right)
    else:
        close(found["in_proj_weight"], torch.cat([q, k, v]))


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_the_output_projection_of_attention_against_attention_by_hand(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, **options)
    layer.out_proj.bias.data.normal_()
    x, padded = random(4, 3, 8), torch.zeros(3 if not options.get("batch_first") else 4, 4, dtype=torch.bool)
    if options.get("batch_first"):
        padded = torch.zeros(4, 3, dtype=torch.bool)
    padded[:, -1] = True
    exact = nn.MultiheadAttention(8, 2, dropout=0.5, **options).double().eval()
    exact.load_state_dict({name: one.double() for name, one in layer.state_dict().items()})
    stats = InputStats(layer, chosen(layer, "out_proj.weight"))
    layer.eval()
    before = torch.get_rng_state()
    with stats.watching():
        layer(x, key=x, value=x, key_padding_mask=padded, attn_mask=None)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        output = exact(x.double(), x.double(), x.double(), key_padding_mask=padded)[0].flatten(0, 1)
        weight, bias = exact.out_proj.weight, exact.out_proj.bias
        attended = torch.linalg.solve(weight, (output - bias).T).T  # output = attended W^T + b
    found = stats.stats()["out_proj.weight"]["input_norm"].double()
    torch.testing.assert_close(found, attended.norm(dim=0), rtol=1e-4, atol=0)


def test_a_transformer_encoder_does_not_go_around_its_layers() -> None:
    """In eval mode, without gradients, torch computes such a layer as one operation, and no inner layer is called."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    found = norms(model, random(2, 3, 8))
    assert len(found) == 8
    assert all(one.any() for one in found.values())
    assert torch.backends.mha.get_fastpath_enabled()


def test_recurrent_layers_see_the_inputs_of_the_first_layer() -> None:
    x = random(5, 3, 4)
    right = x.double().flatten(0, 1).norm(dim=0).expand(12, 4)
    for kind, gates in ((nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)):
        for batch_first in (False, True):
            layer = kind(4, 3, num_layers=2, bidirectional=True, batch_first=batch_first)
            for name in ("weight_ih_l0", "weight_ih_l0_reverse"):
                close(norms(layer, x, only=name)[name], right[: 3 * gates])
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 2, 1]))
    real = torch.cat([x[:5, 0], x[:2, 1], x[:1, 2]]).double()
    close(norms(nn.LSTM(4, 3), packed, only="weight_ih_l0")["weight_ih_l0"], real.norm(dim=0).expand(12, 4))


@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l1", "weight_hr_l0"])
def test_what_is_inside_a_recurrent_layer_is_refused(name: str) -> None:
    layer = nn.Sequential(nn.LSTM(4, 8, num_layers=2, proj_size=4))
    with pytest.raises(AspError, match=rf"'0\.{name}': .*{name} of a LSTM.*inside the layer; exclude it.*magnitude"):
        InputStats(layer, chosen(layer, f"0.{name}"))


def test_cells_see_inputs_and_states() -> None:
    x, h, c = random(5, 4), random(5, 8), random(5, 8) * 9
    for cell, call in ((nn.GRUCell(4, 8), (x, h)), (nn.LSTMCell(4, 8), (x, (h, c)))):
        found = norms(cell, call)
        close(found["weight_ih"][0], x.double().norm(dim=0))
        close(found["weight_hh"][0], h.double().norm(dim=0))
        assert not norms(cell, (x,))["weight_hh"].any()


def test_all_calls_of_a_layer_count() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input=2 * x) + self.inner(x)

    x = random(3, 4)
    close(norms(Twice(), x)["inner.weight"][0], 5**0.5 * x.double().norm(dim=0))


def test_all_layers_that_share_a_tensor_count_and_lookups_do_not() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.head, self.other = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
            self.head.weight = self.other.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.table(tokens)
            return self.head(hidden) + self.other(3 * hidden)

    model = Tied()
    tokens = torch.tensor([[0, 1, 1], [5, 5, 5]])
    right = 10**0.5 * model.table.weight.detach().double()[tokens].flatten(0, 1).norm(dim=0)
    close(norms(model, tokens)["table.weight"], right.expand(8, 4))


def test_a_module_under_two_names_counts_once() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x)

    x = random(3, 4)
    close(norms(Aliased(), x)["one.weight"][0], x.double().norm(dim=0))


def test_parametrized_layers_are_read_through_their_layer() -> None:
    x = random(3, 4)
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))
    close(norms(new, x)["0.parametrizations.weight.original1"][0], x.double().norm(dim=0))
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv1d(4, 8, 1))
    close(norms(conv, x.T[None])["parametrizations.weight.original"][0], x.double().norm(dim=0))


def test_many_batches_lose_no_digits() -> None:
    layer = nn.Linear(4, 1)
    stats = InputStats(layer, chosen(layer))
    batches = torch.rand(10_000, 4, generator=torch.Generator().manual_seed(0))
    with stats.watching():
        for one in batches:
            layer(one)
    torch.testing.assert_close(
        stats.stats()["weight"]["input_norm"].double(), batches.double().norm(dim=0), rtol=1e-7, atol=0
    )


def test_half_precision_inputs_neither_overflow_nor_round() -> None:
    layer = nn.Linear(4, 2).half()
    x = torch.full((300, 4), 400.0, dtype=torch.float16)  # 400^2 is infinite in float16
    found = norms(layer, x)["weight"]
    close(found, torch.full((2, 4), 400.0 * 300**0.5, dtype=torch.float64))
    assert norms(nn.Linear(4, 2).bfloat16(), torch.full((2, 4), 3e38, dtype=torch.bfloat16))["weight"].isinf().all()


def test_sums_do_not_depend_on_where_pieces_end() -> None:
    entries = random(1000, 3000)  # several pieces
    torch.testing.assert_close(sum_of_squares(entries), entries.double().square().sum(0), rtol=1e-12, atol=0)
    assert torch.equal(sum_of_squares(entries), sum_of_squares(entries))
    assert sum_of_squares(torch.zeros(0, 3)).tolist() == [0, 0, 0]
    exact = random(10, 4).double()
    kept = exact.clone()
    sum_of_squares(exact)
    assert torch.equal(exact, kept)


class Scaled(nn.Linear):
    """Not what its base is: the product is with a normalised input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.normalize(input, dim=-1))


class Named(nn.Linear):
    """What its base is."""


def test_subclasses_count_as_their_base_unless_they_have_a_forward_of_their_own() -> None:
    x = random(3, 4)
    close(norms(Named(4, 4), x)["weight"][0], x.double().norm(dim=0))
    with pytest.raises(AspError, match=r"Scaled has a forward of its own.*LAYER_INPUTS\[Scaled\] = linear"):
        norms(Scaled(4, 4), x)


def test_a_layer_type_of_ones_own_is_one_function() -> None:
    LAYER_INPUTS[Scaled] = lambda layer, own: lambda args, kwargs, output: sum_of_squares(F.normalize(args[0], dim=-1))
    try:
        x = random(3, 4)
        close(norms(Scaled(4, 4), x)["weight"][0], F.normalize(x, dim=-1).double().norm(dim=0))
        LAYER_INPUTS[Scaled] = linear
        close(norms(Scaled(4, 4), x)["weight"][0], x.double().norm(dim=0))
    finally:
        del LAYER_INPUTS[Scaled]


def test_fused_experts_are_refused() -> None:
    from transformers import MixtralConfig, MixtralModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralModel(MixtralConfig(vocab_size=8, num_hidden_layers=1, num_local_experts=2, **sizes))
    fused = next(name for name in chosen(model) if name.endswith("experts.down_proj"))
    with pytest.raises(AspError, match=rf"{re.escape(fused)}.*inside the layer; exclude it.*magnitude"):
        InputStats(model, chosen(model, fused))


def test_a_tied_layer_whose_inputs_are_inside_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 16, bias=False), nn.LSTM(4, 4))
    model[1].weight_hh_l0 = model[0].weight
    with pytest.raises(AspError, match=r"'0\.weight' \(tied: 1\.weight_hh_l0\): .*inside the layer"):
        InputStats(model, chosen(model, "0.weight"))


def test_a_layer_that_is_never_called_is_named() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    stats = InputStats(model, chosen(model))
    with stats.watching():
        model[0](random(2, 4))
    with pytest.raises(AspError, match=r"'1\.weight': its layer '1' was never called"):
        stats.stats()


def test_inputs_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(AspError, match=r"'0\.weight': its layer had NaN or infinite inputs"):
        norms(model, torch.tensor([[1.0, float("nan"), 1.0, 1.0]]))


def test_only_layers_whose_score_needs_it_are_watched() -> None:
    model = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4))
    picked = {**chosen(model, score=magnitude), **chosen(model, "1.weight")}
    stats = InputStats(model, picked)
    assert stats.names == ("1.weight",)
    with stats.watching():
        assert [len(one._forward_hooks) for one in model.modules()] == [0, 0, 1]
    assert [len(one._forward_hooks) for one in model.modules()] == [0, 0, 0]


def test_nothing_stays_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ZeroDivisionError), InputStats(model, chosen(model)).watching():
        raise ZeroDivisionError
    assert not model[0]._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_norm_prunes_columns_that_see_nothing() -> None:
    layer = nn.Linear(8, 4)
    x = random(5, 8)
    x[:, [0, 3, 5, 6]] = 0
    weight = layer.weight.detach()
    mask = NM(2, 4).mask(SCORES["activation_norm"](weight, {"input_norm": norms(layer, x)["weight"][0].float()}))
    assert mask.tolist() == [[False, True, True, False, True, False, False, True]] * 4
