"""What a recipe may say: typed, strict sections with their defaults and meanings.

Every field carries a `description`; `asp recipe explain` prints them. A field that names code takes
`package.module:name`; it is imported, never evaluated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from asp_toolkit.recipe.prune_sections import (
    Calibration,
    Gradual,
    OneShot,
    OwnSchedule,
    PruneRule,
    PruneSection,
    RigL,
    ScheduleSection,
    Steps,
    StraightThrough,
)
from asp_toolkit.recipe.section import Section
from asp_toolkit.recipe.task_sections import (
    Callable_,
    CallableData,
    FilesData,
    FolderData,
    HubData,
    ImageSource,
    ImageTask,
    ModelSpec,
    PackageData,
    QATask,
    SyntheticData,
    TaskSection,
    TextSource,
    TextTask,
    TorchvisionData,
    Transform,
)

__all__ = [
    "Calibration",
    "CallableData",
    "Callable_",
    "ExportSection",
    "FilesData",
    "FolderData",
    "Gradual",
    "HubData",
    "ImageSource",
    "ImageTask",
    "LrSchedule",
    "ModelSpec",
    "OneShot",
    "Optimizer",
    "OwnSchedule",
    "PackageData",
    "PruneRule",
    "PruneSection",
    "QATask",
    "Recipe",
    "RetrainSection",
    "RigL",
    "ScheduleSection",
    "Section",
    "Steps",
    "StraightThrough",
    "SyntheticData",
    "TaskSection",
    "TextSource",
    "TextTask",
    "TorchvisionData",
    "TrainSection",
    "Training",
    "Transform",
]


class Optimizer(Section):
    """The optimizer; norms, biases and other vectors are never decayed."""

    name: str = Field(default="sgd", description="sgd, adamw, or the name of a class in torch.optim")
    lr: float = Field(gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="on matrices and kernels only, not on norms and biases")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="sgd only")
    nesterov: bool | None = Field(default=None, description="sgd only; needs momentum")
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments of the optimizer, e.g. betas"
    )

    @model_validator(mode="after")
    def _of_one_kind(self) -> Optimizer:
        if self.name.lower() != "sgd" and (self.momentum is not None or self.nesterov is not None):
            raise ValueError(f"momentum and nesterov belong to sgd, not to {self.name}; leave them out")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum, e.g. momentum: 0.9")
        return self


class LrSchedule(Section):
    """The learning rate over the phase, as a share of optimizer.lr."""

    name: Literal["cosine", "one_cycle", "step", "linear", "constant"] = Field(
        default="cosine", description="its shape"
    )
    warmup: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of all steps spent rising linearly from 0 (one_cycle: where the peak stands, default 0.3)",
    )
    final: float = Field(default=0.0, ge=0, le=1, description="share of lr at the end (cosine, one_cycle, linear)")
    milestones: list[float] = Field(
        default_factory=list, description="step: epochs after which lr is multiplied by gamma"
    )
    every: float | None = Field(default=None, gt=0, description="step: instead of milestones, every so many epochs")
    gamma: float = Field(default=0.1, gt=0, le=1, description="step: the factor")

    @model_validator(mode="after")
    def _of_one_kind(self) -> LrSchedule:
        given = [key for key in ("milestones", "every") if getattr(self, key)]
        if self.name == "step" and len(given) != 1:
            raise ValueError("step needs either milestones, e.g. [30, 60], or every, e.g. 30")
        if self.name != "step" and given:
            raise ValueError(f"{given[0]} belongs to step, not to {self.name}; leave it out")
        return self


class Training(Section):
    """One phase of training."""

    epochs: float = Field(default=1.0, ge=0, description="passes over the data; parts allowed; 0 trains nothing")
    max_steps: int | None = Field(default=None, ge=0, description="stop after this many optimizer steps at the latest")
    batch_size: int = Field(
        default=128, gt=0, description="samples per optimizer step and process, before accumulation"
    )
    accumulate: int = Field(default=1, gt=0, description="batches whose gradients are added up for one optimizer step")
    eval_batch_size: int | None = Field(
        default=None, gt=0, description="samples per evaluation batch; null means batch_size"
    )
    optimizer: Optimizer = Field(description="the optimizer")
    schedule: LrSchedule = Field(default_factory=LrSchedule, description="the learning rate over time")
    clip_norm: float | None = Field(default=None, gt=0, description="largest gradient norm; null does not clip")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="share of the target spread over all classes")
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay per step of averaged weights, which are then what is evaluated and kept",
    )
    evaluate_every: float = Field(default=1.0, gt=0, description="epochs between evaluations; parts allowed")
    evaluate_first: int | None = Field(
        default=None, gt=0, description="also evaluate after so many steps, so that a broken set-up shows early"
    )
    checkpoint_every: float = Field(default=1.0, gt=0, description="epochs between checkpoints; parts allowed")
    log_every: int = Field(default=10, gt=0, description="optimizer steps between lines of the log")


class TrainSection(Training):
    """Dense training."""

    skip: bool = Field(
        default=False,
        description="the weights given in task.model.weights are trained already: only retrain repeats this section",
    )


class _Retraining(Section):
    """Retraining with the masks held. The paper's rule (arXiv 2104.08378): repeat the training of the dense phase."""

    repeat: Literal["train"] = Field(
        default="train", description="the section to repeat: its schedule from the start, fresh optimizer state"
    )
    control: bool = Field(
        default=False,
        description="also train the dense weights once more without masks, so that a gain of longer training "
        "is not taken for one of pruning",
    )


