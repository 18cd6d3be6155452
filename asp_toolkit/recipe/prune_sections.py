"""What a recipe says of pruning: which layers, by which pattern and score, and how the masks come about."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.section import Section


def _pattern(text: str) -> str:
    from asp_toolkit.patterns import parse  # here, so that explaining a recipe does not wait for torch

    if ":" in text and not re.match(r"\s*\d", text):
        return text  # package.module:name is imported when the recipe runs, not when it is read
    try:
        parse(text)
    except AspError as error:
        raise ValueError(str(error)) from error
    return text


class PruneRule(Section):
    """Which layers get which pattern."""

    include: list[str] = Field(
        default_factory=lambda: ["*"],
        min_length=1,
        description="layer names as globs (layer1.*) or layer types (Linear, Conv2d)",
    )
    exclude: list[str] = Field(default_factory=list, description="as include; wins over it")
    pattern: str = Field(
        default="2:4",
        description="which entries may stay: 2:4 (N of every M along the contraction axis), 2:4 transposable, "
        "unstructured 0.9 [per row | global], block 16x16 0.8, 64:2:8 (V:N:M), or package.module:name",
    )
    score: str = Field(
        default="magnitude",
        description="how much an entry matters: magnitude, taylor, fisher, movement, activation_norm, or "
        "package.module:function",
    )

    @field_validator("pattern")
    @classmethod
    def _pattern_exists(cls, text: str) -> str:
        return _pattern(text)

    @field_validator("score")
    @classmethod
    def _score_exists(cls, name: str) -> str:
        from asp_toolkit.scores import SCORES  # here for the same reason

        if name not in SCORES and ":" not in name:
            raise ValueError(
                f"unknown score {name!r}; {closest(name, SCORES)} Or name your own: package.module:function"
            )
        return name


class OneShot(Section):
    """Prune once, then hold the masks: the paper's rule (arXiv 2104.08378)."""

    name: Literal["one_shot"] = Field(
        default="one_shot", description="one_shot prunes once and holds the masks; the others change them on the way"
    )


class Gradual(Section):
    """From dense to each rule's pattern while retraining, by the cubic of arXiv 1710.01878."""

    name: Literal["gradual"] = Field(description="from dense to the pattern while retraining, fast first, then slower")
    begin: float = Field(default=0.0, ge=0, lt=1, description="share of the retraining after which pruning begins")
    end: float = Field(default=0.6, gt=0, le=1, description="share of the retraining after which it is reached")
    every: int | None = Field(
        default=None, gt=0, description="optimizer steps between two prunings; left out: a tenth of the way"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Gradual:
        if self.begin >= self.end:
            raise ValueError(f"begin {self.begin} must be less than end {self.end}")
        return self


class Steps(Section):
    """Other patterns on the way, each from a given step of the retraining on."""

    name: Literal["steps"] = Field(description="other patterns on the way, each from a given step on")
    at: dict[str, str] = Field(
        min_length=1,
        description="optimizer step -> pattern from there on, e.g. {0: 3:4, 1000: 2:4}; the last is the rules' own",
    )

    @field_validator("at")
    @classmethod
    def _patterns_exist(cls, at: dict[str, str]) -> dict[str, str]:
        for step, text in at.items():
            if not re.fullmatch(r"[0-9]{1,12}", step):
                raise ValueError(f"expected a number of optimizer steps before each pattern, got {step!r}: {text}")
            _pattern(text)
        return dict(sorted(at.items(), key=lambda item: int(item[0])))


class StraightThrough(Section):
    """SR-STE (arXiv 2102.04010): dropped weights train on unseen, and masks follow the weights."""

    name: Literal["straight_through"] = Field(description="dropped weights go on training unseen and may come back")
    decay: float = Field(default=2e-4, ge=0, description="pull of dropped weights to zero, added to their gradients")
    every: int = Field(default=1, gt=0, description="optimizer steps between two choices of the masks")
    hysteresis: float = Field(
        default=0.0, ge=0, description="a dropped weight must outdo a kept one by this share to take its place"
    )
    until: float = Field(default=1.0, gt=0, le=1, description="share of the retraining after which the masks stay")


class RigL(Section):
    """RigL (arXiv 1911.11134): now and then the weakest kept weights give way to those with the steepest gradients."""

    name: Literal["rigl"] = Field(description="weak weights give way to dropped ones with steep gradients")
    every: int | None = Field(
        default=None, gt=0, description="optimizer steps between two exchanges; left out: 100, or a tenth of the way"
    )
    fraction: float = Field(
        default=0.3, gt=0, le=1, description="share of kept weights exchanged at first; falls to 0 by a cosine"
    )
    until: float = Field(default=0.75, gt=0, le=1, description="share of the retraining after which the masks stay")


class OwnSchedule(Section):
    """A schedule of one's own."""

    name: Literal["callable"] = Field(description="a schedule of your own")
    call: str = Field(
        pattern=r"^[\w.]+:[\w.]+$",
        description="package.module:name of (total steps, **options) -> function: step -> pattern, or null to keep it",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="its further arguments")


ScheduleSection = Annotated[
    OneShot | Gradual | Steps | StraightThrough | RigL | OwnSchedule, Field(discriminator="name")
]


class Calibration(Section):
    """Data for scores that look at more than the weights."""

    batches: int = Field(default=16, gt=0, description="training batches that gradients and activations are taken from")


class PruneSection(Section):
    """Pruning, between dense training and retraining."""

    rules: list[PruneRule] = Field(
        default_factory=lambda: [PruneRule()],
        min_length=1,
        description="a layer may match one rule only; a layer that matches none stays dense",
    )
    schedule: OneShot | Gradual | Steps | StraightThrough | RigL | OwnSchedule = Field(
        default_factory=OneShot, discriminator="name", description="how masks come about in the retraining"
    )
    calibration: Calibration = Field(
        default_factory=Calibration, description="for scores that need gradients or activations; else unused"
    )

    @model_validator(mode="before")
    @classmethod
    def _schedule_by_its_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("schedule"), str):
            return {**data, "schedule": {"name": data["schedule"]}}
        return data
