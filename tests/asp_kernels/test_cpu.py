"""The C++ kernels against float64 and against ranks in torch, on every instruction set this processor has."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asp_kernels import Packed24, SparseLinear, explain, linear_24, nm_mask
from asp_kernels.backends import cpu
from asp_kernels.dispatch import dense_only, form_24

pytestmark = pytest.mark.skipif(cpu.library().refusal is not None, reason=f"{cpu.library().refusal}")
BEST = 0 if cpu.library().handle is None else cpu.library().handle.asp_level()
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(params=cpu.LEVELS[: BEST + 1], scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level in turn, as ASP_KERNELS_CPU forces it."""
    before = os.environ.get("ASP_KERNELS_CPU")
    os.environ["ASP_KERNELS_CPU"] = request.param
    cpu.library.cache_clear()
    assert cpu.about() == request.param
    yield request.param
    if before is None:
        del os.environ["ASP_KERNELS_CPU"]
    else:
        os.environ["ASP_KERNELS_CPU"] = before
    cpu.library.cache_clear()


def ranks(scores: Tensor, n: int, m: int) -> Tensor:
    """The definition: an entry stays when fewer than n of its group are higher, or equal and before it."""
    groups = scores.double().reshape(-1, m)
    higher = groups.unsqueeze(1) > groups.unsqueeze(2)  # (G, i, j): j is higher than i
    before = torch.ones(m, m, dtype=torch.bool).tril(-1)
    equal = (groups.unsqueeze(1) == groups.unsqueeze(2)) & before
    return ((higher | equal).sum(2) < n).reshape(scores.shape)


@QUICK
@given(data=st.data())
def test_masks_are_the_ranks(level: str, data: st.DataObject) -> None:
    m = data.draw(st.sampled_from([2, 3, 4, 4, 5, 8, 8, 16, 33, 64]))
    n = data.draw(st.integers(1, m - 1))
    rows, groups = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40))
    dtype = data.draw(st.sampled_from(cpu.MASK_DTYPES))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    few = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, float("inf"), -float("inf")])
    scores = few[torch.randint(0, 8, (rows, m * groups))] if data.draw(st.booleans()) else torch.randn(rows, m * groups)
    scores = scores.to(dtype)
    if data.draw(st.booleans()):
        scores = scores.t().contiguous().t()
    assert torch.equal(cpu._nm_mask(scores, n, m), ranks(scores, n, m))


def test_masks_of_large_matrices_are_split_among_threads(level: str) -> None:
    scores = torch.randn(1031, 4100)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = nm_mask(scores, 2, 4)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, ranks(scores, 2, 4))


def test_masks_refuse_what_does_not_fit(level: str) -> None:
    with pytest.raises(ValueError, match="float64"):
        nm_mask(torch.zeros(2, 8, dtype=torch.float64), 2, 4)
    with pytest.raises(ValueError, match="does not fit"):
        nm_mask(torch.zeros(2, 6), 2, 4)


