"""How patterns are spelled: `parse`, its refusals, somebody's own, and what every pattern has in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asp_toolkit.errors import AspError
from asp_toolkit.patterns import NM, PATTERNS, VNM, Block, Pattern, TransposableNM, Unstructured, masks_of, parse

counts = st.integers(2, 64).flatmap(lambda m: st.tuples(st.integers(1, m - 1), st.just(m)))
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
sizes = st.integers(1, 10**9 - 1)
patterns = st.one_of(
    counts.map(lambda c: NM(*c)),
    st.builds(lambda c, greedy: TransposableNM(*c, greedy=greedy), counts, st.booleans()),
    st.builds(Unstructured, shares, st.sampled_from(["layer", "row", "global"])),
    st.builds(Block, sizes, sizes, shares),
    st.builds(lambda v, c: VNM(v, *c), sizes, counts.filter(lambda c: c[1] > 2 * c[0])),
)


@given(patterns)
def test_parse_reads_what_name_writes(pattern: Pattern) -> None:
    assert parse(pattern.name) == pattern


@given(patterns, st.floats(0, 1))
def test_what_a_pattern_is_eased_to_can_be_spelled_too(pattern: Pattern, share: float) -> None:
    eased = pattern.towards(share)  # type: ignore[attr-defined]
    assert eased is None or parse(eased.name) == eased
    assert pattern.towards(0) is None  # type: ignore[attr-defined]
    assert pattern.towards(1) == pattern  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("2:4", NM(2, 4)),
        (" 4 : 8 ", NM(4, 8)),
        ("16:32", NM(16, 32)),
        ("2:4 transposable", TransposableNM(2, 4)),
        ("2:4  transposable greedy", TransposableNM(2, 4, greedy=True)),
        ("unstructured 0.9", Unstructured(0.9)),
        ("unstructured .9", Unstructured(0.9)),
        ("unstructured 9e-1 per row", Unstructured(0.9, "row")),
        ("unstructured 0.9 global", Unstructured(0.9, "global")),
        ("block 16x16 0.8", Block(16, 16, 0.8)),
        ("block 1 x 4 0.5", Block(1, 4, 0.5)),
        ("64:2:8", VNM(64, 2, 8)),
    ],
)
def test_spellings(text: str, pattern: Pattern) -> None:
    assert parse(text) == pattern


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5:4", "pattern 5:4: N:M keeps N of every M entries, with 1 <= N < M <= 64"),
        ("0:4", "pattern 0:4: N:M keeps N of every M entries"),
        ("4:4", "pattern 4:4: N:M keeps N of every M entries"),
        ("2:128", "pattern 2:128: N:M keeps N of every M entries"),
        ("4:4 transposable", "pattern 4:4: N:M keeps N of every M entries"),
        ("unstructured 1.7", "pattern unstructured 1.7: the share of entries dropped lies between 0 and 1"),
        ("unstructured -0.1", "pattern unstructured -0.1: the share"),
        ("unstructured 0", "pattern unstructured 0.0: the share"),
        ("unstructured 1 per row", "pattern unstructured 1.0: the share"),
        ("unstructured 90", "e.g. 0.9 drops 90%"),
        ("block 0x4 0.5", "pattern block 0x4 0.5: a block has at least one row and one column"),
        ("block 4x0 0.5", "pattern block 4x0 0.5: a block has at least one row and one column"),
        ("block 4x4 1.2", "pattern block 4x4 1.2: the share of entries dropped"),
        ("0:2:8", "pattern 0:2:8: V:N:M shares columns between V rows, with V >= 1"),
        ("64:0:8", "pattern 64:0:8: V:N:M keeps N of every M entries"),
        ("64:2:65", "pattern 64:2:65: V:N:M keeps N of every M entries, with 1 <= N < M <= 64"),
        ("64:2:4", "pattern 64:2:4: V:N:M chooses 4 of 4 columns, which leaves nothing to choose; write 2:4"),
    ],
)
def test_numbers_out_of_range_are_refused(text: str, said: str) -> None:
    with pytest.raises(AspError) as refused:
        parse(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "2;4", "1.7", "-2:4", "2.0:4", "99999999999:4", "2:4 transposeable", "2:4 greedy", "unstructured",
     "unstructured 90%", "unstructured nan", "unstructured 0.9 per column", "block 16 0.8", "block 16x16", "1:2:3:4",
     "\u0662:\u0664"],
)  # fmt: skip
def test_what_is_no_pattern_is_refused_with_the_spellings(text: str) -> None:
    with pytest.raises(AspError, match=r"write N:M, e\.g\. 2:4") as refused:
        parse(text)
    for spelling in list(PATTERNS)[1:]:
        assert spelling in str(refused.value)


@pytest.mark.parametrize("value", [124, 2.4, None, True, ["2:4"], (2, 4)])
def test_what_is_no_text_is_refused(value: object) -> None:  # 124: what YAML 1.1 reads for an unquoted 2:4
    with pytest.raises(AspError, match="unknown pattern"):
        parse(value)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(AspError, match="scope is one of layer, row, global, not 'rows'"):
        Unstructured(0.5, "rows")  # type: ignore[arg-type]


def built_in() -> list[Pattern]:
    """One pattern for every line of PATTERNS and every option that its spelling shows."""
    found = []
    for spelling in PATTERNS:
        text, _, options = spelling.rstrip("]").partition(" [")
        found += [parse(" ".join([text, option]).strip()) for option in ["", *options.split("|")]]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("pattern", built_in(), ids=lambda pattern: pattern.name)
def test_every_pattern_obeys_itself(pattern: Pattern) -> None:
    scores = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).abs()
    before = scores.clone()
    assert pattern.why_not(128, 64, 64) is None
    assert pattern.why_not(0, 64, 64) == pattern.why_not(64, 0, 0) == "empty"
    mask = pattern.mask(scores)
    assert torch.equal(scores, before)
    assert (mask.shape, mask.dtype) == (scores.shape, torch.bool)
    assert pattern.holds(mask)
    assert pattern.holds(torch.zeros_like(mask))
    assert "global" in pattern.name or not pattern.holds(torch.ones_like(mask))
    assert mask.double().mean().item() == pytest.approx(pattern.density(128, 64), abs=1 / 128 / 64)
    assert torch.equal(pattern.mask(scores.masked_fill(~mask, 0)), mask)
    assert torch.equal(pattern.mask(scores.t().contiguous().t()), mask)
    assert torch.equal(masks_of(pattern, [scores])[0], mask)
    assert torch.equal(pattern.mask(scores.clone().requires_grad_()), mask)
    nm = getattr(pattern, "nm", None)
    assert nm is None or nm.holds(mask)
    with pytest.raises(ValueError, match="expected"):
        pattern.mask(scores[0])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", built_in(), ids=lambda pattern: pattern.name)
def test_every_pattern_gives_the_same_bits_on_one_and_two_threads(
    threads: None, pattern: Pattern, dtype: torch.dtype
) -> None:
    scores = torch.randn(640, 512, generator=torch.Generator().manual_seed(0)).to(dtype)  # more than one piece
    scores[:64] = scores[:64].round()
    torch.set_num_threads(2)
    many = pattern.mask(scores)
    torch.set_num_threads(1)
    assert torch.equal(pattern.mask(scores), many)


@dataclass(frozen=True)
class FirstColumns:
    """Keeps the first columns: a pattern of one's own."""

    share: float = 0.5

    @property
    def name(self) -> str:
        return f"own_patterns:columns {self.share}"

    def why_not(self, rows: int, cols: int, run: int) -> str | None:
        return None

    def mask(self, scores: Tensor) -> Tensor:
        keep = torch.zeros(scores.shape, dtype=torch.bool)
        keep[:, : int(scores.shape[1] * self.share)] = True
        return keep

    def holds(self, mask: Tensor) -> bool:
        return bool((mask <= self.mask(mask)).all())

    def density(self, rows: int, cols: int) -> float:
        return self.share


