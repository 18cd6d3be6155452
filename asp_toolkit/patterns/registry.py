"""Which pattern a text names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import cast

from asp_toolkit.errors import AspError
from asp_toolkit.patterns.block import Block
from asp_toolkit.patterns.nm import NM
from asp_toolkit.patterns.pattern import Pattern
from asp_toolkit.patterns.transposable import TransposableNM
from asp_toolkit.patterns.unstructured import Unstructured
from asp_toolkit.patterns.vnm import VNM

# How a pattern is spelled, [optional] -> what reads such texts, and gives None for others. A new pattern is one line.
PATTERNS: dict[str, Callable[[str], Pattern | None]] = {
    "2:4": NM.read,
    "2:4 transposable [greedy]": TransposableNM.read,
    "unstructured 0.9 [per row|global]": Unstructured.read,
    "block 16x16 0.8": Block.read,
    "64:2:8": VNM.read,
}
_MEMBERS = ("name", "why_not", "mask", "holds", "density")


def parse(text: object) -> Pattern:
    """The pattern that `text` names: one of PATTERNS, or "package.module:name further text" for somebody's own.

    That name is imported: a pattern object is taken as it is, anything else called, with the further text where there
    is some.

    Raises:
        AspError: the text names none, or is no text (YAML 1.1 reads an unquoted 2:4 as the number 124).
    """
    if not isinstance(text, str):
        raise AspError(f"unknown pattern {text!r}; {_spellings()}")
    plain = " ".join(text.split())
    for read in PATTERNS.values():
        if (pattern := read(plain)) is not None:
            return pattern
    if own := re.fullmatch(r"((?:[^\W\d]\w*\.)*[^\W\d]\w*):([^\W\d]\w*)(?: (.*))?", plain):
        return _own(plain, own[1], own[2], own[3])
    raise AspError(f"unknown pattern {text!r}; {_spellings()}")


def _spellings() -> str:
    others = ", ".join(f'"{spelling}"' for spelling in list(PATTERNS)[1:])
    return (
        f"write N:M, e.g. 2:4 (2 of every 4 entries are kept), or {others} (0.9: 90% are dropped), "
        "or package.module:name of your own"
    )


def _own(text: str, module: str, name: str, further: str | None) -> Pattern:
    given = f"{module}:{name}"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise AspError(f"pattern '{text}': {error}; expected package.module:name of a pattern") from error
    if not _missing(found):
        if further is not None:
            raise AspError(f"pattern '{text}': {given} is a pattern as it is; write it without '{further}'")
        return cast(Pattern, found)
    if not callable(found):
        raise AspError(_unlike_a_pattern(text, given, found))
    call = f"{given}({'' if further is None else repr(further)})"
    try:
        made = found() if further is None else found(further)
    except (TypeError, ValueError) as error:
        raise AspError(f"pattern '{text}': {call}: {error}") from error
    if _missing(made):
        raise AspError(_unlike_a_pattern(text, call, made))
    return cast(Pattern, made)


def _missing(found: object) -> list[str]:
    """Members of a pattern that `found` lacks: all, where it is a class and no pattern yet."""
    return [member for member in _MEMBERS if isinstance(found, type) or not hasattr(found, member)]


def _unlike_a_pattern(text: str, given: str, found: object) -> str:
    return (
        f"pattern '{text}': expected {given} to be a pattern, an object with {', '.join(_MEMBERS)}; "
        f"got a {type(found).__name__} without {', '.join(_missing(found))}"
    )
