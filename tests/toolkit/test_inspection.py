"""inspect: rows from the numbers themselves, whatever holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asp_toolkit.errors import AspError
from asp_toolkit.exporters import export, load_packed, weights_bytes
from asp_toolkit.inspection import held_pattern, inspect, totals
from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import Rule, prune


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(64, 16, bias=False)
        self.dense = nn.Linear(16, 16)
        self.odd = nn.Linear(30, 6)
        self.table = nn.Embedding(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).flatten(1))


def pruned() -> tuple[Net, MaskSet]:
    torch.manual_seed(0)
    net = Net()
    return net, prune(net, rules=[Rule(("conv",)), Rule(("fc",), pattern="1:4")])


def patterns(target: object) -> dict[str, str | None]:
    return {row.name: row.pattern for row in inspect(target)}  # type: ignore[arg-type]


WANTED = {
    "conv.weight": "2:4", "conv.bias": None, "fc.weight": "1:4", "dense.weight": None, "dense.bias": None,
    "odd.weight": None, "odd.bias": None, "table.weight": None,
}  # fmt: skip


def test_model() -> None:
    net, _ = pruned()
    rows = {row.name: row for row in inspect(net)}
    assert {name: row.pattern for name, row in rows.items()} == WANTED
    conv = rows["conv.weight"]
    assert (conv.layer, conv.shape, conv.density, conv.skipped) == ("Conv2d", (8, 8, 3, 3), 0.5, None)
    assert (conv.bytes_dense, conv.bytes_packed) == (4 * 576, 4 * 288 + 8 * 9)
    assert rows["fc.weight"].bytes_packed == 4 * 256 + 16 * 4
    assert rows["table.weight"].skipped == "embedding: a table that is looked up, not multiplied"
    assert "hold no N:M pattern" in str(rows["dense.weight"].skipped)
    assert "vector" in str(rows["conv.bias"].skipped)
    sums = totals(list(rows.values()))
    assert (sums.parameters, sums.pruned) == (8, 2)
    assert sums.entries == sum(p.numel() for p in net.parameters())
    assert sums.density == pytest.approx(sum(int((p != 0).sum()) for p in net.parameters()) / sums.entries)
    assert sums.density_pruned == pytest.approx((288 + 256) / (576 + 1024))
    assert sums.bytes_packed == sums.bytes_dense - sums.pruned_bytes_dense + sums.pruned_bytes_packed
    with torch.device("meta"), pytest.raises(AspError, match="meta device"):
        inspect(nn.Linear(4, 4))


def test_every_kind_of_file(tmp_path: Path) -> None:
    net, masks = pruned()
    state = net.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "b.ckpt")
    for name in ("a.safetensors", "a.pt", "b.ckpt"):
        assert patterns(tmp_path / name) == WANTED
    shards = tmp_path / "shards"
    shards.mkdir()
    names = sorted(state)
    for i, some in enumerate((names[:3], names[3:])):
        save_file({name: state[name] for name in some}, shards / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{int(i > 2)}.safetensors" for i, name in enumerate(names)}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert patterns(shards) == WANTED
    for format in ("dense", "packed"):
        folder = export(net, masks, tmp_path / format, format)
        assert patterns(folder) == WANTED
        by_name = {row.name: row for row in inspect(folder)}
        assert by_name["odd.weight"].skipped == masks.skipped["odd.weight"]
        assert sum(row.bytes_packed or row.bytes_dense for row in by_name.values()) < weights_bytes(tmp_path / "dense")


def test_model_with_packed_layers(tmp_path: Path) -> None:
    net, masks = pruned()
    loaded = load_packed(export(net, masks, tmp_path / "p", "packed"), Net())
    assert patterns(loaded) == WANTED
    plain, sparse = ({row.name: row for row in inspect(model)} for model in (net, loaded))
    assert sparse["conv.weight"].layer == "SparseConv2d"
    for name in ("conv.weight", "fc.weight"):
        assert (plain[name].bytes_packed, plain[name].density) == (sparse[name].bytes_packed, sparse[name].density)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(2), "evil": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(AspError, match="cannot be read with weights_only"):
        inspect(tmp_path / "evil.pt")
    assert "executed" not in capsys.readouterr().out
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(AspError, match="cannot be read"):
        inspect(tmp_path / "bad.safetensors")
    with pytest.raises(AspError, match="does not exist"):
        inspect(tmp_path / "nothing.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(AspError, match="expected a state dict"):
        inspect(tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AspError, match=r"holds no asp_manifest.json and no weights"):
        inspect(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../bad.safetensors"}}')
    with pytest.raises(AspError, match="not the name of a file in the folder"):
        inspect(tmp_path / "empty")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([1, 1, 0, 0, 0, 1, 0, 1], "2:4"),
        ([1, 0, 0, 0, 0, 1, 0, 0], "1:4"),
        ([1, 0, 0, 0, 0, 0, 0, 0], "1:8"),
        ([1, 1, 1, 0, 0, 0, 0, 1], "4:8"),
        ([1, 1, 0, 0, 0, 0, 0, 0], "2:8"),
        ([1, 1, 1, 0, 0, 0, 1, 1], None),
        ([0, 0, 0, 0, 0, 0, 0, 0], None),
    ],
)
def test_held_pattern_by_hand(row: list[float], wanted: str | None) -> None:
    found = held_pattern(torch.tensor([row]), 8)
    assert (found.name if found else None) == wanted
    assert held_pattern(torch.tensor([row]), 2) is None


SWAPPED = torch.eye(4)[[1, 0, 3, 2]]


@pytest.mark.parametrize(
    ("matrix", "wanted"),
    [
        (torch.eye(4) + SWAPPED, "2:4 transposable"),
        (torch.tensor([[1, 1, 0, 0]] * 4), "2:4"),  # its columns keep 4 of 4
        (torch.eye(4), "1:4 transposable"),
        ((torch.eye(4) + SWAPPED)[:2], "2:4"),  # half a tile
        (torch.cat([torch.eye(4), SWAPPED]), "1:4 transposable"),
        (torch.cat([torch.eye(4), torch.tensor([[0, 0, 1, 0]] * 4)]), "1:4"),  # one tile of two
    ],
)
def test_transposable_by_hand(matrix: Tensor, wanted: str) -> None:
    found = held_pattern(matrix, 4)
    assert found is not None
    assert found.name == wanted


@pytest.mark.parametrize("pattern", ["2:4 transposable", "2:4 transposable greedy"])
def test_transposable_is_seen_without_a_manifest(tmp_path: Path, pattern: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 16), nn.Conv2d(16, 8, 3), nn.Linear(16, 10))
    masks = prune(net, pattern)
    assert set(masks.masks) == {"0.weight", "1.weight"}  # 10 rows are no whole tiles
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    for target in (net, tmp_path / "w.safetensors"):
        rows = {row.name: row for row in inspect(target)}
        assert {name for name, row in rows.items() if row.pattern == "2:4 transposable"} == set(masks.masks)
        assert rows["0.weight"].bytes_packed == 4 * 256 + 16 * 4


def test_unstructured_zeros_are_told_as_a_share() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64))
    prune(net, "unstructured 0.25")
    (row,) = [row for row in inspect(net) if row.name == "0.weight"]
    assert (row.pattern, row.density, row.bytes_packed) == (None, 0.75, None)
    assert row.skipped == "dense: its zeros (25.0%) hold no N:M pattern"


def test_export_whose_joint_pattern_does_not_hold(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    folder = export(net, prune(net, "unstructured 0.25 global"), tmp_path / "d")
    assert [row.pattern for row in inspect(folder) if row.name.endswith("weight")] == ["unstructured 0.25 global"] * 2
    net[0].weight.data.fill_(1.0)
    save_file(net.state_dict(), folder / "model.safetensors")
    (row,) = [row for row in inspect(folder) if row.name == "1.weight"]
    assert row.pattern is None
    assert "is not unstructured 0.25 global, as the manifest says: 2 of them keep" in str(row.skipped)
