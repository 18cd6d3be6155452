"""fit and evaluate: what happens at each optimizer step, and what must not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from asp_toolkit.errors import AspError
from asp_toolkit.loop import fit
from asp_toolkit.pruning import prune
from tests.toolkit.made_tasks import ADAMW, SGD, batches, feed, network, run, section, task

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@contextmanager
def watched(before: Callable[[Optimizer], None] | None, after: Callable[[Optimizer], None] | None) -> Iterator[None]:
    """Calls around every optimizer step."""
    handles = []
    if before is not None:
        handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer)))
    if after is not None:
        handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("optimizer", [SGD, {**SGD, "nesterov": True}, ADAMW, {"name": "rmsprop", "lr": 0.01}])
@pytest.mark.parametrize(
    ("more", "precision"),
    [({}, "fp32"), ({"accumulate": 3}, "fp32"), ({"ema": 0.9}, "fp32"), ({"clip_norm": 0.5}, "bf16"), ({}, "fp16")],
)
def test_the_zero_set_is_the_masks_after_every_step(
    optimizer: dict[str, Any], more: dict[str, Any], precision: str
) -> None:
    model = network()
    masks = prune(model)
    starts = {name: value.clone() for name, value in model.named_parameters()}
    seen: list[dict[str, str]] = []
    fitted = fit(
        model,
        task(lambda model: seen.append(masks.violations(model))),
        section(optimizer=optimizer, **more),
        run(precision),
        "retrained",
        masks=masks,
        feed=feed(batches()),
    )
    assert fitted.steps == (4 if "accumulate" in more else 12)
    assert len(seen) == 12
    assert not any(seen)
    assert masks.violations(model) == {}
    for name, mask in masks.masks.items():
        learned = model.get_parameter(name)
        assert not torch.equal(learned[mask], starts[name][mask])
        assert int((learned[mask] == 0).sum()) == 0


def test_masks_hold_under_an_optimizer_that_mixes_entries() -> None:
    """Muon makes the update orthogonal: entries without a gradient move too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 4, bias=False))
    masks = prune(model)
    wrong: list[dict[str, str]] = []
    look = task(see=lambda model: wrong.append(masks.violations(model)))
    before = model[0].weight.clone()
    fit(
        model,
        look,
        section(optimizer={"name": "muon", "lr": 0.02}),
        run(),
        "retrained",
        masks=masks,
        feed=feed(batches()),
    )
    assert not torch.equal(model[0].weight, before)
    assert not any(wrong)
    assert not masks.violations(model)


def test_without_masks_zeros_come_back() -> None:
    model = network()
    masks = prune(model)
    fit(model, task(), section(), run(), "control", feed=feed(batches()))
    assert set(masks.violations(model)) == set(masks.masks)


def test_gradients_of_dropped_entries_are_zero_before_clipping_and_in_the_optimizer() -> None:
    model = network()
    masks = prune(model)
    norms = []

    def before(optimizer: Optimizer) -> None:
        for name, mask in masks.masks.items():
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            assert gradient[~mask].eq(0).all()
            assert gradient[mask].ne(0).any()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item())

    def after(optimizer: Optimizer) -> None:
        for name, mask in masks.masks.items():
            moments = optimizer.state[model.get_parameter(name)]
            assert moments["exp_avg"][~mask].eq(0).all()
            assert moments["exp_avg_sq"][~mask].eq(0).all()

    with watched(before, after):
        of = section(optimizer=ADAMW, clip_norm=1e-3)
        fit(model, task(), of, run(), "retrained", masks=masks, feed=feed(batches()))
    # clipping before zeroing would leave less than the norm it clips to
    assert norms == pytest.approx([1e-3] * 12, rel=1e-3)


def test_accumulated_batches_step_as_one_larger_batch() -> None:
    small, large = batches(8, 8, torch.float64), batches(2, 32, torch.float64)
    models = []
    for of, accumulate in ((small, 4), (large, 1)):
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()
        model.load_state_dict({k: torch.linspace(-1, 1, v.numel()).view_as(v) for k, v in model.state_dict().items()})
        keys = section(optimizer=ADAMW, accumulate=accumulate, clip_norm=0.1, epochs=3.0)
        fitted = fit(model, task(), keys, run(), "dense", feed=feed(of))
        assert (fitted.steps, fitted.epochs) == (6, 3.0)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_accumulating_more_batches_than_an_epoch_has_is_an_error() -> None:
    with pytest.raises(AspError, match="accumulate 4 is more than the 3 batches"):
        fit(network(), task(), section(accumulate=4), run(), "dense", feed=feed(batches(3)))


