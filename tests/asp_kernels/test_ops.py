"""linear_24 and conv_24 against float64, over shapes, strides, dtypes; NaN and infinity; gradients; compile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asp_kernels import CSR, Packed24, PackedNM, conv_24, explain, linear_24
from asp_kernels import library as asp_library

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF, NAN = float("inf"), float("nan")


def weight_24(
    rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0, n: int = 2, m: int = 4
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows * cols // m, m, generator=draw, dtype=torch.float64)
    dense[torch.rand(dense.shape, generator=draw).argsort(1) >= n] = 0
    return dense.reshape(rows, cols).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 9),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from(FLOATS),
    st.integers(0, 1000),
)
def test_linear(lead: list[int], rows: int, groups: int, biased: bool, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = weight_24(rows, 4 * groups, dtype, seed)
    x = torch.randn(*lead, 8 * groups, generator=draw).to(dtype)[..., ::2]  # strided
    bias = torch.randn(rows, generator=draw).to(dtype) if biased else None
    out = linear_24(x, Packed24.from_dense(weight), bias)
    assert torch.equal(out, F.linear(x, weight, bias))
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_linear_on_slices_at_any_storage_offset() -> None:
    weight = weight_24(5, 12)
    packed = Packed24.from_dense(weight)
    values = torch.cat([torch.ones(1), packed.values.flatten()])[1:].view(5, 6)
    codes = torch.cat([torch.ones(3, dtype=torch.uint8), packed.codes.flatten()])[3:].view(5, 2)
    x = torch.randn(7 * 12 + 1)[1:].view(7, 12)
    assert torch.equal(linear_24(x, PackedNM(values, codes, (5, 12), 2, 4)), F.linear(x, weight))


def test_linear_nan_and_inf_pass_through_kept_entries_alone() -> None:
    packed = Packed24.from_dense(torch.tensor([[1.0, 2, 0, 0], [0, 0, 3, -1]]))
    x = torch.tensor([[INF, 1, 2, 3], [1, 1, NAN, 1], [1.0, 2, 3, 4]])
    out = linear_24(x, packed, torch.tensor([10.0, 20]))
    torch.testing.assert_close(out, torch.tensor([[INF, 23], [13, NAN], [15, 25]]), equal_nan=True)
    assert linear_24(x[0], packed).tolist() == [INF, 3.0]


def test_linear_int8_is_exact_int32() -> None:
    weight = weight_24(3, 4096).sign().mul(127).to(torch.int8)
    for rows in (1, 5):
        x = torch.full((rows, 4096), 127, dtype=torch.int8)
        out = linear_24(x, Packed24.from_dense(weight), torch.ones(3, dtype=torch.int32))
        assert out.dtype == torch.int32
        assert torch.equal(out, (x.long() @ weight.long().t() + 1).int())
    wide = Packed24.from_dense(torch.zeros(1, 1 << 19, dtype=torch.int8))
    with pytest.raises(ValueError, match="exceed int32"):
        linear_24(torch.zeros(1, 1 << 19, dtype=torch.int8), wide)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 12), None, r"expected shape \(\.\.\., 8\), got \(2, 12\)"),
        (torch.tensor(1.0), None, "expected shape"),
        (torch.zeros(2, 8, dtype=torch.float64), None, "x is torch.float64, the weight torch.float32"),
        (torch.zeros(2, 8), torch.zeros(2), r"bias: expected shape \(3,\)"),
        (torch.zeros(2, 8), torch.zeros(3).half(), "bias: expected torch.float32"),
    ],
)
def test_linear_refuses(x: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_24(x, Packed24.from_dense(weight_24(3, 8)), bias)


def conv_case(**given: Any) -> tuple[Tensor, Tensor, PackedNM, dict[str, Any]]:
    groups, kernel, dtype = given.get("groups", 1), given.pop("kernel", (3, 3)), given.pop("dtype", torch.float64)
    matrix = weight_24(6, kernel[0] * kernel[1] * 8 // groups, dtype)
    weight = matrix.reshape(6, *kernel, 8 // groups).permute(0, 3, 1, 2)  # (K, C/g, R, S)
    weight = weight.clone(memory_format=torch.contiguous_format)  # in the strides that a layer's own weight has
    x = torch.randn(2, 8, 9, 7, dtype=torch.float64).to(dtype)
    return x, weight, Packed24.from_dense(matrix), {"kernel": kernel, **given}


GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"kernel": (1, 1), "stride": 2},
    {"stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)},
    {"groups": 2, "padding": 1},
    {"padding": "same", "kernel": (2, 3), "dilation": (1, 2)},
    {"padding": "valid", "kernel": (3, 1)},
    {"dtype": torch.bfloat16, "padding": 1},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_conv(geometry: dict[str, Any]) -> None:
    x, weight, packed, call = conv_case(**geometry)
    bias = torch.randn(6, dtype=x.dtype)
    like = {key: value for key, value in call.items() if key != "kernel"}
    for given_x in (x, x[0], x[:0], x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
        out = conv_24(given_x, packed, bias, **call)
        torch.testing.assert_close(out, F.conv2d(given_x, weight, bias, **like))
    assert torch.equal(conv_24(x, packed, **call), F.conv2d(x, weight, **like)) or geometry.get("padding") == "same"


@pytest.mark.parametrize("groups", [1, 2])
def test_conv_invents_no_nan(groups: int) -> None:
    x, weight, packed, call = conv_case(groups=groups, padding=1)
    x[0, 3, 4, 4] = INF
    x[1, 1, 0, 0] = NAN
    out = conv_24(x, packed, **call)
    patches = F.unfold(x, 3, padding=1).reshape(2, groups, -1, 63)  # (B, g, C/g R S, L)
    kept = weight.reshape(groups, -1, patches.shape[2])
    terms = kept[None, :, :, :, None] * patches[:, :, None]
    exact = terms.masked_fill((kept == 0)[None, :, :, :, None], 0).sum(3).reshape(out.shape)
    assert exact.isfinite().logical_not().any()
    assert (F.conv2d(x, weight, groups=groups, padding=1).isnan() & exact.isfinite()).any()
    torch.testing.assert_close(out, exact, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"groups": 4}, "does not suit"),
        ({"kernel": 5}, "does not suit"),
        ({"stride": 0}, "stride: expected"),
        ({"padding": "full"}, "padding: expected"),
        ({"padding": "same", "stride": 2}, "padding: expected"),
    ],
)
def test_conv_refuses(call: dict[str, Any], message: str) -> None:
    x, _, packed, usual = conv_case()
    with pytest.raises(ValueError, match=message):
        conv_24(x, packed, **{**usual, **call})
    with pytest.raises(ValueError, match=r"x: expected \(B, 8"):
        conv_24(x[:, :7], packed, **usual)


def test_gradients() -> None:
    packed = Packed24.from_dense(weight_24(3, 8, torch.float64))
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    values = packed.values.clone().requires_grad_()

    def linear(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        return linear_24(x, PackedNM(values, packed.codes, packed.shape, 2, 4), bias)

    assert torch.autograd.gradcheck(linear, (x, values, bias))
    image, _, kernel, call = conv_case(groups=2, padding=1, stride=2)
    inputs = image[:1, :, :4, :3].clone().requires_grad_()
    kept = kernel.values.clone().requires_grad_()

    def conv(x: Tensor, values: Tensor) -> Tensor:
        return conv_24(x, PackedNM(values, kernel.codes, kernel.shape, 2, 4), **call)

    assert torch.autograd.gradcheck(conv, (inputs, kept))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_registered_operations_pass_opcheck() -> None:
    packed = Packed24.from_dense(weight_24(3, 8))
    x, bias = torch.randn(2, 8, requires_grad=True), torch.randn(3, requires_grad=True)
    torch.library.opcheck(asp_library._linear, (x, packed.values, packed.codes, bias, 2, 4))
    image, _, kernel, _ = conv_case(dtype=torch.float32)
    shape = ([1, 1], [1, 1], [1, 1], 1, [3, 3])
    torch.library.opcheck(asp_library._conv, (image, kernel.values, kernel.codes, None, *shape, 2, 4))


def test_autocast_follows_torch() -> None:
    weight = weight_24(3, 8)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_24(x, Packed24.from_dense(weight)), F.linear(x, weight))


def test_explain_names_backend_and_reason() -> None:
    packed = Packed24.from_dense(weight_24(4, 8))
    choice = explain(torch.zeros(3, 8), packed)
    assert (choice.op, choice.backend, choice.expected_ms) == ("linear_24", "reference", None)
    assert "dense" in str(choice)
    assert explain(torch.zeros(8, 3), CSR.from_dense(torch.ones(2, 8))).op == "spmm"
    with pytest.raises(ValueError, match="cannot meet"):
        explain(torch.zeros(3, 7), packed)


def test_threads_at_once() -> None:
    weight = weight_24(16, 32)
    packed = Packed24.from_dense(weight)
    inputs = [torch.randn(4, 32) for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda x: linear_24(x, packed), inputs))
    assert all(torch.equal(out, F.linear(x, weight)) for x, out in zip(inputs, outputs, strict=True))
