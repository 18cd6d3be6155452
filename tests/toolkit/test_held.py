"""Inside held() every step of every optimizer leaves the zero set as it was."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import prune


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Tanh(), nn.Linear(16, 4, bias=bias))


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def zeros(model: nn.Module, masks: MaskSet) -> None:
    """The zero set is the dropped set, and all of it is +0.0."""
    assert masks.violations(model) == {}
    parameters = dict(model.named_parameters())
    for name, mask in masks.masks.items():
        assert torch.equal(parameters[name] != 0, mask)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, 0.05, weight_decay=0.5),
    "adamw foreach": lambda p: AdamW(p, 0.05, weight_decay=0.5, foreach=True),
    "adamw fused": lambda p: AdamW(p, 0.05, weight_decay=0.5, fused=True),
    "muon": lambda p: torch.optim.Muon(p, 0.05, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_keeps_the_zero_set(name: str) -> None:
    model = network(bias=False)
    masks = prune(model)
    start = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    with masks.held(model, optimizer):
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            zeros(model, masks)
    for parameter, before in zip(model.parameters(), start.parameters(), strict=True):
        moved = (parameter != before)[before != 0]
        assert moved.double().mean() > 0.8  # kept entries did train; all outputs of a hidden unit may be dropped


def test_a_closure_is_allowed() -> None:
    model = network()
    masks = prune(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    before = loss_of(model).item()
    with masks.held(model, optimizer):
        optimizer.step(closure)
    zeros(model, masks)
    assert loss_of(model).item() < before


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_as_a_hand_written_masked_loop(accumulate: int) -> None:
    model = network().double()
    masks = prune(model)
    twin = copy.deepcopy(model)
    mine = [(p, masks.masks.get(n)) for n, p in twin.named_parameters()]
    momenta = [torch.zeros_like(p) for p, _ in mine]
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    with masks.held(model, optimizer):
        for step in range(3):
            for part in range(accumulate):
                seed = step * accumulate + part
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                model(x).square().mean().backward()
                twin(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for (parameter, mask), momentum in zip(mine, momenta, strict=True):
                    assert parameter.grad is not None
                    gradient = parameter.grad if mask is None else parameter.grad * mask
                    momentum.mul_(0.9).add_(gradient + 0.01 * parameter)
                    parameter -= 0.1 * momentum
                    parameter.grad = None
            zeros(model, masks)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-14)


def test_clipping_sees_no_dropped_gradients() -> None:
    model = network().double()
    masks = prune(model)
    twin = copy.deepcopy(model)
    x = torch.randn(16, 8, dtype=torch.float64)
    optimizer = SGD(model.parameters(), 0.1)
    with masks.held(model, optimizer):
        for _ in range(2):  # accumulated
            model(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    squares = torch.zeros((), dtype=torch.float64)
    (2 * twin(x).square().mean()).backward()
    for name, parameter in twin.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        squares += (gradient[masks.masks[name]] if name in masks.masks else gradient).square().sum()
    torch.testing.assert_close(norm, squares.sqrt())
    zeros(model, masks)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_gradients_of_dropped_entries_are_nobodys_business(value: float) -> None:
    model = nn.Linear(8, 4, bias=False)
    masks = prune(model)
    coefficients = torch.where(masks.masks["weight"], 1.0, value)
    optimizer = AdamW(model.parameters(), 0.1, weight_decay=0.1)
    with masks.held(model, optimizer):
        for _ in range(2):
            (model.weight * coefficients).sum().backward()
            assert torch.equal(model.weight.grad, masks.masks["weight"].float())
            assert nn.utils.clip_grad_norm_(model.parameters(), 100.0) == 4.0  # 16 kept entries of gradient 1
            optimizer.step()
            optimizer.zero_grad()
            zeros(model, masks)
    state = optimizer.state[model.weight]
    dropped = ~masks.masks["weight"]
    assert (state["exp_avg"][dropped] == 0).all()
    assert (state["exp_avg_sq"][dropped] == 0).all()


def test_bf16_autocast() -> None:
    model = network()
    masks = prune(model)
    optimizer = AdamW(model.parameters(), 0.05)
    with masks.held(model, optimizer):
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            zeros(model, masks)


def test_a_bf16_model() -> None:
    model = network().bfloat16()
    masks = prune(model)
    optimizer = SGD(model.parameters(), 0.5, momentum=0.9)
    with masks.held(model, optimizer):
        for _ in range(3):
            model(torch.randn(16, 8, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
    assert masks.violations(model) == {}


def test_grad_scaler_also_when_a_step_is_left_out() -> None:
    model = network()
    masks = prune(model)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with masks.held(model, optimizer):
        for step, factor in enumerate([1.0, float("inf"), 1.0]):
            before = model[0].weight.detach().clone()
            scaler.scale(loss_of(model, step) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            zeros(model, masks)
            assert torch.equal(model[0].weight, before) == (factor != 1.0)


def test_two_optimizers_for_one_model() -> None:
    model = network()
    masks = prune(model)
    with masks.held(model):
        pair = SGD(model[0].parameters(), 0.1, momentum=0.9), AdamW(model[2].parameters(), 0.1)
        for step in range(3):
            loss_of(model, step).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
                zeros(model, masks)


def test_an_optimizer_made_inside_is_found_and_one_of_another_model_is_let_be() -> None:
    model, other = network(), network()
    masks = prune(model)
    twin = copy.deepcopy(other)
    with masks.held(model):
        for net in (model, other):
            optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
            for step in range(2):
                loss_of(net, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            zeros(model, masks)
    optimizer = SGD(twin.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        loss_of(twin, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), twin.parameters(), strict=True))


def test_backward_in_another_thread() -> None:
    model = network()
    masks = prune(model)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    with masks.held(model, optimizer):
        for step in range(2):
            loss = loss_of(model, step)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert model[0].weight.grad is not None
            assert (model[0].weight.grad[~masks.masks["0.weight"]] == 0).all()
            optimizer.step()
            optimizer.zero_grad()
            zeros(model, masks)


def test_a_compiled_model_trains() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    masks = prune(compiled)
    optimizer = SGD(compiled.parameters(), 0.1)
    with masks.held(compiled, optimizer):
        loss_of(compiled).backward()
        optimizer.step()
    zeros(model, masks)
