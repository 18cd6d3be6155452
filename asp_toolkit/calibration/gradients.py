"""Statistics of gradients, gathered after each backward pass: of calibration batches, or of the training itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.masks import bare, whole
from asp_toolkit.pruning import Chosen
from asp_toolkit.scores import Stats, needs_of, wide

GRADIENT_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gradient_abs": lambda weight, gradient: gradient.abs(),
    "gradient_square": lambda weight, gradient: gradient.square(),
    "movement": lambda weight, gradient: -weight * gradient,
}
"""Name -> what one batch adds: (weight, its gradient) -> a tensor of the same shape."""


class GradientStats:
    """What the scores of `chosen` need of gradients: one (rows, cols) tensor per parameter and statistic.

    Means over batches are kept, not sums: a sum in float32 that has grown large no longer sees what one batch adds.

    Memory: 4 bytes a weight for every statistic (8 for float64 weights), on the parameter's device, and while updating
    about three times that for one parameter at a time. Of a parameter that is spread over processes, each has all.
    """

    def __init__(self, chosen: Mapping[str, Chosen]) -> None:
        self._views = {name: one.view for name, one in chosen.items()}
        self._needs = {
            name: needed
            for name, one in chosen.items()
            if (needed := tuple(need for need in needs_of(one.score) if need in GRADIENT_STATISTICS))
        }
        self._means: dict[str, dict[str, Tensor]] = {}
        self._batches: dict[str, int] = {}
        self._updates = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients are needed."""
        return tuple(self._needs)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Count the gradients that `model` has now, as one batch. To be called after `backward`, before clipping.

        Gradients must be unscaled (mixed precision). A parameter without a gradient is not counted this time. What
        overflows becomes half the largest finite number. Where parameters are spread over processes, all must call.

        Raises:
            AspError: a gradient is NaN or infinite; nothing is counted then.
        """
        known = dict(bare(model).named_parameters(remove_duplicate=False))
        if missing := next((name for name in self._needs if name not in known), None):
            raise AspError(
                f"gradients of '{missing}': the model has no such parameter; was it chosen in another model?"
            )
        parameters = {name: known[name] for name in self._needs if known[name].grad is not None}
        self._refuse_not_finite(parameters)
        for name, parameter in parameters.items():
            to, view = wide(parameter.dtype), self._views[name]
            weight, gradient = (view.matrix(one).to(to) for one in (whole(parameter.detach()), _gradient(parameter)))
            means = self._means.setdefault(name, {})
            self._batches[name] = count = self._batches.get(name, 0) + 1
            for need in self._needs[name]:
                new = _finite(GRADIENT_STATISTICS[need](weight, gradient))
                # Not in place: what `stats` gave away does not change.
                means[need] = new if count == 1 else torch.lerp(means[need].to(new.device), new, 1 / count)
        self._updates += 1

    def _refuse_not_finite(self, parameters: Mapping[str, nn.Parameter]) -> None:
        fine = {name: torch.isfinite(_gradient(parameter)).all() for name, parameter in parameters.items()}
        by_device: dict[torch.device, list[str]] = {}
        for name, one in fine.items():
            by_device.setdefault(one.device, []).append(name)
        for names in by_device.values():  # the device is waited for once, not once per parameter
            for name, is_fine in zip(names, torch.stack([fine[name] for name in names]).tolist(), strict=True):
                if not is_fine:
                    raise AspError(
                        f"the gradient of '{name}' has NaN or infinite entries in batch {self._updates} (the first is "
                        "0); leave that batch out, or scale the loss down"
                    )

    @torch.no_grad()
    def stats(self) -> dict[str, Stats]:
        """Parameter name -> its statistics by name, over all batches so far.

        Raises:
            AspError: a parameter never had a gradient.
        """
        for name in self._needs:
            if name not in self._batches:
                raise AspError(
                    f"'{name}' had no gradient in any of {self._updates} batches, which its score needs: it is frozen "
                    "or unused in the loss; exclude it, or give it a rule with the score magnitude"
                )
        return {
            name: {
                need: _finite(mean * self._batches[name]) if need == "movement" else mean
                for need, mean in means.items()
            }
            for name, means in self._means.items()
        }

    def state(self) -> dict[str, Any]:
        """Everything counted so far, for a checkpoint."""
        means = {name: dict(means) for name, means in self._means.items()}
        return {"means": means, "batches": dict(self._batches), "updates": self._updates}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._means = {name: dict(means) for name, means in state["means"].items()}
        self._batches, self._updates = dict(state["batches"]), int(state["updates"])


def _finite(tensor: Tensor) -> Tensor:
    largest = torch.finfo(tensor.dtype).max / 2  # half, so that differences are finite too
    return tensor.clamp_(-largest, largest)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    gradient = whole(parameter.grad.detach())
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
