"""How much each entry of a weight matters: the higher stays.

A score is a plain function of a (rows, cols) weight and, where it needs more than the weight, of statistics of that
weight by name. Every score but magnitude is computed in float32 (float64 for a float64 weight); what would overflow
becomes the largest finite number.

Statistics, (rows, cols) each, in the matrix form of the parameter; w and its gradient g are the parameter's own:

    gradient_abs     mean over batches of |g|
    gradient_square  mean over batches of g^2
    movement         -sum over batches of w g
    input_norm       L2 norm, over all samples and positions, of what each entry is multiplied with; (cols,) where
                     that is the same for all rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from asp_toolkit.errors import AspError

Stats = Mapping[str, Tensor]
"""Statistics of one parameter by name; None where the score needs none."""

Score = Callable[[Tensor, Stats | None], Tensor]
"""(rows, cols) weight, statistics -> (rows, cols) scores."""

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def needs(*statistics: str) -> Callable[[_Function], _Function]:
    """Marks a score that needs these statistics: whoever prunes by it gathers them first."""

    def mark(score: _Function) -> _Function:
        score.needs = statistics  # type: ignore[attr-defined]
        return score

    return mark


def needs_of(score: Callable[..., Tensor]) -> tuple[str, ...]:
    """Names of the statistics that `score` needs; () for a plain function."""
    while isinstance(score, partial):
        score = score.func
    return tuple(getattr(score, "needs", ()))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights of `dtype` are scored and their statistics kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistic(name: str, weight: Tensor, stats: Stats | None) -> Tensor:
    """The statistic `name`, where the weight is, in its `wide` dtype, of a shape that broadcasts to the weight's.

    Raises:
        AspError: it is missing, or has another shape.
    """
    if stats is None or name not in stats:
        raise AspError(
            f"the score needs the statistic '{name}', which was not gathered; prune(..., stats=calibrate(model, rules, "
            "batches, loss)) of asp_toolkit.calibration, or prune.calibration in a recipe, gathers it"
        )
    found = stats[name]
    if found.shape != weight.shape and (name != "input_norm" or found.shape != weight.shape[1:]):
        raise AspError(f"statistic '{name}': expected shape {tuple(weight.shape)}, got {tuple(found.shape)}")
    return found.detach().to(weight.device, wide(weight.dtype))


def _entries(weight: Tensor) -> Tensor:
    return weight.detach().to(wide(weight.dtype))


def _finite(scores: Tensor) -> Tensor:
    return scores.clamp_(max=torch.finfo(scores.dtype).max)


def magnitude(weight: Tensor, stats: Stats | None = None) -> Tensor:
    """|w|, in the weight's own dtype. Source: Han et al., arXiv 1506.02626."""
    return weight.detach().abs()


@needs("gradient_abs")
def taylor(weight: Tensor, stats: Stats | None = None) -> Tensor:
    """|w| mean|g|: how much the loss changes, to first order, when the entry becomes 0.

    Source: Molchanov et al., arXiv 1611.06440 and 1906.10771.
    """
    return _finite(_entries(weight).abs() * statistic("gradient_abs", weight, stats))


@needs("movement")
def movement(weight: Tensor, stats: Stats | None = None) -> Tensor:
    """-sum w g, signed: high where steps down the gradient moved the entry away from 0, whatever its size is now.

    Source: Sanh et al., arXiv 2005.07683.
    """
    return statistic("movement", weight, stats).clone()


@needs("gradient_square")
def fisher(weight: Tensor, stats: Stats | None = None) -> Tensor:
    """1/2 w^2 mean g^2: how much the loss rises, to second order, with the Fisher diagonal for the Hessian.

    g is the gradient of a batch, so batches of one sample give the empirical Fisher diagonal itself.
    Source: Theis et al., arXiv 1801.05787.
    """
    root = statistic("gradient_square", weight, stats).sqrt()
    return _finite((_entries(weight) * root).square_().mul_(0.5))  # not w * w * g2: w * w alone may overflow


@needs("input_norm")
def activation_norm(weight: Tensor, stats: Stats | None = None) -> Tensor:
    """|w| |x|: magnitude times the norm of what the entry is multiplied with. Source: Sun et al., arXiv 2306.11695."""
    return _finite(_entries(weight).abs() * statistic("input_norm", weight, stats))


SCORES: dict[str, Score] = {
    "magnitude": magnitude,
    "taylor": taylor,
    "movement": movement,
    "fisher": fisher,
    "activation_norm": activation_norm,
}
