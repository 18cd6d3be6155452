"""Each view's contraction axis is the one that the layer's own forward pass sums over.

The oracle is autograd: with all input features but one at zero, and one output unit looked at, only the weights that
join these two have a gradient. So every weight tells which input feature it multiplies and which output it adds to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asp_toolkit.views import View, view_of

Case = tuple[nn.Module, str, Callable[[Tensor], Tensor], tuple[int, ...]]
"""(layer, parameter, input -> output, shape of the input: features last, or (channels, *spatial))"""


def filled(module: nn.Module) -> nn.Module:
    """The module in float64 with random parameters, positive so that no ReLU or clamp hides them."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.1, 1.0)
    return module


def linear() -> Case:
    layer = filled(nn.Linear(5, 3))
    return layer, "weight", layer, (5,)


def bilinear() -> Case:
    layer, first = filled(nn.Bilinear(2, 5, 3)), torch.rand(2, dtype=torch.float64)
    return layer, "weight", lambda x: layer(first, x), (5,)


def conv(kind: type[nn.Module], *arguments: Any, **options: Any) -> Callable[[], Case]:
    def case() -> Case:
        layer = filled(kind(*arguments, **options))
        channels, dimensions = arguments[0], layer.get_parameter("weight").ndim - 2
        return layer, "weight", lambda x: layer(x[None])[0].movedim(0, -1), (channels, *[4] * dimensions)

    return case


def deformable() -> Case:
    from torchvision.ops import DeformConv2d

    layer = filled(DeformConv2d(4, 6, (3, 2), groups=2))
    offsets = torch.zeros(1, 12, 2, 3, dtype=torch.float64)
    return layer, "weight", lambda x: layer(x[None], offsets)[0].movedim(0, -1), (4, 4, 4)


def hugging_face_conv1d() -> Case:
    from transformers.pytorch_utils import Conv1D

    layer = filled(Conv1D(3, 5))
    return layer, "weight", layer, (5,)


def attention(own: str) -> Callable[[], Case]:
    def case() -> Case:
        wide = {} if own == "in_proj_weight" else {"kdim": 3, "vdim": 2}
        layer = filled(nn.MultiheadAttention(4, 2, **wide))
        with torch.no_grad():
            layer.out_proj.weight.copy_(torch.eye(4))
        lengths = torch.tensor([[0.4], [1.0], [-0.7]], dtype=torch.float64)  # three positions, all different
        fixed = {"q": torch.randn(3, 4), "k": torch.randn(3, 3), "v": torch.randn(3, 2)}

        def forward(x: Tensor) -> Tensor:
            if own == "in_proj_weight":
                given = [lengths * x] * 3
            else:
                given = [lengths * x if own.startswith(name) else fixed[name].double() for name in "qkv"]
            return layer(*given)[0]

        return layer, own, forward, ({"k": 3, "v": 2}.get(own[0], 4),)

    return case


def recurrent(kind: type[nn.RNNBase], own: str) -> Callable[[], Case]:
    def case() -> Case:
        layer = filled(kind(3, 4))
        memory = [torch.randn(1, 4, dtype=torch.float64)]

        def forward(x: Tensor) -> Tensor:
            given, hidden = (x[None], memory[0] * 0) if own == "weight_ih_l0" else (torch.zeros(1, 3).double(), x[None])
            state = (hidden, memory[0]) if kind is nn.LSTM else hidden
            return layer(given, state)[0][0]

        return layer, own, forward, (3 if own == "weight_ih_l0" else 4,)

    return case


def projection_of_lstm() -> Case:
    layer = nn.LSTM(3, 4, proj_size=2).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.zero_()
            if name == "weight_hr_l0":
                parameter.uniform_(0.1, 1.0)
    nothing = torch.zeros(1, 3).double(), torch.zeros(1, 2).double()
    # gates are all 1/2 and the candidate 0: what is projected is tanh(memory / 2) / 2, feature by feature
    return layer, "weight_hr_l0", lambda memory: layer(nothing[0], (nothing[1], memory[None]))[0][0], (4,)


def cell(kind: type[nn.RNNCellBase], own: str) -> Callable[[], Case]:
    def case() -> Case:
        layer, memory = filled(kind(3, 4)), torch.randn(4, dtype=torch.float64)

        def forward(x: Tensor) -> Tensor:
            given, hidden = (x, torch.zeros(4).double()) if own == "weight_ih" else (torch.zeros(3).double(), x)
            return layer(given, (hidden, memory))[0] if kind is nn.LSTMCell else layer(given, hidden)

        return layer, own, forward, (3 if own == "weight_ih" else 4,)

    return case


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralExperts", "MixtralConfig", {"num_local_experts": 2}),
    "qwen3_moe": ("Qwen3MoeExperts", "Qwen3MoeConfig", {"moe_intermediate_size": 4, "num_experts": 2}),
    "gpt_oss": ("GptOssExperts", "GptOssConfig", {"num_local_experts": 2}),
    "aria": ("AriaExperts", "AriaTextConfig", {"moe_num_experts": 2}),
    "nemotron_h": ("NemotronHExperts", "NemotronHConfig", {"moe_intermediate_size": 4, "n_routed_experts": 2}),
    "llama4": ("Llama4TextExperts", "Llama4TextConfig", {"num_local_experts": 2}),
}


