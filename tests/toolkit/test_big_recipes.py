"""The recipes that nobody trains here: each is loaded, built and trained for two steps on tiny synthetic data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from asp_toolkit.loop import Run, fit
from asp_toolkit.recipe import load
from asp_toolkit.tasks import build_task

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

# Parameters of the networks as published, so that a recipe cannot name another one.
IMAGENET = {
    "imagenet_resnet50": 25_557_032,
    "imagenet_vgg16": 138_357_544,
    "imagenet_densenet121": 7_978_856,
    "imagenet_mobilenet_v2": 3_504_872,
}
TINY_TRAINING = {
    "train.batch_size": 2,
    "train.eval_batch_size": 2,
    "train.max_steps": 2,
    "train.optimizer.lr": 1e-3,  # batch norm over two samples does not bear that of the recipe
    "device": "cpu",
}


def two_steps(name: str, overrides: Mapping[str, Any]) -> torch.nn.Module:
    recipe = load(RECIPES / f"{name}.yaml", {**TINY_TRAINING, **overrides})
    task = build_task(recipe.task, recipe.seed)
    torch.manual_seed(0)
    model = task.build()
    before = {key: value.clone() for key, value in model.named_parameters()}
    fitted = fit(model, task, recipe.train, Run(Accelerator(cpu=True), precision="fp32"), "dense")
    assert math.isfinite(fitted.metrics["loss"])
    assert 0 <= fitted.metrics[task.metric] <= 1
    still = [key for key, value in model.named_parameters() if torch.equal(value, before[key])]
    assert not still, "parameters that two steps of training did not move"
    return model


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_recipe_trains(name: str) -> None:
    data = {"source": "synthetic", "size": 4, "classes": 1000, "shape": [3, 72, 80]}
    model = two_steps(
        name,
        {
            "task.data": data,
            "task.workers": 0,
            "task.transform.random_resized_crop": 64,  # five halvings leave 2x2: batch norm needs more than one pixel
            "task.transform.resize": 68,
            "task.transform.center_crop": 64,
        },
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == IMAGENET[name]


def test_squad_recipe_trains(tiny_bert: Path) -> None:
    model = two_steps(
        "squad_bert",
        {
            "task.model.name": str(tiny_bert),
            "task.data": {"source": "synthetic", "size": 6, "length": 40},
            "task.max_length": 100,
            "task.stride": 8,
            "task.workers": 0,
        },
    )
    assert type(model).__name__ == "BertForQuestionAnswering"
