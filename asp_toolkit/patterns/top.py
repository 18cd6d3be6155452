"""The highest scores, exactly and in bounded memory.

Scores are compared as integers in the order of the scores, so that no device, thread count or flushing of subnormals
changes which entry is higher. Of equal ones the lower index is the higher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

PIECE = 1 << 18  # entries worked on at a time on one thread: a few arrays of them stay in the caches
_DIGIT = 12  # bits of a key that one pass over the scores settles
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def piece_of(device: torch.device) -> int:
    """Entries to work on at a time: enough for every thread, or for a device that starts each operation late."""
    return PIECE * min(4, torch.get_num_threads()) if device.type == "cpu" else 8 * PIECE


def pieces(scores: Tensor, entries: int | None = None) -> Iterator[tuple[int, int]]:
    """(first, last + 1) rows of `scores` (rows, cols), about `entries` entries each, at least one row."""
    rows, cols = scores.shape
    step = max(1, (entries or piece_of(scores.device)) // max(1, cols))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def keys(scores: Tensor) -> Tensor:
    """Integers of the scores' width in the order of the scores, contiguous; +0.0 and -0.0 are one integer, 0.

    Above the lowest integer of the dtype. Not to be written to: they may be the scores' own memory.
    """
    scores = scores.detach().contiguous()
    if not scores.is_floating_point():
        return scores
    bits = scores.view(_INTEGERS[scores.element_size()])
    if bits.numel() == 0 or bool(bits.amin() >= 0):
        return bits  # no sign anywhere: the bits of floats are in their order
    sign = bits >> (8 * scores.element_size() - 1)  # -1 where negative, else 0
    return (bits & torch.iinfo(bits.dtype).max).bitwise_xor_(sign).sub_(sign)  # the magnitude, negated where sign is -1


def addable(scores: Tensor) -> Tensor:
    """The scores as float64 whose sums are finite and, added in one order, the same on every device."""
    return scores.detach().to(torch.float64, copy=True).clamp_(-1e300, 1e300)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, one after another: the same bits on every device, which `sum` does not promise."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def keep_top_(found: Tensor, level: Tensor, kept: int, out: Tensor) -> None:
    """Write into `out` (G, C) bool the `kept` highest of each row of `found` (G, C) keys.

    level: (G, 1), the `kept`-th highest key of each row.
    """
    torch.ge(found, level, out=out)
    if int(out.count_nonzero()) == kept * len(out):
        return
    tied = (out.sum(1) > kept).nonzero().flatten()  # rows with more entries at their level than may stay
    some, levels = found[tied], level[tied]
    above, equal = some > levels, some == levels
    left = kept - above.sum(1, keepdim=True)
    out[tied] = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= left))


def top_of_rows(scores: Tensor, kept: int) -> Tensor:
    """(rows, cols) -> bool: the `kept` highest of every row, 0 < kept < cols."""
    cols = scores.shape[1]
    out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    for first, last in pieces(scores):
        found = keys(scores[first:last])
        if 2 * kept <= cols:
            level = found.topk(kept, dim=1, sorted=False).values.amin(1, keepdim=True)
        else:
            level = found.topk(cols - kept + 1, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
        keep_top_(found, level, kept, out[first:last])
    return out


def top_of_all(matrices: Sequence[Tensor], kept: int) -> list[Tensor]:
    """Per (rows, cols) matrix a bool mask: the `kept` highest of all entries; an earlier matrix is lower in index.

    Matrices may differ in shape, floating dtype and device. 0 < kept < all their entries.
    """
    dtype = reduce(torch.promote_types, [matrix.dtype for matrix in matrices])
    level, left = _level(matrices, dtype, kept)
    masks = [torch.empty(matrix.shape, dtype=torch.bool, device=matrix.device) for matrix in matrices]
    for matrix, mask in zip(matrices, masks, strict=True):
        for first, last in pieces(matrix):
            found, out = keys(matrix[first:last].to(dtype)), mask[first:last]
            torch.gt(found, level, out=out)
            if left:
                equal = found == level
                count = int(equal.count_nonzero())
                if count > left:
                    equal &= (equal.flatten().cumsum(0) <= left).view_as(equal)
                out |= equal
                left -= min(left, count)
    return masks


def _level(matrices: Sequence[Tensor], dtype: torch.dtype, kept: int) -> tuple[int, int]:
    """The `kept`-th highest key of all entries, and how many entries with that key are among the `kept` highest.

    Digit by digit from the highest: a histogram of the digit, among entries that share the higher digits, says in
    which of its values the `kept`-th lies.
    """
    width = 8 * torch.empty(0, dtype=dtype).element_size()
    prefix, shift, left = 0, width, kept
    while shift:
        above, shift = shift, max(0, shift - _DIGIT)
        size = 1 << (above - shift)
        counts = torch.zeros(size, dtype=torch.int64)
        for matrix in matrices:
            for first, last in pieces(matrix):
                found = keys(matrix[first:last].to(dtype)).flatten()
                if above == width:
                    digit = (found >> shift).add_(size // 2)  # signed
                else:
                    digit = (found[(found >> above) == prefix] >> shift).bitwise_and_(size - 1)
                counts += torch.bincount(digit, minlength=size).cpu()
        higher = counts.flip(0).cumsum(0).flip(0)  # entries whose digit is this one or higher
        digit_at = int((higher >= left).sum()) - 1
        left -= int(higher[digit_at] - counts[digit_at])
        prefix = digit_at - size // 2 if above == width else (prefix << (above - shift)) | digit_at
    return prefix, left
