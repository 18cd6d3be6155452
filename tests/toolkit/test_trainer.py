"""prune_trainer around batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from asp_toolkit import AspError, prune, prune_trainer
from asp_toolkit.recipe import from_mapping
from asp_toolkit.trainer import PruneResult
from tests.toolkit.made_loaders import loader, network, samples

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 digits of scikit-learn: (N, 64) in [0, 1], classes."""
    datasets = pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    found = datasets.load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def around(model: nn.Module | None = None, **keys: Any) -> PruneResult:
    """prune_trainer on small batches, with what differs in `keys`."""
    given = {"train": loader(), "evaluate": loader(16), "loss": F.cross_entropy, "quiet": True, "epochs": 1.0, **keys}
    return prune_trainer(model or network(), **{key: value for key, value in given.items() if value is not None})


def test_digits_come_back_to_their_dense_accuracy(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    train = DataLoader(TensorDataset(x[:1400], y[:1400]), 32, shuffle=True)
    test = DataLoader(TensorDataset(x[1400:], y[1400:]), 256)
    model = network(64, 10, 64)
    optimizer = {"lr": 0.1, "momentum": 0.9}
    result = prune_trainer(model, train=train, evaluate=test, loss=F.cross_entropy, epochs=6, optimizer=optimizer)
    assert list(result.metrics) == ["dense", "pruned", "retrained"]
    dense, pruned, retrained = (result.metrics[phase]["accuracy"] for phase in result.metrics)
    assert dense > 0.88
    assert pruned < dense
    assert retrained > dense - 0.02
    assert result.model is model
    assert result.masks.violations(model) == {}
    assert set(result.masks.density().values()) == {0.5}
    with torch.no_grad():
        assert retrained == pytest.approx(float((model(x[1400:]).argmax(1) == y[1400:]).float().mean()))


def test_include_exclude_and_pattern() -> None:
    result = around(include=["Linear"], exclude=["0"], pattern="1:4")
    assert set(result.masks.masks) == {"2.weight"}
    assert result.masks.density() == {"2.weight": 0.25}
    result = around(recipe={"prune": {"rules": [{"include": ["0"], "pattern": "1:4"}, {"include": ["2"]}]}})
    assert result.masks.patterns == {"0.weight": "1:4", "2.weight": "2:4"}


def test_the_phases_are_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, float, str]] = []
    import asp_toolkit.trainer.batches as home

    fit = home.fit

    def watched(model: Any, task: Any, section: Any, run: Any, phase: str, **keys: Any) -> Any:
        seen.append((phase, section.epochs, section.optimizer.lr, run.precision))
        return fit(model, task, section, run, phase, **keys)

    monkeypatch.setattr(home, "fit", watched)
    recipe = {"train": {"epochs": 2.0}, "retrain": {"epochs": 1.0}, "precision": "bf16"}
    around(recipe=recipe, epochs=None, optimizer={"lr": 0.05})
    assert seen == [("dense", 2.0, 0.05, "bf16"), ("retrained", 1.0, 0.05, "bf16")]


WHOLE = {
    "task": {"kind": "image_classification", "model": {"name": "resnet18"}, "data": {"source": "synthetic"}},
    "train": {"batch_size": 4, "checkpoint_every": 0.5, "optimizer": {"lr": 0.1}},
    "export": {"formats": ["dense"]},
}


@pytest.mark.parametrize("kind", ["file", "mapping", "Recipe"])
def test_a_whole_recipe_gives_way_to_the_model_and_the_data(kind: str, tmp_path: Path) -> None:
    import json

    file = tmp_path / "whole.yaml"
    file.write_text(json.dumps(WHOLE))
    recipe = {"file": file, "mapping": WHOLE, "Recipe": from_mapping(WHOLE)}[kind]
    assert set(around(recipe=recipe).masks.masks) == {"0.weight", "2.weight"}


def test_weights_that_a_recipe_calls_trained_are_only_retrained() -> None:
    model = network()
    expected = {name: mask.clone() for name, mask in prune(network()).masks.items()}
    masks = around(model, recipe=from_mapping({**WHOLE, "train": {**WHOLE["train"], "skip": True}})).masks.masks  # type: ignore[dict-item]
    assert all(torch.equal(masks[name], mask) for name, mask in expected.items())


