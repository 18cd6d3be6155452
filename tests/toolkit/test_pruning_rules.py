"""Which rule prunes which layer; names that match nothing; scores of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM
from asp_toolkit.pruning import Rule, choose, prune, resolve_score
from asp_toolkit.scores import Stats, magnitude


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = {
        "stem": nn.Conv2d(4, 8, 3),
        "layer1": nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)),
        "fc": nn.Linear(8, 8),
        "head": nn.Linear(8, 4),
    }
    return nn.ModuleDict(parts)


def unchanged(model: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), network().parameters(), strict=True))


def test_two_rules_hold_side_by_side() -> None:
    model = network()
    masks = prune(model, rules=[Rule(["layer1.*"], [], "2:4"), Rule(["fc", "head"], [], "1:4")])
    assert masks.patterns == {
        "layer1.0.weight": "2:4",
        "layer1.1.weight": "2:4",
        "fc.weight": "1:4",
        "head.weight": "1:4",
    }
    assert masks.density() == {
        "layer1.0.weight": 0.5,
        "layer1.1.weight": 0.5,
        "fc.weight": 0.25,
        "head.weight": 0.25,
    }
    assert masks.skipped["stem.weight"] == "matched by no rule"


def test_two_rules_for_one_layer_are_an_error() -> None:
    model = network()
    with pytest.raises(AspError, match=r"'fc\.weight' is matched by prune\.rules\.0 and prune\.rules\.1; exclude it"):
        prune(model, rules=[Rule(["Linear"]), Rule(["fc"], [], "1:4")])
    assert unchanged(model)
    masks = prune(model, rules=[Rule(["Linear"], ["fc"]), Rule(["fc"], [], "1:4")])
    assert masks.patterns == {"fc.weight": "1:4", "head.weight": "2:4"}


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        (None, None, ["stem", "layer1.0", "layer1.1", "fc", "head"]),
        (["Linear"], None, ["fc", "head"]),
        (["Conv*"], ["stem"], ["layer1.0", "layer1.1"]),
        (["layer1.*"], ["layer1.0"], ["layer1.1"]),
        (["fc.weight"], None, ["fc"]),
        (None, ["Conv2d", "head"], ["fc"]),
        (["_ConvNd"], None, ["stem", "layer1.0", "layer1.1"]),
        ("fc", None, ["fc"]),
        ("*", "Conv2d", ["fc", "head"]),
    ],
)
def test_include_and_exclude(include: Sequence[str] | None, exclude: Sequence[str] | None, chosen: list[str]) -> None:
    masks = prune(network(), include=include, exclude=exclude)
    assert list(masks.masks) == [f"{name}.weight" for name in chosen]
    assert all(masks.skipped[f"{name}.bias"].startswith("vector") for name in chosen)


def test_what_a_rule_excludes_says_so() -> None:
    assert prune(network(), exclude=["fc"]).skipped["fc.weight"] == "excluded by a rule"


@pytest.mark.parametrize(
    ("key", "glob", "near"),
    [
        ("include", "layr1.0", "did you mean 'layer1.0'"),
        ("include", "linear", "did you mean 'Linear'"),
        ("exclude", "heads", "did you mean 'head'"),
        ("include", "transformer.h.*", "choose from 'Conv2d'"),
    ],
)
def test_a_glob_that_matches_nothing_names_the_closest(key: str, glob: str, near: str) -> None:
    model = network()
    with pytest.raises(AspError) as caught:
        prune(model, **{key: [glob]})
    assert f"prune.rules.0.{key}: '{glob}' matches no layer name and no layer type" in str(caught.value)
    assert near in str(caught.value)
    assert unchanged(model)


def test_rules_that_leave_everything_dense_are_an_error_with_the_reasons() -> None:
    with pytest.raises(AspError, match=r"nothing to prune.*0\.weight: 2:4 does not fit: contraction length 30"):
        prune(nn.Sequential(nn.Linear(30, 6)))
    with pytest.raises(AspError, match="the model has no parameters"):
        prune(nn.ReLU())
    with pytest.raises(AspError, match="matched by no rule"):
        prune(network(), include=[])


def test_rules_and_include_together_are_an_error() -> None:
    with pytest.raises(AspError, match="either rules or include/exclude"):
        prune(network(), include=["fc"], rules=[Rule()])


@pytest.mark.parametrize("pattern", ["5:4", "0:4", "2;4", 124])
def test_a_bad_pattern_is_refused_before_anything_changes(pattern: str) -> None:
    model = network()
    with pytest.raises(AspError, match="pattern"):
        prune(model, pattern)
    assert unchanged(model)


def test_a_pattern_object_does_as_well_as_its_name() -> None:
    assert prune(network(), NM(4, 8), include=["Linear"]).patterns == {"fc.weight": "4:8", "head.weight": "4:8"}


class TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight


@pytest.mark.parametrize("name", ["one", "two", "two.weight", "Linear"])
def test_a_tied_parameter_answers_to_all_its_names(name: str) -> None:
    model = TiedLinears()
    assert set(prune(model, include=[name]).masks) == {"one.weight"}
    assert model.two.weight is model.one.weight


def test_choosing_changes_nothing_and_accounts_for_all() -> None:
    model = network()
    choice = choose(model, [Rule(["Linear"])])
    assert unchanged(model)
    assert set(choice.chosen) | set(choice.skipped) == dict(model.named_parameters()).keys()
    assert not set(choice.chosen) & set(choice.skipped)


def smallest(weight: Tensor, stats: Stats | None) -> Tensor:
    return -weight.abs()


def with_nan(weight: Tensor, stats: Stats | None) -> Tensor:
    scores = weight.abs()
    scores[0, 0] = float("nan")
    return scores


def of_wrong_shape(weight: Tensor, stats: Stats | None) -> Tensor:
    return weight.abs()[:, :4]


def test_a_score_of_ones_own_decides() -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    prune(model, score=smallest)
    assert model.weight.tolist() == [[0, 1, 0, 2]]


@pytest.mark.parametrize(("score", "error"), [(with_nan, "NaN"), (of_wrong_shape, r"expected shape \(8, 8\), got")])
def test_a_score_that_is_broken_is_an_error_and_nothing_changes(score: object, error: str) -> None:
    model = network()
    with pytest.raises(AspError, match=rf"score of 'fc\.weight'.*{error}"):
        prune(model, include=["Linear"], score=score)
    assert unchanged(model)


def test_scores_are_found_by_name_or_import() -> None:
    assert resolve_score("magnitude") is magnitude
    assert resolve_score("asp_toolkit.scores:magnitude") is magnitude
    with pytest.raises(AspError, match=r"unknown score 'magnitud'; did you mean 'magnitude'\?"):
        resolve_score("magnitud")
    for text in ("no_such_package.scores:f", "asp_toolkit.scores:nothing"):
        with pytest.raises(AspError, match=f"score '{text}'"):
            resolve_score(text)
    with pytest.raises(AspError, match="expected a function, got dict"):
        resolve_score("asp_toolkit.scores:SCORES")


class Table(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("name", ["head", "head.weight", "table", "table.weight"])
def test_a_rule_that_names_a_tied_weight_prunes_it(name: str) -> None:
    model = Table()
    masks = prune(model, include=[name])
    assert set(masks.masks) == {"table.weight"}
    assert model.head.weight is model.table.weight
    assert NM(2, 4).holds(model.head.weight != 0)


@pytest.mark.parametrize("glob", ["*", "Linear", "hea[d]", "*.weight"])
def test_a_rule_that_only_matches_it_leaves_a_tied_weight_dense(glob: str) -> None:
    masks = prune(Table(), include=[glob, "body"])
    assert set(masks.masks) == {"body.weight"}
    assert masks.skipped["table.weight"].startswith("tied with head.weight")


def test_a_depthwise_convolution_is_pruned_where_it_is_named_and_the_pattern_fits() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    assert set(prune(model, "unstructured 0.5").masks) == {"1.weight"}
    assert set(prune(model, "unstructured 0.5", include=["0"]).masks) == {"0.weight"}
    with pytest.raises(AspError, match="2:4 does not fit: contraction length 1"):
        prune(model, include=["0"])
