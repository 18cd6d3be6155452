"""verify and same_outputs: each must be able to say no."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.exporters import EXPORTERS, export
from asp_toolkit.files import sha256
from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import prune
from asp_toolkit.verification import same_outputs, verify


def pruned() -> tuple[nn.Sequential, MaskSet]:
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    return net, prune(net, "2:4")


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change tensors of a dense export under a true hash."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    manifest = json.loads((folder / "asp_manifest.json").read_text())
    manifest["files"][path.name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    (folder / "asp_manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("format", list(EXPORTERS))
def test_export_and_run_folder_hold(tmp_path: Path, format: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "exports" / format, format)
    for target in (folder, tmp_path, str(folder)):
        found = verify(target)
        assert (found.ok, found.problems, found.checked) == (True, [], 2)
        assert {layer.name: (layer.pattern, layer.density, layer.problem) for layer in found.layers} == {
            "0.weight": ("2:4", 0.5, None),
            "2.weight": ("2:4", 0.5, None),
        }
    assert verify(folder, masks).ok
    other = MaskSet({"2.weight": ~masks.masks["2.weight"], "9.weight": masks.masks["2.weight"]}, {}, {})
    problems = verify(folder, other).problems
    assert any("'2.weight': has entries that the given mask drops" in problem for problem in problems)
    assert any("'9.weight' has a mask but is not listed" in problem for problem in problems)


def fill_a_group(tensors: dict[str, Tensor]) -> None:
    tensors["0.weight"][3, :, 1, 2] = 1.0


def negative_zero(tensors: dict[str, Tensor]) -> None:
    tensors["2.weight"][tensors["2.weight"] == 0] = -0.0


def fewer(tensors: dict[str, Tensor]) -> None:
    tensors["2.weight"][0] = 0


def wider(tensors: dict[str, Tensor]) -> None:
    tensors["2.weight"] = torch.zeros(8, 12)


def gone(tensors: dict[str, Tensor]) -> None:
    del tensors["2.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fill_a_group, "'0.weight': is not 2:4 along axis 1"),
        (negative_zero, "'2.weight': holds -0.0 where"),
        (fewer, "'2.weight': the manifest says density 0.5, the file has 0.4375"),
        (wider, r"'2.weight': expected float32 \[8, 8\]"),
        (gone, "'2.weight': missing"),
    ],
)
def test_dense_file_that_does_not_hold(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "d")
    rewritten(folder, change)
    found = verify(folder)
    assert not found.ok
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("\n".join(found.problems))
    assert len(found.problems) == 1


def test_weights_file_that_nobody_listed(tmp_path: Path) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "d")
    (folder / "README.md").write_text("fine")
    assert verify(folder).ok
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin: a weights file that the manifest does not know" in verify(folder).problems[0]


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(AspError, match="neither an export"):
        verify(tmp_path)
    with pytest.raises(AspError, match="a model needs its masks"):
        verify(nn.Linear(4, 4))


def test_model_against_masks() -> None:
    net, masks = pruned()
    assert verify(net, masks).ok
    assert verify(net, masks).checked == 2
    assert not verify(net, MaskSet({})).ok
    full = MaskSet({"2.weight": torch.ones(8, 8, dtype=torch.bool)}, {}, {"2.weight": "2:4"})
    assert verify(net, full).problems == ["'2.weight': its mask is not 2:4"]
    with torch.no_grad():
        net[2].weight.add_(1)
    assert verify(net, masks).problems == ["'2.weight': 32 of 32 dropped entries are not +0.0"]


def test_masks_of_no_pattern_or_of_none_that_is_known() -> None:
    net, masks = pruned()
    bare = MaskSet(masks.masks)
    found = verify(net, bare)
    assert (found.ok, found.notes[0]) == (True, "'0.weight': its mask has no pattern to be checked against")
    wrong = MaskSet(masks.masks, {}, dict.fromkeys(masks.masks, "2;4"))
    assert "'0.weight': unknown pattern '2;4'" in verify(net, wrong).problems[0]


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Fixed(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: Any) -> Any:
        return self.value


NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2), torch.ones(2), None),
        (NAN, NAN.clone(), None),
        ((NAN, {"x": [torch.ones(())]}), (NAN, {"x": [torch.ones(())]}), None),
        (Output(NAN), Output(NAN), None),
        (torch.tensor([0.0, 1]), torch.tensor([-0.0, 1]), "output: "),
        (torch.tensor([1.0, 1]), torch.tensor([1.0, 1.5]), "1 of 2 entries differ, by at most 0.5"),
        (torch.ones(2), torch.ones(2).double(), "expected torch.float32"),
        (torch.ones(2), torch.ones(1, 2), r"expected torch.float32 \(2,\)"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "other entries"),
        ([torch.ones(1)], (torch.ones(1),), "expected list, got tuple"),
        ((torch.ones(1), {"x": torch.ones(1)}), (torch.ones(1), {"x": torch.zeros(1)}), r"output\[1\]\['x'\]: 1 of 1"),
        (Output(NAN), Output(NAN, torch.ones(())), r"output\['loss'\]"),
    ],
)
def test_same_outputs(a: Any, b: Any, message: str | None) -> None:
    if message is None:
        same_outputs(Fixed(a), Fixed(b), None)
        return
    with pytest.raises(AspError, match=message):
        same_outputs(Fixed(a), Fixed(b), None)


def test_same_outputs_runs_in_eval_mode_and_restores_each_mode() -> None:
    net = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3).eval(), nn.Linear(3, 3)).train()
    net[1].eval()
    same_outputs(net, net, torch.randn(4, 3))
    same_outputs(net, net, {"x": torch.randn(4, 3)}, lambda model, batch: model(batch["x"]))
    assert [module.training for module in net] == [True, False, True]
    assert int(net[1].num_batches_tracked) == 0
