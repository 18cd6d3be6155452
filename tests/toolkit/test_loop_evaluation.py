"""fit and evaluate: when and how a model is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.loop import Feed, Run, evaluate, fit
from asp_toolkit.recipe.schema import Training
from asp_toolkit.tasks.task import Batch, Task

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SGD = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(7)
    layers = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.0), nn.Linear(12, 4)
    return nn.Sequential(*layers).to(dtype)


def batches(count: int = 6, size: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count * size, 8, generator=generator, dtype=torch.float64).to(dtype)
    return list(zip(x.split(size), x[:, :4].argmax(1).split(size), strict=True))


def task(
    see: Callable[[nn.Module], None] = lambda model: None,
    judge: Callable[[nn.Module], None] = lambda model: None,
    change: Callable[[Tensor, float], Tensor] = lambda loss, smoothing: loss,
) -> Task:
    """Classification; `see` is called with the model before each forward pass of training, `judge` in evaluation."""

    def loss(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        see(model)
        return change(F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing), smoothing)

    def measure(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        judge(model)
        found = model(batch[0])
        return {
            "loss": F.cross_entropy(found.float(), batch[1], reduction="none"),
            "accuracy": (found.argmax(1) == batch[1]).float(),
        }

    return Task("test", network, [], [], list, loss, measure, lambda model, batch: model(batch[0]))


def feed(of: list[Batch]) -> Feed:
    return Feed(lambda epoch, skip: of[skip:], len(of), lambda: of)


def section(**keys: Any) -> Training:
    return Training.model_validate({"optimizer": SGD, "epochs": 2.0, "schedule": {"name": "constant"}, **keys})


def run(precision: str = "fp32") -> Run:
    return Run(Accelerator(cpu=True), precision=precision)


def test_when_it_evaluates() -> None:
    work = run()
    keys = section(evaluate_every=0.5, evaluate_first=1, epochs=1.5)
    fitted = fit(network(), task(), keys, work, "dense", feed=feed(batches()))
    evaluated = [row["step"] for row in work.rows if "accuracy" in row]
    assert evaluated == [1, 3, 6, 9]
    assert [row["epoch"] for row in work.rows if "accuracy" in row] == pytest.approx([1 / 6, 0.5, 1.0, 1.5], abs=1e-4)
    last = [row for row in work.rows if "accuracy" in row][-1]
    assert fitted.metrics == {key: last[key] for key in ("loss", "accuracy", "samples")}
    assert fitted.metrics["samples"] == 48


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_is_in_evaluation_mode_and_puts_the_mode_back(training: bool) -> None:
    model = network().train(training)
    modes: list[bool] = []
    gradients: list[bool] = []
    watch = task(judge=lambda model: (modes.append(model.training), gradients.append(torch.is_grad_enabled()))[0])
    statistics = model[1].running_mean.clone()
    evaluate(model, watch, run(), batches())
    assert modes == [False] * 6
    assert gradients == [False] * 6
    assert model.training is training
    assert torch.equal(model[1].running_mean, statistics)


def test_training_goes_on_in_training_mode_after_an_evaluation() -> None:
    modes: list[bool] = []
    watch = task(lambda model: modes.append(all(module.training for module in model.modules())))
    fit(network().eval(), watch, section(evaluate_every=1 / 6), run(), "dense", feed=feed(batches()))
    assert modes == [True] * 12


def test_the_mode_is_put_back_when_evaluation_fails() -> None:
    model = network()

    def fail(model: nn.Module) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        evaluate(model, task(judge=fail), run(), batches())
    assert model.training


def test_metrics_are_means_over_samples_not_over_batches() -> None:
    of = batches(2, 8)
    uneven = [(of[0][0], of[0][1]), (of[1][0][:3], of[1][1][:3])]
    model = network().eval()
    with torch.no_grad():
        x, y = torch.cat([x for x, _ in uneven]), torch.cat([y for _, y in uneven])
        expected = float(F.cross_entropy(model(x), y))
    found = evaluate(model, task(), run(), uneven)
    assert found == {"loss": pytest.approx(expected), "accuracy": pytest.approx(found["accuracy"]), "samples": 11}
    assert found["accuracy"] * 11 == pytest.approx(round(found["accuracy"] * 11))


def test_nothing_to_evaluate_on_is_an_error() -> None:
    with pytest.raises(AspError, match="no test batch"):
        evaluate(network(), task(), run(), [])
