"""Values set from outside the file: `train.epochs=2` on the command line, or a mapping in Python."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.yaml_file import KeyPath, parse_yaml

Overrides = Mapping[str, Any] | Sequence[str]
"""{"train.epochs": 2} or ["train.epochs=2"]; the text form is read as YAML."""


@dataclass(frozen=True)
class Override:
    """One value to set, and how to name it in an error."""

    path: tuple[str, ...]
    value: Any
    name: str


def parse_overrides(overrides: Overrides | None) -> list[Override]:
    """The overrides in order.

    Raises:
        AspError: one is not KEY=VALUE, or its value is not YAML.
    """
    if overrides is None:
        return []
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        return [
            Override(_path(str(key), f"override {key}"), value, f"override {key}") for key, value in overrides.items()
        ]
    found = []
    for text in overrides:
        name = f"override {_short(text)}"
        key, equals, value = text.partition("=")
        if not equals:
            raise AspError(f"{name}: expected KEY=VALUE, e.g. train.epochs=2")
        found.append(Override(_path(key.strip(), name), parse_yaml(value, name).value, name))
    return found


def apply_overrides(data: Any, overrides: Sequence[Override]) -> tuple[Any, dict[KeyPath, str]]:
    """A copy of `data` with every override set; the second value says which override set which path.

    Mappings that are missing on the way are made; lists are indexed from 0 and never grow.

    Raises:
        AspError: a part of the path is neither a mapping nor a list, or an index is out of range.
    """
    data = copy.deepcopy({} if data is None else data)
    origin: dict[KeyPath, str] = {}
    for override in overrides:
        holder, done = data, ()  # type: Any, KeyPath
        for i, part in enumerate(override.path):
            last = i == len(override.path) - 1
            where = ".".join(map(str, done)) or "the recipe"
            key: str | int = part
            if isinstance(holder, list):
                if not part.isascii() or not part.isdigit() or int(part[:9]) >= len(holder):
                    raise AspError(
                        f"{override.name}: {where} is a list of {len(holder)}, counted from 0; there is no {part}"
                    )
                key = int(part)
            elif not isinstance(holder, dict):
                raise AspError(f"{override.name}: {where} is {_short(repr(holder))}, it has no keys")
            done = (*done, key)
            if last:
                holder[key] = copy.deepcopy(override.value)
            else:
                if isinstance(holder, dict) and holder.get(part) is None:
                    holder[part] = {}
                holder = holder[key]
        origin[done] = override.name
    return data, origin


def _path(key: str, name: str) -> tuple[str, ...]:
    parts = tuple(key.split("."))
    if not all(parts):
        raise AspError(f"{name}: expected a key like train.epochs before the equals sign, got {key!r}")
    return parts


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
