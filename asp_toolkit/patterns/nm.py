"""N:M: keep N of every M consecutive entries (arXiv 2104.08378)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from asp_kernels import nm_mask, why_not_mask
from asp_toolkit.errors import AspError
from asp_toolkit.patterns.top import keep_top_, keys, piece_of

_RANKS_UP_TO = 8  # in wider groups a selection network takes fewer operations than comparing all pairs


@dataclass(frozen=True)
class NM:
    """Keep `n` of every `m` consecutive entries of a row: exactly the n highest scores, ties to the lower index."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m <= 64:
            raise AspError(f"pattern {self.n}:{self.m}: N:M keeps N of every M entries, with 1 <= N < M <= 64")

    @staticmethod
    def read(text: str) -> NM | None:
        """`text` as "2:4"; None where it is spelled otherwise."""
        found = re.fullmatch(r"([0-9]{1,9}) ?: ?([0-9]{1,9})", text)
        return NM(int(found[1]), int(found[2])) if found else None

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def nm(self) -> NM:
        return self

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        if rows == 0 or cols == 0 or run == 0:
            return "empty"
        if run % self.m:
            return f"contraction length {run} is not a multiple of {self.m}"
        return None

    def mask(self, scores: Tensor) -> Tensor:
        if scores.ndim != 2 or scores.shape[1] % self.m:
            raise ValueError(f"expected (rows, multiple of {self.m}) scores, got {tuple(scores.shape)}")
        if why_not_mask(scores, self.n, self.m) is None:
            return nm_mask(scores, self.n, self.m)
        groups = scores.detach().reshape(-1, self.m)  # (rows * cols / m, m)
        out = torch.empty(groups.shape, dtype=torch.bool, device=scores.device)
        top = _top_by_ranks_ if self.m <= _RANKS_UP_TO else _top_by_level_
        top(groups, self.n, out)
        return out.reshape(scores.shape)

    def density(self, rows: int, cols: int) -> float:
        return self.n / self.m

    def holds(self, mask: Tensor) -> bool:
        return mask.shape[1] % self.m == 0 and bool((mask.reshape(-1, self.m).sum(1) <= self.n).all())

    def towards(self, share: float) -> NM | None:
        """Drops `share` of what it drops, rounded down to whole entries of a group; None where that is none."""
        kept = self.m - math.floor((self.m - self.n) * share)
        return NM(kept, self.m) if kept < self.m else None


def _top_by_ranks_(groups: Tensor, n: int, out: Tensor) -> None:
    """(G, m) scores -> `out` (G, m) bool: entry i stays when fewer than n others of its group beat it.

    j beats i when it is higher, or equal with j < i. Neighbours at each distance are compared along the flat array,
    across the borders of groups too, since that is one contiguous operation; `inside` then drops those.
    """
    m = groups.shape[1]
    entries = groups.numel()
    step = min(entries, piece_of(groups.device) // m * m)
    if entries == 0:
        return

    def bytes_of(group: Tensor) -> Tensor:  # (m,) -> (step,)
        return group.to(groups.device, torch.uint8).repeat(step // m)

    place = torch.arange(m)
    inside = [bytes_of(place < m - distance) for distance in range(1, m)]
    earlier, limit = bytes_of(place), bytes_of(torch.full((m,), n))
    beaten, wins = torch.empty_like(limit), torch.empty_like(limit)
    flat, kept = groups.reshape(-1), out.view(-1)
    for start in range(0, entries, step):
        found = keys(flat[start : start + step])
        size = len(found)
        higher = torch.empty_like(found)  # 0 or 1 in the keys' dtype: several times faster than a comparison to bool
        beaten.copy_(earlier)  # as if all earlier entries beat it
        for distance in range(1, m):
            torch.gt(found[distance:], found[:-distance], out=higher[:-distance])
            later = wins[: size - distance].copy_(higher[:-distance])
            later &= inside[distance - 1][: size - distance]
            beaten[: size - distance] += later
            beaten[distance:size] -= later
        torch.lt(beaten[:size], limit[:size], out=kept[start : start + size])


def _top_by_level_(groups: Tensor, n: int, out: Tensor) -> None:
    """As `_top_by_ranks_`: the n-th highest of every group by a selection network, then what is not below it."""
    m = groups.shape[1]
    network = _selection(m, m - n)
    step = max(1, 2 * piece_of(groups.device) // m)
    for start in range(0, len(groups), step):
        found = keys(groups[start : start + step])
        lanes = list(found.t().clone(memory_format=torch.contiguous_format).unbind(0))  # m of (G,)
        spare = torch.empty_like(lanes[0])
        for low, high, needs_low, needs_high in network:
            if needs_low and needs_high:
                torch.minimum(lanes[low], lanes[high], out=spare)
                torch.maximum(lanes[low], lanes[high], out=lanes[high])
                lanes[low], spare = spare, lanes[low]
            elif needs_low:
                torch.minimum(lanes[low], lanes[high], out=lanes[low])
            else:
                torch.maximum(lanes[low], lanes[high], out=lanes[high])
        keep_top_(found, lanes[m - n].unsqueeze(1), n, out[start : start + step])


@cache
def _selection(m: int, place: int) -> list[tuple[int, int, bool, bool]]:
    """Exchanges (low, high, low needed, high needed) after which lane `place` of m holds its value in ascending order.

    Batcher's odd-even merge sort, less what only the other lanes need.
    """
    width = 1 << (m - 1).bit_length()
    exchanges = []
    part = 1
    while part < width:
        gap = part
        while gap:
            for start in range(gap % part, width - gap, 2 * gap):
                lows = range(start, min(start + gap, m - gap))
                exchanges += [(i, i + gap) for i in lows if i // (2 * part) == (i + gap) // (2 * part)]
            gap //= 2
        part *= 2
    needed, network = {place}, []
    for low, high in reversed(exchanges):
        if low in needed or high in needed:
            network.append((low, high, low in needed, high in needed))
            needed |= {low, high}
    return network[::-1]