OWN = """
import sys
FirstColumns = sys.modules["test_patterns_spelling_made"].FirstColumns
half = FirstColumns()
number = 4
def columns(text="0.5"): return FirstColumns(float(text))
def nothing(): return None
def kind(): return FirstColumns
def needs(text): return FirstColumns(float(text))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_patterns.py").write_text(OWN)
    (tmp_path / "broken_patterns.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "test_patterns_spelling_made", sys.modules[__name__])
    yield
    for name in ("own_patterns", "broken_patterns"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("own_patterns:half", 0.5),
        ("own_patterns:FirstColumns", 0.5),
        ("own_patterns:columns", 0.5),
        ("own_patterns:columns 0.25", 0.25),
        ("  own_patterns:needs   0.125 ", 0.125),
    ],
)
def test_a_pattern_of_ones_own(own: None, text: str, share: float) -> None:
    pattern = parse(text)
    assert pattern == FirstColumns(share)
    assert pattern.mask(torch.rand(2, 8)).sum() == 2 * 8 * share
    assert parse(FirstColumns(0.25).name) == FirstColumns(0.25)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_such_package:x", "No module named 'no_such_package'; expected package.module:name of a pattern"),
        ("own_patterns:missing", "has no attribute 'missing'; expected package.module:name"),
        ("broken_patterns:f", "pattern 'broken_patterns:f': "),
        ("own_patterns:number", "expected own_patterns:number to be a pattern, an object with name, why_not, mask, "),
        ("own_patterns:nothing", "expected own_patterns:nothing() to be a pattern"),
        ("own_patterns:kind", "expected own_patterns:kind() to be a pattern"),
        ("own_patterns:half 3", "own_patterns:half is a pattern as it is; write it without '3'"),
        ("own_patterns:columns x", "own_patterns:columns('x'): could not convert string to float"),
        ("own_patterns:needs", "own_patterns:needs(): "),
        ("own_patterns:nothing 1", "own_patterns:nothing('1'): "),
        ("collections:OrderedDict", "got a OrderedDict without name, why_not, mask, holds, density"),
    ],
)
def test_what_is_no_pattern_of_ones_own_is_refused(own: None, text: str, said: str) -> None:
    with pytest.raises(AspError) as refused:
        parse(text)
    assert str(refused.value).startswith(f"pattern '{text}'")
    assert said in str(refused.value)
