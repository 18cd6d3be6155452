"""Exports from strangers: damaged, hostile, or of another model. Each is named; the model stays as it was."""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.exporters import EXPORTERS, export, load_dense, load_packed, read_manifest
from asp_toolkit.files import sha256
from asp_toolkit.inspection import inspect
from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import prune
from asp_toolkit.verification import verify

LOAD: dict[str, Callable[..., nn.Module]] = {"dense": load_dense, "packed": load_packed}


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(32, 16)
            self.twin = nn.Linear(16, 16)
            self.norm = nn.BatchNorm1d(16)


def pruned() -> tuple[Net, MaskSet]:
    net = Net()
    return net, prune(net, "2:4")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "asp_manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def retensor(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the weights file and give it a true hash: what a malicious or mistaken writer would do."""
    name = read_manifest(folder).weights[0]
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)

    def rehash(value: dict[str, Any]) -> None:
        value["files"][name] = {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}

    rewrite(folder, rehash)


def same_state(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("format", list(EXPORTERS))
def test_wrong_model_is_an_error_and_stays_as_it_was(tmp_path: Path, format: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "out", format)
    more, fewer, wider = Net(seed=1), Net(seed=1), Net(seed=1)
    more.extra = nn.Linear(4, 4)
    del fewer.fc
    wider.fc = nn.Linear(64, 16)
    for model, message in (
        (more, "missing 'extra.weight', 'extra.bias'"),
        (fewer, r"unexpected 'fc.bias', 'fc.weight'"),
        (wider, r"'fc.weight': expected shape \(16, 64\), got \(16, 32\)"),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(AspError, match=message):
            LOAD[format](folder, model)
        assert same_state(model, before)
    with pytest.raises(AspError, match=f"load it with load_{format}"):
        LOAD["packed" if format == "dense" else "dense"](folder, Net())


def damage_code(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight.codes"][2, 1] = 0


def drop_codes(tensors: dict[str, Tensor]) -> None:
    del tensors["fc.weight.codes"]


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight.values"] = tensors["fc.weight.values"][:, :-1].contiguous()


def other_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight.values"] = tensors["fc.weight.values"].half()


def whole_numbers(tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"] = tensors["fc.bias"].int()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_code, r"'fc.weight': codes: row 2, group 2: expected 2 ascending"),
        (drop_codes, "'fc.weight': codes missing"),
        (narrow, r"'fc.weight': values: expected shape \(16, 16\), got \(16, 15\)"),
        (other_dtype, "'fc.weight': expected float32, got torch.float16"),
        (whole_numbers, "'fc.bias': expected torch.float32, got torch.int32"),
    ],
)
def test_hostile_packed_tensors(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", "packed")
    retensor(folder, damage)
    model = Net(seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AspError, match=message):
        load_packed(folder, model)
    assert same_state(model, before)
    assert verify(folder).ok == (damage is whole_numbers)


def set_at(*path: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = path

    def change(manifest: dict[str, Any]) -> None:
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return change


FC = ("parameters", "fc.weight")
FILE = {"sha256": "0" * 64, "bytes": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_at("asp_manifest", 2), "version 2, this asp_toolkit reads version 1"),
        (set_at("format", "zip"), "format"),
        (set_at("surprise", 1), "surprise: Extra inputs"),
        (set_at("files", "../../etc/passwd", FILE), "not a plain path inside the folder"),
        (set_at("files", "/etc/passwd", FILE), "not a plain path"),
        (set_at("files", "a\\..\\b", FILE), "not a plain path"),
        (set_at("files", "C:x", FILE), "not a plain path"),
        (set_at("weights", ["../x.safetensors"]), "not a plain path"),
        (set_at("weights", ["y.safetensors"]), "not a .safetensors file listed"),
        (set_at("files", "ghost.txt", FILE), "ghost.txt: missing"),
        (set_at(*FC, "pattern", "5:4"), "pattern 5:4"),
        (set_at(*FC, "pattern", "2;4"), "unknown pattern"),
        (set_at(*FC, "shape", [16, -32]), "greater than or equal to 0"),
        (set_at(*FC, "shape", [16, 30]), "does not fit shape"),
        (set_at(*FC, "shape", [16, 1 << 50]), "less than or equal"),
        (set_at(*FC, "shape", [32, 32]), "'fc.weight': "),
        (set_at(*FC, "order", [0, 0]), "do not suit 2 dimensions"),
        (set_at(*FC, "row_dims", 2), "do not suit 2 dimensions"),
        (set_at(*FC, "density", 7), "less than or equal to 1"),
        (set_at(*FC, "dtype", "complex64"), "dtype"),
        (set_at(*FC, "pattern", "2:4 " * 300), "at most 1000 characters"),
        (set_at(*FC, "pattern", "999999999:999999999"), "pattern 999999999:999999999"),
        (set_at(*FC, "pattern", "unstructured 7"), "unstructured 7"),
        (set_at(*FC, "pattern", "block 48x48 0.5"), "does not fit shape"),
        (set_at(*FC, "pattern", "2:32 transposable"), "does not fit shape"),
        (set_at(*FC, "pattern", "64:2:8"), "does not fit shape"),
        (set_at(*FC, "split", [16, 2, 16]), "do not suit 3 dimensions"),
        (set_at(*FC, "split", [16, 31]), "not as many entries as shape"),
        (set_at(*FC, "split", [0, 32]), "not as many entries as shape"),
        (set_at(*FC, "split", [1 << 38, 1]), "not as many entries as shape"),
        (set_at(*FC, "split", [-16, -32]), "greater than or equal to 0"),
        (set_at(*FC, "split", [1] * 40), "at most 16 items"),
        (set_at(*FC, "split", []), "at least 2 items"),
        (set_at(*FC, "split", "16x32"), "valid list"),
        (set_at(*FC, "shape", [1 << 40] * 16), "has more entries than any parameter"),
        (set_at(*FC, "run", 7), "run 7 does not divide the 32 columns"),
        (set_at(*FC, "run", 0), "run 0 does not divide"),
        (set_at(*FC, "run", 2), "does not fit shape"),
        (set_at(*FC, "also", "2:4"), "beside a pattern that is not built in"),
        (set_at(*FC, "also", "os:system"), "beside a pattern that is not built in"),
        (set_at("tied", "ghost", "fc.weight"), "unexpected 'ghost'"),
        (set_at("parameters", "ghost.weight", None), "valid dictionary or instance of Entry"),
    ],
)
@pytest.mark.parametrize("format", list(EXPORTERS))
def test_hostile_manifests(tmp_path: Path, format: str, change: Callable[[dict[str, Any]], None], message: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", format)
    rewrite(folder, change)
    with pytest.raises(AspError, match=message):
        LOAD[format](folder, Net())


def both(*changes: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        for one in changes:
            one(manifest)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (both(set_at(*FC, "pattern", "os:system"), set_at(*FC, "also", "os:system")), "also: expected N:M"),
        (both(set_at(*FC, "pattern", "os:system"), set_at(*FC, "also", "unstructured 0.5")), "also: expected N:M"),
        (both(set_at(*FC, "pattern", "os:system"), set_at(*FC, "also", "2:64")), "2:64 does not fit shape"),
        (both(set_at(*FC, "split", [16, 8, 4]), set_at(*FC, "order", [0, 2, 1])), "axis 1 do not suit|pruned along"),
    ],
)
def test_hostile_pairs(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", "packed")
    rewrite(folder, change)
    model = Net(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AspError, match=message):
        load_packed(folder, model)
    assert same_state(model, before)


@pytest.mark.parametrize("format", list(EXPORTERS))
def test_pattern_that_names_code_runs_nothing(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder from a stranger names a module that lies ready; nobody who reads the folder may import it."""
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", format)
    (tmp_path / "trap.py").write_text("print('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    rewrite(folder, set_at(*FC, "pattern", "trap:pattern"))
    found = verify(folder)
    if format == "dense":
        assert (found.ok, found.checked) == (True, 2)
        same = load_dense(folder, Net(1)).state_dict()
        assert same_state(net, same)
    else:  # the pattern no longer says N:M, so the parameter's tensor is looked for as an ordinary one
        assert any("'fc.weight': missing" in problem for problem in found.problems)
        with pytest.raises(AspError, match=r"missing 'fc.weight'"):
            load_packed(folder, Net(1))
    assert "pattern 'trap:pattern' is not built in, and code that a file names is not run" in found.notes[0]
    if format == "dense":
        assert {row.pattern for row in inspect(folder) if row.name == "fc.weight"} == {"2:4"}  # what its zeros say
    assert "executed" not in capsys.readouterr().out


def test_huge_patterns_cost_nothing(tmp_path: Path) -> None:
    """Checked by arithmetic alone: a pattern of 10^9 x 10^9 blocks, or a shape of 2^50 entries, allocates nothing."""
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for pattern in ("block 999999999x999999999 0.5", "unstructured 0." + "9" * 900, "1:64 transposable", "999999:2:8"):
        shape = [1 << 25, 1 << 25]
        rewrite(folder, both(set_at(*FC, "pattern", pattern), set_at(*FC, "shape", shape)))
        assert not verify(folder).ok
        with pytest.raises(AspError):
            load_dense(folder, Net(1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_hostile_axis(tmp_path: Path) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", "packed")

    def turn(manifest: dict[str, Any]) -> None:
        manifest["parameters"]["twin.weight"].update(order=[1, 0], axis=0)

    rewrite(folder, turn)
    with pytest.raises(AspError, match=r"'twin.weight' was pruned along axis 0"):
        load_packed(folder, Net())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"asp_manifest": 1}', "[" * 100_000, "\xff"])
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "asp_manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(AspError, match=r"asp_manifest.json"):
        load_packed(tmp_path, Net())
    assert not verify(tmp_path).ok


@pytest.mark.parametrize("format", list(EXPORTERS))
def test_damaged_weights(tmp_path: Path, format: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", format)
    path = folder / read_manifest(folder).weights[0]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(AspError, match=f"{path.name}: its content has changed"):
        LOAD[format](folder, Net())
    path.write_bytes(data[:100])
    with pytest.raises(AspError, match=f"{path.name}: expected .* bytes, got 100"):
        LOAD[format](folder, Net())
    path.unlink()
    with pytest.raises(AspError, match=f"{path.name}: missing"):
        LOAD[format](folder, Net())
    assert not verify(folder).ok
    with pytest.raises(AspError, match="expected an export folder"):
        LOAD[format](tmp_path / "nowhere", Net())
