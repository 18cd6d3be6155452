"""A transformers Trainer. Nothing here imports transformers: whoever has a Trainer has it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from asp_toolkit.calibration import calibrate
from asp_toolkit.errors import AspError
from asp_toolkit.pruning import Rule
from asp_toolkit.schedules import Keeper, held
from asp_toolkit.scores import Stats
from asp_toolkit.trainer.story import Phases


def is_hf_trainer(thing: Any) -> bool:
    """Whether it is a transformers Trainer or of a class derived from it."""
    return _base(thing) is not None


def _base(trainer: Any) -> Any:
    kinds = (kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    return next((kind for kind in kinds if kind.__module__.startswith("transformers.")), None)


def hf_phases(trainer: Any, trained: bool) -> Phases:
    """`trainer.train()` twice, the second time with the masks held, with a fresh optimizer, in a folder of its own.

    Raises:
        AspError: what the Trainer was made with rules this out.
    """
    _refuse(trainer, trained)

    def dense() -> None:
        trainer.train()

    def retrained(schedule: Callable[[int | None, bool], Keeper]) -> None:
        with _as_new(trainer), held(schedule(_steps(trainer), False), trainer.model):
            trainer.train()

    def gather(rules: Sequence[Rule], batches: int) -> Mapping[str, Stats]:
        def loss(model: nn.Module, batch: Any) -> Any:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(model, trainer._prepare_inputs(batch))

        return calibrate(trainer.model, rules, islice(trainer.get_train_dataloader(), batches), loss)

    return Phases(
        lambda: trainer.model,
        dense,
        retrained,
        lambda: trainer.evaluate(),
        lambda: _steps(trainer),
        gather,
        _save_with(trainer),
    )


def _steps(trainer: Any) -> int | None:
    """Optimizer steps of a `trainer.train()`; None where its data has no length and no max_steps is given."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        batches = len(trainer.get_train_dataloader())
    except TypeError:
        return None
    epochs: float = args.num_train_epochs
    accumulate: int = args.gradient_accumulation_steps
    return math.ceil(epochs * max(1, math.ceil(batches / accumulate)))


def _refuse(trainer: Any, trained: bool) -> None:
    where = "prune_trainer(trainer)"
    if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
        raise AspError(f"{where}: under DeepSpeed and FSDP the optimizer holds other tensors than the model")
    for data, loader in (("train_dataset", "get_train_dataloader"), ("eval_dataset", "get_eval_dataloader")):
        if getattr(trainer, data, None) is None and not _overrides(trainer, loader):
            raise AspError(f"{where}: the Trainer has no {data}; give it one")
    stepped = trainer.state.global_step > 0
    if stepped and not trained:
        raise AspError(f"{where}: the Trainer has trained already; say trained=True to start with pruning")
    if not (_made_its_scheduler(trainer, stepped) and _made_its_optimizer(trainer, stepped)):
        raise AspError(
            f"{where}: the Trainer was given its optimizer or scheduler, but retraining needs fresh ones; let it make "
            "them (TrainingArguments(optim=..., lr_scheduler_type=...), or Trainer(optimizer_cls_and_kwargs=...))"
        )


def _overrides(trainer: Any, *methods: str) -> bool:
    return any(getattr(type(trainer), method) is not getattr(_base(trainer), method) for method in methods)


def _made_its_scheduler(trainer: Any, stepped: bool) -> bool:
    if trainer.lr_scheduler is None or _overrides(trainer, "create_scheduler", "create_optimizer_and_scheduler"):
        return trainer.lr_scheduler is None or stepped
    return bool(getattr(trainer, "_created_lr_scheduler", False))


def _made_its_optimizer(trainer: Any, stepped: bool) -> bool:
    """A Trainer does not note who made its optimizer; one like those it makes can be made again."""
    if trainer.optimizer is None or not stepped:
        return trainer.optimizer is None
    if _overrides(trainer, "create_optimizer", "create_optimizer_and_scheduler"):
        return True
    given = trainer.optimizer_cls_and_kwargs
    kind, arguments = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # out of accelerate's wrapper
    if not isinstance(kind, type) or not issubclass(type(optimizer), kind):
        return False
    return all(optimizer.defaults[key] == value for key, value in arguments.items() if key in optimizer.defaults)


@contextmanager
def _as_new(trainer: Any) -> Iterator[None]:
    """The Trainer as if it had not trained, around the weights that it has; writing to OUTPUT_DIR/retrained."""
    args, model_init = trainer.args, trainer.model_init
    trainer.args = copy.copy(args)
    trainer.args.output_dir = str(Path(args.output_dir) / "retrained")
    trainer.model_init = None  # train() would begin with other weights
    trainer.optimizer = trainer.lr_scheduler = None  # it makes fresh ones: the rule of arXiv 2104.08378
    try:
        yield
    finally:
        trainer.args, trainer.model_init = args, model_init


def _save_with(trainer: Any) -> Callable[[Path, nn.Module], None]:
    """Beside the weights: the tokenizer or processor, as the Trainer's own checkpoints have it."""

    def write(folder: Path, model: nn.Module) -> None:
        processing = getattr(trainer, "processing_class", None) or getattr(trainer.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)

    return write
