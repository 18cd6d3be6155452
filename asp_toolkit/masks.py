"""MaskSet: the only sparsity state. A value the caller holds; nothing is attached to the model."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from asp_toolkit.errors import AspError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 18  # entries at a time: a piece stays in the second-level cache


def _sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    # Whoever sharded a tensor has imported its class; importing it here would cost everybody else half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def zero_dropped_(tensor: Tensor, mask: Tensor) -> None:
    """Write +0.0 into `tensor` wherever `mask` (bool, same shape, True keeps) is False.

    On a CPU the float's bits, read as an integer, are multiplied by 1 or 0: NaN and -1.0 become +0.0, as with
    `masked_fill_`, whose CPU kernel is not vectorised and takes about twenty times as long.
    """
    tensor, mask = _local(tensor), _local(mask)
    if tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.ndim == 0:
        tensor.masked_fill_(~mask, 0)
        return
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    rows = max(1, _PIECE * tensor.shape[0] // tensor.numel())
    for part, keep in zip(torch.split(bits, rows), torch.split(mask, rows), strict=True):
        part.mul_(keep.view(torch.int8))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if _sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself; of one that is spread over processes, all of it (every process must call)."""
    return tensor.full_tensor() if _sharded(tensor) else tensor


def bare(model: nn.Module) -> nn.Module:
    """The model itself, out of wrappers that rename parameters: of DDP, of averaging, of torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _placed(mask: Tensor, parameter: Tensor) -> Tensor:
    """`mask` where and as `parameter` is laid out: device, strides, shards."""
    if _sharded(parameter):
        if _sharded(mask):
            return mask
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            mask.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    if mask.device == parameter.device and mask.stride() == parameter.stride():
        return mask
    return torch.empty_like(parameter, dtype=torch.bool, requires_grad=False).copy_(mask)


@dataclass(frozen=True, eq=False)
class MaskSet:
    """Which entries of which parameters stay.

    masks:    parameter name -> bool tensor of the parameter's shape, True keeps (one byte a weight)
    skipped:  every other parameter's name -> why it stays dense
    patterns: parameter name -> the pattern its mask was made by, e.g. "2:4"; same keys as masks

    Names, not tensors, tie a mask to its parameter: a model that was moved, copied or reloaded is still matched.
    """

    masks: Mapping[str, Tensor]
    skipped: Mapping[str, str] = field(default_factory=dict)
    patterns: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(self.patterns.values()))
        return f"MaskSet({len(self.masks)} parameters masked ({kinds}), {len(self.skipped)} skipped)"

    def _pairs(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        parameters = dict(bare(model).named_parameters(remove_duplicate=False))
        for name, mask in self.masks.items():
            parameter = parameters.get(name)
            if parameter is None:
                raise AspError(f"mask for '{name}': the model has no such parameter; was it pruned as another model?")
            if parameter.shape != mask.shape:
                raise AspError(f"mask for '{name}': expected shape {tuple(mask.shape)}, got {tuple(parameter.shape)}")
            yield name, parameter, mask

    def placed_like(self, model: nn.Module) -> MaskSet:
        """The same masks on the devices, in the strides and in the shards of `model`'s parameters."""
        placed = {name: _placed(mask, parameter) for name, parameter, mask in self._pairs(model)}
        return MaskSet(placed, self.skipped, self.patterns)

    def apply_(self, model: nn.Module) -> None:
        """Set the dropped entries of the parameters to +0.0. To be called after every `optimizer.step()`."""
        for _, parameter, mask in self._pairs(model):
            zero_dropped_(parameter, _placed(mask, parameter))

    def zero_grads_(self, model: nn.Module) -> None:
        """Set the gradients of dropped entries to +0.0. To be called before clipping and before the optimizer."""
        for _, parameter, mask in self._pairs(model):
            if parameter.grad is not None:
                zero_dropped_(parameter.grad, _placed(mask, parameter))

    @contextmanager
    def held(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[MaskSet]:
        """Keep the masks true inside somebody else's training loop; nothing is left behind afterwards.

        Gradients of dropped entries are zeroed as soon as `backward` has accumulated them, so before any clipping;
        dropped weights are zeroed after each step of `optimizer`, or of every optimizer in the process that trains
        parameters of `model` when none is named (for a loop that makes its own).
        """
        placed = self.placed_like(model)
        placed.apply_(model)
        with ExitStack() as hooks:
            hooked: dict[str, nn.Parameter] = {}

            def watch_gradients() -> bool:
                new = False
                for name, parameter, mask in placed._pairs(model):
                    if hooked.get(name) is not parameter and parameter.requires_grad:
                        zero = _grad_hook(_placed(mask, parameter))
                        handle = parameter.register_post_accumulate_grad_hook(zero)  # type: ignore[no-untyped-call]
                        hooks.callback(handle.remove)
                        hooked[name] = parameter
                        new = True
                return new

            def ours(stepping: Optimizer) -> bool:
                mine = {id(parameter) for _, parameter, _ in placed._pairs(model)}
                return any(id(p) in mine for group in stepping.param_groups for p in group["params"])

            def before(stepping: Optimizer, *_: Any) -> None:
                # Averaging over processes happens after the gradient hook; parameters replaced meanwhile had none.
                if ours(stepping) and (watch_gradients() or isinstance(model, DistributedDataParallel)):
                    placed.zero_grads_(model)

            def after(stepping: Optimizer, *_: Any) -> None:
                if ours(stepping):
                    placed.apply_(model)

            watch_gradients()
            if optimizer is None:
                handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
            else:
                handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
            for handle in handles:
                hooks.callback(handle.remove)
            yield placed
        self.warn_of_changes(model, stacklevel=4)
        self.apply_(model)

    def warn_of_changes(self, model: nn.Module, stacklevel: int) -> None:
        """Warn where weights were changed behind the back of whoever holds the masks."""
        if moved := self.violations(model):
            warnings.warn(
                f"{', '.join(list(moved)[:3])}: changed outside any optimizer step, so the masks did not hold all the "
                "time; they do now, but what was measured in between was not this sparse model",
                stacklevel=stacklevel,
            )

    @torch.no_grad()
    def violations(self, model: nn.Module) -> dict[str, str]:
        """Parameter name -> what is wrong with it, for every parameter whose dropped entries are not all +0.0."""
        found = {}
        for name, parameter, mask in self._pairs(model):
            local = _local(parameter.detach())
            keep = _placed(mask, parameter)
            dropped = local.view(_BITS[local.element_size()])[~_local(keep)]
            if wrong := int(dropped.count_nonzero()):
                found[name] = f"{wrong} of {dropped.numel()} dropped entries are not +0.0"
        return found

    def density(self) -> dict[str, float]:
        """Parameter name -> kept share, a fraction in [0, 1]; of the whole parameter, also where masks are sharded."""
        return {name: int(whole(mask.sum())) / max(1, mask.numel()) for name, mask in self.masks.items()}

    def share(self) -> float:
        """Kept share of all masked entries together, a fraction in [0, 1]."""
        kept = sum(int(whole(mask.sum())) for mask in self.masks.values())
        return kept / max(1, sum(mask.numel() for mask in self.masks.values()))

    def save(self, path: Path) -> None:
        """Write as safetensors: bool masks; reasons, patterns and a hash of all of it in the header."""
        masks = {name: whole(mask).detach().cpu().contiguous() for name, mask in self.masks.items()}
        about = {"skipped": json.dumps(dict(self.skipped)), "patterns": json.dumps(dict(self.patterns))}
        header = json.dumps({**about, "sha256": _digest(masks, about)})
        save_file(masks, path, metadata={"asp_masks": header})  # one key: several are written in no fixed order

    @staticmethod
    def load(path: Path) -> MaskSet:
        """Read what `save` wrote.

        Raises:
            AspError: the file is missing, damaged, or holds something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = (file.metadata() or {}).get("asp_masks")
                if header is None:
                    raise AspError(f"{path}: expected a file of masks, got another safetensors file")
                about = json.loads(header)
                masks = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            skipped, patterns = json.loads(about["skipped"]), json.loads(about["patterns"])
            digest = about["sha256"]
        except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise AspError(f"{path}: cannot read masks: {error}") from error
        if any(mask.dtype != torch.bool for mask in masks.values()) or set(masks) != set(patterns):
            raise AspError(f"{path}: expected one bool mask and one pattern per parameter")
        if digest != _digest(masks, about):
            raise AspError(f"{path}: the masks do not match their hash; the file is damaged")
        return MaskSet(masks, skipped, patterns)


def _digest(masks: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    digest = hashlib.sha256(f"{about['skipped']}\n{about['patterns']}".encode())
    for name in sorted(masks):
        digest.update(f"\n{name} {tuple(masks[name].shape)} {masks[name].dtype}\n".encode())
        digest.update(masks[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _grad_hook(mask: Tensor) -> Callable[[Tensor], None]:
    def zero(parameter: Tensor) -> None:
        if parameter.grad is not None:
            zero_dropped_(parameter.grad, mask)

    return zero
