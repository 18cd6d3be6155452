"""prune_trainer around somebody's own train and evaluate functions, and what it prints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asp_toolkit import AspError, prune, prune_trainer
from tests.toolkit.made_loaders import loader, network, samples

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_dense_training_then_pruning_then_the_same_training_again(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    seen: list[tuple[str, int]] = []

    def train(given: nn.Module) -> None:
        assert given is model
        seen.append(("train", int((given[0].weight == 0).sum())))
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(given(x), y).backward()
            optimizer.step()
            seen.append(("step", int((given[0].weight == 0).sum())))

    def evaluate(given: nn.Module) -> float:
        seen.append(("evaluate", int((given[0].weight == 0).sum())))
        return 0.5

    result = prune_trainer(model, train=train, evaluate=evaluate)
    dense = [("train", 0), *[("step", 0)] * 6, ("evaluate", 0)]
    assert seen == [*dense, ("evaluate", 64), ("train", 64), *[("step", 64)] * 6, ("evaluate", 64)]
    assert result.metrics == {phase: {"metric": 0.5} for phase in ("dense", "pruned", "retrained")}
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split() for line in said.err.splitlines()] == [
        [phase, "metric", "0.5000"] for phase in ("dense", "pruned", "retrained")
    ]


def test_trained_weights_are_pruned_as_they_are() -> None:
    model = network()
    calls = []
    expected = prune(network()).masks
    functions: dict[str, Any] = {"train": lambda model: calls.append("train"), "evaluate": lambda model: {"a": 1}}
    result = prune_trainer(model, trained=True, quiet=True, **functions)
    assert calls == ["train"]
    assert all(torch.equal(result.masks.masks[name], mask) for name, mask in expected.items())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    ],
)
def test_own_functions_with_accumulation_autocast_and_averaged_weights(make: Any) -> None:
    model = network()
    zeros: list[int] = []

    def train(given: nn.Module) -> nn.Module:
        optimizer = make(given.parameters())
        average = AveragedModel(given, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        scaler = torch.amp.GradScaler("cpu")
        for number, (x, y) in enumerate(loader()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(given(x), y)
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(given.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                average.update_parameters(given)
                zeros.append(int((given[0].weight == 0).sum()))
                zeros.append(int((average.module[0].weight == 0).sum()))
        given.load_state_dict(average.module.state_dict())
        return given

    result = prune_trainer(model, train=train, evaluate=lambda model: 1, quiet=True)
    assert zeros == [0] * 6 + [64] * 6
    assert result.masks.violations(model) == {}


def test_own_function_may_bring_dense_weights_back_from_a_file() -> None:
    model = network()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="changed outside any optimizer step"):
        result = prune_trainer(
            model, train=lambda model: model.load_state_dict(saved), evaluate=lambda model: 1, trained=True, quiet=True
        )
    assert result.masks.violations(model) == {}


def test_another_model_from_the_train_function_is_refused_at_once() -> None:
    calls: list[str] = []

    def train(model: nn.Module) -> nn.Module:
        calls.append("train")
        return network()

    with pytest.raises(AspError, match=r"returned another Sequential.*in place"):
        prune_trainer(network(), train=train, evaluate=lambda model: 1.0)
    assert calls == ["train"]


def test_a_wrapper_of_the_same_model_is_no_other_model() -> None:
    class Compiled(nn.Module):  # as torch.compile wraps, without its seconds
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    result = prune_trainer(network(), train=Compiled, evaluate=lambda model: 1.0, quiet=True)
    assert result.masks.violations(result.model) == {}


def test_nothing_is_left_behind_by_a_train_function_that_raises() -> None:
    model = network()
    calls: list[str] = []

    def train(model: nn.Module) -> None:
        calls.append("train")
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_trainer(model, train=train, evaluate=lambda model: 1.0, quiet=True)
    F.cross_entropy(model(samples()[0]), samples()[1]).backward()
    assert int((model[0].weight.grad == 0).sum()) < 64  # no hook zeroes gradients any more
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert int((model[0].weight == 0).sum()) < 64


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (None, r"a number or a dict of numbers, got NoneType.*trained=True"),
        ({"note": "fine"}, r"none under \['note'\]"),
    ],
)
def test_an_evaluation_without_numbers_is_an_error(returned: Any, match: str) -> None:
    with pytest.raises(AspError, match=match):
        prune_trainer(network(), train=lambda model: None, evaluate=lambda model: returned)


def test_numbers_of_every_kind_are_kept() -> None:
    found = {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": 3, "d": "text", "e": torch.ones(2), "runtime": 9.0}
    result = prune_trainer(network(), train=lambda model: None, evaluate=lambda model: found, quiet=True)
    assert result.metrics["pruned"] == {"a": 0.5, "b": 0.25, "c": 3.0, "runtime": 9.0}
    assert "runtime" not in str(result)


def test_print_shows_phases_layers_and_reasons() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 6), nn.Linear(6, 2))
    result = prune_trainer(model, train=lambda model: None, evaluate=lambda model: {"accuracy": 0.75}, quiet=True)
    assert str(result).splitlines() == [
        "dense      accuracy 0.7500",
        "pruned     accuracy 0.7500",
        "retrained  accuracy 0.7500",
        "2 parameters pruned (2:4): 112 of their 224 entries kept, 50.0%",
        "  dense: 0.weight: embedding: a table that is looked up, not multiplied",
        "  dense: 5 vectors (biases, norms)",
        "  dense: 4.weight: 2:4 does not fit: contraction length 6 is not a multiple of 4",
    ]
    assert repr(result) == str(result)
    assert set(result.skipped) | set(result.masks.masks) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"epochs": 3}, "epochs: would have no effect here: your train function or Trainer decides"),
        ({"seed": 3}, "seed: would have no effect"),
        ({"recipe": {"train": {"epochs": 3}, "device": "cpu"}}, "train, device: would have no effect"),
        ({"loss": F.cross_entropy}, "your train function has its own"),
        ({"evaluate": [1]}, "train is a function, so evaluate must be one too"),
        ({"exclude": ["Lineer"]}, "Linear"),
    ],
)
def test_functions_refuse_what_they_would_ignore(keys: dict[str, Any], match: str) -> None:
    def train(model: nn.Module) -> None:
        pytest.fail("trained before it refused")

    with pytest.raises(AspError, match=match):
        prune_trainer(network(), **{"train": train, "evaluate": lambda model: 1.0, **keys})


@pytest.mark.parametrize(("model", "match"), [(nn.Linear, "Linear, a class"), ("resnet18", "got str"), (None, "None")])
def test_what_is_no_model_is_refused(model: Any, match: str) -> None:
    with pytest.raises(AspError, match=match):
        prune_trainer(model, train=lambda model: None, evaluate=lambda model: 1.0)
