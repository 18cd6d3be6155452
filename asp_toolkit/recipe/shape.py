"""What a field of the schema holds, without the wrapping of its annotation."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def bare(annotation: Any) -> Any:
    """The annotation without Annotated and without `| None`."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if len(kinds) == 1:
            return bare(kinds[0])
    return annotation


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Whether an annotation is a section itself."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def members(info: FieldInfo) -> dict[str, type[BaseModel]] | None:
    """tag -> section, where a field is a choice of sections by one key; else None."""
    tag = info.discriminator
    if not isinstance(tag, str):
        return None
    sections = typing.get_args(bare(info.annotation))
    return {typing.get_args(section.model_fields[tag].annotation)[0]: section for section in sections}