def _changes(of: type[Section], name: str, base: type[Section], doc: str) -> type[Section]:
    """`base` with the keys of `of`, all of them optional: null means as there."""
    fields: dict[str, Any] = {}
    for key, info in of.model_fields.items():
        inner: Any = info.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            inner = _changes(inner, f"{inner.__name__}Change", Section, f"What differs from train.{key}.")
        for constraint in info.metadata:
            inner = Annotated[inner, constraint]
        fields[key] = (inner | None, Field(default=None, description=f"{info.description}; left out: as in train"))
    return create_model(name, __base__=base, __doc__=doc, **fields)


if TYPE_CHECKING:
    RetrainSection = _Retraining  # what a type checker can see; the rest is read through Recipe.retraining()
else:
    RetrainSection = _changes(Training, "RetrainSection", _Retraining, _Retraining.__doc__)


class ExportSection(Section):
    """What is written when the network is ready."""

    formats: list[str] = Field(
        default_factory=lambda: ["dense", "packed"], description="dense loads everywhere; packed is the small one"
    )
    bench: bool = Field(default=True, description="measure dense against sparse speed for the report")


class Recipe(Section):
    """A whole run."""

    task: TaskSection = Field(description="model, data, metric")
    train: TrainSection = Field(description="dense training")
    prune: PruneSection = Field(default_factory=PruneSection, description="pruning")
    retrain: RetrainSection = Field(default_factory=RetrainSection, description="retraining with the masks held")
    export: ExportSection = Field(default_factory=ExportSection, description="files to write")
    seed: int = Field(default=0, ge=0, lt=2**32, description="same seed, same machine: same result")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="auto takes cuda where there is one"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="of the arithmetic (autocast); weights stay fp32"
    )

    def retraining(self) -> Training:
        """The retraining phase: `train` with what `retrain` changes. Another optimizer starts from its own defaults.

        Raises:
            pydantic.ValidationError: the merged section is not valid (another optimizer without its lr, say);
                `recipe.load` has checked this already.
        """
        merged = self.train.model_dump(exclude={"skip"})
        changes = self.retrain.model_dump(exclude={"repeat", "control"}, exclude_none=True)
        name = changes.get("optimizer", {}).get("name", self.train.optimizer.name)
        if name != self.train.optimizer.name:
            merged["optimizer"] = {}
        return Training.model_validate(_merge(merged, changes))


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`; a section of another name (another optimizer) shares no key with the one it replaces."""
    if changes.get("name", base.get("name")) != base.get("name"):
        return changes
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and key != "options"
        merged[key] = _merge(base[key], value) if both else value
    return merged
