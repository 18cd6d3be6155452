"""SparseLinear and SparseConv2d: the bits of the dense layer, and everything a module must survive."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from asp_kernels import PackedNM, SparseConv2d, SparseLinear, layer_backends, swap_, unswap_


def prune_(module: nn.Linear | nn.Conv2d) -> None:
    """Keep 2 of every 4 input channels."""
    with torch.no_grad():
        module.weight.unflatten(1, (-1, 4))[:, :, 1:3] = 0


def dense_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 12, 3, padding=1, groups=2)
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(12 * 25, 6), nn.Linear(6, 3, bias=False))
    prune_(conv)
    prune_(model[3])
    return model.to(dtype)


def packed_of(model: nn.Module) -> dict[str, PackedNM]:
    conv, linear = model.get_submodule("0").weight, model.get_submodule("3").weight
    return {
        "0.weight": PackedNM.from_dense(conv.permute(0, 2, 3, 1).flatten(1), 2, 4),
        "3.weight": PackedNM.from_dense(linear, 2, 4),
    }


def sparse_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = dense_model(dtype)
    assert swap_(model, packed_of(model)) == ["0.weight", "3.weight"]
    return model


X = torch.randn(4, 8, 5, 5, generator=torch.Generator().manual_seed(1))


def fresh(model: nn.Module) -> nn.Module:
    """The same architecture, sparse, with other weights."""
    other = sparse_model()
    for tensor in other.state_dict().values():
        tensor.zero_() if tensor.is_floating_point() else None
    return other


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def by_state_dict(model: nn.Module) -> nn.Module:
    other = fresh(model)
    other.load_state_dict(model.state_dict())
    return other


def by_assign(model: nn.Module) -> nn.Module:
    other = fresh(model)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return other


def by_weights_only(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = fresh(model)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("way", [by_deepcopy, by_pickle, by_state_dict, by_assign, by_weights_only])
@pytest.mark.parametrize("warm", [False, True])
def test_survives(way: Callable[[nn.Module], nn.Module], warm: bool) -> None:
    model, wanted = sparse_model(), dense_model()(X)
    if warm:
        model(X)
    other = way(model)
    assert torch.equal(other(X), wanted)
    assert torch.equal(model(X), wanted)


def test_state_dict_has_the_names_of_a_packed_file() -> None:
    model = sparse_model()
    model(X)
    assert list(model.state_dict()) == ["0.bias", "0.weight.values", "0.weight.codes", "3.bias", "3.weight.values",
                                        "3.weight.codes", "4.weight"]  # fmt: skip
    assert len(pickle.dumps(model)) < 1.01 * len(pickle.dumps(sparse_model()))  # the unpacked weight stays behind


def test_missing_unexpected_and_bad_entries_are_named() -> None:
    model = sparse_model()
    state = model.state_dict()
    values = state.pop("3.weight.values")
    with pytest.raises(RuntimeError, match=r"Missing key.*3.weight.values"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*3.weight.value_s"):
        model.load_state_dict({**state, "3.weight.values": values, "3.weight.value_s": values})
    with pytest.raises(RuntimeError, match=r"3.weight: codes: row 0, group 0"):
        model.load_state_dict({**state, "3.weight.values": values, "3.weight.codes": state["3.weight.codes"] * 0})
    with pytest.raises(RuntimeError, match=r"3.weight: values: expected shape"):
        model.load_state_dict({**state, "3.weight.values": values[:2]})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(dense_model().state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_dtype_after_use_is_not_stale(dtype: torch.dtype) -> None:
    model = sparse_model()
    model(X)
    assert torch.equal(model.to(dtype)(X.to(dtype)), dense_model(dtype)(X.to(dtype)))


def test_cached_weight_follows_every_change() -> None:
    layer = SparseLinear.from_dense(dense_model()[3])
    x = torch.randn(2, 300)
    first = layer(x)
    with torch.no_grad():
        layer.values.mul_(2)
    assert torch.equal(layer(x) - layer.bias, nn.functional.linear(x, layer.weight))
    assert not torch.equal(layer(x), first)
    layer.values.data = layer.values.data / 2
    assert torch.equal(layer(x), first)
    layer.load_state_dict({"bias": layer.bias, "weight.values": layer.values * 3, "weight.codes": layer.codes})
    assert torch.equal(layer(x), nn.functional.linear(x, layer.packed().to_dense(), layer.bias))


def test_inference_mode_first_then_gradients() -> None:
    model = sparse_model()
    with torch.inference_mode():
        wanted = model(X)
    x = X.clone().requires_grad_()
    out = model(x)
    out.sum().backward()
    dense, y = dense_model(), X.clone().requires_grad_()
    dense(y).sum().backward()
    assert torch.equal(out, wanted)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(model[0].bias.grad, dense[0].bias.grad)


@pytest.mark.parametrize("shape", [(300,), (1, 300), (0, 300), (2, 3, 300), (2, 0, 3, 300)])
def test_linear_input_shapes(shape: tuple[int, ...]) -> None:
    dense = dense_model()[3]
    x = torch.randn(*shape)
    assert torch.equal(SparseLinear.from_dense(dense)(x), dense(x))
    wide = torch.randn(3, 600)[:, ::2]
    assert torch.equal(SparseLinear.from_dense(dense)(wide), dense(wide))
    with pytest.raises(ValueError, match=r"expected input \(..., 300\)"):
        SparseLinear.from_dense(dense)(torch.zeros(2, 299))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 4, 1),
        nn.Conv2d(8, 4, (3, 2), (2, 1), (1, 2), (1, 2), bias=False),
        nn.Conv2d(8, 4, (2, 3), padding="same", dilation=(1, 2)),
        nn.Conv2d(16, 4, 3, padding="valid", groups=4),
        nn.Conv2d(8, 4, 3, padding=2, padding_mode="circular"),
        nn.Conv2d(8, 4, 3, padding="same", padding_mode="reflect"),
    ],
)
def test_conv_geometry(conv: nn.Conv2d) -> None:
    prune_(conv)
    sparse = SparseConv2d.from_dense(conv)
    for x in (torch.randn(2, conv.in_channels, 7, 6), torch.randn(conv.in_channels, 7, 6)):
        torch.testing.assert_close(sparse(x), conv(x))
    assert torch.equal(sparse.weight, conv.weight)
    assert torch.equal(sparse.to_dense().weight, conv.weight)
    assert str(sparse).endswith("pattern=2:4)")


def test_unswap_gives_the_dense_model_back() -> None:
    model = sparse_model()
    assert layer_backends(model) == {"0": "reference", "3": "reference"}
    assert unswap_(model) == ["0.weight", "3.weight"]
    dense = dense_model()
    assert [type(m) for m in model] == [type(m) for m in dense]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in dense.state_dict().items())
    assert all(p.is_contiguous() for p in model.parameters())
    assert layer_backends(model) == {}


def test_swap_is_all_or_nothing() -> None:
    model = dense_model()
    packed = packed_of(model)
    with pytest.raises(ValueError, match=r"'3.weigth' is not the weight.*did you mean '3.weight'"):
        swap_(model, {"0.weight": packed["0.weight"], "3.weigth": packed["3.weight"]})
    with pytest.raises(ValueError, match=r"'3.weight': expected a packed matrix of shape"):
        swap_(model, {"0.weight": packed["0.weight"], "3.weight": packed["0.weight"]})
    handle = model[3].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        swap_(model, packed)
    handle.remove()
    assert type(model[0]) is nn.Conv2d
    with pytest.raises(ValueError, match="the model itself"):
        swap_(model[3], {"weight": packed["3.weight"]})

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match="no sparse layer stands for Scaled"):
        SparseLinear.from_dense(Scaled(8, 4))


def test_module_under_two_names_stays_one() -> None:
    shared = nn.Linear(8, 8)
    prune_(shared)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    swap_(model, {"a.weight": PackedNM.from_dense(shared.weight, 2, 4)})
    assert isinstance(model["a"], SparseLinear)
    assert model["b"][0] is model["a"]


def test_from_dense_checks_and_shares_the_bias() -> None:
    with pytest.raises(ValueError, match="not 2:4: row 0, group 0"):
        SparseLinear.from_dense(nn.Linear(8, 4))
    with pytest.raises(ValueError, match="multiple of 4 input channels"):
        SparseConv2d.from_dense(nn.Conv2d(6, 4, 2))
    dense = dense_model()[3].eval()
    sparse = SparseLinear.from_dense(dense, mask=dense.weight != 0)
    assert sparse.bias is dense.bias
    assert not sparse.training


def test_weight_read_by_other_code_is_the_dense_one() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    prune_(layer.linear1)
    x = torch.randn(2, 3, 8)
    wanted = layer(x)
    swap_(layer, {"linear1.weight": PackedNM.from_dense(layer.linear1.weight, 2, 4)})
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted)


def test_compile_goes_through_the_operations() -> None:
    torch._dynamo.reset()
    model = sparse_model().eval()
    wanted = model(X)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), wanted)
    torch.testing.assert_close(compiled(X[:2]), wanted[:2])
    program = torch.export.export(model, (X,))
    called = {str(node.target) for node in program.graph.nodes}
    assert {"asp_kernels.linear_24.default", "asp_kernels.conv_24.default"} <= called
    torch._dynamo.reset()


def test_eight_threads_at_once() -> None:
    model, wanted = sparse_model(), dense_model()(X)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(out, wanted) for out in pool.map(lambda _: model(X), range(32)))


def test_new_layer_is_zeros_and_valid(tmp_path: Path) -> None:
    layer = SparseLinear(8, 4, n=1)
    assert torch.equal(layer(torch.ones(8)), torch.zeros(4))
    assert layer.packed().shape == (4, 8)
    with torch.device("meta"):
        empty = SparseConv2d(8, 4, 3)
    empty.load_state_dict(SparseConv2d(8, 4, 3).state_dict(), assign=True)
    assert empty(torch.ones(8, 3, 3)).shape == (4, 1, 1)


def test_a_1x1_convolution_has_the_strides_of_the_dense_layer_and_its_bits() -> None:
    """Kernels of one pixel are contiguous in several strides, by which torch picks its algorithm."""
    torch.manual_seed(0)
    dense = nn.Conv2d(16, 8, 1)
    with torch.no_grad():
        dense.weight.view(8, 4, 4)[:, :, 2:] = 0
    sparse = SparseConv2d.from_dense(dense)
    assert sparse.weight.stride() == dense.weight.stride()
    x = torch.randn(2, 16, 1, 1)
    assert torch.equal(sparse(x), dense(x))
