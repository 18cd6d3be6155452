"""The greedy mask of m x m tiles (arXiv 2102.08124), completed to exactly n in every row and column.

Going through the entries in descending order, one tile at a time, is what the paper does. The same mask comes out in a
few rounds for all tiles at once: an entry is certain to be taken when, of the entries still open, fewer beat it in its
row than the row has room for, and likewise in its column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asp_toolkit.patterns.top import addable, keys


def greedy_tiles(tiles: Tensor, n: int) -> Tensor:
    """(m, m, T) scores of T tiles, rows x columns -> (m, T, m) bool by rows, n in every row and column of each tile.

    Of equal scores the one with the lower index, row by row, is the higher.
    """
    m, _, count = tiles.shape
    kept = torch.zeros(tiles.shape, dtype=torch.bool, device=tiles.device)
    found = keys(tiles).clone()
    closed = torch.iinfo(found.dtype).min  # below every score's key
    room = torch.full((2, m, count), n, dtype=torch.int8, device=tiles.device)  # left in rows, in columns
    tile = torch.arange(count, device=tiles.device)  # whose tiles these are
    part, still_open = kept, torch.ones_like(kept)
    while len(tile):
        rows, cols = room[0].unsqueeze(1), room[1].unsqueeze(0)  # (m, 1, T), (1, m, T)
        taken = (_beaten(found, 1) < rows) & (_beaten(found, 0) < cols) & still_open
        part |= taken
        room -= torch.stack([taken.sum(1, dtype=torch.int8), taken.sum(0, dtype=torch.int8)])
        still_open &= ~taken & (rows > 0) & (cols > 0)
        found.masked_fill_(~still_open, closed)
        unfinished = still_open.view(m * m, -1).any(0).nonzero().flatten()
        if 2 * len(unfinished) < len(tile):
            if part is not kept:
                kept.index_copy_(2, tile, part)
            part, found, still_open, room = (x.index_select(-1, unfinished) for x in (part, found, still_open, room))
            tile = tile[unfinished]
    short = (kept.sum(1, dtype=torch.int8) < n).any(0).nonzero().flatten()
    if len(short):
        scores = addable(tiles.index_select(2, short))
        kept.index_copy_(2, short, _completed(scores, kept.index_select(2, short), n))
    return kept.transpose(1, 2)


def _beaten(found: Tensor, dim: int) -> Tensor:
    """(m, m, T) keys -> int8: how many of the others along `dim` beat each; of equal ones the later is beaten."""
    m = found.shape[dim]
    lanes = found.unbind(dim)
    counts = torch.empty(found.shape, dtype=torch.int8, device=found.device)
    beaten = counts.unbind(dim)
    higher = torch.empty_like(lanes[0], memory_format=torch.contiguous_format)
    wins = torch.empty_like(higher, dtype=torch.int8)
    for i in range(m):
        beaten[i].fill_(i)  # as if all earlier ones beat it
    for i in range(m):
        for j in range(i + 1, m):
            wins.copy_(torch.gt(lanes[j], lanes[i], out=higher))  # a comparison in the keys' own width is the fastest
            beaten[i].add_(wins)
            beaten[j].sub_(wins)
    return counts


def _completed(scores: Tensor, kept: Tensor, n: int) -> Tensor:
    """(m, m, T) scores and maximal masks, (m, m, T) -> masks with exactly n in every row and column.

    Where row i and column j are short, entry (i, j) is kept already, since the mask is maximal. Some kept (r, c) then
    has neither (i, c) nor (r, j) kept, and keeping those two instead of it fills i and j; the one with the highest gain
    is moved, ties to the lower index.
    """
    m = len(scores)
    scores, kept = scores.permute(2, 0, 1).contiguous(), kept.permute(2, 0, 1).contiguous()  # (T, m, m)
    tile = torch.arange(len(kept), device=kept.device)
    while len(tile):
        now, worth, every = kept[tile], scores[tile], torch.arange(len(tile), device=kept.device)
        i = (now.sum(2) < n).byte().argmax(1)  # the first row that is short
        j = (now.sum(1) < n).byte().argmax(1)
        kept_i, kept_j = now[every, i], now[every, :, j]
        movable = now & ~kept_i[:, None, :] & ~kept_j[:, :, None]
        gain = worth[every, i][:, None, :] + worth[every, :, j][:, :, None] - worth
        best = gain.masked_fill(~movable, -torch.inf).flatten(1).argmax(1)
        r, c = best // m, best % m
        kept[tile, r, c] = False
        kept[tile, i, c] = True
        kept[tile, r, j] = True
        tile = tile[(kept[tile].sum(2) < n).any(1)]
    return kept.permute(1, 2, 0)
