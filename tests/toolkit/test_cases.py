"""Cases that pruners were seen to get wrong, one test each: what goes wrong elsewhere is in the name or the docstring.

Those that a file of one thing (test_pruning, test_masks, test_held ...) has already are not repeated here.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel

from asp_toolkit import recipe as recipes
from asp_toolkit.calibration import calibrate
from asp_toolkit.errors import AspError
from asp_toolkit.inspection import inspect
from asp_toolkit.masks import MaskSet
from asp_toolkit.patterns import NM, parse
from asp_toolkit.pruning import Rule, masks_from_zeros, prune
from asp_toolkit.recipe.schema import Recipe, ScheduleSection
from asp_toolkit.schedules import Keeper, dense_weights, held, keeper_for
from asp_toolkit.scores import SCORES, Stats
from tests.toolkit.made_models import LanguageModel
from tests.toolkit.made_tasks import batches, network

PATTERNS = [
    *("2:4", "1:4", "3:4", "8:16", "2:4 transposable", "2:4 transposable greedy", "8:2:8"),
    *("unstructured 0.9", "unstructured 0.9 per row", "unstructured 0.9 global", "block 4x4 0.5"),
]
SCHEDULES: list[dict[str, Any]] = [
    {"name": "one_shot"},
    {"name": "gradual", "end": 0.5, "every": 1},
    {"name": "steps", "at": {"0": "3:4", "2": "2:4"}},
    {"name": "straight_through"},
    {"name": "straight_through", "until": 0.5, "hysteresis": 0.1},
    {"name": "rigl", "every": 2},
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def minus_zeros(model: nn.Module) -> int:
    return sum(int((torch.signbit(p) & (p == 0)).sum()) for p in model.parameters())


def bits(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in model.state_dict().values()]


def along(weight: Tensor, axis: int) -> Tensor:
    """(groups, 4): every four consecutive entries along `axis`."""
    return weight.detach().movedim(axis, -1).reshape(-1, 4)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def keeper(schedule: dict[str, Any], model: nn.Module, rules: list[Rule], total: int = 6) -> Keeper:
    section = TypeAdapter(ScheduleSection).validate_python(schedule)
    dense = dense_weights(model, rules)
    return keeper_for(section, model, rules, prune(model, rules=rules), dense, total)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Masks and layers


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_models_that_train_in_turns_do_not_share_masks(schedule: dict[str, Any]) -> None:
    """A pruner that keeps its state in the class gives the second model the first one's masks."""

    def train(models: list[nn.Sequential]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
        kept = [keeper(schedule, model, [Rule()]) for model in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9) for model in models]
        for step in range(6):
            for model, one, optimizer in zip(models, kept, optimizers, strict=True):
                loss(model, batches()[step]).backward()
                one.before_step(model, optimizer, step)
                optimizer.step()
                one.after_step(model, optimizer, step)
                optimizer.zero_grad()
        return [(bits(m), dict(k.masks.masks)) for m, k in zip(models, kept, strict=True)]

    def two() -> tuple[nn.Sequential, nn.Sequential]:
        one, other = network(), network()
        nn.init.normal_(other[0].weight, generator=torch.Generator().manual_seed(1))
        return one, other

    one, other = two()
    alone = [*train([one]), *train([other])]
    together = train(list(two()))
    for (seen, masks), (wanted, wanted_masks) in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
        assert all(torch.equal(masks[name], wanted_masks[name]) for name in wanted_masks)


def test_rules_of_a_saved_recipe_are_read_back_and_prune_the_same(tmp_path: Path) -> None:
    rules = [
        {"include": ["0"], "pattern": "2:4"},
        {"include": ["2"], "pattern": "1:4"},
        {"include": ["4"], "pattern": "unstructured 0.75 per row"},
        {"include": ["6"], "pattern": "8:2:8"},
    ]
    said = Recipe.model_validate(
        {
            "task": {"kind": "image_classification", "model": {"name": "x"}, "data": {"source": "synthetic"}},
            "train": {"optimizer": {"lr": 0.1}},
            "prune": {"rules": rules},
        }
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipes.dump(said))
    again = recipes.load(path)
    assert again == said

    def pruned(recipe: Recipe) -> tuple[nn.Module, MaskSet]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
        of = [Rule(rule.include, rule.exclude, rule.pattern, rule.score) for rule in recipe.prune.rules]
        return model, prune(model, rules=of)

    (model, masks), (_, reread) = pruned(said), pruned(again)
    assert masks.patterns == reread.patterns == {f"{rule['include'][0]}.weight": rule["pattern"] for rule in rules}
    assert all(torch.equal(masks.masks[name], reread.masks[name]) for name in masks.masks)
    for name, pattern in masks.patterns.items():
        assert parse(pattern).holds(model.get_parameter(name).detach() != 0)
        assert masks.density()[name] == (0.5 if pattern == "2:4" else 0.25)


