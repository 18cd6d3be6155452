"""calibrate: what the rules' scores need, from batches; the model and the process are as before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from asp_toolkit.calibration import calibrate
from asp_toolkit.errors import AspError
from asp_toolkit.pruning import Rule, prune
from asp_toolkit.scores import SCORES, needs, needs_of

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Everything that a run could change: batch norm, dropout, a counter, a frozen layer, a layer in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        return self.last(self.drop(self.frozen(self.norm(self.first(x)).relu())))


def make(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def batches(count: int = 3, seed: int = 1) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 8, generator=draws), torch.randint(4, (5,), generator=draws)) for _ in range(count)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def rules(**scores: str) -> list[Rule]:
    return [Rule([name], score=score) for name, score in scores.items()]


def test_every_statistic_against_float64() -> None:
    model, exact = make(), make().double().eval().requires_grad_(True)
    asked = rules(first="taylor", frozen="fisher", last="movement")
    stats = calibrate(model, asked, batches(), loss)
    norms = calibrate(model, rules(first="activation_norm", frozen="activation_norm"), batches(), loss)
    sums: dict[str, Tensor] = {}
    seen: dict[str, list[Tensor]] = {"first": [], "frozen": []}
    for name, inputs in seen.items():
        exact.get_submodule(name).register_forward_hook(lambda m, args, out, into=inputs: into.append(args[0].detach()))
    for x, y in batches():
        exact.zero_grad()
        loss(exact, (x.double(), y)).backward()
        for name, new in {
            "first.weight": exact.first.weight.grad.abs() / 3,
            "frozen.weight": exact.frozen.weight.grad.square() / 3,
            "last.weight": -exact.last.weight.detach() * exact.last.weight.grad,
        }.items():
            sums[name] = sums.get(name, torch.zeros(())) + new
    needed = {"first.weight": "gradient_abs", "frozen.weight": "gradient_square", "last.weight": "movement"}
    assert {name: list(one) for name, one in stats.items()} == {name: [need] for name, need in needed.items()}
    for name, need in needed.items():
        torch.testing.assert_close(stats[name][need].double(), sums[name], rtol=1e-4, atol=1e-7)
    assert norms.keys() == {"first.weight", "frozen.weight"}
    for name, inputs in seen.items():
        right = torch.cat(inputs).norm(dim=0)
        torch.testing.assert_close(norms[f"{name}.weight"]["input_norm"].double(), right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("score", [name for name, score in SCORES.items() if needs_of(score)])
def test_prune_takes_what_calibrate_gives(score: str) -> None:
    model, asked = make(), [Rule(score=score)]
    masks = prune(model, rules=asked, stats=calibrate(model, asked, batches(), loss))
    assert masks.density() == {"first.weight": 0.5, "frozen.weight": 0.5, "last.weight": 0.5}
    plain = prune(make())
    assert any(not torch.equal(masks.masks[name], plain.masks[name]) for name in masks.masks)


def test_the_model_is_as_before() -> None:
    model = make().train()
    model.norm.eval()
    loss(model, batches(1, seed=9)[0]).backward()
    model.last.weight.grad = None
    state = {name: one.clone() for name, one in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    grads = {name: (one.grad, None if one.grad is None else one.grad.clone()) for name, one in model.named_parameters()}
    modes = {name: one.training for name, one in model.named_modules()}
    trainable = {name: one.requires_grad for name, one in model.named_parameters()}
    for score in ("taylor", "activation_norm"):
        calibrate(model, [Rule(score=score)], batches(), loss)
        assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
        assert all(one is buffers[name] for name, one in model.named_buffers())
        for name, parameter in model.named_parameters():
            before, content = grads[name]
            assert parameter.grad is before
            assert before is None or torch.equal(before, content)
        assert {name: one.training for name, one in model.named_modules()} == modes
        assert {name: one.requires_grad for name, one in model.named_parameters()} == trainable
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("score", ["fisher", "activation_norm"])
def test_the_model_is_as_before_after_an_error(score: str) -> None:
    model = make().train()
    state = {name: one.clone() for name, one in model.state_dict().items()}

    def failing(model: nn.Module, batch: Batch) -> Tensor:
        loss(model, batch)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        calibrate(model, [Rule(score=score)], batches(), failing)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert all(one.training for one in model.modules())
    assert not model.frozen.weight.requires_grad
    assert model.first.weight.grad is None
    assert not any(one._forward_hooks for one in model.modules())


def test_random_states_are_as_before() -> None:
    model = make()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, (batch[0] + torch.rand(()) + random.random() + np.random.rand(), batch[1]))

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    calibrate(model, [Rule(score="taylor")], loader, noisy)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before[2:]


def test_the_same_batches_give_the_same_bits() -> None:
    asked = rules(first="taylor", frozen="fisher", last="activation_norm")
    one, other = (calibrate(make(), asked, batches(), loss) for _ in range(2))
    assert one.keys() == other.keys() == {"first.weight", "frozen.weight", "last.weight"}
    assert all(torch.equal(one[name][need], other[name][need]) for name in one for need in one[name])


def test_backward_only_where_gradients_are_needed() -> None:
    enabled = []

    def watching(model: nn.Module, batch: Batch) -> Tensor:
        hooks = sum(len(one._forward_hooks) for one in model.modules())
        enabled.append((torch.is_grad_enabled(), hooks, any(one.training for one in model.modules())))
        return loss(model, batch)

    with torch.no_grad():
        calibrate(make(), [Rule(score="activation_norm")], batches(1), watching)
        calibrate(make(), [Rule(score="taylor")], batches(1), watching)
    assert enabled == [(False, 3, False), (True, 0, False)]


def test_inside_inference_mode() -> None:
    model, given = make(), batches()
    right = calibrate(model, [Rule(score="taylor")], given, loss)
    with torch.inference_mode():
        found = calibrate(model, [Rule(score="taylor")], given, loss)
    assert all(torch.equal(found[name]["gradient_abs"], right[name]["gradient_abs"]) for name in right)


def test_without_need_the_batches_are_not_touched() -> None:
    def never() -> Iterator[Batch]:
        raise AssertionError("read")
        yield

    assert calibrate(make(), [Rule()], never(), loss) == {}


def test_two_rules_with_different_needs() -> None:
    @needs("input_norm", "gradient_square")
    def both(weight: Tensor, stats: Any) -> Tensor:
        return weight.abs().float() * stats["input_norm"] * stats["gradient_square"]

    asked = [Rule(["first"], score=both), Rule(["last"]), Rule(["frozen"], score="movement")]
    model = make()
    stats = calibrate(model, asked, iter(batches()), loss)
    assert {name: set(one) for name, one in stats.items()} == {
        "first.weight": {"input_norm", "gradient_square"},
        "frozen.weight": {"movement"},
    }
    assert prune(model, rules=asked, stats=stats).density().keys() == {"first.weight", "frozen.weight", "last.weight"}


def test_a_hugging_face_model_in_bfloat16_with_a_tied_head() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)).bfloat16()
    asked = [Rule(["*.c_attn", "*.mlp.*"], score="activation_norm"), Rule(["*.attn.c_proj"], score="fisher")]
    tokens = [{"input_ids": torch.tensor([[1, 2, 3, 4]])}, {"input_ids": torch.tensor([[5, 6, 7, 8]])}]
    stats = calibrate(model, asked, tokens, lambda model, batch: model(**batch, labels=batch["input_ids"]).loss)
    assert len(stats) == 4
    assert all(torch.isfinite(one).all() and one.any() for found in stats.values() for one in found.values())
    assert {one.dtype for found in stats.values() for one in found.values()} == {torch.float32}
    masks = prune(model, rules=asked, stats=stats)
    assert set(masks.density().values()) == {0.5}
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(AspError, match=r"expected a scalar tensor from the loss, got \w+Output.*return output\.loss"):
        calibrate(model, asked, tokens, lambda model, batch: model(**batch))  # type: ignore[arg-type, return-value]


def test_recomputed_layers_count_once() -> None:
    """Checkpointed layers run again in backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    @needs("input_norm", "gradient_abs")
    def both(weight: Tensor, stats: Any) -> Tensor:
        return weight.abs()

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    stats = calibrate(Checkpointed(), [Rule(score=both)], [x], lambda model, x: model(x).sum())
    torch.testing.assert_close(stats["inner.weight"]["input_norm"], x.norm(dim=0))