def experts_of(family: str) -> nn.Module:
    """Two experts, each 4 -> 4 -> 4."""
    import transformers

    kind, config_kind, options = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, config_kind)(**sizes, **options)
    config._experts_implementation = "eager"
    made: nn.Module = getattr(module, kind)(config)
    return made


def experts(family: str, own: str) -> Callable[[], Case]:
    def case() -> Case:
        layer = filled(experts_of(family))
        other = "down_proj" if own != "down_proj" else ("up_proj" if family == "nemotron_h" else "gate_up_proj")
        turned = family in ("gpt_oss", "aria", "llama4")
        with torch.no_grad():  # the other product passes every feature through on its own
            shape = layer.get_parameter(other).shape
            one = torch.eye(4, dtype=torch.float64)
            gates = one.repeat_interleave(2, 0) if family == "gpt_oss" else torch.cat([one, one])
            through = gates if shape.numel() == 2 * 8 * 4 else one
            layer.get_parameter(other).copy_((through.T if turned else through).expand(shape))
            for name, bias in layer.named_parameters():
                if name.endswith("_bias"):
                    bias.zero_()
        both = torch.tensor([[0, 1]]), torch.tensor([[0.3, 0.7]], dtype=torch.float64)

        def forward(x: Tensor) -> Tensor:
            if family == "llama4":
                return layer(x.repeat(2, 1))  # one token for each expert
            return layer(x[None], *both)

        return layer, own, forward, (4,)

    return case


def dbrx(own: str) -> Callable[[], Case]:
    def case() -> Case:
        from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
        from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU

        config = DbrxFFNConfig(ffn_hidden_size=3, moe_num_experts=2, hidden_size=4)
        config.hidden_size = 4
        layer = filled(DbrxExpertGLU(config))
        identity = torch.eye(3, 4, dtype=torch.float64).repeat(2, 1)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name != own and (own == "w2" or name == "w2"):
                    parameter.copy_(identity)

        def forward(x: Tensor) -> Tensor:
            weights = [weight.view(2, 3, 4) for weight in (layer.w1, layer.v1, layer.w2)]
            return torch.cat([layer(x, *(weight[expert] for weight in weights)) for expert in range(2)])

        return layer, own, forward, (4,)

    return case


def router() -> Case:
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    layer = filled(MixtralTopKRouter(transformers.MixtralConfig(hidden_size=4, num_local_experts=3)))
    return layer, "weight", lambda x: layer(x)[0], (4,)


CASES: dict[str, Callable[[], Case]] = {
    "Linear": linear,
    "Bilinear": bilinear,
    "Conv1d": conv(nn.Conv1d, 4, 6, 3),
    "Conv2d": conv(nn.Conv2d, 4, 6, (3, 2)),
    "Conv3d": conv(nn.Conv3d, 2, 3, (1, 2, 3)),
    "Conv2d strided, dilated, padded": conv(nn.Conv2d, 4, 6, 3, stride=2, dilation=2, padding=3),
    "Conv2d grouped": conv(nn.Conv2d, 4, 6, 2, groups=2),
    "Conv2d depthwise": conv(nn.Conv2d, 3, 6, 2, groups=3),
    "ConvTranspose1d": conv(nn.ConvTranspose1d, 4, 6, 3),
    "ConvTranspose2d": conv(nn.ConvTranspose2d, 4, 3, (3, 2), stride=2),
    "ConvTranspose3d": conv(nn.ConvTranspose3d, 2, 3, (1, 2, 3)),
    "ConvTranspose2d grouped": conv(nn.ConvTranspose2d, 6, 4, 2, groups=2),
    "ConvTranspose2d depthwise": conv(nn.ConvTranspose2d, 3, 6, 2, groups=3),
    "DeformConv2d grouped": deformable,
    "Conv1D of GPT-2": hugging_face_conv1d,
    **{f"MultiheadAttention {own}": attention(f"{own}_proj_weight") for own in ("in", "q", "k", "v")},
    **{
        f"{kind.__name__} {own}": recurrent(kind, own)
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
        for own in ("weight_ih_l0", "weight_hh_l0")
    },
    "LSTM weight_hr_l0": projection_of_lstm,
    **{
        f"{kind.__name__} {own}": cell(kind, own)
        for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
        for own in ("weight_ih", "weight_hh")
    },
    **{
        f"experts of {family}, {own}": experts(family, own)
        for family in FAMILIES
        for own in ("up_proj" if family == "nemotron_h" else "gate_up_proj", "down_proj")
    },
    **{f"experts of dbrx, {own}": dbrx(own) for own in ("w1", "v1", "w2")},
    "router of mixtral": router,
}


