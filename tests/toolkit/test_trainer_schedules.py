"""prune_trainer with masks that change in the retraining, and with scores that need batches: all three ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asp_toolkit import AspError, prune_trainer
from asp_toolkit.patterns import NM
from tests.toolkit.made_loaders import loader, network

pytestmark = pytest.mark.usefixtures("leaves_nothing")

GRADUAL = {"name": "gradual", "begin": 0.1, "end": 0.9, "every": 1}


def training(zeros: list[int]) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in loader():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            zeros.append(int((model.get_parameter("0.weight") == 0).sum()))

    return train


def test_steps_of_the_dense_training_tell_how_long_the_gradual_one_is() -> None:
    zeros: list[int] = []
    model = network()
    result = prune_trainer(
        model, train=training(zeros), evaluate=lambda model: 1.0, prune_schedule=GRADUAL, pattern="1:8", quiet=True
    )
    assert zeros[:6] == [0] * 6
    assert zeros[6] < zeros[8] < zeros[11] == 128 * 7 // 8
    assert sorted(zeros[6:]) == zeros[6:]
    assert NM(1, 8).holds(model.get_parameter("0.weight") != 0)
    assert result.masks.patterns["0.weight"] == "1:8"


def test_without_the_dense_training_a_share_of_the_steps_is_not_known() -> None:
    keys: dict[str, Any] = {"train": training([]), "evaluate": lambda model: 1.0, "trained": True, "quiet": True}
    with pytest.raises(AspError, match="gradual speaks of shares of the retraining"):
        prune_trainer(network(), prune_schedule=GRADUAL, **keys)
    result = prune_trainer(network(), prune_schedule={"name": "steps", "at": {0: "3:4", 3: "2:4"}}, **keys)
    assert set(result.masks.patterns.values()) == {"2:4"}
    prune_trainer(network(), prune_schedule="straight_through", **keys)


def test_a_second_training_that_stops_early_is_told() -> None:
    lengths = iter((18, 6))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(next(lengths)):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(AspError, match=r"the retraining ended before its schedule: '0.weight' is 3:4"):
        prune_trainer(network(), train=train, evaluate=lambda model: 1.0, prune_schedule=GRADUAL, quiet=True)


@pytest.mark.parametrize("schedule", [GRADUAL, "straight_through", {"name": "rigl", "every": 2}])
def test_batches_in_our_loop(schedule: Any) -> None:
    model = network()
    result = prune_trainer(
        model, train=loader(), evaluate=loader(), loss=F.cross_entropy, epochs=2, prune_schedule=schedule, quiet=True
    )
    assert not result.masks.violations(model)
    assert NM(2, 4).holds(model.get_parameter("0.weight") != 0)
    assert set(result.metrics) == {"dense", "pruned", "retrained"}


def test_a_learning_rate_schedule_is_still_called_schedule() -> None:
    keys = {"schedule": {"name": "linear"}, "prune_schedule": "rigl", "epochs": 1, "quiet": True}
    prune_trainer(network(), train=loader(), evaluate=loader(), loss=F.cross_entropy, **keys)  # type: ignore[arg-type]
    with pytest.raises(AspError, match=r"unknown name .cosine."):
        prune_trainer(
            network(), train=loader(), evaluate=loader(), loss=F.cross_entropy, prune_schedule="cosine", quiet=True
        )


@pytest.mark.parametrize("score", ["taylor", "activation_norm"])
def test_scores_are_calibrated_on_the_batches(score: str) -> None:
    def pruned(**keys: Any) -> torch.Tensor:
        result = prune_trainer(
            network(), train=loader(), evaluate=loader(), loss=F.cross_entropy, epochs=1, quiet=True, **keys
        )
        return result.masks.masks["0.weight"]

    assert not torch.equal(pruned(score=score), pruned())


def test_a_train_function_keeps_its_batches_to_itself() -> None:
    with pytest.raises(AspError, match="score 'taylor' needs batches, which a train function keeps to itself"):
        prune_trainer(network(), train=training([]), evaluate=lambda model: 1.0, score="taylor", quiet=True)


def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.toolkit.test_trainer_hugging_face import trainer_of

    trainer = trainer_of(tmp_path, num_train_epochs=2)
    result = prune_trainer(trainer, prune_schedule=GRADUAL, score="movement", quiet=True)
    assert result.masks.share() == 0.5
    assert not result.masks.violations(trainer.model)
    trainer = trainer_of(tmp_path, num_train_epochs=2)
    result = prune_trainer(trainer, prune_schedule="straight_through", quiet=True)
    assert not result.masks.violations(trainer.model)
