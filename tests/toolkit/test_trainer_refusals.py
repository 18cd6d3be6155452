"""What does not fit, or would silently have no effect, is refused before anything is trained."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from asp_toolkit import AspError, prune_trainer
from asp_toolkit.recipe import from_mapping
from tests.toolkit.made_loaders import loader, network, samples

pytestmark = pytest.mark.usefixtures("leaves_nothing")

WHOLE = {
    "task": {"kind": "image_classification", "model": {"name": "resnet18"}, "data": {"source": "synthetic"}},
    "train": {"batch_size": 4, "checkpoint_every": 0.5, "optimizer": {"lr": 0.1}},
    "export": {"formats": ["dense"]},
}


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"batch_size": 4}, "batch_size: would have no effect here: the batches of your loader decide"),
        ({"eval_batch_size": 4}, "eval_batch_size: would have no effect"),
        ({"checkpoint_every": 1.0}, "checkpoint_every: would have no effect here: prune_trainer writes no checkpoints"),
        ({"skip": True}, "skip: .*trained=True"),
        ({"recipe": {"retrain": {"batch_size": 8}}}, "batch_size: would have no effect"),
        ({"recipe": {"retrain": {"control": True}}}, "control: would have no effect"),
        ({"recipe": from_mapping({**WHOLE, "retrain": {"control": True}})}, r"retrain.control: would have no effect"),
        ({"recipe": {"export": {"formats": ["dense"]}}}, r"export: would have no effect here: result\.export"),
        ({"label_smoothing": 0.1}, r"train.label_smoothing: the loss is yours"),
        ({"recipe": {"retrain": {"label_smoothing": 0.1}}}, r"retrain.label_smoothing: the loss is yours"),
        ({"epoch": 3}, r"train.epoch: .*epochs"),
        ({"optimizer": {"name": "adamw"}}, r"train.optimizer.lr"),
        ({"optimizer": {"name": "adamv", "lr": 0.1}}, r"unknown optimizer 'adamv'.*Adam"),
        ({"optimizer": torch.optim.SGD}, r"optimizer: the retraining needs a fresh one; describe it"),
        ({"recipe": {"retrain": {"optimizer": {"options": {"beta": 1}}}}}, "SGD takes no 'beta'"),
        ({"accumulate": 7}, "accumulate 7 is more than the 6 batches"),
        ({"device": "mps"}, "device: mps was asked for, but there is none"),
        ({"pattern": "4:2"}, "4:2"),
        ({"include": ["layer9"]}, "'layer9' matches no layer"),
        ({"loss": "cross_entropy"}, r"loss: expected a function of \(outputs, targets\), got str"),
        ({"loss": functools.partial(F.cross_entropy, reduction="none")}, r"one number.*got shape \(16,\)"),
        ({"loss": nn.CrossEntropyLoss}, r"got the class CrossEntropyLoss; write CrossEntropyLoss\(\)"),
        ({"loss": None}, r"give loss=\.\.\.; a function|give loss=\.\.\., a function"),
        ({"train": iter([])}, "train: an iterator can be read only once"),
        ({"evaluate": iter(loader())}, "evaluate: an iterator can be read only once"),
        ({"train": TensorDataset(*samples())}, r"train: a data set of single samples; give DataLoader"),
        ({"train": samples()[0]}, "train: expected batches"),
        ({"train": 3}, "train: expected batches"),
        ({"train": []}, "train holds no batch"),
        ({"evaluate": []}, "no test batch"),
        ({"evaluate": [samples()[0]]}, "pairs|batches of .* got Tensor"),
        ({"evaluate": [(*samples(), 1)]}, "got tuple of 3"),
        ({"train": None}, "give both train and evaluate"),
        ({"evaluate": None}, "give both train and evaluate"),
    ],
)
def test_what_does_not_fit_or_would_be_ignored_is_refused_before_training(keys: dict[str, Any], match: str) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"train": loader(), "evaluate": loader(16), "loss": F.cross_entropy, **keys}
    with pytest.raises(AspError, match=match):
        prune_trainer(model, quiet=True, **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
