"""Masks that change while a model trains: each schedule inside real training, against worked-out references."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from asp_toolkit.calibration import calibrate
from asp_toolkit.errors import AspError
from asp_toolkit.loop import Fitted, fit
from asp_toolkit.masks import MaskSet
from asp_toolkit.patterns import NM
from asp_toolkit.pruning import Rule, prune
from asp_toolkit.recipe.schema import ScheduleSection
from asp_toolkit.schedules import Keeper, check_reached, check_schedule, cubic, dense_weights, held, keeper_for
from tests.toolkit.made_tasks import batches, feed, network, run, section, task

STEPS = 12  # 2 epochs of 6 batches


def said(name: str, **keys: Any) -> Any:
    return TypeAdapter(ScheduleSection).validate_python({"name": name, **keys})


EVERY_KIND = [
    said("one_shot"),
    said("gradual", end=0.5, every=2),
    said("steps", at={"0": "3:4", "5": "2:4"}),
    said("straight_through"),
    said("straight_through", until=0.5, every=2, hysteresis=0.2),
    said("rigl", every=3, until=0.8),
]


def made(of: Any, model: nn.Module, rules: list[Rule] | None = None, total: int | None = STEPS) -> Keeper:
    rules = rules or [Rule()]
    dense = dense_weights(model, rules)
    return keeper_for(of, model, rules, prune(model, rules=rules), dense, total)


@contextmanager
def after_each_step(see: Callable[[Optimizer], None]) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: see(optimizer))
    try:
        yield
    finally:
        handle.remove()


def train(of: Any, model: nn.Module, rules: list[Rule] | None = None, **keys: Any) -> tuple[Fitted, list[MaskSet]]:
    """Train by the schedule in the real loop; the masks after each step as well."""
    rules, seen, keepers = rules or [Rule()], [], list[Keeper]()
    stats = calibrate(model, rules, batches(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    dense, masks = dense_weights(model, rules), prune(model, rules=rules, stats=stats)

    def schedule(total: int, zeros_stay: bool) -> Keeper:
        keeper = keeper_for(of, model, rules, masks, dense, total, zeros_stay)
        keepers.append(keeper)
        step = keeper.after_step

        def watched(model: nn.Module, optimizer: Optimizer, number: int) -> None:
            step(model, optimizer, number)
            assert not keeper.masks.violations(model)
            seen.append(keeper.masks)

        keeper.after_step = watched  # type: ignore[method-assign]
        return keeper

    fitted = fit(model, task(), section(**keys), run(), "retrained", masks=schedule, feed=feed(batches()))
    return fitted, seen


@pytest.mark.parametrize("of", EVERY_KIND, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_model_is_sparse_after_every_step_and_ends_in_its_pattern(of: Any, optimizer: str) -> None:
    model = network()
    keys = {"name": optimizer, "lr": 0.05, "weight_decay": 0.1}
    fitted, seen = train(of, model, optimizer=keys)
    assert len(seen) == STEPS
    assert fitted.masks is not None
    assert not fitted.masks.violations(model)
    assert set(fitted.masks.patterns.values()) == {"2:4"}
    for name in ("0.weight", "4.weight"):
        assert NM(2, 4).holds(model.get_parameter(name) != 0)
        assert fitted.masks.density()[name] == 0.5


def test_the_cubic_starts_at_nothing_and_ends_with_all() -> None:
    # 1 - (1 - t)^3: half of the way is 7/8 of the dropping.
    assert [cubic(step, 10, 20) for step in (0, 10, 15, 20, 30)] == [0, 0, 0.875, 1, 1]


def test_gradual_pruning_advances_along_the_cubic() -> None:
    _, seen = train(said("gradual", begin=0.0, end=10 / 12, every=1), network(), [Rule(pattern="1:8", include=["0"])])
    kept = [masks.share() for masks in seen]
    # Entries of 8 dropped after the step with number s: floor(7 * (1 - (1 - s/10)^3)).
    share = [1 - (1 - min(step, 10) / 10) ** 3 for step in range(1, STEPS + 1)]
    assert kept == [(8 - int(7 * s + 1e-9)) / 8 for s in share]
    assert len(set(kept)) >= 5


def test_unstructured_sparsity_follows_the_schedule() -> None:
    rules = [Rule(pattern="unstructured 0.8")]
    fitted, seen = train(said("gradual", begin=0.0, end=10 / 12, every=1), network(), rules)
    sparsity = [1 - masks.share() for masks in seen]
    wanted = [0.8 * (1 - (1 - min(step, 10) / 10) ** 3) for step in range(1, STEPS + 1)]
    assert sparsity == pytest.approx(wanted, abs=0.01)  # whole entries of 96 and 48
    assert fitted.masks is not None
    assert fitted.masks.share() == pytest.approx(0.2, abs=0.01)


def test_gradual_masks_are_nested_and_the_weakest_go() -> None:
    model = network()
    _, seen = train(said("gradual", end=0.9, every=1), model, [Rule(pattern="1:8", include=["0"])])
    for before, after in itertools.pairwise(seen):
        assert not (after.masks["0.weight"] & ~before.masks["0.weight"]).any()


def test_the_log_tells_the_density() -> None:
    work = run()
    model, rules = network(), [Rule()]
    dense, masks = dense_weights(model, rules), prune(model)
    of = said("steps", at={"0": "3:4", "7": "2:4"})
    fit(
        model,
        task(),
        section(),
        work,
        "retrained",
        masks=lambda total, stay: keeper_for(of, model, rules, masks, dense, total, stay),
        feed=feed(batches()),
    )
    assert [row["density"] for row in work.rows if "loss" in row] == [0.75, 0.5]


def sr_ste(
    weight: Tensor, data: list[Any], decay: float, steps: int, every: int = 1, lr: float = 0.2
) -> tuple[Tensor, Tensor]:
    """arXiv 2102.04010 by the book, for one bias-free layer under plain SGD, in float64."""
    weight = weight.clone()
    mask = NM(2, 4).mask(weight.abs())
    for step in range(steps):
        x, target = data[step % len(data)]
        sparse = (weight * mask).requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(x @ sparse.t(), target), sparse)
        weight = weight - lr * (gradient + decay * weight * ~mask)
        if (step + 1) % every == 0:
            mask = NM(2, 4).mask(weight.abs())
    return weight * mask, mask


@pytest.mark.parametrize(("decay", "every"), [(0.0, 1), (0.05, 1), (0.05, 3)])
def test_straight_through_is_the_papers_update(decay: float, every: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 12, bias=False)).double()
    data = batches(dtype=torch.float64)
    wanted, mask = sr_ste(model[0].weight.detach(), data, decay, STEPS, every)
    keeper = made(said("straight_through", decay=decay, every=every), model)
    first = keeper.masks.masks["0.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        x, target = data[step % len(data)]
        F.cross_entropy(model(x), target).backward()
        keeper.before_step(model, optimizer, step)
        optimizer.step()
        keeper.after_step(model, optimizer, step)
        optimizer.zero_grad()
    assert torch.equal(keeper.masks.masks["0.weight"], mask)
    assert not torch.equal(first, mask)  # masks did move
    torch.testing.assert_close(model[0].weight.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    # As a gradient scaler does where a gradient overflows: the keeper is asked, the optimizer is not.
    model = network()
    keeper = made(said("straight_through", decay=0.0), model)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.before_step(model, optimizer, 0)
    keeper.after_step(model, optimizer, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def one_layer(weight: list[float]) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(len(weight), 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([weight]))
    return model


@pytest.mark.parametrize(("hysteresis", "kept"), [(0.0, [0, 2]), (0.05, [0, 2]), (0.2, [0, 1])])
def test_hysteresis_keeps_what_is_almost_as_good(hysteresis: float, kept: list[int]) -> None:
    model = one_layer([4.0, 2.0, 1.0, 0.5])
    keeper = made(said("straight_through", decay=0.0, hysteresis=hysteresis), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].weight.grad = torch.tensor([[0.0, 0.0, -1.2, 0.0]])  # entry 2 becomes 2.2, a tenth more than entry 1
    keeper.before_step(model, optimizer, 0)
    optimizer.step()
    keeper.after_step(model, optimizer, 0)
    assert keeper.masks.masks["0.weight"][0].nonzero().flatten().tolist() == kept


def test_after_its_end_straight_through_holds_masks_and_forgets_the_dropped() -> None:
    model = network()
    _, seen = train(said("straight_through", until=0.5), model)
    moved = [not torch.equal(a.masks["0.weight"], b.masks["0.weight"]) for a, b in itertools.pairwise(seen)]
    assert any(moved[:5])
    assert all(torch.equal(masks.masks["0.weight"], seen[5].masks["0.weight"]) for masks in seen[5:])


def rigl_by_hand(pattern: str, weight: list[float], gradient: list[float], fraction: float) -> list[int]:
    model = one_layer(weight)
    rules = [Rule(pattern=pattern)]
    keeper = made(said("rigl", every=1, fraction=fraction, until=1.0), model, rules, total=10_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model[0].weight.grad = torch.tensor([gradient])
    keeper.before_step(model, optimizer, 1)  # step 0 exchanges nothing; at step 1 of many the cosine is still 1
    return keeper.masks.masks["0.weight"][0].nonzero().flatten().tolist()


def test_rigl_exchanges_inside_each_group_of_n_m() -> None:
    weight = [9.0, 8.0, 0.0, 0.0, 7.0, 0.1, 0.0, 0.0]
    gradient = [0.0, 0.0, 50.0, 50.0, 0.0, 0.0, 0.2, -0.3]
    # The weakest of the four kept entries is the 0.1 in the second group; what grows is steepest in that group.
    assert rigl_by_hand("2:4", weight, gradient, 0.26) == [0, 1, 4, 7]


def test_rigl_exchanges_in_the_whole_layer_where_nothing_is_grouped() -> None:
    weight = [9.0, 8.0, 0.0, 0.0, 7.0, 0.1, 0.0, 0.0]
    gradient = [0.0, 0.0, 50.0, -60.0, 0.0, 0.0, 0.2, -0.3]
    assert rigl_by_hand("unstructured 0.5", weight, gradient, 0.26) == [0, 1, 3, 4]


def test_rigl_takes_the_strongest_back_where_a_group_has_too_few_to_grow() -> None:
    # 3:4, all three kept are to go and only one can grow: the two strongest stay.
    assert rigl_by_hand("3:4", [3.0, 1.0, 2.0, 0.5], [0.0, 0.0, 0.0, 1.0], 1.0) == [0, 2, 3]


def test_grown_weights_start_at_zero_with_fresh_moments() -> None:
    model = one_layer([9.0, 0.1, 0.0, 0.0])
    keeper = made(said("rigl", every=1, fraction=0.6, until=1.0), model, total=10_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model[0].weight.grad = torch.tensor([[1.0, 1.0, 2.0, 3.0]])
    optimizer.step()  # leaves momentum everywhere, and weights
    keeper.after_step(model, optimizer, 0)
    model[0].weight.grad = torch.tensor([[0.0, 0.0, 2.0, 4.0]])
    keeper.before_step(model, optimizer, 1)
    mask = keeper.masks.masks["0.weight"][0]
    assert mask.tolist() == [True, False, False, True]
    momentum = optimizer.state[model[0].weight]["momentum_buffer"][0]
    assert momentum[~mask].tolist() == [0.0, 0.0]
    assert model[0].weight[0, 3] == 0
    optimizer.step()
    keeper.after_step(model, optimizer, 1)
    assert model[0].weight[0, 1:3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("of", EVERY_KIND, ids=str)
def test_a_keeper_goes_on_from_its_state_with_the_same_bits(of: Any) -> None:
    data = batches()

    def steps(model: nn.Module, optimizer: Optimizer, keeper: Keeper, first: int, last: int) -> None:
        for step in range(first, last):
            x, target = data[step % len(data)]
            F.cross_entropy(model(x), target).backward()
            keeper.before_step(model, optimizer, step)
            optimizer.step()
            keeper.after_step(model, optimizer, step)
            optimizer.zero_grad()

    def fresh() -> tuple[nn.Module, Optimizer, Keeper]:
        model = network()
        keeper = made(of, model)
        return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), keeper

    model, optimizer, keeper = fresh()
    steps(model, optimizer, keeper, 0, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), keeper.state()))
    steps(model, optimizer, keeper, 4, STEPS)
    other, other_optimizer, other_keeper = fresh()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    other_keeper.load(saved[2], other)
    steps(other, other_optimizer, other_keeper, 4, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    for name, mask in keeper.masks.masks.items():
        assert torch.equal(mask, other_keeper.masks.masks[name])


@pytest.mark.parametrize("of", EVERY_KIND, ids=str)
def test_in_a_loop_of_ones_own_it_does_the_same_and_leaves_nothing(of: Any) -> None:
    model = network()
    keeper = made(of, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with held(keeper, model):
        for step in range(STEPS):
            x, target = batches()[step % 6]
            F.cross_entropy(model(x), target).backward()
            if not keeper.wants_dense_gradients(step):  # zeroed by then, so before somebody clips
                grad = model.get_parameter("0.weight").grad
                assert grad is not None
                assert not grad[~keeper.masks.masks["0.weight"]].any()
            optimizer.step()
            assert not keeper.masks.violations(model)
            optimizer.zero_grad()
    assert NM(2, 4).holds(model.get_parameter("0.weight") != 0)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    before = model.get_parameter("0.weight").detach().clone()
    model.get_parameter("0.weight").grad = torch.ones_like(before)
    optimizer.step()
    assert bool(((before == 0) & (model.get_parameter("0.weight") != 0)).any())  # nobody holds them any more


def test_two_optimizers_of_pruned_parameters_cannot_be_counted() -> None:
    model = network()
    keeper = made(said("straight_through"), model)
    first = torch.optim.SGD([model.get_parameter("0.weight")], lr=0.1)
    second = torch.optim.SGD([model.get_parameter("4.weight")], lr=0.1)
    F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
    with held(keeper, model):
        first.step()
        with pytest.raises(AspError, match="the steps of one optimizer"):
            second.step()


@pytest.mark.parametrize("score", ["movement", "taylor", "fisher"])
def test_gradual_pruning_can_judge_by_the_gradients_of_the_training(score: str) -> None:
    model = network()
    fitted, seen = train(said("gradual", begin=0.2, end=0.8, every=2), model, [Rule(score=score)])
    assert seen[0].share() == 1
    assert fitted.masks is not None
    assert fitted.masks.share() == 0.5
    by_magnitude, _ = train(said("gradual", begin=0.2, end=0.8, every=2), network())
    assert by_magnitude.masks is not None
    assert any(not torch.equal(a, by_magnitude.masks.masks[n]) for n, a in fitted.masks.masks.items())


def own(total: int, first: str = "3:4") -> Callable[[int], str | None]:
    return lambda step: {0: first, total // 2: "2:4"}.get(step)


def test_a_schedule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("somebodys_schedules")
    module.own = own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_schedules", module)
    _, seen = train(said("callable", call="somebodys_schedules:own", options={"first": "3:4"}), network())
    assert [masks.share() for masks in seen] == [0.75] * 5 + [0.5] * 7
    with pytest.raises(AspError, match=r"prune.schedule.call: 'somebodys_schedules:nobody'"):
        check_schedule(said("callable", call="somebodys_schedules:nobody"), network(), [Rule()], STEPS)
    module.number = lambda total: lambda step: 5  # type: ignore[attr-defined]
    module.typo = lambda total: lambda step: "2;4" if step == 3 else None  # type: ignore[attr-defined]
    module.fails = lambda total: lambda step: None if step < 3 else 1 // 0  # type: ignore[attr-defined]
    module.never = lambda total: lambda step: None  # type: ignore[attr-defined]
    module.short = lambda total: lambda step: "3:4"  # type: ignore[attr-defined]
    for name, told in {
        "number": "step 0: expected a pattern, its text or None, got 5",
        "typo": "step 3: AspError: unknown pattern '2;4'",
        "fails": "step 3: ZeroDivisionError",
        "never": "it never prunes, but the rule of '0.weight' wants 2:4",
        "short": "it ends with 3:4, but the rule of '0.weight' wants 2:4",
    }.items():
        with pytest.raises(AspError, match=f"prune.schedule.call: 'somebodys_schedules:{name}': {told}"):
            check_schedule(said("callable", call=f"somebodys_schedules:{name}"), network(), [Rule()], STEPS)
    with pytest.raises(AspError, match="unexpected keyword argument 'last'"):
        check_schedule(said("callable", call="somebodys_schedules:own", options={"last": 1}), network(), [Rule()], 9)


@pytest.mark.parametrize(
    ("of", "rule", "total", "told"),
    [
        (said("gradual"), Rule(), None, "whose number of optimizer steps is not known"),
        (said("rigl"), Rule(), None, "whose number of optimizer steps is not known"),
        (said("straight_through", until=0.5), Rule(), None, "whose number of optimizer steps is not known"),
        (said("steps", at={"0": "3:4", "13": "2:4"}), Rule(), 12, "step 13 never comes: the retraining has 12"),
        (said("steps", at={"0": "3:4"}), Rule(), 12, "it ends with 3:4, but the rule of '0.weight' wants 2:4"),
        (said("steps", at={"0": "8:16", "2": "2:4"}), Rule(), 12, "at: step 0: 8:16 does not fit '0.weight'"),
        (said("steps", at={"0": "1:4", "2": "2:4"}), Rule(), 12, "step 2: 2:4 keeps more than 1:4 before it"),
        (said("gradual"), Rule(), 0, "the retraining has no optimizer step"),
        (said("gradual", every=20), Rule(), 12, "every 20 steps, but has only steps 0 to 7: one jump"),
        (said("rigl", every=9), Rule(), 12, "exchanges every 9 steps until step 9 of 12, so never"),
        (said("straight_through", every=13), Rule(), 12, "every 13 steps, but the retraining has 12, so never"),
        (said("rigl"), Rule(score="taylor"), 12, "the score of '0.weight' needs gradient_abs"),
        (said("straight_through"), Rule(score="fisher"), 12, "needs gradient_square"),
        (said("gradual"), Rule(score="activation_norm"), 12, "is scored by its inputs"),
        (said("steps", at={"0": "2:4"}), Rule(score="taylor"), 12, "cannot prune before the first step"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(of: Any, rule: Rule, total: int | None, told: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AspError, match=r"prune\.schedule") as refused:
        check_schedule(of, model, [rule], total)
    assert told in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("pattern", ["2:4", "unstructured 0.5"])
def test_rigl_leaves_a_step_alone_whose_gradients_overflowed(pattern: str) -> None:
    model = network()
    keeper = made(said("rigl", every=1), model, [Rule(pattern=pattern)])
    before = {name: mask.clone() for name, mask in keeper.masks.masks.items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    keeper.before_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert all(torch.equal(mask, before[name]) for name, mask in keeper.masks.masks.items())


def test_rigl_does_not_wear_out_what_does_not_learn() -> None:
    model = network()
    keeper = made(said("rigl", every=1, fraction=1.0), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.get_parameter("4.weight").detach().clone()
    for step in range(1, 8):
        weight = model.get_parameter("0.weight")  # only two rows of it get a gradient; the other layer gets none
        weight.grad = torch.zeros_like(weight)
        weight.grad[:2] = 1.0
        keeper.before_step(model, optimizer, step)
        keeper.after_step(model, optimizer, step)
    assert torch.equal(model.get_parameter("4.weight").detach(), before)
    assert int((model.get_parameter("0.weight")[2:] != 0).sum()) == 10 * 4


def test_overflowed_gradients_are_not_counted() -> None:
    model = network()
    keeper = made(said("gradual", begin=0.2, every=1), model)
    scored = made_with_stats("movement", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in (keeper, scored):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        one.before_step(model, optimizer, 0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for step in range(STEPS):
            one.before_step(model, optimizer, step)
            one.after_step(model, optimizer, step)
        assert one.masks.share() == 0.5


def made_with_stats(score: str, model: nn.Module) -> Keeper:
    rules = [Rule(score=score)]
    stats = calibrate(model, rules, batches(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    dense = dense_weights(model, rules)
    masks = prune(model, rules=rules, stats=stats)
    return keeper_for(said("gradual", begin=0.2, every=1), model, rules, masks, dense, STEPS)


@pytest.mark.parametrize("score", ["movement", "taylor"])
def test_gradual_by_gradients_may_begin_at_once(score: str) -> None:
    fitted, seen = train(said("gradual"), network(), [Rule(score=score)])
    assert seen[-1].share() == 0.5
    assert fitted.masks is not None


def test_a_frozen_layer_cannot_be_scored_by_gradients() -> None:
    model = network()
    model.get_parameter("4.weight").requires_grad_(False)
    with pytest.raises(AspError, match=r"'4.weight' is scored by its gradients, but is frozen"):
        check_schedule(said("gradual"), model, [Rule(score="movement")], STEPS)


@pytest.mark.parametrize("of", [said("straight_through"), said("rigl", every=2)], ids=str)
def test_how_often_one_looks_does_not_change_the_averaged_weights(of: Any) -> None:
    often, seldom = network(), network()
    train(of, often, ema=0.8, evaluate_every=0.34)
    train(of, seldom, ema=0.8, evaluate_every=2.0)
    assert all(
        torch.equal(a, b) for a, b in zip(often.state_dict().values(), seldom.state_dict().values(), strict=True)
    )


def test_a_step_with_a_closure_is_refused_and_leaves_the_model_sparse() -> None:
    model = network()
    keeper = made(said("straight_through"), model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    with pytest.raises(AspError, match=r"cannot follow LBFGS.step\(closure\)"), held(keeper, model):
        optimizer.step(lambda: F.cross_entropy(model(batches()[0][0]), batches()[0][1]))
    assert not keeper.masks.violations(model)


def test_weights_changed_outside_a_step_are_told() -> None:
    model = network()
    keeper = made(said("straight_through"), model)
    with pytest.warns(UserWarning, match=r"0.weight.*changed outside any optimizer step"), held(keeper, model):
        model.load_state_dict(network().state_dict())
    assert not keeper.masks.violations(model)


def test_a_schedule_that_did_not_come_to_its_end_is_refused() -> None:
    model = network()
    masks = prune(model)
    keeper = made(said("steps", at={"0": "3:4", "9": "2:4"}), network())
    with pytest.raises(AspError, match=r"ended before its schedule: '0.weight' is 3:4, its rule wants 2:4"):
        check_reached(keeper.masks, masks)
    check_reached(masks, masks)
