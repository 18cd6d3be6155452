"""Whether zeros are those of a pattern that chooses among the entries of several parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from asp_toolkit.patterns import Pattern


def is_joint(pattern: Pattern | None) -> bool:
    """Whether the pattern chooses among the entries of several parameters (unstructured global)."""
    return hasattr(pattern, "holds_together") and getattr(pattern, "scope", "global") == "global"


def broken_together(masks: Iterable[tuple[Pattern, Tensor]]) -> dict[str, str]:
    """Joint pattern's name -> what is wrong, where the (rows, cols) bool masks under it keep more than it allows.

    Rules may share a pattern, and each rounds to whole entries: as many entries as there are other parameters may be
    kept beyond what the pattern allows of all of them.
    """
    groups: dict[str, tuple[Pattern, list[Tensor]]] = {}
    for pattern, mask in masks:
        if is_joint(pattern):
            groups.setdefault(pattern.name, (pattern, []))[1].append(mask)
    return {
        name: f"{len(members)} of them keep {_share(members):.2%} together"
        for name, (pattern, members) in groups.items()
        if not (_hold(pattern, members) or _hold(pattern, _fewer(members, len(members) - 1)))
    }


def _hold(pattern: Pattern, masks: list[Tensor]) -> bool:
    return bool(pattern.holds_together(masks))  # type: ignore[attr-defined]


def _fewer(masks: list[Tensor], count: int) -> list[Tensor]:
    """The masks with `count` entries kept less."""
    out = []
    for mask in masks:
        kept = mask.flatten().nonzero()[:count, 0]
        count -= len(kept)
        out.append(mask.flatten().index_fill(0, kept, False).reshape(mask.shape))
    return out


def _share(masks: list[Tensor]) -> float:
    return sum(int(mask.count_nonzero()) for mask in masks) / max(1, sum(mask.numel() for mask in masks))
