"""Entry: one pruned parameter as a manifest describes it. Nothing that a file says is imported or believed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM, Pattern, parse

Size = Annotated[int, Field(ge=0, le=1 << 40)]
Sizes = Annotated[list[Size], Field(min_length=2, max_length=16)]

_MOST_ENTRIES = 1 << 50
_WITH_COLON = re.compile(r"\s*[0-9]+(\s*:\s*[0-9]+){1,2}(\s+[a-z]+)*\s*")


class Strict(BaseModel):
    """Exactly these keys, of exactly these types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def known_pattern(text: str, given: Mapping[str, Pattern] | None = None) -> Pattern | None:
    """The pattern that a file or a MaskSet names: a built-in one, or of package.module:name the one in `given`.

    Such a name is never imported here, and gives None: whoever wrote the file would choose what runs on this machine.

    Raises:
        AspError: there is no such pattern.
    """
    if ":" in text and not _WITH_COLON.fullmatch(text):  # a built-in name has its colons between numbers
        return (given or {}).get(text)
    return parse(text)


def not_built_in(text: str) -> str:
    """What is said of a pattern that `known_pattern` does not import."""
    return (
        f"pattern '{text}' is not built in, and code that a file names is not run: the zeros cannot be checked "
        f"against it; verify(..., patterns={{'{text}': ...}}) takes the pattern itself"
    )


class Entry(Strict):
    """One pruned parameter.

    pattern:  as a recipe spells it, e.g. "2:4"
    shape:    the parameter's
    split:    the shape that `order` speaks of: `shape` with dimensions split in two; absent where none is split
    order, row_dims: the permutation of `split` that makes it a (rows, contraction) matrix, and how many of its
              dimensions are rows: matrix = parameter.reshape(split).permute(order).reshape(rows, cols)
    axis:     order[-1], the dimension of `split` along which groups run
    run:      entries of the contraction that groups must not cross; absent where it is the length of `axis`
    also:     the N:M that a pattern which is not built in holds too, so that it can be packed; absent otherwise
    density:  share of entries that are not zero
    dtype:    e.g. "bfloat16"
    """

    pattern: str = Field(max_length=1000)
    shape: Sizes
    axis: int
    order: list[int]
    row_dims: int
    density: float = Field(ge=0, le=1)
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    split: Sizes | None = None
    run: Size | None = None
    also: str | None = Field(default=None, max_length=20)

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        dims = len(self.dims)
        if math.prod(self.dims) != math.prod(self.shape):
            raise ValueError(f"split {self.split} has not as many entries as shape {self.shape}")
        if math.prod(self.shape) > _MOST_ENTRIES:
            raise ValueError(f"shape {self.shape} has more entries than any parameter")
        if sorted(self.order) != list(range(dims)) or not 1 <= self.row_dims < dims or self.axis != self.order[-1]:
            raise ValueError(
                f"order {self.order}, row_dims {self.row_dims}, axis {self.axis} do not suit {dims} dimensions"
            )
        try:
            patterns = [found for found in (known_pattern(self.pattern), self.nm) if found is not None]
        except AspError as error:
            raise ValueError(str(error)) from error
        if self.cols and (self.groups_run < 1 or self.cols % self.groups_run):
            raise ValueError(f"run {self.run} does not divide the {self.cols} columns")
        for pattern in patterns:
            if reason := pattern.why_not(self.rows, self.cols, self.groups_run):
                raise ValueError(f"{pattern.name} does not fit shape {self.shape}: {reason}")
        return self

    @property
    def dims(self) -> list[int]:
        """The shape that `order` speaks of."""
        return self.shape if self.split is None else self.split

    @property
    def groups_run(self) -> int:
        """Entries of the contraction that are consecutive: groups do not cross a multiple of it."""
        return self.dims[self.axis] if self.run is None else self.run

    @property
    def nm(self) -> NM | None:
        """The N:M that it is packed by; None where its pattern is none, and it is stored as an ordinary tensor.

        Raises:
            AspError: `also` is no N:M, or stands beside a built-in pattern.
        """
        pattern = known_pattern(self.pattern)
        if self.also is None:
            return None if pattern is None else getattr(pattern, "nm", None)
        also = known_pattern(self.also)
        if pattern is not None or not isinstance(also, NM):
            raise AspError(f"also: expected N:M, beside a pattern that is not built in; got {self.also!r}")
        return also

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return math.prod(self.dims[d] for d in self.order[: self.row_dims])

    @property
    def cols(self) -> int:
        """Length of the contraction."""
        return math.prod(self.dims[d] for d in self.order[self.row_dims :])

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape -> (rows, cols)."""
        return tensor.reshape(self.dims).permute(self.order).reshape(self.rows, self.cols)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """(rows, cols) -> the parameter's shape."""
        permuted = matrix.reshape([self.dims[d] for d in self.order])
        return permuted.permute([self.order.index(d) for d in range(len(self.order))]).reshape(self.shape)
