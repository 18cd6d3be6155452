"""A MaskSet is a value: it follows names, writes +0.0, counts, saves and loads."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asp_toolkit.errors import AspError
from asp_toolkit.masks import MaskSet, zero_dropped_
from asp_toolkit.pruning import prune

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 8))


@pytest.fixture
def pruned() -> tuple[nn.Sequential, MaskSet]:
    model = network()
    return model, prune(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 8), (7, 4, 3, 3), (5,), (0, 4), (600, 1024), (1, 1)])
def test_dropped_entries_become_plus_zero_and_the_rest_keeps_its_bits(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0, -0.0], dtype=dtype)
    tensor.flatten()[: special.numel()] = special[: tensor.numel()]
    mask = torch.rand(shape, generator=generator) < 0.5
    bits = tensor.view(BITS[tensor.element_size()]).clone()
    zero_dropped_(tensor, mask)
    expected = torch.where(mask, bits, 0)
    assert torch.equal(tensor.view(BITS[tensor.element_size()]), expected)


def test_a_scalar_and_strided_tensors_are_zeroed_too() -> None:
    scalar = torch.tensor(-1.0)
    zero_dropped_(scalar, torch.tensor(False))
    assert scalar == 0
    wide = -torch.ones(4, 8)
    zero_dropped_(wide[:, ::2], torch.zeros(4, 4, dtype=torch.bool))
    assert wide.tolist() == [[0, -1] * 4] * 4
    last = torch.ones(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    mask = torch.rand(2, 4, 3, 3) < 0.5
    zero_dropped_(last, mask)
    assert torch.equal(last != 0, mask)


def test_one_planted_entry_is_a_violation(pruned: tuple[nn.Sequential, MaskSet]) -> None:
    model, masks = pruned
    assert masks.violations(model) == {}
    where = tuple((~masks.masks["2.weight"]).nonzero()[17].tolist())
    with torch.no_grad():
        model[2].weight[where] = 1e-30
    assert masks.violations(model) == {"2.weight": "1 of 512 dropped entries are not +0.0"}
    masks.apply_(model)
    assert masks.violations(model) == {}


@pytest.mark.parametrize("value", [-0.0, float("nan"), -1.0])
def test_minus_zero_and_nan_are_violations_and_apply_mends_them(
    pruned: tuple[nn.Sequential, MaskSet], value: float
) -> None:
    model, masks = pruned
    where = tuple((~masks.masks["0.weight"]).nonzero()[-1].tolist())
    with torch.no_grad():
        model[0].weight[where] = value
    assert list(masks.violations(model)) == ["0.weight"]
    masks.apply_(model)
    assert masks.violations(model) == {}
    assert not torch.signbit(model[0].weight[where])


def test_a_kept_zero_is_no_violation(pruned: tuple[nn.Sequential, MaskSet]) -> None:
    model, masks = pruned
    nn.init.zeros_(model[2].weight)
    assert masks.violations(model) == {}


def test_zero_grads_touches_dropped_entries_alone(pruned: tuple[nn.Sequential, MaskSet]) -> None:
    model, masks = pruned
    masks.zero_grads_(model)  # no gradients yet: nothing to do
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -2.0)
    model[2].weight.grad[0, :4] = float("nan")
    masks.zero_grads_(model)
    grad = model[2].weight.grad
    assert grad is not None
    assert torch.equal(grad.view(torch.int32) == 0, ~masks.masks["2.weight"])
    assert (model[2].bias.grad == -2).all()


def test_masks_follow_names_through_copies_and_reloads(pruned: tuple[nn.Sequential, MaskSet]) -> None:
    model, masks = pruned
    dense = network().state_dict()

    def holds(other: nn.Module) -> bool:
        assert masks.violations(other)
        masks.apply_(other)
        return not masks.violations(other)

    moved = network().to(torch.bfloat16)
    assert holds(moved)
    assert holds(network().to(memory_format=torch.channels_last))
    copied = copy.deepcopy(model)
    copied.load_state_dict(dense)
    assert holds(copied)
    assert masks.violations(model) == {}  # the copy is another model
    assigned = network()
    assigned.load_state_dict({name: tensor.clone() for name, tensor in dense.items()}, assign=True)
    assert holds(assigned)
    assert torch.equal(assigned[2].weight != 0, masks.masks["2.weight"])


def test_masks_hold_for_an_averaged_copy() -> None:
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    masks = prune(model)
    average.update_parameters(model)
    average.update_parameters(model)  # the dense weights it began with are copied over by the first
    assert masks.violations(average.module) == {}
    late = AveragedModel(network(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    late.n_averaged += 1
    late.update_parameters(model)
    assert masks.violations(late.module)
    masks.apply_(late.module)
    assert masks.violations(late.module) == {}


def test_names_inside_torch_compile_are_the_models_own() -> None:
    model = network()
    masks = prune(torch.compile(model, backend="eager"))
    assert set(masks.masks) == {"0.weight", "2.weight"}
    assert masks.violations(model) == {}


def test_another_model_is_an_error(pruned: tuple[nn.Sequential, MaskSet]) -> None:
    _, masks = pruned
    with pytest.raises(AspError, match=r"mask for '0\.weight': the model has no such parameter"):
        masks.apply_(nn.Linear(8, 8))
    with pytest.raises(AspError, match=r"expected shape \(8, 4, 3, 3\), got \(8, 4, 1, 1\)"):
        masks.violations(nn.Sequential(nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(8, 8)))


def test_density_counts() -> None:
    masks = MaskSet({"a": torch.tensor([[True, False, False, False]]), "b": torch.zeros(0, 4, dtype=torch.bool)})
    assert masks.density() == {"a": 0.25, "b": 0.0}


def test_model_and_masks_can_be_copied_and_pickled(pruned: tuple[nn.Sequential, MaskSet]) -> None:
    model, masks = pruned
    for again, kept in (copy.deepcopy((model, masks)), pickle.loads(pickle.dumps((model, masks)))):
        assert kept.violations(again) == {}
        assert kept.skipped == masks.skipped
        assert kept.patterns == masks.patterns
        assert all(torch.equal(kept.masks[name], mask) for name, mask in masks.masks.items())
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_zeros_are_in_a_saved_state_dict(pruned: tuple[nn.Sequential, MaskSet], tmp_path: Path) -> None:
    model, masks = pruned
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = network()
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert masks.violations(again) == {}


def test_load_reads_what_save_wrote(pruned: tuple[nn.Sequential, MaskSet], tmp_path: Path) -> None:
    _, masks = pruned
    masks.save(tmp_path / "masks.safetensors")
    again = MaskSet.load(tmp_path / "masks.safetensors")
    assert list(again.masks) == sorted(masks.masks)
    assert all(torch.equal(again.masks[name], mask) for name, mask in masks.masks.items())
    assert (again.skipped, again.patterns) == (masks.skipped, masks.patterns)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_file_is_never_read_as_other_masks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("masks") / "masks.safetensors"
    mask = torch.tensor([[True, True, False, False]])
    MaskSet({"w": mask}, {"b": "vector"}, {"w": "2:4"}).save(path)
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="truncated"):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    path.write_bytes(damaged)
    with contextlib.suppress(AspError):
        again = MaskSet.load(path)  # possible after a flip in white space, say
        assert torch.equal(again.masks["w"], mask)
        assert (again.skipped, again.patterns) == ({"b": "vector"}, {"w": "2:4"})


@pytest.mark.parametrize(
    ("masks", "header", "error"),
    [
        ({"w": torch.ones(2, 4, dtype=torch.bool)}, {}, "got another safetensors file"),
        ({"w": torch.ones(2, 4, dtype=torch.bool)}, {"asp_masks": "{}"}, "cannot read masks"),
        (
            {"w": torch.ones(2, 4)},
            {"asp_masks": json.dumps({"skipped": "{}", "patterns": '{"w": "2:4"}', "sha256": ""})},
            "one bool mask",
        ),
        (
            {"w": torch.ones(2, 4, dtype=torch.bool)},
            {"asp_masks": json.dumps({"skipped": "{}", "patterns": "{}", "sha256": ""})},
            "one pattern per parameter",
        ),
        (
            {"w": torch.ones(2, 4, dtype=torch.bool)},
            {"asp_masks": json.dumps({"skipped": "{}", "patterns": '{"w": "2:4"}', "sha256": "0"})},
            "do not match their hash",
        ),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    tmp_path: Path, masks: dict[str, Tensor], header: dict[str, str], error: str
) -> None:
    save_file(masks, tmp_path / "other.safetensors", metadata=header)
    with pytest.raises(AspError, match=error):
        MaskSet.load(tmp_path / "other.safetensors")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AspError, match="cannot read masks"):
        MaskSet.load(tmp_path / "none.safetensors")
