"""Image classification: any torchvision network, or one's own, on images from any source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.task_sections import (
    CallableData,
    FolderData,
    HubData,
    ImageTask,
    PackageData,
    SyntheticData,
    TorchvisionData,
)
from asp_toolkit.tasks.data.sets import Mapped, Source, limited
from asp_toolkit.tasks.images import collate, normaliser, prepare
from asp_toolkit.tasks.networks import image_network
from asp_toolkit.tasks.task import MapDataset, Task


def image_classification(section: ImageTask, seed: int) -> Task:
    """The task of `section`; batches are (images (B, C, H, W) float32, classes (B,) int64), outputs (B, classes).

    Raises:
        AspError: names that do not exist, or model and data that do not fit.
    """
    build = image_network(section.model)
    with torch.random.fork_rng(devices=[]):
        model = build().eval()
    taken = _input_channels(model)
    source = _source(section.data, seed, channels=taken if taken in (1, 3) else 3)
    train, test = (
        _prepared(limited(data, limit, seed), section, training)
        for data, limit, training in (
            (source.train, section.limit_train, True),
            (source.test, section.limit_test, False),
        )
    )
    for name, data in (("training", train), ("test", test)):
        if len(data) == 0:
            raise AspError(f"task.data: the {name} set is empty")
    channels = _channels(test)
    batching = functools.partial(collate, normalise=normaliser(section.transform, channels))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for data in (train, test):
            images, classes = batching([data[i] for i in range(min(len(data), 4))])
            _fits(model, images, classes, source, section, taken)
    return Task(
        kind=section.kind,
        build=build,
        train=train,
        test=test,
        collate=batching,
        loss=_loss,
        measure=functools.partial(_measure, top5=section.metric == "top5"),
        forward=_forward,
        metric=section.metric,
        channels_last=section.channels_last,
        workers=section.workers,
    )


def _source(data: Any, seed: int, channels: int) -> Source:
    # Sources are imported here: each loads the library that it alone needs.
    match data:
        case PackageData():
            from asp_toolkit.tasks.data import package

            return package.images(data, seed)
        case SyntheticData():
            from asp_toolkit.tasks.data import synthetic

            return synthetic.images(data, seed)
        case TorchvisionData():
            from asp_toolkit.tasks.data import torchvision

            return torchvision.images(data, channels)
        case FolderData():
            from asp_toolkit.tasks.data import folder

            return folder.images(data, channels)
        case HubData():
            from asp_toolkit.tasks.data import huggingface

            return huggingface.images(data, channels)
        case CallableData():
            from asp_toolkit.tasks.data import called

            return called.images(data, channels)
    raise AspError(f"task.data.source: {data.source!r} holds no images")


def _prepared(data: MapDataset, section: ImageTask, training: bool) -> MapDataset:
    change = prepare(section.transform, training)
    return data if change is None else Mapped(data, functools.partial(_change_image, change=change))


def _change_image(sample: tuple[Tensor, int], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    image, label = sample
    return change(image), label


def _input_channels(model: nn.Module) -> int | None:
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    first = next(convolutions, None)
    return None if first is None else first.in_channels


def _channels(data: MapDataset) -> int:
    image = data[0][0]
    if not isinstance(image, Tensor) or image.ndim != 3:
        shape = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise AspError(f"task.data: expected images as (C, H, W) tensors, got {shape}")
    return int(image.shape[0])


def _fits(
    model: nn.Module, images: Tensor, classes: Tensor, source: Source, section: ImageTask, taken: int | None
) -> None:
    """Run a few samples through the network and compare what comes out with the labels."""
    name, shape = section.model.name, tuple(images.shape[1:])
    if taken is not None and taken != shape[0]:
        raise AspError(
            f"task.model: the first convolution of {name} takes {taken} channels, the images have {shape[0]}; "
            f"replace it under task.model.replace, or give the option that sets its input channels"
        )
    try:
        logits = _logits(model, images)
    except RuntimeError as error:
        raise AspError(f"task.model: {name} cannot take images of shape {shape}: {error}") from error
    if logits.ndim != 2 or len(logits) != len(images):
        raise AspError(f"task.model: {name} returned shape {tuple(logits.shape)}, expected ({len(images)}, classes)")
    outputs = logits.shape[1]
    if source.classes is not None and source.classes != outputs:
        raise AspError(
            f"task.model: {name} has {outputs} outputs, the data has {source.classes} classes; "
            f"set task.model.options.num_classes to {source.classes}"
        )
    if int(classes.min()) < 0 or int(classes.max()) >= outputs:
        raise AspError(
            f"task.data: expected class numbers 0 to {outputs - 1}, got {int(classes.min())} to {int(classes.max())}"
        )
    if section.metric == "top5" and outputs <= 5:
        raise AspError(f"task.metric: top5 says nothing of {outputs} classes; write accuracy")


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    output = getattr(output, "logits", output) if not isinstance(output, Tensor) else output
    if not isinstance(output, Tensor):
        raise AspError(
            f"task.model: the network returned a {type(output).__name__}, expected a tensor (B, classes) or .logits"
        )
    return output


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], label_smoothing: float) -> Tensor:
    images, classes = batch
    return F.cross_entropy(_logits(model, images).float(), classes, label_smoothing=label_smoothing)


def _measure(model: nn.Module, batch: tuple[Tensor, Tensor], top5: bool) -> dict[str, Tensor]:
    images, classes = batch
    logits = _logits(model, images).float()  # (B, classes)
    values = {
        "loss": F.cross_entropy(logits, classes, reduction="none"),
        "accuracy": (logits.argmax(dim=1) == classes).float(),
    }
    if top5:
        values["top5"] = (logits.topk(5, dim=1).indices == classes[:, None]).any(dim=1).float()
    return values


def _forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return _logits(model, batch[0])