def test_a_compiled_model_is_watched_too() -> None:
    model = make().eval()
    right = calibrate(model, [Rule(score="activation_norm")], batches(), loss)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(batches(1)[0][0])  # compiled before there are hooks
    found = calibrate(compiled, [Rule(score="activation_norm")], batches(), loss)
    assert all(torch.equal(found[name]["input_norm"], right[name]["input_norm"]) for name in right)
    torch.compiler.reset()


def test_zero_batches_are_refused() -> None:
    used = iter(batches())
    list(used)
    for score in ("taylor", "activation_norm"):
        with pytest.raises(AspError, match="there are no batches; a generator"):
            calibrate(make(), [Rule(score=score)], used, loss)


def test_losses_without_gradient_are_refused() -> None:
    with pytest.raises(AspError, match=r"expected a scalar tensor from the loss, got shape \(5, 4\)"):
        calibrate(make(), [Rule(score="taylor")], batches(), lambda model, batch: model(batch[0]))
    with pytest.raises(AspError, match=r"loss of batch 0 does not depend on any trainable parameter"):
        calibrate(make(), [Rule(score="taylor")], batches(), lambda model, batch: loss(model, batch).detach())
    with pytest.raises(AspError, match=r"'first\.weight' had no gradient in any of 3 batches"):
        calibrate(make(), [Rule(score="taylor")], batches(), lambda model, batch: model.last(batch[0]).sum())  # type: ignore[operator]


def test_a_batch_with_a_loss_that_is_not_finite_is_named() -> None:
    given = batches()
    given[1][0][0, 0] = float("nan")
    with pytest.raises(AspError, match=r"gradient of 'first\.weight' has NaN or infinite entries in batch 1"):
        calibrate(make(), [Rule(score="taylor")], given, loss)


def test_layers_whose_inputs_cannot_be_known_are_refused_before_any_batch() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(4, 4)

    with pytest.raises(AspError, match=r"'inner\.weight_hh_l0': its score needs input_norm, but.*exclude it"):
        calibrate(Recurrent(), [Rule(score="activation_norm")], iter([]), loss)


def test_unknown_statistics_and_meta_weights_are_refused() -> None:
    @needs("gradient_ab")
    def wrong(weight: Tensor, stats: Any) -> Tensor:
        return weight

    with pytest.raises(AspError, match=r"'first\.weight' needs an unknown statistic 'gradient_ab'; did you mean"):
        calibrate(make(), [Rule(score=wrong)], batches(), loss)
    with torch.device("meta"):
        model = Net()
    with pytest.raises(AspError, match=r"'first\.weight' is on the meta device.*load its weights first"):
        calibrate(model, [Rule(score="taylor")], batches(), loss)
