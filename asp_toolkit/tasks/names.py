"""Code and packages by name."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from asp_toolkit.errors import AspError, closest


def import_named(name: str, key: str) -> Any:
    """The object that `package.module:name` names; `name` may be dotted (`Class.method`).

    Args:
        name: what to import.
        key: the recipe key it stands under, for messages.

    Raises:
        AspError: the text has another form, the module cannot be imported or lacks the name.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise AspError(f"{key}: expected package.module:name, got {name!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise AspError(
            f"{key}: cannot import {module_name!r} ({error}); is it installed, or its folder on PYTHONPATH?"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise AspError(f"{key}: {module_name!r} has no {attribute!r}; {closest(part, known)}")
        found = getattr(found, part)
    return found


def call_named(name: str, options: dict[str, Any], key: str) -> Any:
    """What the function or class `name` returns for the keyword arguments `options`.

    Raises:
        AspError: it cannot be imported, is not callable, or does not take these arguments.
    """
    function = import_named(name, key)
    if not callable(function):
        raise AspError(f"{key}: {name!r} is a {type(function).__name__}, expected a function or class")
    return call(function, options, key)


def call(function: Any, options: dict[str, Any], key: str) -> Any:
    """`function(**options)`, with the arguments' mistakes told as a user's."""
    try:
        return function(**options)
    except (TypeError, ValueError) as error:
        raise AspError(
            f"{key}: {getattr(function, '__name__', function)} refused the options {options}: {error}"
        ) from error


def package_folder(package: str, key: str) -> Path:
    """Folder of an installed package, which is not imported for it.

    Raises:
        AspError: no such package.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise AspError(f"{key}: the package {package!r} is not installed; pip install {package.replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)))
