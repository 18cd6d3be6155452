"""Which backend runs an operation, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from asp_kernels.backends import cpu, reference
from asp_kernels.formats import CSR, PackedNM

OPS = ("linear_24", "conv_24", "spmm", "sddmm", "sparse_softmax")

_LEAST = 1 << 16  # entries of a weight below which a call costs more than the product

# level, dtype -> (samples up to, form), measured by kernels/benchmarks/bench_linear_24.py; beyond the last, dense wins.
_FORMS: Mapping[tuple[str, torch.dtype], tuple[tuple[float, str], ...]] = {
    ("avx512", torch.float32): ((32, "decode"), (float("inf"), "batch")),
    ("avx512", torch.bfloat16): ((float("inf"), "decode"),),
    ("avx2", torch.float32): ((32, "decode"), (float("inf"), "batch")),
    ("avx2", torch.bfloat16): ((16, "decode"),),
}


_DENSE: ContextVar[bool] = ContextVar("asp_kernels_dense", default=False)


@contextmanager
def dense_only() -> Iterator[None]:
    """Inside, packed weights multiply by the dense product alone, whose bits are those of the dense layer."""
    token = _DENSE.set(True)
    try:
        yield
    finally:
        _DENSE.reset(token)


def form_24(x: Tensor, values: Tensor, n: int, m: int) -> tuple[str | None, str | None]:
    """How the CPU kernels multiply x by a 2:4 weight with these values: (form, None), or (None, why they do not).

    Forms: "decode" for few rows of x, "batch" for many.
    """
    if _DENSE.get():
        return None, "inside dense_only()"
    reason = cpu.why_not_24(x, values, n, m)
    if reason is not None:
        return None, reason
    if torch.is_grad_enabled() and (x.requires_grad or values.requires_grad):
        return None, "gradients are wanted, which the dense product gives"
    rows, cols = values.shape[0], values.shape[1] * 2
    if rows * cols < _LEAST:
        return None, f"a {rows} x {cols} weight is too small to gain: dense is faster"
    samples, level = x.numel() // max(1, cols), cpu.about()
    for most, form in _FORMS.get((level, values.dtype), ()):
        if samples <= most:
            return form, None
    return None, f"dense was measured faster for {samples} rows of {values.dtype} on {level}"


def _cpu(op: str, x: Tensor | None, weight: PackedNM | CSR | None) -> str | None:
    if op != "linear_24":
        return "it has no kernel for this operation"
    if x is None or not isinstance(weight, PackedNM):
        return cpu.library().refusal
    return form_24(x, weight.values, weight.n, weight.m)[1]


WHY_NOT: Mapping[str, Callable[[str, Tensor | None, PackedNM | CSR | None], str | None]] = {
    "cpu": _cpu,
    "reference": lambda op, x, weight: reference.why_not(op),
}
"""Backends, fastest first: operation, x and weight -> why it does not run it, or None.

Without x and weight: why it never does."""


@dataclass(frozen=True)
class Choice:
    """What runs an operation.

    op:       one of OPS
    backend:  the backend's name
    how:      what it will do, in words
    refusals: backend -> why it was passed over
    expected_ms: the measured time for such a shape, or None where nothing was measured
    """

    op: str
    backend: str
    how: str
    refusals: Mapping[str, str]
    expected_ms: float | None = None

    def __str__(self) -> str:
        time = "no measurement for this machine" if self.expected_ms is None else f"expected {self.expected_ms:.3f} ms"
        lines = [f"{self.op}: {self.backend} ({self.how}; {time})"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refusals.items()])


_HOW = {
    "cpu": "the packed weight, kept entries alone",
    "linear_24": "dense product with the unpacked weight: no sparse kernel here is faster",
    "conv_24": "dense convolution with the unpacked weight: no sparse kernel here is faster",
    "spmm": "row by row over stored entries",
    "sddmm": "dot products at stored entries",
    "sparse_softmax": "row by row over stored entries",
}


def choose(op: str, x: Tensor | None = None, weight: PackedNM | CSR | None = None) -> Choice:
    """The first backend that runs `op` on these operands, with the refusals of those before it.

    Without operands: the first that runs it on some.

    Raises:
        ValueError: there is no such operation.
    """
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}; choose from {', '.join(OPS)}")
    refusals: dict[str, str] = {}
    for name, why_not in WHY_NOT.items():
        reason = why_not(op, x, weight)
        if reason is None:
            return Choice(op, name, _how(op, name, x, weight), refusals)
        refusals[name] = reason
    raise ValueError(f"{op}: no backend runs it: {refusals}")


def _how(op: str, name: str, x: Tensor | None, weight: PackedNM | CSR | None) -> str:
    if name != "cpu":
        return _HOW[op]
    form = ""
    if x is not None and isinstance(weight, PackedNM):
        form = f", {form_24(x, weight.values, weight.n, weight.m)[0]} form"
    return f"{_HOW['cpu']}{form}, {cpu.about()}"


def operation(weight: PackedNM | CSR) -> str:
    """The operation that multiplies activations by `weight`."""
    return "spmm" if isinstance(weight, CSR) else "linear_24"
