"""Exports of every pattern: which are packed, which are stored as they are, and that each is checked as itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asp_kernels import SparseLinear
from asp_toolkit.errors import AspError
from asp_toolkit.exporters import export, load_dense, load_packed, read_manifest, weights_bytes
from asp_toolkit.exporters.checks import is_joint
from asp_toolkit.exporters.entry import known_pattern
from asp_toolkit.files import sha256
from asp_toolkit.inspection import inspect, totals
from asp_toolkit.masks import MaskSet
from asp_toolkit.patterns import NM
from asp_toolkit.pruning import Rule, prune
from asp_toolkit.verification import same_outputs, verify

PACKABLE = ["3:4", "2:4 transposable", "2:4 transposable greedy", "16:2:8"]
OTHERS = ["unstructured 0.7", "unstructured 0.7 per row", "unstructured 0.7 global", "block 8x8 0.5"]
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()


def retensor(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the weights file under a true hash."""
    path = folder / read_manifest(folder).weights[0]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    value = json.loads((folder / "asp_manifest.json").read_text())
    value["files"][path.name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    (folder / "asp_manifest.json").write_text(json.dumps(value))


@pytest.mark.parametrize("pattern", PACKABLE + OTHERS)
def test_dense(tmp_path: Path, pattern: str) -> None:
    model = net()
    masks = prune(model, pattern)
    folder = export(model, masks, tmp_path / "d")
    same_outputs(model, load_dense(folder, net(1)), X)
    assert verify(folder, masks) == verify(folder)
    assert (verify(folder).problems, verify(folder).notes, verify(folder).checked) == ([], [], 2)
    assert {entry.pattern for entry in read_manifest(folder).parameters.values()} == {pattern}
    assert [row.pattern for row in inspect(folder) if row.name.endswith("weight")] == [pattern] * 2


@pytest.mark.parametrize("pattern", PACKABLE)
def test_packed_by_the_nm_that_a_pattern_is(tmp_path: Path, pattern: str) -> None:
    model = net()
    masks = prune(model, pattern)
    folder = export(model, masks, tmp_path / "p", "packed")
    assert {"0.weight.values", "2.weight.codes"} < set(load_file(folder / "packed.safetensors"))
    loaded = load_packed(folder, net(1))
    assert isinstance(loaded[0], SparseLinear)
    same_outputs(model, loaded, X)
    assert verify(folder, masks).problems == []
    rows = {row.name: row for row in inspect(folder)}
    assert rows["0.weight"].pattern == pattern
    assert rows["0.weight"].bytes_packed == loaded[0].values.nbytes + loaded[0].codes.nbytes


@pytest.mark.parametrize("pattern", OTHERS)
def test_nothing_to_pack_is_said_before_a_file_is_written(tmp_path: Path, pattern: str) -> None:
    model = net()
    with pytest.raises(AspError, match=rf"only N:M is packed, the patterns here: '{pattern}'; use format 'dense'"):
        export(model, prune(model, pattern), tmp_path / "p", "packed")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("pattern", OTHERS)
def test_packed_and_ordinary_parameters_in_one_file(tmp_path: Path, pattern: str) -> None:
    model = net()
    masks = prune(model, rules=[Rule(("0",)), Rule(("2",), pattern=pattern)])
    folder = export(model, masks, tmp_path / "p", "packed")
    assert set(load_file(folder / "packed.safetensors")) == {
        *("0.weight.values", "0.weight.codes", "0.bias", "2.weight", "2.bias"),
    }
    for layers in ("sparse", "dense"):
        loaded = load_packed(folder, net(1), layers=layers)
        same_outputs(model, loaded, X)
        assert [type(part) is nn.Linear for part in loaded] == [layers == "dense", False, True]
    assert verify(folder, masks).problems == []
    rows = {row.name: row for row in inspect(folder)}
    assert (rows["0.weight"].pattern, rows["2.weight"].pattern) == ("2:4", pattern)
    assert rows["2.weight"].bytes_packed is None
    sums = totals(list(rows.values()))
    assert sums.pruned == 2
    assert sums.pruned_bytes_packed == 4 * 1024 + 64 * 4 + 4 * 1024  # values, codes; the other one as it is
    assert sums.bytes_packed - 4 * 80 == sums.pruned_bytes_packed < weights_bytes(folder)


def one_more(tensors: dict[str, Tensor]) -> None:
    weight = tensors["2.weight"]
    weight[weight == 0] = 1.0


def negative_zero(tensors: dict[str, Tensor]) -> None:
    weight = tensors["2.weight"]
    weight[weight == 0] = -0.0


@pytest.mark.parametrize("pattern", ["2:4 transposable", "16:2:8", *OTHERS])
@pytest.mark.parametrize(("change", "message"), [(one_more, "not {pattern}"), (negative_zero, "-0.0")])
def test_zeros_that_do_not_hold(
    tmp_path: Path, pattern: str, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    model = net()
    folder = export(model, prune(model, pattern), tmp_path / "d")
    retensor(folder, change)
    found = verify(folder)
    assert not found.ok
    assert any(message.format(pattern=pattern) in problem for problem in found.problems)
    if change is one_more:
        (row,) = [row for row in inspect(folder) if row.name == "2.weight"]
        assert row.pattern is None
        assert f"is not {pattern}, as the manifest says" in str(row.skipped)


def test_masks_that_are_not_their_pattern_are_not_exported(tmp_path: Path) -> None:
    model = net()
    masks = prune(model, "unstructured 0.5")
    for pattern in ("unstructured 0.7", "block 8x8 0.5", "2:4 transposable", "unstructured 0.7 global"):
        claimed = MaskSet(masks.masks, {}, dict.fromkeys(masks.masks, pattern))
        with pytest.raises(AspError, match=rf"(is|are) not {pattern}"):
            export(model, claimed, tmp_path / "x")
        assert not verify(model, claimed).ok
    with pytest.raises(AspError, match=r"'0.weight': block 48x48 0.5 does not fit"):
        export(model, MaskSet(masks.masks, {}, dict.fromkeys(masks.masks, "block 48x48 0.5")), tmp_path / "x")
    with pytest.raises(AspError, match=r"the mask of '0.weight' has no pattern; name it in MaskSet.patterns"):
        export(model, MaskSet(masks.masks), tmp_path / "x")
    assert not any(tmp_path.iterdir())


def test_joint_pattern_is_checked_over_all_its_parameters(tmp_path: Path) -> None:
    model = net()
    with torch.no_grad():
        model[0].weight.mul_(100)  # so that the first keeps far more than its share, and the second almost nothing
    masks = prune(model, "unstructured 0.7 global")
    density = masks.density()
    assert density["0.weight"] > 0.4
    folder = export(model, masks, tmp_path / "d")
    assert verify(folder).ok
    assert verify(model, masks).ok
    alone = MaskSet({"0.weight": masks.masks["0.weight"]}, {}, {"0.weight": "unstructured 0.7 global"})
    assert not verify(model, alone).ok
    with pytest.raises(AspError, match=r"masks under unstructured 0.7 global are not .* 1 of them keep"):
        export(model, alone, tmp_path / "x")


def test_rules_that_share_a_joint_pattern_round_each_for_themselves(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(5, 1), nn.Linear(5, 1))
    pattern = "unstructured 0.9 global"  # drops 4 of 5 each, but 14 of 15: ties go to the even number
    masks = prune(model, rules=[Rule((str(i),), pattern=pattern) for i in range(3)])
    assert sum(int(mask.sum()) for mask in masks.masks.values()) == 3
    assert verify(model, masks).ok
    assert verify(export(model, masks, tmp_path / "d")).ok
    full = MaskSet({name: torch.ones(1, 5).bool() for name in masks.masks}, {}, masks.patterns)
    assert not verify(model, full).ok


def test_patterns_of_one_layer_are_not_joint() -> None:
    joint = {pattern for pattern in PACKABLE + OTHERS if is_joint(known_pattern(pattern))}
    assert joint == {"unstructured 0.7 global"}


OWN = """
from asp_toolkit.patterns import parse

class Halves:
    '''Keeps only even columns.'''
    name = "halves_of_{stem}:pattern"
    nm = {nm}
    def why_not(self, rows, cols, run):
        return "odd" if cols % 2 else None
    def mask(self, scores):
        keep = scores.new_zeros(scores.shape).bool()
        keep[:, ::2] = True
        return keep
    def holds(self, mask):
        return not mask[:, 1::2].any()
    def density(self, rows, cols):
        return 0.5

pattern = Halves()
"""


@dataclass(frozen=True)
class Own:
    """An importable pattern: its name, and what to forget so that only an import would bring it back."""

    name: str
    module: str

    def forget(self) -> None:
        sys.modules.pop(self.module, None)

    @property
    def imported(self) -> bool:
        return self.module in sys.modules


@pytest.fixture(params=["None", "parse('2:4')"], ids=["no N:M", "N:M too"])
def own(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Own:
    stem = "none" if request.param == "None" else "nm"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"halves_of_{stem}.py").write_text(OWN.format(stem=stem, nm=request.param))
    return Own(f"halves_of_{stem}:pattern", f"halves_of_{stem}")


def test_pattern_that_is_not_built_in_is_never_imported_for_a_file(tmp_path: Path, own: Own) -> None:
    from asp_toolkit.patterns import parse

    model = net()
    pattern = parse(own.name)
    masks = prune(model, own.name)
    folder = export(model, masks, tmp_path / "d", patterns={own.name: pattern})
    unchecked = export(model, masks, tmp_path / "u")
    own.forget()
    for made in (folder, unchecked):
        same_outputs(model, load_dense(made, net(1)), X)
        found = verify(made, masks)
        assert (found.ok, found.checked, len(found.notes)) == (True, 2, 2)
        assert f"'0.weight': pattern '{own.name}' is not built in" in found.notes[0]
        assert [layer.note is not None for layer in found.layers] == [True, True]
        assert {row.name for row in inspect(made)} == set(model.state_dict())
    found = verify(model, masks)
    assert (found.ok, len(found.notes)) == (True, 2)
    masks.save(tmp_path / "masks.safetensors")
    assert verify(model, MaskSet.load(tmp_path / "masks.safetensors")).notes == found.notes
    assert not own.imported
    assert verify(folder, patterns={own.name: pattern}).notes == []
    assert verify(folder, patterns={own.name: pattern}).ok

    def odd(tensors: dict[str, Tensor]) -> None:
        tensors["2.weight"][:, 0], tensors["2.weight"][:, 1] = tensors["2.weight"][:, 1], 0.1

    retensor(folder, odd)
    assert any("is not " in problem for problem in verify(folder, patterns={own.name: pattern}).problems)
    assert verify(folder).ok  # which is what the notes say
    full = MaskSet({"0.weight": torch.ones(64, 32, dtype=torch.bool)}, {}, {"0.weight": own.name})
    with pytest.raises(AspError, match=r"mask of '0.weight' is not halves_of"):
        export(net(), full, tmp_path / "x", patterns={own.name: pattern})


def test_pattern_of_ones_own_is_packed_where_it_is_nm(tmp_path: Path, own: Own) -> None:
    from asp_toolkit.patterns import parse

    model = net()
    pattern = parse(own.name)
    masks = prune(model, own.name)
    with pytest.raises(AspError, match=f"the patterns here: '{own.name}'; use format 'dense'"):
        export(model, masks, tmp_path / "x", "packed")
    if own.name.startswith("halves_of_none"):
        return
    folder = export(model, masks, tmp_path / "p", "packed", patterns={own.name: pattern})
    own.forget()
    assert {(e.also, e.nm) for e in read_manifest(folder).parameters.values()} == {("2:4", NM(2, 4))}
    loaded = load_packed(folder, net(1))
    assert isinstance(loaded[0], SparseLinear)
    same_outputs(model, loaded, X)
    assert verify(folder).ok
    assert len(verify(folder).notes) == 2
    assert not own.imported


@pytest.mark.parametrize(
    "text",
    [
        *("os:system", " os:system", "os.path:join a", "2:4 os:system", "\u0662:4", "a2:4", "2:4:os:x", "os :system"),
        *("unstructured 0.9 os:system", "block 2x2 0.5:x", "\nos:system", "2:\n4\nos:path", ":", "2:", ":4"),
    ],
)
def test_no_name_with_code_in_it_reaches_an_import(text: str) -> None:
    assert known_pattern(text) is None


@pytest.mark.parametrize("text", [*PACKABLE, *OTHERS, " 2 : 4 ", "64:2:8"])
def test_built_in_names_are_known(text: str) -> None:
    assert known_pattern(text) is not None
