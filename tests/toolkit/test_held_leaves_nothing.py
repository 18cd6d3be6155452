"""held() ends without a trace, and copes with models that change while it lasts."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import prune


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(16, 8, generator=torch.Generator().manual_seed(0))).square().mean()


def traces(model: nn.Module, optimizer: SGD) -> list[object]:
    """Everything that a careless wrapper would leave behind."""
    hooks = [len(p._post_accumulate_grad_hooks or {}) + len(p._backward_hooks or {}) for p in model.parameters()]
    modules = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    return [
        hooks,
        modules,
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        sorted(set(vars(optimizer)) - {"_opt_called"}),
        [type(m).forward for m in model.modules()],
        threading.active_count(),
        dict(os.environ),
    ]


@pytest.fixture
def parts() -> Iterator[tuple[nn.Sequential, MaskSet, SGD]]:
    model = network()
    yield model, prune(model), SGD(model.parameters(), 0.1, momentum=0.9)
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_left_behind(parts: tuple[nn.Sequential, MaskSet, SGD], named: bool, fails: bool) -> None:
    model, masks, optimizer = parts
    before = traces(model, optimizer)

    def train() -> None:
        with masks.held(model, optimizer if named else None):
            assert traces(model, optimizer) != before
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            if fails:
                raise KeyError("in the loop")

    if fails:
        with pytest.raises(KeyError, match="in the loop"):
            train()
    else:
        train()
    assert traces(model, optimizer) == before
    loss_of(model).backward()
    optimizer.step()
    assert masks.violations(model)  # outside, nobody holds them any more


def test_a_mask_set_for_another_model_leaves_nothing_either(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    before = traces(model, optimizer)
    with pytest.raises(Exception, match="no such parameter"), masks.held(nn.Linear(8, 8), optimizer):
        pass
    assert traces(model, optimizer) == before


def test_held_can_be_entered_again_and_inside_itself(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    for _ in range(2):
        with masks.held(model, optimizer), masks.held(model):
            loss_of(model).backward()
            optimizer.step()
            assert masks.violations(model) == {}


def test_weights_written_inside_are_masked_at_the_end(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    with (
        pytest.warns(UserWarning, match=r"0\.weight: changed outside any optimizer step"),
        masks.held(model, optimizer),
    ):
        nn.init.ones_(model[0].weight)
    assert torch.equal(model[0].weight != 0, masks.masks["0.weight"])


def test_copies_made_inside_carry_no_hooks(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    with masks.held(model, optimizer) as placed:
        for again, kept in (copy.deepcopy((model, placed)), pickle.loads(pickle.dumps((model, placed)))):
            assert not any(p._post_accumulate_grad_hooks for p in again.parameters())
            assert kept.violations(again) == {}


def test_new_masks_are_used_at_once(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    with masks.held(model, optimizer):
        loss_of(model).backward()
        optimizer.step()
    sparser = prune(model, "1:4")
    with sparser.held(model, optimizer):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert sparser.violations(model) == {}
    assert torch.equal(model[0].weight != 0, sparser.masks["0.weight"])
    assert sparser.density()["0.weight"] == 0.25


def test_parameters_replaced_inside_are_found_by_name(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, _ = parts
    with masks.held(model):
        model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=True)
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            assert masks.violations(model) == {}
            assert (optimizer.state[model[0].weight]["momentum_buffer"][~masks.masks["0.weight"]] == 0).all()
            optimizer.zero_grad()


def test_layers_unfrozen_inside_are_held(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    model[0].requires_grad_(False)
    with masks.held(model, optimizer):
        model[0].requires_grad_(True)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            assert masks.violations(model) == {}


def test_an_average_of_held_weights_is_masked(parts: tuple[nn.Sequential, MaskSet, SGD]) -> None:
    model, masks, optimizer = parts
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with masks.held(model, optimizer):
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            average.update_parameters(model)
            assert masks.violations(average.module) == {}


def test_channels_last_while_training() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    masks = prune(model)
    model.to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    with masks.held(model, optimizer) as placed:
        assert placed.masks["0.weight"].is_contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            model(torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
            assert torch.equal(model[0].weight != 0, masks.masks["0.weight"])
    assert masks.violations(model) == {}