@pytest.mark.parametrize("unquoted", ["2:4", "4:8", "1:4", "8:16", "16:32", "64:2:8"])
def test_yaml_does_not_read_a_pattern_as_a_number_of_base_60(unquoted: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "task: {kind: image_classification, model: {name: x}, data: {source: synthetic}}\n"
        f"train: {{optimizer: {{lr: 0.1}}}}\nprune:\n  rules:\n    - pattern: {unquoted}\n"
    )
    assert recipes.load(path).prune.rules[0].pattern == unquoted


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_is_pruned_along_its_inputs_not_its_outputs(groups: int) -> None:
    layer = nn.ConvTranspose2d(16, 6, (3, 2), groups=groups)  # weight (16, 6 / groups, 3, 2)
    mask = prune(layer).masks["weight"]
    assert set(along(mask, 0).sum(1).tolist()) == {2}
    assert torch.equal(layer.weight != 0, mask)


def test_conv1d_of_hugging_face_is_pruned_along_its_first_axis() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(12, 8)  # weight (8 in, 12 out); both axes divide by 4, so the wrong one would pass unseen
    before = layer.weight.detach().clone()
    mask = prune(layer).masks["weight"]
    assert torch.equal(mask.t(), NM(2, 4).mask(before.t().abs().contiguous()))
    assert not NM(2, 4).holds(mask)


@pytest.mark.parametrize(
    ("name", "axes"),
    [("mixtral", {"gate_up_proj": 2, "down_proj": 2}), ("llama4", {"gate_up_proj": 1, "down_proj": 1})],
)
@pytest.mark.parametrize("hidden", [8, 6])
def test_fused_experts_are_pruned_along_the_right_axis_or_skipped(name: str, axes: dict[str, int], hidden: int) -> None:
    """A pruner that takes 2-D weights only crashes on them; one that takes the last axis prunes outputs."""
    transformers = pytest.importorskip("transformers")
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        config = transformers.MixtralConfig(hidden_size=hidden, intermediate_size=12, num_local_experts=3)
    else:
        from transformers.models.llama4.modeling_llama4 import Llama4TextExperts as Experts

        config = transformers.Llama4TextConfig(hidden_size=hidden, intermediate_size=12, num_local_experts=3)
    experts = Experts(config)
    for number, weight in enumerate(experts.parameters()):
        nn.init.normal_(weight, generator=torch.Generator().manual_seed(number))
    masks = prune(experts)
    for own, axis in axes.items():
        weight = experts.get_parameter(own)
        if weight.shape[axis] % 4:
            assert masks.skipped[own] == f"2:4 does not fit: contraction length {hidden} is not a multiple of 4"
            assert bool((weight != 0).all())
        else:
            assert set(along(masks.masks[own], axis).sum(1).tolist()) == {2}
            assert torch.equal(weight != 0, masks.masks[own])
    assert len(masks.masks) == (2 if hidden == 8 else 1)


def test_a_tied_head_that_is_pruned_is_one_tensor_after_save_and_load() -> None:
    model = LanguageModel()
    masks = prune(model, include=["head", "body"])
    saved = copy.deepcopy(model.state_dict())
    assert model.head.weight is model.table.weight
    assert torch.equal(saved["head.weight"], saved["table.weight"])
    other = LanguageModel()
    other.load_state_dict(saved)
    assert other.head.weight is other.table.weight
    assert not masks.violations(other)
    assert list(masks.masks) == ["table.weight", "body.weight"]  # once, not under both names


@pytest.mark.parametrize("score", sorted(SCORES))
def test_a_model_that_branches_on_its_data_is_pruned_by_every_score(score: str) -> None:
    """No tracing: a branch and a dict as output are nobody's business."""
    model = LanguageModel()
    rules = [Rule(include=["body"], score=score)]
    tokens = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])]
    stats = calibrate(model, rules, tokens, lambda model, batch: model(batch)["logits"].square().mean())
    assert prune(model, rules=rules, stats=stats).density() == {"body.weight": 0.5}


