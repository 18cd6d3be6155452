"""Optimizers by name, what they decay, and learning rates against hand-computed numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asp_toolkit.errors import AspError
from asp_toolkit.optimizers import build_optimizer, keeps_zeros, lr_factor, optimizer_arguments
from asp_toolkit.recipe.schema import LrSchedule, Optimizer


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2), nn.Embedding(5, 4))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("SGD", torch.optim.SGD),
        ("adamw", torch.optim.AdamW),
        ("AdamW", torch.optim.AdamW),
        ("rmsprop", torch.optim.RMSprop),
        ("nadam", torch.optim.NAdam),
    ],
)
def test_an_optimizer_is_found_by_name_in_any_case(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert type(build_optimizer(network(), Optimizer(name=name, lr=0.1))) is kind


def test_arguments_arrive() -> None:
    section = Optimizer(name="sgd", lr=0.3, weight_decay=0.01, momentum=0.9, nesterov=True)
    group = build_optimizer(network(), section).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"]) == (0.3, 0.01, 0.9, True)
    section = Optimizer(name="adamw", lr=0.3, options={"betas": [0.8, 0.9], "eps": 1e-6})
    group = build_optimizer(network(), section).param_groups[0]
    assert (list(group["betas"]), group["eps"], group["weight_decay"]) == ([0.8, 0.9], 1e-6, 0.0)


def test_vectors_are_not_decayed_and_everything_that_trains_is_there_once() -> None:
    model = network()
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model, Optimizer(name="adamw", lr=0.1, weight_decay=0.05))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay)
    expected = {n: (0.05 if p.ndim >= 2 else 0.0) for n, p in model.named_parameters() if p.requires_grad}
    assert {n: decay.get(id(p)) for n, p in model.named_parameters() if p.requires_grad} == expected
    assert len(decay) == len(expected)
    assert "2.weight" not in expected
    assert expected["1.weight"] == 0.0  # the norm's scale


def test_decay_shrinks_matrices_alone() -> None:
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, Optimizer(name="sgd", lr=0.5, weight_decay=0.1)).step()
    assert torch.equal(model.weight, torch.full((4, 4), 1 - 0.5 * 0.1))
    assert torch.equal(model.bias, torch.ones(4))


def test_a_model_without_vectors_or_without_matrices_is_fine() -> None:
    assert len(build_optimizer(nn.Linear(2, 2, bias=False), Optimizer(lr=0.1)).param_groups) == 1
    assert len(build_optimizer(nn.LayerNorm(2), Optimizer(lr=0.1)).param_groups) == 1


def test_the_state_is_fresh() -> None:
    model, section = nn.Linear(2, 2), Optimizer(name="adamw", lr=0.1)
    first = build_optimizer(model, section)
    model(torch.ones(1, 2)).sum().backward()
    first.step()
    assert first.state
    assert not build_optimizer(model, section).state


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "adamv"}, r"optimizer\.name: unknown optimizer 'adamv'; did you mean 'Adam"),
        ({"name": "Optimizer"}, "unknown optimizer 'Optimizer'"),
        ({"name": "lr_scheduler"}, "unknown optimizer"),
        ({"name": "adamw", "options": {"beta": [0.9, 0.99]}}, "AdamW takes no 'beta'; did you mean 'betas'"),
        ({"name": "sgd", "options": {"params": []}}, "SGD takes no 'params'"),
        ({"name": "rprop", "weight_decay": 0.1}, "Rprop takes no 'weight_decay'"),
        ({"name": "adamw", "options": {"betas": [2.0, 0.9]}}, "AdamW refuses its arguments"),
    ],
)
def test_what_is_unknown_or_impossible_is_refused_before_training(arguments: dict[str, Any], error: str) -> None:
    section = Optimizer(lr=0.1, **arguments)
    with pytest.raises(AspError, match=error):
        optimizer_arguments(section)


def test_an_optimizer_without_weight_decay_does_without() -> None:
    kind, arguments = optimizer_arguments(Optimizer(name="rprop", lr=0.1))
    assert kind is torch.optim.Rprop
    assert arguments == {"lr": 0.1}


def test_an_optimizer_that_refuses_the_parameters_says_so() -> None:
    with pytest.raises(AspError, match="Muon refuses this model's parameters"):
        build_optimizer(nn.Linear(2, 2), Optimizer(name="muon", lr=0.1))


# total 100 steps, 10 an epoch; values by hand
SCHEDULES: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({"name": "constant"}, {0: 1.0, 50: 1.0, 99: 1.0}),
    ({"name": "constant", "warmup": 0.1}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 99: 1.0}),
    ({"name": "linear"}, {0: 1.0, 25: 0.75, 50: 0.5, 99: 0.01, 100: 0.0}),
    ({"name": "linear", "warmup": 0.2, "final": 0.2}, {0: 0.05, 19: 1.0, 20: 1.0, 60: 0.6, 100: 0.2}),
    ({"name": "cosine"}, {0: 1.0, 25: (2 + 2**0.5) / 4, 50: 0.5, 75: (2 - 2**0.5) / 4, 100: 0.0}),
    ({"name": "cosine", "warmup": 0.1, "final": 0.1}, {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1}),
    ({"name": "one_cycle"}, {14: 0.52, 29: 1.0, 30: 1.0, 65: 0.5, 100: 0.0}),
    ({"name": "one_cycle", "warmup": 0.02}, {0: 0.52, 1: 1.0, 2: 1.0, 51: 0.5, 100: 0.0}),
    ({"name": "one_cycle"}, {0: 0.042629490223}),  # 0.04 + 0.96 (1 - cos 6°) / 2, cos 6° = 0.994521895368
    (
        {"name": "step", "every": 2, "gamma": 0.5},
        {0: 1.0, 19: 1.0, 20: 0.5, 39: 0.5, 40: 0.25, 99: 0.0625},
    ),
    (
        {"name": "step", "milestones": [3, 6.5]},
        {0: 1.0, 29: 1.0, 30: 0.1, 64: 0.1, 65: 0.01, 99: 0.01},
    ),
    ({"name": "step", "milestones": [2], "gamma": 0.5, "warmup": 0.1}, {0: 0.1, 9: 1.0, 19: 1.0, 20: 0.5}),
]


@pytest.mark.parametrize(("arguments", "expected"), SCHEDULES)
def test_schedules_against_hand_computed_values(arguments: dict[str, Any], expected: dict[int, float]) -> None:
    schedule = LrSchedule(**arguments)
    assert {step: lr_factor(schedule, step, 100, 10) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_the_warm_up_never_trains_with_a_rate_of_zero() -> None:
    for name in ("cosine", "one_cycle", "linear", "constant"):
        assert lr_factor(LrSchedule(name=name, warmup=0.5), 0, 100, 10) > 0


@settings(deadline=None)
@given(
    st.sampled_from(["cosine", "one_cycle", "linear", "constant"]),
    st.floats(0, 0.999),
    st.floats(0, 1),
    st.integers(1, 50),
)
def test_every_schedule_rises_to_the_peak_and_falls(name: Any, warmup: float, final: float, total: int) -> None:
    schedule = LrSchedule(name=name, warmup=warmup, final=final)
    values = [lr_factor(schedule, step, total, 5) for step in range(total + 1)]
    peak = max(range(total + 1), key=values.__getitem__)
    assert values[peak] == pytest.approx(1.0)
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert all(a <= b + 1e-12 for a, b in pairwise(values[: peak + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[peak:]))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), True),
        (Optimizer(name="adamw", lr=0.1, weight_decay=0.1), True),
        (Optimizer(name="adagrad", lr=0.1, weight_decay=0.1), True),
        (Optimizer(name="rmsprop", lr=0.1, options={"centered": True}), True),
        (Optimizer(name="muon", lr=0.1), False),
    ],
)
def test_whether_an_optimizer_keeps_zeros_is_found_by_trying_it(section: Optimizer, expected: bool) -> None:
    before = torch.get_rng_state()
    assert keeps_zeros(section) is expected
    assert torch.equal(torch.get_rng_state(), before)
