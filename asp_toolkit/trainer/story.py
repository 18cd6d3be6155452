"""The order of events, whoever trains; and what is left at the end."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.exporters import export
from asp_toolkit.masks import MaskSet
from asp_toolkit.patterns import Pattern
from asp_toolkit.progress import Progress, figures
from asp_toolkit.pruning import Rule, prune, resolve_pattern, resolve_score
from asp_toolkit.recipe.schema import PruneSection
from asp_toolkit.schedules import Keeper, check_reached, check_schedule, dense_weights, keeper_for
from asp_toolkit.scores import Stats, needs_of

Figures = Mapping[str, Any]
"""Figures by name, as somebody's evaluation returns them."""

_BESIDE_THE_POINT = ("runtime", "per_second", "preparation_time", "samples", "epoch", "seconds", "steps", "tokens")
_NAMES_SHOWN = 4
_MANY = 1 << 40  # optimizer steps, where their number is not known yet


@dataclass(frozen=True)
class Phases:
    """How one kind of caller trains and evaluates.

    model:     () -> the model; asked again after the dense training
    dense:     () -> trains it; figures where it has evaluated already, else None
    retrained: schedule -> trains it again, kept sparse by `schedule(optimizer steps or None, whether zeros stay)`
    evaluate:  () -> figures
    steps:     () -> optimizer steps of the retraining; None where only the dense training will tell
    gather:    (rules, number of batches) -> statistics for scores that need more than weights; None where it cannot
    save_with: as of `export`
    """

    model: Callable[[], nn.Module]
    dense: Callable[[], Figures | None]
    retrained: Callable[[Callable[[int | None, bool], Keeper]], Figures | None]
    evaluate: Callable[[], Figures]
    steps: Callable[[], int | None]
    gather: Callable[[Sequence[Rule], int], Mapping[str, Stats]] | None = None
    save_with: Callable[[Path, nn.Module], None] | None = None


@dataclass(frozen=True, repr=False)
class PruneResult:
    """What `prune_trainer` leaves. `print(result)` shows it.

    model:   the pruned and retrained model, the same object that was given
    masks:   its MaskSet
    metrics: "dense", "pruned", "retrained" -> figures by name
    """

    model: nn.Module
    masks: MaskSet
    metrics: Mapping[str, Mapping[str, float]]
    _save_with: Callable[[Path, nn.Module], None] | None = field(default=None, compare=False)
    _patterns: Mapping[str, Pattern] = field(default_factory=dict, compare=False)

    @property
    def skipped(self) -> Mapping[str, str]:
        """Parameter name -> why it stays dense."""
        return self.masks.skipped

    def export(self, folder: str | Path, format: str = "dense") -> Path:
        """Write the model as a checkpoint: "dense" loads everywhere, "packed" is the small one."""
        return export(self.model, self.masks, Path(folder), format, save_with=self._save_with, patterns=self._patterns)

    def __str__(self) -> str:
        masks = self.masks.masks
        kept, total = sum(int(mask.sum()) for mask in masks.values()), sum(mask.numel() for mask in masks.values())
        lines = [f"{phase:<10} {figures(telling(found))}" for phase, found in self.metrics.items()]
        lines += [f"{_many(len(masks), 'parameter')} pruned ({', '.join(sorted(set(self.masks.patterns.values())))})"]
        lines[-1] += f": {kept:,} of their {total:,} entries kept, {kept / max(1, total):.1%}"
        return "\n".join([*lines, *(f"  dense: {line}" for line in _by_reason(self.skipped))])

    __repr__ = __str__  # a notebook shows the repr of a cell's last value: not thousands of mask entries


def tell(phases: Phases, rules: Sequence[Rule], pruning: PruneSection, trained: bool, quiet: bool) -> PruneResult:
    """Train, prune once, train again with the masks held or as the schedule has it; evaluate after each."""
    total = phases.steps()
    to_be_counted = total is None and not trained
    check_schedule(pruning.schedule, phases.model(), rules, _MANY if to_be_counted else total)  # before the expensive
    needing = [rule for rule in rules if needs_of(resolve_score(rule.score))]
    if needing and phases.gather is None:
        raise AspError(
            f"prune_trainer: score {needing[0].score!r} needs batches, which a train function keeps to itself; "
            "give train as batches and loss, or use magnitude"
        )
    progress = Progress(quiet)
    metrics: dict[str, dict[str, float]] = {}

    def record(phase: str, found: Figures | None = None) -> None:
        metrics[phase] = numbers_of(phases.evaluate() if found is None else found)
        progress.say(f"{phase:<10} {figures(telling(metrics[phase]))}")

    record("dense", None if trained else phases.dense())
    model = phases.model()
    stats = phases.gather(rules, pruning.calibration.batches) if needing and phases.gather is not None else None
    dense = dense_weights(model, rules)
    masks = prune(model, rules=rules, stats=stats)
    record("pruned")
    keepers: list[Keeper] = []

    def schedule(total: int | None, zeros_stay: bool) -> Keeper:
        keepers.append(keeper_for(pruning.schedule, model, rules, masks, dense, total, zeros_stay))
        return keepers[-1]

    record("retrained", phases.retrained(schedule))
    check_reached(keepers[-1].masks, masks)
    masks = keepers[-1].masks
    if wrong := masks.violations(model):
        said = "; ".join(f"{name}: {why}" for name, why in wrong.items())
        raise AspError(f"prune_trainer: masks do not hold after retraining: {said}")
    own = {pattern.name: pattern for pattern in (resolve_pattern(rule.pattern) for rule in rules)}
    return PruneResult(model, masks, metrics, phases.save_with, own)


def numbers_of(found: Any) -> dict[str, float]:
    """All numbers among somebody's figures, by name; one bare number is the "metric".

    Raises:
        AspError: there is no number.
    """
    given = found if isinstance(found, Mapping) else {"metric": found}
    read = {str(name): number for name, value in given.items() if (number := _number(value)) is not None}
    if not read:
        shown = f"none under {sorted(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
        raise AspError(
            f"prune_trainer: expected evaluate to return a number or a dict of numbers, got {shown}; "
            "the model keeps what it has learned: once evaluate is mended, trained=True goes on from here"
        )
    return read


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, numbers.Real) else None


def telling(found: Mapping[str, float]) -> dict[str, float]:
    """The figures that say how good the model is, without those of time and amount; all, where there are no others."""
    return {name: value for name, value in found.items() if not name.endswith(_BESIDE_THE_POINT)} or dict(found)


def _by_reason(skipped: Mapping[str, str]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(reason, []).append(name)
    for reason, same in names.items():
        if reason.startswith("vector"):
            yield f"{_many(len(same), 'vector')} (biases, norms)"
        else:
            more = f" and {len(same) - _NAMES_SHOWN} more" if len(same) > _NAMES_SHOWN else ""
            yield f"{', '.join(same[:_NAMES_SHOWN])}{more}: {reason}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
