"""Recipes: `load` a YAML file as a checked `Recipe`, `dump` one as YAML. Nothing else in the package sees YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import asp_toolkit
from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.messages import Source, describe, shown
from asp_toolkit.recipe.overrides import Overrides, apply_overrides, parse_overrides
from asp_toolkit.recipe.schema import Recipe, Training
from asp_toolkit.recipe.yaml_file import dump_yaml, parse_yaml

__all__ = ["Recipe", "bundled", "difference", "dump", "find", "from_mapping", "load", "located"]

_LARGEST = 1 << 20  # bytes; more is not a recipe but, say, a checkpoint named by mistake


def bundled() -> dict[str, Path]:
    """The recipes that come with the toolkit: name -> file."""
    package = Path(asp_toolkit.__file__).parent
    for folder in (package / "recipes", package.parent / "recipes"):  # installed; in a checkout
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return {}


def find(name: str | Path) -> Path:
    """The file that `name` means: a path, or the name of a recipe that comes with the toolkit.

    Raises:
        AspError: there is neither.
    """
    path = Path(name).expanduser()
    known = bundled()
    if path.is_file():
        return path
    if path.is_dir():
        raise AspError(f"{name}: a folder, not a recipe; name a .yaml file in it")
    if str(name) in known:
        return known[str(name)]
    if path.stem in known:
        raise AspError(f"{name}: no such file; did you mean the recipe that comes with the toolkit, '{path.stem}'?")
    raise AspError(
        f"{name}: no such file, and no recipe of that name comes with the toolkit; {closest(path.stem, known)}"
    )


def load(path: str | Path, overrides: Overrides | None = None) -> Recipe:
    """The recipe in a YAML file (or the bundled one of that name), with overrides set and everything checked.

    Args:
        path: a file, or the bare name of a bundled recipe.
        overrides: {"train.epochs": 2} or ["train.epochs=2"].

    Raises:
        AspError: every problem found, one a line, each with file and line (or the override) and key.
    """
    file = find(path)
    name = str(path) if Path(path).expanduser().is_file() else file.name
    try:
        if file.stat().st_size > _LARGEST:
            raise AspError(f"{name}: {file.stat().st_size} bytes are too many for a recipe; is it one?")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AspError(f"{name}: not UTF-8 text; is it a recipe?") from error
    except OSError as error:
        raise AspError(f"{name}: cannot be read: {error.strerror}") from error
    document = parse_yaml(text, name)
    return _checked(document.value, overrides, Source(name, document.lines))


def from_mapping(data: Mapping[str, Any], overrides: Overrides | None = None, name: str = "recipe") -> Recipe:
    """The recipe in a plain mapping; as `load` otherwise.

    Raises:
        AspError: as `load`; `name` stands for the file.
    """
    return _checked(_plain(data, name), overrides, Source(name))


def located(path: str | Path, error: str, overrides: Overrides | None = None) -> str:
    """`error` with the override, or file and line, before it, where it begins with a key that stands there."""
    found = re.match(r"[a-z_]+(?:\.\w+)*(?=[: ])", error)
    if not found or found[0].split(".")[0] not in Recipe.model_fields:
        return error
    for given in overrides or ():
        name = given.partition("=")[0]  # a mapping gives its keys
        if f"{found[0]}.".startswith(f"{name}."):
            return f"override {name}: {error}"
    file = find(path)
    lines = parse_yaml(file.read_text(encoding="utf-8"), file.name).lines
    key = tuple(int(part) if part.isdigit() else part for part in found[0].split("."))
    line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
    return error if line is None else f"{path if Path(path).is_file() else file.name}:{line} {error}"


def dump(recipe: Recipe) -> str:
    """YAML text with every value spelled out, defaults too; `load` of it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def difference(there: Recipe, here: Recipe) -> str:
    """The keys in which two recipes differ, e.g. "train.epochs: 8.0 there, 2.0 here"; empty where they are equal."""
    found = list(_differences(there.model_dump(mode="json"), here.model_dump(mode="json"), ""))
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")


def _differences(there: Any, here: Any, key: str) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in [*there, *(name for name in here if name not in there)]:
            below = f"{key}.{name}" if key else name
            if name in there and name in here:
                yield from _differences(there[name], here[name], below)
            else:
                yield f"{below}: only {'there' if name in there else 'here'}"
    elif there != here:
        yield f"{key}: {shown(there)} there, {shown(here)} here"


def _checked(data: Any, overrides: Overrides | None, source: Source) -> Recipe:
    if data is None:
        raise AspError(f"{source.name}: empty; a recipe has at least task and train")
    if not isinstance(data, dict):
        raise AspError(f"{source.place(())}: expected keys like task and train, got {shown(data)}")
    parsed = parse_overrides(overrides)
    for override in parsed:
        _plain(override.value, override.name)
    data, origin = apply_overrides(data, parsed)
    source = Source(source.name, source.lines, origin)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise AspError(describe(error, Recipe, source)) from error
    try:
        recipe.retraining()
    except ValidationError as error:
        raise AspError(describe(error, Training, source, under=("retrain",))) from error
    return recipe


def _plain(value: Any, name: str) -> Any:
    """`value` with tuples as lists.

    Raises:
        AspError: it holds something that YAML could not.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) and not isinstance(key, bool) for key in value):
        return {str(key): _plain(item, name) for key, item in value.items()}  # steps are keys: text, as JSON has them
    raise AspError(
        f"{name}: expected plain values (text, finite numbers, true, false, lists, mappings), got {shown(value)}"
    )
