"""fit and evaluate: when and how a model is evaluated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asp_toolkit.errors import AspError
from asp_toolkit.loop import evaluate, fit
from tests.toolkit.made_tasks import batches, feed, network, run, section, task

pytestmark = pytest.mark.usefixtures("leaves_nothing")


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