def joined(case: Case, view: View) -> Iterator[tuple[int, int, Tensor]]:
    """(input feature, output unit, which entries of the matrix join them)."""
    layer, own, forward, shape = case
    parameter = layer.get_parameter(own)
    for feature in range(shape[0]):
        x = torch.zeros(shape, dtype=torch.float64)
        x[feature] = torch.rand(shape[1:], dtype=torch.float64) + 0.5
        y = forward(x)
        for unit, one in enumerate(y.reshape(-1, y.shape[-1]).sum(0)):
            (gradient,) = torch.autograd.grad(one, parameter, retain_graph=True, allow_unused=True)
            if gradient is not None:
                yield feature, unit, view.matrix(gradient) != 0


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_summed_over_the_input_features(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = CASES[name]()
        layer, own, _, shape = case
        view = view_of(layer, own, own)
        assert isinstance(view, View), view
        found = list(joined(case, view))
    reads = torch.full((view.rows, view.cols), -1)  # the input feature that each entry multiplies
    adds: dict[tuple[int, int], set[int]] = {(i, j): set() for i in range(view.rows) for j in range(view.cols)}
    for feature, unit, entries in found:
        for i, j in entries.nonzero().tolist():
            assert reads[i, j] in (-1, feature), f"entry {i, j} multiplies two input features"
            reads[i, j] = feature
            adds[i, j].add(unit)
    assert (reads >= 0).all(), "an entry multiplies nothing"
    for i in range(view.rows):
        assert len({frozenset(adds[i, j]) for j in range(view.cols)}) == 1, f"row {i} adds to several outputs"
        for start, end in pairwise(range(0, view.cols + 1, view.run)):
            run = reads[i, start:end].tolist()
            assert len(set(run)) == view.run, f"row {i}: groups of {run} do not lie along the input features"
    if "MultiheadAttention" not in name:  # whose queries and keys reach every unit of their head
        assert {len(units) for units in adds.values()} == {1}
    if "grouped" not in name and "depthwise" not in name and "dbrx" not in name:
        assert view.run == shape[0]


@pytest.mark.parametrize("name", CASES)
def test_unmatrix_undoes_matrix(name: str) -> None:
    layer, own, _, _ = CASES[name]()
    view = view_of(layer, own, own)
    assert isinstance(view, View)
    tensor = layer.get_parameter(own).detach()
    assert view.matrix(tensor).shape == (view.rows, view.cols)
    assert torch.equal(view.unmatrix(view.matrix(tensor)), tensor)


@pytest.mark.parametrize("name", [name for name in CASES if "depthwise" in name or "router" in name])
def test_what_is_better_left_dense_has_a_view_with_the_reason(name: str) -> None:
    layer, own, _, _ = CASES[name]()
    view = view_of(layer, own, own)
    assert isinstance(view, View)
    assert ("depthwise" if "depthwise" in name else "router of experts") in str(view.reason)


@pytest.mark.parametrize("name", [name for name in CASES if "depthwise" not in name and "router" not in name])
def test_everything_else_is_pruned_unless_told_otherwise(name: str) -> None:
    layer, own, _, _ = CASES[name]()
    view = view_of(layer, own, own)
    assert isinstance(view, View)
    assert view.reason is None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_every_layer_and_direction_of_a_recurrent_network_is_seen(
    kind: type[nn.Module], options: dict[str, Any]
) -> None:
    if kind is nn.LSTM and options:
        options = {**options, "proj_size": 4}
    layer = kind(12, 8, **options)
    for own, parameter in layer.named_parameters():
        view = view_of(layer, own, own)
        if own.startswith("weight"):
            assert isinstance(view, View), own
            assert (view.rows, view.cols) == tuple(parameter.shape)
        else:
            assert "vector" in str(view)


def test_grouped_transposed_convolution_splits_its_channels() -> None:
    layer = nn.ConvTranspose2d(8, 6, 3, groups=2)
    view = view_of(layer, "weight", "weight")
    assert isinstance(view, View)
    assert view.split == (2, 4, 3, 3, 3)
    assert (view.rows, view.cols, view.run) == (6, 36, 4)
    matrix = view.matrix(layer.weight.detach())
    for group, k, r, s in [(0, 0, 0, 0), (1, 2, 2, 1)]:  # one pixel: the group's four channels, in order
        start = (r * 3 + s) * 4
        assert torch.equal(
            matrix[group * 3 + k, start : start + 4], layer.weight.detach()[group * 4 : group * 4 + 4, k, r, s]
        )
