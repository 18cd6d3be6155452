"""Every network of torchvision, and families of transformers, pruned to 2:4: what is a matrix and fits gets a mask."""

from __future__ import annotations

import csv
import json
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import list_models

from asp_toolkit.pruning import Rule, choose, prune
from tests.toolkit.made_networks import COVERAGE, matrices, to_be_pruned

NETWORKS = COVERAGE.networks()

REFERENCE = {  # network -> modules that NVIDIA's ASP prunes, Linear and convolutions that there are
    "resnet50": (53, 54),
    "vit_b_16": (49, 50),
    "efficientnet_b0": (38, 82),
    "regnet_y_400mf": (19, 86),
    "shufflenet_v2_x1_0": (2, 57),
    "mobilenet_v3_small": (29, 54),
    "maxvit_t": (139, 151),
    "swin_v2_t": (54, 77),
}

with COVERAGE.RESULTS.open(newline="", encoding="utf-8") as table:
    ROWS = list(csv.DictReader(table))
TABLE = {one["network"]: one for one in ROWS}
LARGE = [name for name, one in TABLE.items() if int(one["entries"]) > 60_000_000 and name in NETWORKS]


def sizes() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in NETWORKS]


def exactly_two_of_four(mask: Tensor) -> bool:
    """Of every 4 consecutive entries; four bools are read as one int32, and its bytes added up in the highest."""
    fours = mask.reshape(-1, 4).view(torch.int32)
    return bool(((fours * 0x01010101) >> 24 == 2).all())


def test_two_of_four_are_counted() -> None:
    every = torch.cartesian_prod(*[torch.tensor([False, True])] * 4)
    assert [exactly_two_of_four(four) for four in every] == (every.sum(1) == 2).tolist()


@pytest.mark.parametrize("name", sizes())
def test_every_matrix_that_fits_is_pruned(name: str) -> None:
    model = COVERAGE.filled(NETWORKS[name]())
    expected = to_be_pruned(model)
    parameters = dict(model.named_parameters())
    tied = {slot: parameter.data_ptr() for slot, parameter in model.named_parameters(remove_duplicate=False)}
    masks = prune(model)

    assert masks.masks.keys() == expected.keys()
    assert masks.masks.keys() | masks.skipped.keys() == parameters.keys()
    assert not masks.masks.keys() & masks.skipped.keys()
    assert all(masks.skipped.values())
    for parameter_name, mask in masks.masks.items():
        assert exactly_two_of_four(expected[parameter_name].along(mask)), parameter_name
        assert torch.equal(parameters[parameter_name] != 0, mask), parameter_name
    assert tied == {slot: p.data_ptr() for slot, p in model.named_parameters(remove_duplicate=False)}

    found = COVERAGE.row(name, model, masks)
    assert found["eligible"] == found["pruned"] == str(len(expected))
    if TABLE.get(name, {}).get("library") == found["library"]:
        assert found == TABLE[name], "run python benchmarks/coverage.py"


def counted(model: nn.Module) -> list[int]:
    return [id(one.weight) for one in matrices(model) if one.counted]


@pytest.mark.parametrize("name", REFERENCE)
def test_no_network_has_fewer_pruned_layers_than_the_reference(name: str) -> None:
    model = NETWORKS[name]()
    chosen = {id(one.parameter) for one in choose(model, [Rule()]).chosen.values()}
    least, modules = REFERENCE[name]
    assert len(counted(model)) == modules
    assert sum(weight in chosen for weight in counted(model)) >= least
    assert int(TABLE[name]["pruned_modules"]) >= least
    assert int(TABLE[name]["modules"]) == modules


@pytest.mark.parametrize("name", LARGE)
def test_large_networks_are_chosen_without_their_values(name: str) -> None:
    model = NETWORKS[name]()
    choice = choose(model, [Rule()])
    assert choice.chosen.keys() == to_be_pruned(model).keys()
    assert choice.chosen.keys() | choice.skipped.keys() == dict(model.named_parameters()).keys()


def test_the_table_has_every_network_once() -> None:
    names = [one["network"] for one in ROWS]
    assert names == list(TABLE)
    assert set(COVERAGE.FAMILIES) < set(names)
    if TABLE["resnet50"]["library"] == f"torchvision {version('torchvision').partition('+')[0]}":
        assert set(list_models()) < set(names)


def test_the_rows_of_the_table_add_up() -> None:
    for name, one in TABLE.items():
        skipped = sum(json.loads(one["skipped"]).values())
        assert int(one["pruned"]) == int(one["eligible"]) > 0, name
        assert int(one["pruned"]) + skipped == int(one["parameters"]), name
        assert int(one["pruned_modules"]) <= int(one["modules"]), name
