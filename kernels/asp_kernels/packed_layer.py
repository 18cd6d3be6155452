"""What the sparse layers share: a packed weight as buffers, its state-dict names, the cached dense weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from asp_kernels.backends.cpu import stamp
from asp_kernels.formats import PackedNM, pack_codes, unpack
from asp_kernels.validate import FLOAT_DTYPES, check_codes, check_nm, check_packed_layout, code_bits


@dataclass(frozen=True)
class _Unpacked:
    """A dense weight, and what it was made from: holding that memory keeps its address from being given to another."""

    weight: Tensor
    values: Tensor
    codes: Tensor
    stamp: tuple[object, ...]


class PackedLayer(nn.Module):
    """What both layers share: buffers `values` and `codes` of a (rows, cols) N:M matrix, and their state-dict names."""

    values: Tensor
    codes: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        rows: int,
        cols: int,
        bias: bool,
        n: int,
        m: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_nm(n, m)
        if cols % m:
            raise ValueError(f"{n}:{m} needs a multiple of {m} columns, got {cols}")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"expected one of {[str(d) for d in FLOAT_DTYPES]}, got {dtype}")
        self.n, self.m, self.shape = n, m, (rows, cols)
        self._dense: _Unpacked | None = None
        places = torch.arange(n, dtype=torch.uint8, device=device).repeat(rows, cols // m)
        self.register_buffer("values", torch.zeros(rows, cols // m * n, device=device, dtype=dtype))
        self.register_buffer("codes", pack_codes(places, code_bits(m)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(rows, device=device, dtype=dtype)) if bias else None)

    def unpack(self) -> Tensor:
        """The dense weight in the layer's own shape, made anew."""
        return unpack(self.values, self.codes, self.n, self.m, self.shape[1])

    @property
    def weight(self) -> Tensor:
        """The dense weight, bit for bit; not a parameter: writing to it has no lasting effect."""
        if torch.compiler.is_compiling():
            return self.unpack()
        state = (*stamp(self.values), *stamp(self.codes))
        held = self._dense
        if held is None or held.stamp != state:
            with torch.inference_mode(False), torch.no_grad():
                held = _Unpacked(self.unpack(), self.values.detach(), self.codes.detach(), state)
            self._dense = held
        return held.weight

    def packed(self) -> PackedNM:
        """The weight as a PackedNM that shares this layer's memory."""
        return PackedNM(self.values, self.codes, self.shape, self.n, self.m)

    def adopt_(self, packed: PackedNM, bias: nn.Parameter | None) -> Self:
        """Share the memory of a valid `packed` and the parameter `bias`; returns this layer."""
        self.values, self.codes, self.bias = packed.values, packed.codes, bias
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dense": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("values", "codes"):
            destination[f"{prefix}weight.{name}"] = destination.pop(prefix + name)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        renamed = dict(state_dict)
        for name in ("values", "codes"):
            if f"{prefix}weight.{name}" in renamed:
                renamed[prefix + name] = renamed.pop(f"{prefix}weight.{name}")
        values, codes = renamed.get(prefix + "values"), renamed.get(prefix + "codes")
        if isinstance(values, Tensor) and isinstance(codes, Tensor):
            try:
                check_packed_layout(values, codes, self.shape, self.n, self.m)
                check_codes(codes, self.shape, self.n, self.m)
            except ValueError as error:
                error_msgs.append(f"{prefix}weight: {error}")
                return
        missing: list[str] = []
        super()._load_from_state_dict(renamed, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        names = {f"{prefix}{name}": f"{prefix}weight.{name}" for name in ("values", "codes")}
        missing_keys.extend(names.get(key, key) for key in missing)
        self._dense = None


def why_not_swap(module: nn.Module) -> str | None:
    """Why `module` cannot give way to a sparse layer, or None where it can."""
    if type(module) not in (nn.Linear, nn.Conv2d):
        return f"no sparse layer stands for {type(module).__name__} (a subclass may compute something else)"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks):
        return "it has hooks, which would be lost; remove them first"
    return None


def refuse_swap(module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ValueError unless `module` is exactly a `kind` that can be swapped."""
    reason = why_not_swap(module) or (None if type(module) is kind else f"expected {kind.__name__}")
    if reason:
        raise ValueError(f"{type(module).__name__}: {reason}")