@pytest.mark.parametrize("score", sorted(SCORES))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_zeros_of_a_sparse_model_stay_zeros(pattern: str, score: str) -> None:
    """70% unstructured, then another pattern: no dropped weight comes back, no kept zero costs a nonzero its place."""
    layer = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(normal(32, 64))
    prune(layer, "unstructured 0.7")
    old = layer.weight.detach() == 0
    seen = {name: normal(32, 64, seed=seed).abs() + 0.1 for seed, name in enumerate(NEEDED, start=1)}
    mask = prune(layer, pattern, score=score, stats={"weight": {**seen, "input_norm": seen["input_norm"][0]}})
    new = layer.weight.detach() == 0
    assert parse(pattern).holds(mask.masks["weight"])
    assert bool((new | ~old).all())
    if parse(pattern).name[-1].isdigit() and ":" in pattern and pattern.count(":") == 1 and score != "movement":
        n, m = (int(text) for text in pattern.split(":"))
        nonzeros = (~old).reshape(-1, m).sum(1)
        assert (~new).reshape(-1, m).sum(1).tolist() == nonzeros.clamp(max=n).tolist()


NEEDED = ("gradient_abs", "gradient_square", "movement", "input_norm")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantization_aware_layers_do_not_cost_the_masks() -> None:
    """Wrapped, trained with the masks held, pruned "again": the same zeros. Elsewhere the masks are chosen anew."""
    from torch.ao import quantization

    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    masks = prune(model)
    model.train().qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    wrapped = quantization.prepare_qat(model)
    assert type(wrapped[3]).__module__.startswith("torch.ao.nn.qat")
    assert not masks.violations(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    with masks.held(wrapped):
        for seed in range(3):
            wrapped(normal(2, 4, 4, 4, seed=seed)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not masks.violations(wrapped)
    for again in (masks_from_zeros(wrapped), prune(wrapped)):
        assert {"0.weight", "3.weight"} == set(again.masks)
        assert all(torch.equal(again.masks[name], mask) for name, mask in masks.masks.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_dropped_negative_weight_is_plus_zero(pattern: str, dtype: torch.dtype) -> None:
    """weight * mask makes -0.0 of it, and -0.0 is not zero to whoever compares bits."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Conv2d(16, 8, 3, bias=False)).to(dtype)
    for weight in model.parameters():
        nn.init.uniform_(weight, -1, -0.5)
    masks = prune(model, pattern)
    assert set(masks.masks) == {"0.weight", "1.weight"}
    assert minus_zeros(model) == 0
    assert not masks.violations(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_pruned(pattern: str, value: float) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight[31, 31] = value
    before = bits(model)
    with pytest.raises(AspError, match=r"'1\.weight' has NaN or infinite entries; nothing was pruned"):
        prune(model, pattern)
    assert all(torch.equal(a, b) for a, b in zip(bits(model), before, strict=True))


@pytest.mark.parametrize("value", [0.0, -2.5])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equal_weights_keep_exactly_as_many_on_any_number_of_threads(threads: None, pattern: str, value: float) -> None:
    found = []
    for count in (1, 2, 8):
        torch.set_num_threads(count)
        layer = nn.Linear(64, 32, bias=False)
        nn.init.constant_(layer.weight, value)
        found.append(prune(layer, pattern).masks["weight"])
    assert all(torch.equal(mask, found[0]) for mask in found)
    assert int(found[0].sum()) == round(parse(pattern).density(32, 64) * 32 * 64)
    assert bool(found[0][0, 0])  # the lowest index stays
    assert bool(found[0][-1, -1]) == ("transposable" in pattern)  # the first such mask has two diagonal squares


def test_activation_norm_refuses_what_does_not_divide_and_works_on_convolutions() -> None:
    """Wanda elsewhere: a broken mask for 30 features, a crash for a Conv2d."""
    model = nn.Sequential(nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 5))
    rules = [Rule(score="activation_norm")]
    data = [normal(4, 8, 4, 4, seed=seed) for seed in range(2)]
    before = model[0].weight.detach().clone()
    stats = calibrate(model, rules, data, lambda model, x: model(x).sum())
    masks = prune(model, rules=rules, stats=stats)
    assert masks.skipped["4.weight"] == "2:4 does not fit: contraction length 30 is not a multiple of 4"
    assert set(masks.masks) == {"0.weight", "2.weight"}
    seen = F.unfold(torch.cat(data), 3).double().square().sum((0, 2)).sqrt().view(8, 3, 3)
    score = (before.double().abs() * seen).movedim(1, -1).reshape(-1, 8)
    assert torch.equal(masks.masks["0.weight"].movedim(1, -1).reshape(-1, 8), NM(2, 4).mask(score))


class Sub(nn.Linear):
    """A subclass that its pruner has never heard of."""


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))


@pytest.mark.parametrize(
    ("make", "kernel"),
    [(lambda: Sub(16, 8), ()), (weight_normed, ()), (lambda: nn.Conv3d(16, 8, (1, 2, 3)), (1, 2, 3))],
)
def test_a_layer_whose_class_is_not_in_a_table_is_pruned_as_what_it_is(
    make: Callable[[], nn.Module], kernel: tuple[int, ...]
) -> None:
    layer = make()
    masks = prune(nn.ModuleDict({"fc": layer}))
    assert len(masks.masks) == 1
    weight = layer.weight
    assert isinstance(weight, Tensor)
    assert weight.shape == (8, 16, *kernel)
    assert set(along(weight != 0, 1).sum(1).tolist()) == {2}


@pytest.mark.parametrize(("n", "m"), [(8, 16), (16, 32)])
def test_wide_groups_keep_their_exact_top(n: int, m: int) -> None:
    """A table of all 12,870 or 601,080,390 masks is no way to choose one."""
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.copy_((normal(64, 64) * 4).round())  # with many ties
    before = layer.weight.detach().abs().reshape(-1, m)
    mask = prune(layer, f"{n}:{m}").masks["weight"].reshape(-1, m)
    for group, kept in zip(before.tolist(), mask, strict=True):
        wanted = sorted(sorted(range(m), key=lambda i: (-group[i], i))[:n])
        assert kept.nonzero().flatten().tolist() == wanted


@pytest.mark.parametrize(
    ("group", "kept"), [([1e8, 1, 2, 3], [0, 3]), ([1e-30, 1e8, 2e-30, 5e-31], [1, 2]), ([3, -1e8, 2, 1], [0, 1])]
)
def test_a_large_weight_does_not_hide_the_small_ones_beside_it(group: list[float], kept: list[int]) -> None:
    """In fp32 1e8 + 1 is 1e8 + 3: whoever compares sums of kept entries cannot tell them apart."""
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([group]))
    assert prune(layer).masks["weight"][0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(("into", "out"), [(30, 6), (3, 8)])
@pytest.mark.parametrize("pattern", ["2:4", "8:16", "2:4 transposable", "8:2:8", "block 4x4 0.5"])
def test_odd_sizes_are_skipped_with_the_reason_and_never_crash(pattern: str, into: int, out: int) -> None:
    model = nn.Sequential(nn.Linear(into, out), nn.Linear(64, 64))
    masks = prune(model, pattern)
    assert set(masks.masks) == {"1.weight"}
    assert masks.skipped["0.weight"].startswith(f"{pattern} does not fit: ")
    assert bool((model[0].weight != 0).all())


def test_a_vocabulary_that_does_not_divide_is_pruned_along_the_features() -> None:
    """30522 rows are no multiple of 4 or 8; a kernel that minds says so itself, the mask does not."""
    layer = nn.utils.skip_init(nn.Linear, 768, 30522, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 768).expand(30522, 768))
    masks = prune(layer)
    assert masks.density() == {"weight": 0.5}
    assert [row.pattern for row in inspect(layer)] == ["2:4"]


def moved() -> nn.Module:
    return network().to(torch.float64).to(torch.float32)


def copied() -> nn.Module:
    return copy.deepcopy(network())


def assigned() -> nn.Module:
    model = network()
    model.load_state_dict({name: tensor.clone() for name, tensor in network().state_dict().items()}, assign=True)
    return model


def averaged() -> nn.Module:
    return AveragedModel(network())


def compiled() -> nn.Module:
    return torch.compile(network())  # type: ignore[return-value]


@pytest.mark.parametrize("make", [moved, copied, assigned, averaged, compiled])
def test_masks_belong_to_names_not_to_tensors(make: Callable[[], nn.Module]) -> None:
    """Pruned as one copy, applied to another: elsewhere the old tensor is zeroed and the model stays dense."""
    masks, plain = prune(make()), prune(network())
    assert all(torch.equal(masks.masks[name], mask) for name, mask in plain.masks.items())
    for other in (network(), make()):
        assert set(masks.violations(other)) == {"0.weight", "4.weight"}
        masks.apply_(other)
        assert not masks.violations(other)


def process_state() -> list[object]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    flags = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cudnn.enabled, matmul.allow_tf32)
    generators = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    modes = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device())
    hooks = (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), threading.active_count())
    environment = (dict(os.environ), Path.cwd(), torch.are_deterministic_algorithms_enabled())
    return [flags, generators, modes, hooks, environment]


@pytest.mark.parametrize("score", sorted(SCORES))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pruning_and_calibrating_leave_the_process_alone(
    pattern: str, score: str, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    rules = [Rule(pattern=pattern, score=score)]
    data = [(normal(8, 32, seed=seed), torch.arange(8)) for seed in range(2)]
    modes = [module.training for module in model.modules()]
    before, weights = process_state(), bits(model)
    stats: dict[str, Stats] = calibrate(model, rules, data, loss)
    assert all(torch.equal(a, b) for a, b in zip(bits(model), weights, strict=True))
    prune(model, rules=rules, stats=stats)
    assert process_state() == before
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert capfd.readouterr() == ("", "")


# Training


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "accumulated", "autocast", "averaged"])
def test_zeros_are_the_masks_after_every_step(schedule: dict[str, Any], optimizer: str) -> None:
    """Weight decay, momentum of what was kept before, an average of the weights: each can bring dropped ones back."""
    model = network()
    one = keeper(schedule, model, [Rule()])
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    if optimizer == "adamw":
        steps: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    else:
        steps = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1)
    with held(one, model):
        for step in range(6):
            for _ in range(2 if optimizer == "accumulated" else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=optimizer == "autocast"):
                    found = loss(model, batches()[step])
                found.backward()
            steps.step()
            steps.zero_grad()
            average.update_parameters(model)
            for name, mask in one.masks.masks.items():
                assert not model.get_parameter(name)[~mask].any()
            assert minus_zeros(model) == 0
    assert one.masks.density() == {"0.weight": 0.5, "4.weight": 0.5}
    assert NM(2, 4).holds(model.get_parameter("0.weight").detach() != 0)
    one.masks.apply_(average)
    assert not one.masks.violations(average)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_backward_in_another_thread_does_the_same(schedule: dict[str, Any]) -> None:
    def trained(elsewhere: bool) -> list[Tensor]:
        model = network()
        one = keeper(schedule, model, [Rule()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        with held(one, model):
            for step in range(6):
                found = loss(model, batches()[step])
                if elsewhere:
                    thread = threading.Thread(target=found.backward)
                    thread.start()
                    thread.join()
                else:
                    found.backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(model)

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_model_can_be_copied_and_pickled_in_the_middle_of_training(schedule: dict[str, Any]) -> None:
    model = network()
    one = keeper(schedule, model, [Rule()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with held(one, model):
        for step in range(3):
            loss(model, batches()[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(other), strict=True))
            assert not one.masks.violations(other)
            assert list(other.state_dict()) == list(network().state_dict())
        masks = pickle.loads(pickle.dumps(one.masks))
        assert all(torch.equal(mask, one.masks.masks[name]) for name, mask in masks.masks.items())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_behind_when_a_run_ends_or_fails(
    schedule: dict[str, Any], fails: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model = network()
    before = process_state()
    one = keeper(schedule, model, [Rule()])
    assert process_state() == before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), held(one, model):
        for step in range(6):
            loss(model, batches()[step]).backward()
            optimizer.step()
            if fails and step == 2:
                raise ZeroDivisionError
            optimizer.zero_grad()
    assert process_state() == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
        assert "forward" not in vars(module)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
    assert capfd.readouterr() == ("", "")


def test_a_schedules_new_masks_are_used_by_the_next_step() -> None:
    """Elsewhere the sparse weight is cached, and a new mask has no effect before the cache is cleared."""
    model = network()
    one = keeper({"name": "steps", "at": {"0": "3:4", "2": "2:4"}}, model, [Rule()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with held(one, model):
        for step in range(4):
            loss(model, batches()[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(float((model.get_parameter("0.weight") != 0).float().mean()))
    assert kept == [0.75, 0.5, 0.5, 0.5]


def test_sparse_groups_with_three_zeros_stay_so_while_fine_tuning_by_any_optimizer() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    prune(model, "1:4")
    zeros = model[0].weight.detach() == 0
    masks = masks_from_zeros(model, "2:4")
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1)
        with masks.held(model):
            for seed in range(3):
                model(normal(4, 16, seed=seed)).square().sum().backward()
                optimizer.step()
        assert torch.equal(model[0].weight.detach() == 0, zeros)
