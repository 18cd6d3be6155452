"""YAML as recipes need it: the JSON-like core of YAML 1.2, and for each value the line it stands on.

PyYAML follows YAML 1.1, where `2:4` is the number 124, `1e-3` is text and `no` is false. Here plain scalars are
read as YAML 1.2 reads them, and what a recipe never needs (aliases, tags, dates, duplicate keys) is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from asp_toolkit.errors import AspError

KeyPath = tuple[str | int, ...]
"""Where a value stands: mapping keys and list indices from the top."""

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 300  # characters; far beyond any use, and within what int() takes
_DEEPEST = 60


@dataclass(frozen=True)
class Document:
    """A file's plain value and the line (from 1) of each value and of each mapping's key."""

    value: Any
    lines: Mapping[KeyPath, int]


class _Loader(yaml.SafeLoader):
    """Composes nodes; never constructs objects."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        told = None
        if isinstance(event, yaml.AliasEvent):
            told = f"alias *{event.anchor}: aliases are not part of recipes; write the value out"
        elif getattr(event, "tag", None) is not None:
            told = f"tag {event.tag}: tags are not part of recipes; leave it out"
        if told:
            raise yaml.MarkedYAMLError(problem=told, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes text so that YAML 1.1 and 1.2 readers take it for the same text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'  # single quotes would fold line ends such as U+0085 into spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.yaml_implicit_resolvers = {key: list(pairs) for key, pairs in yaml.SafeDumper.yaml_implicit_resolvers.items()}
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))


def parse_yaml(text: str, name: str) -> Document:
    """The one document in `text`: dicts with text keys, lists, str, int, float, bool, None.

    Args:
        text: YAML.
        name: what errors call it, e.g. the file's path.

    Raises:
        AspError: with `name:line`, for anything that is not such a document.
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        return Document(None if node is None else _value(node, (), lines, name), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        told = "; ".join(part for part in (error.problem, error.context) if part)
        raise AspError(f"{where}: not valid YAML: {told}") from error
    except yaml.YAMLError as error:
        raise AspError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise AspError(f"{name}: nested too deeply") from error


def dump_yaml(value: Any) -> str:
    """Plain values as YAML text; `parse_yaml` reads the same values back."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return str(text)


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)  # a mapping's key has set it already: the key's line is the one to name
    where = f"{name}:{line}"
    if len(path) > _DEEPEST:
        raise AspError(f"{where}: nested too deeply")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, where)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, i), lines, name) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        here = f"{name}:{key_node.start_mark.line + 1}"
        key = _scalar(key_node, here) if isinstance(key_node, yaml.ScalarNode) else None
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)  # optimizer steps are keys; JSON, where a recipe goes too, has text keys only
        if not isinstance(key, str):
            raise AspError(f"{here}: a key must be text; put it in quotes")
        if key in found:
            raise AspError(f"{here}: key '{key}' stands twice, first in line {lines[(*path, key)]}")
        lines[(*path, key)] = key_node.start_mark.line + 1
        found[key] = _value(value_node, (*path, key), lines, name)
    return found


def _scalar(node: yaml.ScalarNode, where: str) -> str | int | float | bool | None:
    text: str = node.value
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise AspError(f"{where}: text with half a character (a lone surrogate)")
    if node.style is not None:  # quoted, or a block
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        number = math.inf if text[-1].isalpha() else float(text)
        if not math.isfinite(number):
            raise AspError(f"{where}: {text} is not a finite number")
        return number
    return text
