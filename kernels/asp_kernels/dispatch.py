"""Which backend runs an operation, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asp_kernels.backends import reference
from asp_kernels.formats import CSR, PackedNM

OPS = ("linear_24", "conv_24", "spmm", "sddmm", "sparse_softmax")

WHY_NOT: Mapping[str, Callable[[str], str | None]] = {
    "reference": reference.why_not,
}
"""Backends, fastest first: operation -> why it does not run it, or None."""


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
    "linear_24": "dense product with the unpacked weight: no sparse kernel here is faster",
    "conv_24": "dense convolution with the unpacked weight: no sparse kernel here is faster",
    "spmm": "row by row over stored entries",
    "sddmm": "dot products at stored entries",
    "sparse_softmax": "row by row over stored entries",
}


def choose(op: str) -> Choice:
    """The first backend that runs `op`, with the refusals of those before it.

    Raises:
        ValueError: there is no such operation.
    """
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}; choose from {', '.join(OPS)}")
    refusals: dict[str, str] = {}
    for name, why_not in WHY_NOT.items():
        reason = why_not(op)
        if reason is None:
            return Choice(op, name, _HOW[op], refusals)
        refusals[name] = reason
    raise ValueError(f"{op}: no backend runs it: {refusals}")


def operation(weight: PackedNM | CSR) -> str:
    """The operation that multiplies activations by `weight`."""
    return "spmm" if isinstance(weight, CSR) else "linear_24"
