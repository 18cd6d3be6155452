"""asp recipe explain and schema: every key, with type, default and meaning."""

from __future__ import annotations

from typing import Any

import pytest

from asp_toolkit.errors import AspError
from asp_toolkit.recipe import explain, schema


def test_explain_knows_every_key_with_a_meaning() -> None:
    rows = explain.explain()
    keys = {row.key for row in rows}
    assert {"task.data.source", "train.optimizer.lr", "prune.rules.N.pattern", "retrain.control", "seed"} <= keys
    assert all(row.meaning for row in rows), [row.key for row in rows if not row.meaning]
    assert [row.default for row in explain.explain("train.epochs")] == ["1.0"]
    assert [row.key for row in explain.explain("prune.rules.0.pattern")] == ["prune.rules.N.pattern"]
    with pytest.raises(AspError, match=r"did you mean 'train\.epochs'"):
        explain.explain("train.epoch")


def test_explained_sections_are_all_there() -> None:
    def count(section: Any) -> int:
        return len(section.model_fields)

    keys = [row.key for row in explain.explain("train.optimizer")]
    assert len(keys) == 1 + count(schema.Optimizer)
    folder = [row for row in explain.explain("task.data") if row.where == "kind: image_classification, source: folder"]
    assert len(folder) == count(schema.FolderData) - 1  # `source` is told once for all


def test_json_schema_is_strict_and_describes() -> None:
    found = explain.json_schema()
    assert found["additionalProperties"] is False
    assert found["properties"]["seed"]["description"]
    assert {"task", "train"} == set(found["required"])