def weight_24(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    weight = torch.randn(rows, cols)
    return (weight * ranks(weight.abs(), 2, 4)).to(dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out` is the product up to rounding of fp32 sums and of the result."""
    wide, wide_x = weight.double(), x.double()
    offset = 0 if bias is None else bias.double()
    wanted, size = wide_x @ wide.t() + offset, wide_x.abs() @ wide.abs().t() + abs(offset)
    assert out.dtype == x.dtype
    assert out.shape == wanted.shape
    own = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-23
    assert bool(((out - wanted).abs() <= own * wanted.abs() + 2.0**-20 * size + 1e-30).all())


@QUICK
@given(data=st.data())
def test_products_are_those_of_float64(level: str, data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(0, 70)), 4 * data.draw(st.integers(0, 70))
    dtype = data.draw(st.sampled_from(cpu.DTYPES))
    leading = data.draw(st.sampled_from([(), (0,), (1,), (2, 3), (9,), (16,), (17,), (3, 11), (65,), (100,)]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    weight = weight_24(rows, cols, dtype)
    bias = torch.randn(rows).to(dtype) if data.draw(st.booleans()) else None
    x = torch.randn(*leading, cols + 3).to(dtype)[..., 3:]
    if data.draw(st.booleans()) and x.ndim > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    packed = Packed24.from_dense(weight)
    check(x, weight, bias, cpu.linear_24(x, packed.values, packed.codes, bias, data.draw(st.booleans())))


@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize(("samples", "batched"), [(1, False), (8, False), (11, False), (70, True)])
def test_rows_are_split_among_threads(level: str, dtype: torch.dtype, samples: int, batched: bool) -> None:
    weight = weight_24(700, 6000, dtype)
    packed, x = Packed24.from_dense(weight), torch.randn(samples, 6000).to(dtype)
    alone, threads = None, torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = cpu.linear_24(x, packed.values, packed.codes, None, batched)
            alone = out if alone is None else alone
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(out, alone)
    check(x, weight, None, out)


@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize("batched", [False, True])
def test_not_finite_activations_reach_outputs_through_kept_entries_alone(
    level: str, dtype: torch.dtype, batched: bool
) -> None:
    weight = weight_24(37, 100, dtype)
    packed, x = Packed24.from_dense(weight), torch.randn(19, 100).to(dtype)
    x[3, 10], x[5, 11], x[18, 99] = float("nan"), float("inf"), -float("inf")
    out = cpu.linear_24(x, packed.values, packed.codes, None, batched)
    keeps = Packed24(torch.ones_like(packed.values), packed.codes, packed.shape).to_dense().bool()
    touched = (~torch.isfinite(x)).float() @ keeps.float().t() > 0
    assert torch.equal(torch.isfinite(out), ~touched)
    assert bool(touched.any())


def test_tiles_follow_the_weight_and_go_with_it() -> None:
    layer = SparseLinear.from_dense(_linear(256, 512))
    x = torch.randn(4, 512)
    with torch.no_grad():
        assert explain(x, layer.packed()).backend == "cpu"
        first = layer(x)
        layer.values.mul_(2)
        check(x, layer.weight, layer.bias, layer(x))
        assert not torch.equal(layer(x), first)
        other = _linear(256, 512)
        layer.load_state_dict(SparseLinear.from_dense(other).state_dict())
        check(x, other.weight, other.bias, layer(x))
    held = weakref.ref(cpu._tiles[layer.values])
    del layer
    gc.collect()
    assert held() is None


def _linear(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(cols, rows, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(weight_24(rows, cols, dtype))
    return layer


@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_layers_run_the_kernel_and_survive_what_modules_must(dtype: torch.dtype) -> None:
    dense = _linear(300, 520, dtype)
    layer, x = SparseLinear.from_dense(dense), torch.randn(2, 2, 520).to(dtype)
    assert form_24(x, layer.values, 2, 4)[0] == "decode"
    out = layer(x)
    check(x, dense.weight, dense.bias, out)
    with dense_only():
        assert torch.equal(layer(x), dense(x))
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x), out)
    assert set(layer.state_dict()) == {"weight.values", "weight.codes", "bias"}
    packed = layer.packed()
    assert torch.equal(linear_24(x, packed, layer.bias), out)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(one, out) for one in pool.map(lambda _: layer(x), range(64)))


def test_gradients_come_from_the_dense_product() -> None:
    dense = _linear(256, 512)
    layer, x = SparseLinear.from_dense(dense), torch.randn(4, 512, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, dense(x))
    (found,) = torch.autograd.grad(out.sum(), x)
    (wanted,) = torch.autograd.grad(dense(x).sum(), x)
    assert torch.equal(found, wanted)
    assert "gradients" in explain(x, layer.packed()).refusals["cpu"]


def test_codes_out_of_order_are_refused_before_a_kernel_sees_them() -> None:
    packed = Packed24.from_dense(weight_24(4, 8, torch.float32))
    packed.codes.fill_(0xFF)  # behind the checks of Packed24
    with pytest.raises(ValueError, match="ascend"):
        cpu.linear_24(torch.zeros(1, 8), packed.values, packed.codes, None)


def test_off_and_unknown_levels_say_so() -> None:
    code = "from asp_kernels.backends import cpu; print(cpu.about())"
    for value, word in (("off", "ASP_KERNELS_CPU=off"), ("sse9", "expected generic")):
        env = {**os.environ, "ASP_KERNELS_CPU": value, "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert word in found.stdout


def _in_child(x: Tensor, layer: SparseLinear, out: Tensor) -> None:
    torch.set_num_threads(2)
    sys.exit(0 if torch.allclose(layer(x), out, rtol=1e-5, atol=1e-5) else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_too() -> None:
    layer, x = SparseLinear.from_dense(_linear(1100, 4000)), torch.randn(2, 4000)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(x, layer, layer(x)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
