"""Pruned networks still run: finite outputs that the masks have changed, masks as they were, tied weights tied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import prune
from tests.toolkit.made_networks import COVERAGE

BATCH = 2

TORCHVISION: dict[str, tuple[int, ...]] = {  # network -> shape of one input
    "resnet18": (3, 64, 64),
    "shufflenet_v2_x0_5": (3, 64, 64),
    "regnet_y_400mf": (3, 64, 64),
    "swin_t": (3, 64, 64),
    "ssdlite320_mobilenet_v3_large": (3, 320, 320),
    "deeplabv3_mobilenet_v3_large": (3, 64, 64),
    "raft_small": (3, 128, 128),
    "r3d_18": (3, 4, 32, 32),
}

TIED = [  # whose output layer has the tensor of the input table
    *("GPT2LMHeadModel", "OPTForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM", "DebertaV2ForMaskedLM"),
    *("AlbertForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration", "Qwen3ForCausalLM"),
    "WhisperForConditionalGeneration",
]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 96, (BATCH, length), generator=torch.Generator().manual_seed(2))


def tensors(output: object) -> Iterator[Tensor]:
    """Every floating point tensor in what a network returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)


def inputs_of_transformers(model: Any) -> dict[str, Tensor]:
    known = {
        "input_ids": tokens(),
        "pixel_values": random(BATCH, 3, 32, 32),
        "input_features": random(BATCH, 16, 64),
        "input_values": random(BATCH, 400),
        "decoder_input_ids": tokens(),
    }
    names = {model.main_input_name}
    if model.config.is_encoder_decoder:
        names.add("decoder_input_ids")
    if hasattr(model.config, "text_config") and hasattr(model.config, "vision_config"):
        names |= {"input_ids", "pixel_values"}
    return {name: known[name] for name in sorted(names)}


@torch.no_grad()
def run(model: nn.Module, *inputs: Tensor, **named: Tensor) -> list[Tensor]:
    found = [one.clone() for one in tensors(model(*inputs, **named))]
    assert found
    assert all(torch.isfinite(one).all() for one in found)
    return found


def check(before: list[Tensor], after: list[Tensor], masks: MaskSet, model: nn.Module) -> None:
    assert not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not masks.violations(model)


@torch.no_grad()
def normalized(backbone: nn.Module, inputs: Tensor) -> None:
    """Statistics of a MobileNet without training are 0 and 1, with which its signal dies away below the biases."""
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the average of what was seen, which is one batch
    backbone.train()(inputs)
    backbone.eval()


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_pruned_network_of_torchvision_runs(name: str) -> None:
    torch.manual_seed(0)
    model = get_model(name, weights=None, **({"weights_backbone": None} if "_mobilenet" in name else {})).eval()
    images = random(BATCH, *TORCHVISION[name])
    if "_mobilenet" in name:
        normalized(model.backbone, images)
    inputs: Any = (images,)
    if name.startswith("raft"):
        inputs = (images[:1], images[1:])
    elif name.startswith("ssd"):
        inputs = (list(images.sigmoid()),)
    before = run(model, *inputs)
    masks = prune(model)
    check(before, run(model, *inputs), masks, model)


@pytest.mark.parametrize("name", COVERAGE.FAMILIES)
def test_a_pruned_network_of_transformers_runs(name: str) -> None:
    model = COVERAGE.networks()[name]().eval()
    inputs = inputs_of_transformers(model)
    before = run(model, **inputs)
    masks = prune(model)
    check(before, run(model, **inputs), masks, model)


@pytest.mark.parametrize("name", TIED)
def test_a_tied_output_layer_stays_tied_and_dense(name: str) -> None:
    model = COVERAGE.networks()[name]()
    table = model.get_input_embeddings().weight
    before = table.detach().clone()
    masks = prune(model)
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is table
    assert torch.equal(table, before)
    name = next(name for name, parameter in model.named_parameters() if parameter is table)
    assert masks.skipped[name].startswith("tied with ")
