"""Says what is wrong with a recipe: the place, what was expected, what came, the way out."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asp_toolkit.errors import closest
from asp_toolkit.recipe.shape import bare, is_section, members
from asp_toolkit.recipe.yaml_file import KeyPath

_MOST = 20  # errors shown; one wrong indentation can cause dozens


@dataclass(frozen=True)
class Source:
    """Where a recipe's values came from."""

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    overrides: Mapping[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """`file:line key` of a path, or `override … key` where an override set it or something above it."""
        key = ".".join(map(str, path))
        override = self._override(path)
        if override is not None:
            name = self.overrides[override]
            return name if override == path else f"{name}: {key}"
        line = self.line(path)
        return f"{self.name} {key}".rstrip() if line is None else f"{self.name}:{line} {key}".rstrip()

    def line(self, path: KeyPath) -> int | None:
        """The line of a path, or of the nearest thing above it."""
        return next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)

    def order(self, path: KeyPath) -> tuple[int, int]:
        """Sorts overrides first, then lines."""
        return (0, 0) if self._override(path) is not None else (1, self.line(path) or 0)

    def _override(self, path: KeyPath) -> KeyPath | None:
        return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.overrides), None)


def describe(error: ValidationError, model: type[BaseModel], source: Source, under: KeyPath = ()) -> str:
    """One line per error, in the order of the file; `under` is where `model` stands in the recipe."""
    found = [_line(detail, model) for detail in error.errors(include_url=False)]
    found = sorted((((*under, *path), text) for path, text in found), key=lambda entry: source.order(entry[0]))
    told = list(dict.fromkeys(f"{source.place(path)}: {text}" for path, text in found))
    if len(told) > _MOST:
        told[_MOST:] = [f"and {len(told) - _MOST} more"]
    return "\n".join(told)


def _line(detail: ErrorDetails, model: type[BaseModel]) -> tuple[KeyPath, str]:
    path, owner = _plain(detail["loc"], model)
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(owner.model_fields) if owner else []
        return path, f"unknown key{_of_which(owner)}; {closest(str(path[-1]), known)}"
    if kind == "missing":
        if path and isinstance(path[-1], int):
            return path[:-1], f"too few values, number {path[-1] + 1} is missing{_meaning(path[:-1], model)}"
        return path, f"required but missing{_meaning(path, model)}"
    if kind == "union_tag_not_found":
        tag, known = _tags(path, model)
        return (*path, tag), f"required but missing; choose from {_listed(known)}"
    if kind == "union_tag_invalid":
        tag, known = _tags(path, model)
        came = detail["input"].get(tag) if isinstance(detail["input"], Mapping) else None
        hint = closest(came, known) if isinstance(came, str) else f"choose from {_listed(known)}"
        return (*path, tag), f"unknown {tag} {shown(came)}; {hint}"
    if kind == "literal_error":
        known = list(typing.get_args(_annotation(path, model)))
        near = closest(detail["input"], known) if isinstance(detail["input"], str) and known else ""
        near = f"; {near}" if near.startswith("did you mean") else ""  # all the names stand in the text already
        return path, f"expected {context['expected']}, got {shown(detail['input'])}{near}"
    if kind == "value_error":
        return path, str(context["error"])
    expected = _EXPECTED.get(kind)
    if expected is None:
        return path, f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, got {shown(detail['input'])}"
    return path, f"expected {expected(context)}, got {shown(detail['input'])}{_way_out(kind, detail['input'])}"


def _of_which(owner: type[BaseModel] | None) -> str:
    """ " of source 'folder'", for a section that is one of several."""
    for tag in ("source", "kind"):
        if owner is not None and tag in owner.model_fields:
            return f" of {tag} '{typing.get_args(owner.model_fields[tag].annotation)[0]}'"
    return ""


def _count(number: int) -> str:
    return f"{number} value" + ("" if number == 1 else "s")


_Context = Mapping[str, Any]
_EXPECTED: dict[str, Callable[[_Context], str]] = {
    "int_type": lambda _: "a whole number",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "string_type": lambda _: "text",
    "bool_type": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "tuple_type": lambda _: "a list",
    "dict_type": lambda _: "keys with values",
    "model_type": lambda _: "keys with values",
    "model_attributes_type": lambda _: "keys with values",
    "greater_than": lambda c: f"more than {c['gt']:g}",
    "greater_than_equal": lambda c: f"at least {c['ge']:g}",
    "less_than": lambda c: f"less than {c['lt']:g}",
    "less_than_equal": lambda c: f"at most {c['le']:g}",
    "too_short": lambda c: f"at least {_count(c['min_length'])}",
    "too_long": lambda c: f"at most {_count(c['max_length'])}",
    "finite_number": lambda _: "a finite number",
}


def _way_out(kind: str, came: Any) -> str:
    if came == "None" and kind not in ("string_type",):
        return "; write null for none"
    if kind == "bool_type" and isinstance(came, str) and came.lower() in ("yes", "no", "on", "off"):
        return f"; write {'true' if came.lower() in ('yes', 'on') else 'false'}"
    if kind == "string_type" and isinstance(came, int | float):
        return f"; write '{shown(came)}' in quotes"
    if kind in ("list_type", "tuple_type") and not isinstance(came, Mapping | None):
        return f"; write [{shown(came)}]"
    if kind in ("int_type", "float_type") and isinstance(came, str) and _is_number(came):
        return "; leave the quotes out"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def shown(value: Any) -> str:
    """A value as a recipe would have it, cut to a line."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _plain(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[KeyPath, type[BaseModel] | None]:
    """pydantic's location without the tags of the unions passed, and the section that holds the last key."""
    path: list[str | int] = []
    here: Any = model
    owner: type[BaseModel] | None = model
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        path.append(part)
        owner = here if is_section(here) else None
        if owner is not None:
            info = owner.model_fields.get(str(part))
            choices = None if info is None else members(info)
            if choices is not None:
                here = choices.get(str(rest.pop(0))) if rest else None
            else:
                here = None if info is None else bare(info.annotation)
        else:
            inner = typing.get_args(here)
            here = bare(inner[-1]) if inner else None  # list[X], dict[str, X]
    return tuple(path), owner


def _fields(path: KeyPath, model: type[BaseModel]) -> list[FieldInfo]:
    """The fields that `path` may mean: several where the path passes a choice of sections."""
    heres: list[Any] = [model]
    found: list[FieldInfo] = []
    for part in path:
        found = []
        after: list[Any] = []
        for here in heres:
            if not is_section(here):
                after += [bare(inner) for inner in typing.get_args(here)[-1:]]
            elif str(part) in here.model_fields:
                info = here.model_fields[str(part)]
                found.append(info)
                choices = members(info)
                after += list(choices.values()) if choices else [bare(info.annotation)]
        heres = after
    return found


def _meaning(path: KeyPath, model: type[BaseModel]) -> str:
    return next((f" ({info.description})" for info in _fields(path, model) if info.description), "")


def _annotation(path: KeyPath, model: type[BaseModel]) -> Any:
    return next((bare(info.annotation) for info in _fields(path, model)), None)


def _tags(path: KeyPath, model: type[BaseModel]) -> tuple[str, list[str]]:
    """The key that chooses among sections at `path`, and the names it may have."""
    for info in _fields(path, model):
        choices = members(info)
        if choices is not None and isinstance(info.discriminator, str):
            return info.discriminator, list(choices)
    return "kind", []
