"""The row that a speed measurement leaves in a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field


@dataclass(frozen=True)
class SpeedRow:
    """One measurement: dense against sparse for one batch. Times are per call of the model, in milliseconds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Annotated[str, Field(description="what was measured, e.g. 'batch 32'")]
    batch: Annotated[int, Field(ge=1, description="samples per call")]
    inputs: Annotated[str, Field(description="shapes and dtypes of the input tensors, e.g. '32x1x28x28 float32'")]
    dtype: Annotated[str, Field(description="dtype of the models' floating-point weights")]
    device: Annotated[str, Field(description="torch device")]
    hardware: Annotated[str, Field(description="name of the processor or accelerator")]
    threads: Annotated[int, Field(ge=1, description="torch threads inside an operation")]
    torch: Annotated[str, Field(description="torch version")]
    rounds: Annotated[int, Field(ge=1, description="rounds measured; in each both models ran")]
    repeats: Annotated[int, Field(ge=1, description="calls timed together per model and round")]
    dense_ms: Annotated[float, Field(gt=0, description="dense: median time")]
    dense_ms_p10: Annotated[float, Field(gt=0, description="dense: 10th percentile")]
    dense_ms_p90: Annotated[float, Field(gt=0, description="dense: 90th percentile")]
    sparse_ms: Annotated[float, Field(gt=0, description="sparse: median time")]
    sparse_ms_p10: Annotated[float, Field(gt=0, description="sparse: 10th percentile")]
    sparse_ms_p90: Annotated[float, Field(gt=0, description="sparse: 90th percentile")]
    speedup: Annotated[
        float, Field(gt=0, description="median of the rounds' dense / sparse time; above 1 sparse is faster")
    ]
    speedup_p10: Annotated[float, Field(gt=0, description="10th percentile of that ratio")]
    speedup_p90: Annotated[float, Field(gt=0, description="90th percentile of that ratio")]
    dense_per_second: Annotated[float, Field(gt=0, description="dense: samples per second at the median")]
    sparse_per_second: Annotated[float, Field(gt=0, description="sparse: samples per second at the median")]
    backends: Annotated[dict[str, str], Field(description="sparse layer -> the kernel backend that it ran with")]