class Stream(IterableDataset[Any]):
    """Samples without a number of them."""

    def __init__(self, passes: list[int]) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[Any]:
        self.passes.append(0)
        for pair in zip(*samples(20), strict=True):
            self.passes[-1] += 1
            yield pair


def test_a_loader_without_length_runs_for_max_steps() -> None:
    passes: list[int] = []
    result = around(train=DataLoader(Stream(passes), 8), max_steps=7, accumulate=2, epochs=None)
    assert passes == [20, 20, 20, 20, 16] * 2  # 14 batches in each phase, three in a pass
    assert result.masks.violations(result.model) == {}


def test_a_loader_without_length_needs_max_steps_alone() -> None:
    with pytest.raises(AspError, match="no length; give max_steps"):
        around(train=DataLoader(Stream([]), 8), epochs=None)
    with pytest.raises(AspError, match="epochs: train has no length"):
        around(train=DataLoader(Stream([]), 8), max_steps=5)


def test_evaluation_may_have_no_length() -> None:
    assert around(evaluate=DataLoader(Stream([]), 8)).metrics["dense"]["samples"] == 20


def test_evaluate_may_be_a_function_beside_a_loader() -> None:
    modes = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        modes.append(model.training)
        return {"f1": 1 / 3}

    result = around(evaluate=evaluate, ema=0.5, epochs=2.0)
    assert result.metrics == {phase: {"f1": 1 / 3} for phase in ("dense", "pruned", "retrained")}
    assert modes == [False] * 5  # two epochs twice, and the pruned model


class WithLoss(nn.Module):
    """Takes keywords, and returns its loss as transformers models do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = network(), kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        found = {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})
        return found if self.kind == "dict" else SimpleNamespace(**found)


@pytest.mark.parametrize("kind", ["dict", "attributes"])
def test_dict_batches_for_a_model_that_returns_its_loss(kind: str) -> None:
    batches = [{"x": x, "labels": y} for x, y in loader()]
    result = around(WithLoss(kind), train=batches, evaluate=batches, loss=None)
    assert set(result.metrics["retrained"]) == {"loss", "accuracy", "samples"}
    assert result.metrics["retrained"]["samples"] == 48


def test_dict_batches_for_a_model_that_takes_no_labels() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)
            return out

    batches = [{"x": x, "labels": y} for x, y in loader()]
    assert "accuracy" in around(Plain(), train=batches, evaluate=batches).metrics["dense"]


def test_targets_that_are_no_classes_have_a_loss_only() -> None:
    batches = [(x, x[:, :4]) for x, _ in loader()]
    result = around(train=batches, evaluate=batches, loss=F.mse_loss)
    assert set(result.metrics["dense"]) == {"loss", "samples"}


def test_a_worker_process_of_a_loader_ends() -> None:
    around(train=loader(num_workers=1), evaluate=loader(16, num_workers=1), max_steps=2)


def test_random_state_and_mode_are_as_before() -> None:
    model = network().eval()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    around(model)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert not model.training


def test_the_same_call_gives_the_same_bits() -> None:
    train = loader(shuffle=True)
    made = [around(train=train, seed=3, epochs=2.0).model for _ in range(2)]
    assert torch.equal(made[0][0].weight, made[1][0].weight)
    assert not torch.equal(made[0][0].weight, around(train=train, seed=4, epochs=2.0).model[0].weight)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_export_writes_what_loads_again(format: str, tmp_path: Path) -> None:
    from asp_toolkit import load_dense, load_packed

    result = around()
    folder = result.export(tmp_path / format, format)
    other = (load_dense if format == "dense" else load_packed)(folder, network()).eval()
    x = samples()[0]
    with torch.inference_mode():
        assert torch.equal(other(x), result.model.eval()(x))


def test_two_models_at_once_do_not_meet() -> None:
    first, second = network(), network(hidden=24)
    around(first)
    kept = {name: value.clone() for name, value in first.state_dict().items()}
    result = around(second)
    assert all(torch.equal(value, kept[name]) for name, value in first.state_dict().items())
    assert result.masks.masks["0.weight"].shape == (24, 8)
