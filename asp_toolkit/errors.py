"""The one error type that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AspError(Exception):
    """Something the user can mend: the message names the place, what was expected, what came, and the way out."""


def closest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown `name`: the nearest of `known`, or all of them where none is near and they are few."""
    names = sorted(set(known))
    by_case = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), by_case, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(f"'{by_case[n]}'" for n in near) + "?"
    if not names:
        return "there is nothing to choose from"
    shown = ", ".join(f"'{n}'" for n in names[:12])
    return f"choose from {shown}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")
