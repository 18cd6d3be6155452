"""YAML as recipes read it: what a scalar is, what is refused, and that no text does anything else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asp_toolkit.errors import AspError
from asp_toolkit.recipe import dump, load
from asp_toolkit.recipe.yaml_file import dump_yaml, parse_yaml
from tests.toolkit.made_recipes import TEXT


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1e3),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0.0", -0.0),
        ("12", 12),
        ("+12", 12),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("190:20:30", "190:20:30"),
        ("2:4", "2:4"),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("None", "None"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("=", "="),
        ("'12'", "12"),
        ('"true"', "true"),
        ("9" * 5000, "9" * 5000),
        ("[1, 2:4]", [1, "2:4"]),
        ("{a: 2:4}", {"a": "2:4"}),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = parse_yaml(f"x: {text}\n", "r.yaml").value["x"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3: key 'a' stands twice, first in line 1"),
        ("a: &x 1\nb: *x\n", "r.yaml:2: not valid YAML: alias *x"),
        ("a: !!python/object:os.system 1\n", "r.yaml:1: not valid YAML: tag"),
        ("a: !!int '3'\n", "r.yaml:1: not valid YAML: tag"),
        ("true: a\n", "r.yaml:1: a key must be text"),
        ("? [a]\n: 1\n", "r.yaml:1: a key must be text"),
        ("a: .inf\n", "r.yaml:1: .inf is not a finite number"),
        ("a: .nan\n", "r.yaml:1: .nan is not a finite number"),
        ("a: 1e999\n", "r.yaml:1: 1e999 is not a finite number"),
        ("a: [1\nb: 2\n", "r.yaml:2: not valid YAML"),
        ("a: 1\n--- \nb: 1\n", "r.yaml:2: not valid YAML"),
        ("\ta: 1\n", "r.yaml:1: not valid YAML"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested too deeply"),
        ('a: "\\ud800"\n', "r.yaml:1: text with half a character"),
        ("a: \x00", "r.yaml: not valid YAML"),
    ],
)
def test_refused_yaml(text: str, told: str) -> None:
    with pytest.raises(AspError) as caught:
        parse_yaml(text, "r.yaml")
    assert told in str(caught.value)


@given(
    st.text()
    | st.binary().map(lambda raw: raw.decode("latin-1"))
    | st.text(alphabet="abc:-{}[],'\"!&*#|>%@? \n\t0123.")
)
@settings(deadline=None)
def test_any_text_gives_a_value_or_an_asp_error(text: str) -> None:
    try:
        value = parse_yaml(text, "r.yaml").value
    except AspError:
        return
    assert parse_yaml(dump_yaml(value), "again").value == value


@given(st.binary(max_size=200), st.integers(0, len(TEXT)))
@settings(deadline=None, max_examples=60)
def test_any_damage_to_a_file_gives_a_recipe_or_an_asp_error(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "r.yaml"
    path.write_bytes(TEXT.encode()[:at] + junk + TEXT.encode()[at:])
    try:
        found = load(path)
    except AspError:
        return
    path.write_text(dump(found), encoding="utf-8")
    assert load(path) == found


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
@settings(deadline=None)
def test_plain_values_survive_yaml(value: dict[str, Any]) -> None:
    text = dump_yaml(value)
    found = parse_yaml(text, "r.yaml").value
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal but not the same


@pytest.mark.parametrize(
    "text", ["2:4", "1e-3", "yes", "null", "12", "0o17", "1:30:00", "2020-01-01", "=", "<<", "", " a "]
)
def test_other_yaml_readers_see_the_same_text(text: str) -> None:
    assert yaml.safe_load(dump_yaml({"x": text})) == {"x": text}
