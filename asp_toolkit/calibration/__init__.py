"""What scores need besides the weights, gathered from batches: statistics of gradients and of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from asp_toolkit.calibration.gradients import GRADIENT_STATISTICS, GradientStats
from asp_toolkit.calibration.inputs import INPUT_STATISTICS, InputStats
from asp_toolkit.calibration.layer_inputs import LAYER_INPUTS
from asp_toolkit.calibration.state import as_before
from asp_toolkit.errors import AspError, closest
from asp_toolkit.pruning import Chosen, Rule, choose
from asp_toolkit.scores import Stats, needs_of

__all__ = ["LAYER_INPUTS", "GradientStats", "InputStats", "calibrate"]

Batch = TypeVar("Batch")


def calibrate(
    model: nn.Module, rules: Sequence[Rule], batches: Iterable[Batch], loss: Callable[[nn.Module, Batch], Tensor]
) -> dict[str, Stats]:
    """What the scores of `rules` need of `model`: for `prune(model, rules=rules, stats=...)`.

    Runs every batch once, in eval mode. Afterwards the model is as before, with its gradients, modes, buffers and
    frozen parameters, and so is the process's random state. The same batches give the same statistics, as far as the
    model itself computes the same twice.

    batches: whatever `loss` understands; of a generator, what is left of it. Each counts as much as any other.
    loss:    (model, batch) -> the loss of the batch, a scalar. It moves the batch to the model's device. There is a
             backward pass only where a score needs gradients.

    Returns:
        Parameter name -> its statistics by name (see `scores`), only for parameters whose score needs some. Without
        any, the batches are not touched.

    Raises:
        AspError: as `choose`; there are no batches; a parameter has no gradient, or a layer's inputs cannot be known
            or were never seen; something is NaN or infinite; the loss is no scalar; a parameter whose gradient is
            needed is frozen under DistributedDataParallel.
    """
    chosen = choose(model, rules).chosen
    _refuse_unknown(chosen)
    gradients, inputs = GradientStats(chosen), InputStats(model, chosen)
    if not gradients.names and not inputs.names:
        return {}
    _refuse_not_averaged(model, {name: chosen[name] for name in gradients.names})
    add_up, count = _adding_up(model), 0
    with as_before(model, [chosen[name].parameter for name in gradients.names]):
        for batch in batches:
            with inputs.watching():
                value = loss(model, batch)
            if gradients.names:
                _backward(value, count)
                gradients.update(model)
                for parameter in model.parameters():
                    parameter.grad = None
            count += 1
        if count == 0:
            raise AspError("calibrate: there are no batches; a generator that was read before is empty")
        found: dict[str, dict[str, Tensor]] = {name: {} for name in chosen}
        for stats in (gradients.stats(), inputs.stats(add_up)):
            for name, one in stats.items():
                found[name].update(one)
    return {name: one for name, one in found.items() if one}


def _refuse_unknown(chosen: Mapping[str, Chosen]) -> None:
    known = (*GRADIENT_STATISTICS, *INPUT_STATISTICS)
    for name, one in chosen.items():
        for need in needs_of(one.score):
            if need not in known:
                raise AspError(f"the score of '{name}' needs an unknown statistic '{need}'; {closest(need, known)}")
        if needs_of(one.score) and one.parameter.is_meta:
            raise AspError(f"'{name}' is on the meta device, without values to calibrate with; load its weights first")


def _backward(value: object, batch: int) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise AspError(
            f"calibrate: expected a scalar tensor from the loss, got {got}; of an output, return output.loss"
        )
    if not value.requires_grad:
        raise AspError(
            f"calibrate: the loss of batch {batch} does not depend on any trainable parameter; was it detached, or "
            "computed under no_grad?"
        )
    value.backward()  # type: ignore[no-untyped-call]


def _refuse_not_averaged(model: nn.Module, chosen: Mapping[str, Chosen]) -> None:
    if isinstance(model, DistributedDataParallel):
        for name, one in chosen.items():
            if not one.parameter.requires_grad:
                raise AspError(
                    f"'{name}' is frozen, so DistributedDataParallel does not average its gradient over processes; "
                    "calibrate before wrapping, or let it be trainable"
                )


def _adding_up(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What adds up sums over all processes that share the work on `model`; all must have called the same layers."""
    if isinstance(model, DistributedDataParallel):
        groups = [model.process_group]
    else:
        meshes = {mesh for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None}
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]

    def add_up(sums: Tensor) -> Tensor:
        for group in groups:
            sums = sums.clone()
            distributed.all_reduce(sums, group=group)
        return sums

    return add_up
