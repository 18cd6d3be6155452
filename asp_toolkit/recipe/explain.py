"""Every key a recipe may have, with type, default and meaning, read off the schema itself."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asp_toolkit.errors import AspError, closest
from asp_toolkit.recipe.schema import Recipe
from asp_toolkit.recipe.shape import bare, is_section, members


@dataclass(frozen=True)
class KeyRow:
    """One key. `where` names the choice it belongs to, e.g. "source: folder"; empty where it is always there."""

    key: str
    type: str
    default: str
    meaning: str
    where: str = ""


def explain(key: str | None = None) -> list[KeyRow]:
    """The rows of `key` and everything below it; of the whole recipe for None. List items are written `rules.N`.

    Raises:
        AspError: no such key.
    """
    rows = list(_rows(Recipe, "", ""))
    if key is None:
        return rows
    wanted = ".".join("N" if part.isdigit() else part for part in key.strip(".").split("."))
    found = [row for row in rows if row.key == wanted or row.key.startswith(wanted + ".")]
    if not found:
        raise AspError(f"{key}: no such key in a recipe; {closest(wanted, {row.key for row in rows})}")
    return found


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors that complete and check YAML."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "asp_toolkit recipe"}


def _rows(section: type[BaseModel], prefix: str, where: str) -> Iterator[KeyRow]:
    for name, info in section.model_fields.items():
        key = f"{prefix}{name}"
        yield KeyRow(key, _type(info), _default(info), info.description or "", where)
        choices = members(info)
        if choices:
            yield from _choices(info, choices, key, where)
            continue
        inner = bare(info.annotation)
        if is_section(inner):
            yield from _rows(inner, f"{key}.", where)
        elif typing.get_origin(inner) is list and is_section(bare(typing.get_args(inner)[0])):
            yield from _rows(bare(typing.get_args(inner)[0]), f"{key}.N.", where)
        elif typing.get_origin(inner) is dict and is_section(bare(typing.get_args(inner)[1])):
            yield from _rows(bare(typing.get_args(inner)[1]), f"{key}.NAME.", where)


def _choices(info: FieldInfo, choices: dict[str, type[BaseModel]], key: str, where: str) -> Iterator[KeyRow]:
    """The keys that all choices share once, then each choice's own."""
    sections = list(choices.values())
    shared = {
        name for name in sections[0].model_fields if all(_same(name, section, sections[0]) for section in sections)
    }
    yield from (row for row in _rows(sections[0], f"{key}.", where) if row.key[len(key) + 1 :].split(".")[0] in shared)
    tag = str(info.discriminator)
    yield KeyRow(f"{key}.{tag}", " | ".join(choices), "(required)", _tag_meaning(sections[0], tag), where)
    for name, section in choices.items():
        own = ", ".join(part for part in (where, f"{tag}: {name}") if part)
        for row in _rows(section, f"{key}.", own):
            first = row.key[len(key) + 1 :].split(".")[0]
            if first not in shared and first != tag:
                yield row


def _same(name: str, section: type[BaseModel], other: type[BaseModel]) -> bool:
    mine, theirs = section.model_fields.get(name), other.model_fields.get(name)
    return mine is not None and theirs is not None and repr(mine) == repr(theirs)


def _tag_meaning(section: type[BaseModel], tag: str) -> str:
    return section.model_fields[tag].description or ""


def _type(info: FieldInfo) -> str:
    choices = members(info)
    if choices:
        return "section"
    limits = [_limit(constraint) for constraint in info.metadata]
    told = ", ".join(limit for limit in limits if limit)
    return _name(info.annotation) + (f" ({told})" if told else "")


def _limit(constraint: Any) -> str:
    for attribute, text in (("gt", "> "), ("ge", ">= "), ("lt", "< "), ("le", "<= "), ("min_length", "at least ")):
        if getattr(constraint, attribute, None) is not None:
            return f"{text}{getattr(constraint, attribute)}"
    return ""


_NAMES: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true | false", Any: "anything"}


def _name(annotation: Any) -> str:
    inner = bare(annotation)
    null = " | null" if type(None) in typing.get_args(annotation) else ""
    origin, parts = typing.get_origin(inner), typing.get_args(inner)
    if is_section(inner):
        return "section"
    if origin is typing.Literal:
        return " | ".join(map(str, parts)) + null
    if origin in (list, tuple):
        kind = _name(parts[0])
        many = f"{len(parts)} of " if origin is tuple else "list of "
        return f"{many}{kind}" + null
    if origin is dict:
        return f"name: {_name(parts[1])}" + null
    return _NAMES.get(inner, str(inner)) + null


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(required)"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or (isinstance(value, list) and any(isinstance(item, BaseModel) for item in value)):
        return ""  # its own keys say it
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, dict):
        return "{}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
