"""Statistics of gradients against gradients worked out by hand or in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from asp_toolkit.calibration import GradientStats
from asp_toolkit.errors import AspError
from asp_toolkit.pruning import Chosen, Rule, choose
from asp_toolkit.scores import Stats, fisher, movement, needs, taylor


@needs("gradient_abs", "gradient_square", "movement")
def everything(weight: Tensor, stats: Stats | None = None) -> Tensor:
    return weight.abs()


def chosen(model: nn.Module, score: object = everything, **rule: object) -> dict[str, Chosen]:
    return choose(model, [Rule(score=score, **rule)]).chosen  # type: ignore[arg-type]


def test_a_linear_layer_by_hand() -> None:
    """y = w x summed: the gradient of row o is x, so two batches x = (1, -2, 0, 4) and (3, 2, 0, -4) are averaged."""
    model = nn.Linear(4, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.0, 1.0, 0.5]])
    gathered = GradientStats(chosen(model))
    for x in ([1.0, -2.0, 0.0, 4.0], [3.0, 2.0, 0.0, -4.0]):
        model.zero_grad()
        model(torch.tensor([x])).sum().backward()
        gathered.update(model)
    stats = gathered.stats()["weight"]
    assert stats["gradient_abs"].tolist() == [[2.0, 2.0, 0.0, 4.0]] * 2
    assert stats["gradient_square"].tolist() == [[5.0, 4.0, 0.0, 16.0]] * 2
    assert stats["movement"].tolist() == [[-4.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]
    assert taylor(model.weight, stats).tolist() == [[2.0, 4.0, 0.0, 16.0], [2.0, 0.0, 0.0, 2.0]]
    assert fisher(model.weight, stats).tolist() == pytest.approx(
        torch.tensor([[2.5, 8.0, 0.0, 128.0], [2.5, 0.0, 0.0, 2.0]])
    )
    assert movement(model.weight, stats).tolist() == [[-4.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]


def test_movement_uses_the_weight_as_it_was_at_each_batch() -> None:
    model = nn.Linear(4, 1, bias=False)
    gathered = GradientStats(chosen(model, movement))
    model.weight.grad = torch.tensor([[1.0, 1.0, 2.0, -1.0]])
    for weight in ([1.0, 0.0, 2.0, 1.0], [3.0, 1.0, -2.0, 1.0]):
        model.weight.data = torch.tensor([weight])
        gathered.update(model)
    assert gathered.stats()["weight"]["movement"].tolist() == [[-4.0, -1.0, 0.0, 2.0]]


def test_convolutions_against_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))
    exact = copy.deepcopy(model).double()
    picked = chosen(model)
    gathered = GradientStats(picked)
    sums = {name: [0.0, 0.0, 0.0] for name in picked}
    for _ in range(3):
        x = torch.randn(2, 4, 6, 6)
        for one, given in ((model, x), (exact, x.double())):
            one.zero_grad()
            one(given).square().mean().backward()
        gathered.update(model)
        for name, parameter in exact.named_parameters():
            if name in sums:
                g, w = parameter.grad, parameter.detach()
                sums[name] = [a + b for a, b in zip(sums[name], (g.abs() / 3, g**2 / 3, -w * g), strict=True)]
    stats = gathered.stats()
    assert stats.keys() == sums.keys() == {"0.weight", "2.weight"}
    for name, right in sums.items():
        for need, expected in zip(("gradient_abs", "gradient_square", "movement"), right, strict=True):
            found = stats[name][need]
            assert found.dtype == torch.float32
            matrix = picked[name].view.matrix(expected)
            torch.testing.assert_close(found.double(), matrix, rtol=1e-4, atol=1e-6 * float(matrix.abs().max()))


def test_only_what_a_score_needs_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    picked = choose(model, [Rule(["0"], score="fisher"), Rule(["1"]), Rule(["2"], score="activation_norm")]).chosen
    gathered = GradientStats(picked)
    assert gathered.names == ("0.weight",)
    model(torch.ones(1, 4)).sum().backward()
    gathered.update(model)
    stats = gathered.stats()
    assert {name: list(one) for name, one in stats.items()} == {"0.weight": ["gradient_square"]}


def test_ten_thousand_batches_lose_no_digits() -> None:
    """A float32 sum of ten thousand times 0.1 is off by 1e-4, and each addition to it by more."""
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.fill_(1.0)
    gathered = GradientStats(chosen(model))
    draws = torch.Generator().manual_seed(0)
    noise = 1 + 0.5 * torch.rand(10_000, 4, generator=draws)
    noise[:, 0] = 0.1
    for one in noise:
        model.weight.grad = one.reshape(1, 4)
        gathered.update(model)
    stats, exact = gathered.stats()["weight"], noise.double()
    for need, right in (("abs", exact.mean(0)), ("square", exact.square().mean(0))):
        torch.testing.assert_close(stats[f"gradient_{need}"][0].double(), right, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats["movement"][0].double(), -exact.sum(0), rtol=1e-5, atol=0)


def test_a_batch_without_gradient_is_not_counted() -> None:
    model = nn.Linear(4, 1, bias=False)
    gathered = GradientStats(chosen(model))
    for gradient in (torch.full((1, 4), 2.0), None, torch.full((1, 4), 4.0)):
        model.weight.grad = gradient
        gathered.update(model)
    assert gathered.stats()["weight"]["gradient_abs"].tolist() == [[3.0] * 4]


def test_a_parameter_that_never_had_a_gradient_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gathered = GradientStats(chosen(model))
    with pytest.raises(AspError, match=r"'0\.weight' had no gradient in any of 0 batches"):
        gathered.stats()
    model[1](torch.ones(1, 4)).sum().backward()
    gathered.update(model)
    with pytest.raises(
        AspError, match=r"'0\.weight' had no gradient in any of 1 batches.*frozen or unused in the loss"
    ):
        gathered.stats()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_counts_nothing(bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    gathered = GradientStats(chosen(model))
    for layer in model:
        layer.weight.grad = torch.ones(4, 4)
    gathered.update(model)
    before = gathered.stats()
    for layer in model:
        layer.weight.grad = torch.full((4, 4), 7.0)
    model[1].weight.grad[2, 3] = bad
    with pytest.raises(AspError, match=r"gradient of '1\.weight' has NaN or infinite entries in batch 1 "):
        gathered.update(model)
    after = gathered.stats()
    assert all(torch.equal(after[name][need], before[name][need]) for name in before for need in before[name])


def test_huge_and_tiny_gradients_stay_finite() -> None:
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.tensor([[3e38, -3e38, 1.0, 0.0]])
    gathered = GradientStats(chosen(model))
    for sign in (1, -1, 1):
        model.weight.grad = sign * torch.tensor([[3e38, 3e38, 1e-30, 3e38]])
        gathered.update(model)
    stats = gathered.stats()["weight"]
    assert all(torch.isfinite(one).all() for one in stats.values())
    for score in (taylor, fisher, movement):
        assert torch.isfinite(score(model.weight, stats)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_gradients_are_added_in_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1, bias=False).to(dtype)
    model.weight.data.fill_(1.0)
    gathered = GradientStats(chosen(model))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for value in (1.0, 1.0, 1.0078125, 1.0):  # the last digit of bfloat16
        model.weight.grad = torch.full((1, 4), value, dtype=dtype)
        gathered.update(model)
    stats = gathered.stats()["weight"]
    assert {one.dtype for one in stats.values()} == {wide}
    assert stats["gradient_abs"].tolist() == [[4.0078125 / 4] * 4]


def test_a_weight_normed_layer_is_judged_by_the_gradient_of_its_direction() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    name = "parametrizations.weight.original1"
    gathered = GradientStats(chosen(model))
    assert gathered.names == (name,)
    torch.manual_seed(0)
    model(torch.randn(5, 4)).square().sum().backward()
    gathered.update(model)
    direction = model.get_parameter(name)
    assert torch.equal(gathered.stats()[name]["gradient_abs"], direction.grad.abs())
    assert torch.equal(gathered.stats()[name]["movement"], -direction.detach() * direction.grad)


def test_sparse_gradients_and_tied_tensors() -> None:
    """A table that is also the output layer: its gradient is that of the lookup and of the product together."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens))

    model = Tied()
    gathered = GradientStats(chosen(model, include=["table.weight"]))
    model(torch.tensor([1, 2])).square().sum().backward()
    gathered.update(model)
    assert torch.equal(gathered.stats()["table.weight"]["gradient_abs"], model.table.weight.grad.abs())
    dense = model.table.weight.grad
    model.table.weight.grad = dense.to_sparse()
    again = GradientStats(chosen(model, include=["table.weight"]))
    again.update(model)
    assert torch.equal(again.stats()["table.weight"]["gradient_square"], dense.square())


def test_what_stats_gave_does_not_change_and_the_state_goes_on(tmp_path: object) -> None:
    model = nn.Linear(4, 1, bias=False)
    gathered = GradientStats(chosen(model))
    model.weight.grad = torch.ones(1, 4)
    gathered.update(model)
    given = gathered.stats()["weight"]["gradient_abs"]
    torch.save(gathered.state(), f"{tmp_path}/state.pt")
    resumed = GradientStats(chosen(model))
    resumed.load(torch.load(f"{tmp_path}/state.pt", weights_only=True))
    model.weight.grad = torch.full((1, 4), 2.0)
    for one in (gathered, resumed):
        one.update(model)
    assert given.tolist() == [[1.0] * 4]
    for need, right in gathered.stats()["weight"].items():
        assert torch.equal(resumed.stats()["weight"][need], right)
    assert gathered.stats()["weight"]["gradient_abs"].tolist() == [[1.5] * 4]


def test_another_model_is_refused() -> None:
    gathered = GradientStats(chosen(nn.Sequential(nn.Linear(4, 4))))
    with pytest.raises(AspError, match=r"'0\.weight': the model has no such parameter"):
        gathered.update(nn.Linear(4, 4))
