"""Somebody's model and batches, in our loop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from asp_toolkit.calibration import calibrate
from asp_toolkit.checkpoint import random_state, set_random_state
from asp_toolkit.errors import AspError
from asp_toolkit.loop import Feed, Run, accelerator_for, evaluate, fit, placed, steps_of
from asp_toolkit.masks import bare
from asp_toolkit.optimizers import optimizer_arguments
from asp_toolkit.progress import Progress
from asp_toolkit.pruning import Rule
from asp_toolkit.recipe.schema import Recipe, Training
from asp_toolkit.schedules import Keeper
from asp_toolkit.scores import Stats
from asp_toolkit.tasks.task import Batch, Task
from asp_toolkit.trainer.story import Phases, numbers_of

Loss = Callable[[Any, Any], Tensor]
Judge = Callable[[nn.Module], Any]


@contextmanager
def batch_phases(
    model: nn.Module,
    train: Iterable[Batch],
    test: Judge | Iterable[Batch],
    loss: Loss | None,
    said: Recipe,
    trained: bool,
    quiet: bool,
) -> Iterator[Phases]:
    """`fit` twice over the given batches. The random state and the model's mode are afterwards as they were."""
    _refuse_unreadable("train", train)
    if not callable(test):
        _refuse_unreadable("evaluate", test)
    if isinstance(loss, type) or (loss is not None and not callable(loss)):
        shown = f"the class {loss.__name__}; write {loss.__name__}()" if isinstance(loss, type) else type(loss).__name__
        raise AspError(f"prune_trainer: loss: expected a function of (outputs, targets), got {shown}")
    optimizer_arguments(said.train.optimizer)
    optimizer_arguments(said.retraining().optimizer)
    run = Run(accelerator_for(said.device), said.seed, said.precision, progress=Progress(quiet))
    if said.device not in ("auto", run.device.type):
        raise AspError(f"prune_trainer: device: {said.device} was asked for, but there is none; use auto or cpu")
    if isinstance(loss, nn.Module):
        loss.to(run.device)  # class weights
    task = _task_around(model, loss, test if callable(test) else None)
    judged: Iterable[Batch] = (None,) if callable(test) else test

    def whole(section: Training) -> tuple[Training, int]:
        """The section, and the batches of its epoch."""
        per_epoch = _length(train, said, section)
        if per_epoch is not None:
            return section, per_epoch
        assert section.max_steps is not None
        return section.model_copy(update={"epochs": 1.0}), section.max_steps * section.accumulate

    def phase(name: str, section: Training, masks: Callable[[int, bool], Keeper] | None = None) -> dict[str, float]:
        section, per_epoch = whole(section)
        feed = Feed(lambda epoch, skip: islice(_endless(train, epoch), skip, None), per_epoch, lambda: judged)
        return _without_count(fit(model, task, section, run, name, masks=masks, feed=feed).metrics, test)

    def look(batches: Iterable[Batch]) -> dict[str, float]:
        model.to(run.device)
        return _without_count(evaluate(model, task, run, batches), test)

    def gather(rules: Sequence[Rule], batches: int) -> Mapping[str, Stats]:
        def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
            with run.autocast():
                return task.loss(model, placed(batch, task, run), 0.0)

        return calibrate(model.to(run.device), rules, islice(_endless(train, 0), batches), batch_loss)

    before, mode = random_state(), model.training
    try:
        for section in (said.train, said.retraining()):
            _length(train, said, section)
        if not callable(test) and not trained:
            look(islice(test, 1))  # a loss or a batch that does not fit is found before the training
        yield Phases(
            lambda: model,
            lambda: phase("dense", said.train),
            lambda schedule: phase("retrained", said.retraining(), schedule),
            lambda: look(judged),
            lambda: steps_of(*whole(said.retraining()))[1],
            gather,
        )
    finally:
        model.train(mode)
        set_random_state(before)


def _refuse_unreadable(name: str, batches: Any) -> None:
    if isinstance(batches, Iterator):
        raise AspError(f"prune_trainer: {name}: an iterator can be read only once; give a DataLoader or a list")
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise AspError(f"prune_trainer: {name}: a data set of single samples; give DataLoader(data, batch_size=...)")
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise AspError(f"prune_trainer: {name}: expected batches (a DataLoader, a list), got {type(batches).__name__}")


def _length(train: Any, said: Recipe, section: Training) -> int | None:
    """Batches in an epoch; None where `train` has no length and `section` says in steps how long to train."""
    try:
        length = len(train)
    except TypeError:
        if section.max_steps is None:
            raise AspError("prune_trainer: train has no length; give max_steps, which is then its epoch") from None
        if "epochs" in said.train.model_fields_set | said.retrain.model_fields_set:
            raise AspError("prune_trainer: epochs: train has no length, so max_steps decides; leave it out") from None
        return None
    if length == 0:
        raise AspError("prune_trainer: train holds no batch (a DataLoader with drop_last=True and too few samples?)")
    return int(length)


def _endless(train: Any, epoch: int) -> Iterator[Batch]:
    """Pass after pass; the loop takes as much as it needs."""
    while True:
        set_epoch = getattr(getattr(train, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        empty = True
        for batch in train:
            empty = False
            yield batch
        if empty:
            raise AspError("prune_trainer: train yields no batch when read again; give something that can be read anew")


def _without_count(found: dict[str, float], test: Any) -> dict[str, float]:
    """A function's figures are not a mean over samples, so their number is no news."""
    return {name: value for name, value in found.items() if name != "samples"} if callable(test) else found


def _task_around(model: nn.Module, loss: Loss | None, judge: Judge | None) -> Task:
    """A task of the caller's own batches, and of the caller's own loss and evaluation where given."""
    arguments = inspect.signature(bare(model).forward).parameters.values()
    takes_labels = any(one.name == "labels" or one.kind is inspect.Parameter.VAR_KEYWORD for one in arguments)

    def outputs(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            left_out = () if loss is None or takes_labels else ("labels",)
            return model(**{key: value for key, value in batch.items() if key not in left_out}), batch.get("labels")
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            shown = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
            raise AspError(f"prune_trainer: expected batches of (inputs, targets) or dicts, got {shown}")
        return model(batch[0]), batch[1]

    def judged(found: Any, target: Any) -> Tensor:
        own = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        value = own if loss is None else loss(found, target)
        if loss is None and not isinstance(value, Tensor):
            raise AspError("prune_trainer: give loss=..., a function of (outputs, targets); the model returns no loss")
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise AspError(f"prune_trainer: loss: expected a tensor with one number, the batch's mean, got {shown}")
        return value.reshape(())

    def measure(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if judge is not None:
            found = numbers_of(judge(model))
            return {name: torch.tensor([value], dtype=torch.float64) for name, value in found.items()}
        found, target = outputs(model, batch)
        value = judged(found, target).detach().float()
        measured = {"loss": value.expand(find_batch_size(batch) or 1)}
        scores = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
        classes = isinstance(target, Tensor) and not target.is_floating_point() and target.ndim == 1
        if classes and isinstance(scores, Tensor) and scores.ndim == 2:
            measured["accuracy"] = (scores.argmax(1) == target).float()
        return measured

    return Task(
        kind="custom",
        build=lambda: copy.deepcopy(model),
        train=[],
        test=[],
        collate=list,
        loss=lambda model, batch, smoothing: judged(*outputs(model, batch)),
        measure=measure,
        forward=lambda model, batch: outputs(model, batch)[0],
        metric="loss",
    )