def test_ema_is_what_is_evaluated_and_kept() -> None:
    model = network()
    masks = prune(model)
    mask = masks.masks["0.weight"]
    average: list[Tensor] = []
    judged: list[Tensor] = []

    def after(optimizer: Optimizer) -> None:
        now = model[0].weight.detach().double() * mask
        average.append(average[-1] * 0.8 + now * 0.2 if average else now)

    with watched(None, after):
        watch = task(judge=lambda judged_model: judged.append(judged_model.get_parameter("0.weight").clone()))
        fit(model, watch, section(ema=0.8), run(), "retrained", masks=masks, feed=feed(batches()))
    torch.testing.assert_close(model[0].weight.detach().double(), average[-1], rtol=1e-5, atol=1e-6)
    assert torch.equal(judged[-1], model[0].weight)
    assert masks.violations(model) == {}


def test_label_smoothing_reaches_the_loss() -> None:
    seen = []
    watch = task(change=lambda loss, smoothing: (seen.append(smoothing), loss)[1])
    fit(network(), watch, section(label_smoothing=0.1, epochs=0.5), run(), "dense", feed=feed(batches()))
    assert seen == [0.1] * 3


def test_the_learning_rate_follows_its_schedule() -> None:
    rates: list[list[float]] = []
    with watched(lambda optimizer: rates.append([group["lr"] for group in optimizer.param_groups]), None):
        keys = section(schedule={"name": "cosine", "warmup": 0.25, "final": 0.1})
        work = run()
        fit(network(), task(), keys, work, "dense", feed=feed(batches()))
    rising = [0.2 * share for share in (1 / 3, 2 / 3, 1.0)]
    falling = [0.2 * (0.1 + 0.9 * (1 + math.cos(math.pi * gone / 9)) / 2) for gone in range(9)]
    for group in range(2):  # matrices, and vectors without decay
        assert [rate[group] for rate in rates] == pytest.approx(rising + falling)
    logged = {row["step"]: row["lr"] for row in work.rows if "lr" in row}
    assert logged == pytest.approx({10: rates[9][0], 12: rates[11][0]})


def test_milestones_are_epochs() -> None:
    rates: list[float] = []
    with watched(lambda optimizer: rates.append(optimizer.param_groups[0]["lr"]), None):
        keys = section(schedule={"name": "step", "milestones": [0.5, 1.0], "gamma": 0.5}, accumulate=2)
        fit(network(), task(), keys, run(), "dense", feed=feed(batches(8)))
    assert rates == pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])


def test_vectors_are_not_decayed() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.named_parameters()}
    still = task(change=lambda loss, smoothing: loss * 0)
    keys = section(optimizer={"name": "sgd", "lr": 0.5, "weight_decay": 0.5}, max_steps=1)
    fit(model, still, keys, run(), "dense", feed=feed(batches()))
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] * (0.75 if value.ndim > 1 else 1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_training(value: float) -> None:
    broken = task(change=lambda loss, smoothing: loss * value)
    with pytest.raises(AspError, match=r"dense: the loss is (nan|inf) at step 4.*clip_norm"):
        fit(network(), broken, section(log_every=4), run(), "dense", feed=feed(batches()))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_arithmetic_is_in_the_runs_precision_and_weights_stay_fp32(precision: str, dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()
    model = network()
    model[4].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    fitted = fit(model, task(), section(), run(precision), "dense", feed=feed(batches()))
    assert seen == {dtype}
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert math.isfinite(fitted.metrics["loss"])


@pytest.mark.parametrize(("keys", "steps", "epochs"), [({"max_steps": 5}, 5, 0.8333), ({"max_steps": 50}, 12, 2.0)])
def test_max_steps_is_a_limit(keys: dict[str, int], steps: int, epochs: float) -> None:
    fitted = fit(network(), task(), section(**keys), run(), "dense", feed=feed(batches()))
    assert (fitted.steps, fitted.epochs) == (steps, epochs)


@pytest.mark.parametrize("keys", [{"epochs": 0.0}, {"max_steps": 0}, {"epochs": 0.0, "ema": 0.9}])
def test_no_epochs_train_nothing_but_are_evaluated(keys: dict[str, float]) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted = fit(model, task(), section(**keys), run(), "dense", feed=feed(batches()))
    assert fitted.steps == 0
    assert fitted.metrics["samples"] == 48
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_same_seed_and_stream_give_the_same_weights() -> None:
    made = []
    for phase in ("retrained", "control"):
        model = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 4))
        model.load_state_dict({k: torch.linspace(-1, 1, v.numel()).view_as(v) for k, v in model.state_dict().items()})
        fit(model, task(), section(), run(), phase, stream="shared", feed=feed(batches()))
        made.append(model[0].weight)
    assert torch.equal(*made)


def test_masks_are_matched_by_name_on_another_copy() -> None:
    model = network()
    masks = prune(model)
    other = network()
    fit(other, task(), section(epochs=0.5), run(), "retrained", masks=masks, feed=feed(batches()))
    assert masks.violations(other) == {}
