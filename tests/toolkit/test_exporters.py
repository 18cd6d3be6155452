"""Exports: they reload to the same bits, leave the model alone, and nothing damaged or foreign gets in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from asp_kernels import SparseConv2d, SparseLinear, swap_
from asp_toolkit.errors import AspError
from asp_toolkit.exporters import EXPORTERS, export, load_dense, load_packed, read_manifest, weights_bytes
from asp_toolkit.masks import MaskSet
from asp_toolkit.pruning import masks_from_zeros, prune
from asp_toolkit.verification import same_outputs, verify

LOAD: dict[str, Callable[..., nn.Module]] = {"dense": load_dense, "packed": load_packed}


class Net(nn.Module):
    """Plain and grouped convolutions, a norm with buffers, tied embedding and head, tied layers, a Conv1d."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.grouped = nn.Conv2d(8, 16, 3, groups=2)
            self.norm = nn.BatchNorm2d(16)
            self.line = nn.Conv1d(16, 8, 3)
            self.fc = nn.Linear(32, 16)
            self.twin = nn.Linear(16, 16)
            self.other = nn.Linear(16, 16)
            self.other.weight = self.twin.weight
            self.table = nn.Embedding(5, 16)
            self.head = nn.Linear(16, 5, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("steps", torch.tensor(3 + seed))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(self.conv(x)))  # (B, 16, 4, 4)
        x = self.line(x.flatten(2)[:, :, :6]).flatten(1)
        x = self.other(self.twin(self.fc(x))) + self.table(torch.arange(len(x)) % 5)
        return self.head(x)


X = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(3))
PRUNED = ["grouped.weight", "line.weight", "fc.weight", "twin.weight"]


def pruned(dtype: torch.dtype = torch.float32, pattern: str = "2:4") -> tuple[Net, MaskSet]:
    net = Net().to(dtype).eval()
    return net, prune(net, pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", list(EXPORTERS))
def test_reloads_to_the_same_bits_and_leaves_the_model_alone(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    net, masks = pruned(dtype)
    assert sorted(masks.masks) == sorted(PRUNED)
    before = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in net.state_dict().items()}
    parameters = dict(net.named_parameters())
    folder = export(net, masks, tmp_path / "out", format, recipe={"seed": 1})
    assert all(torch.equal(t, was) and t._version == v for t, was, v in before.values())
    assert all(p is parameters[name] for name, p in net.named_parameters())
    loaded = LOAD[format](folder, Net(seed=9).eval())
    same_outputs(net, loaded, X.to(dtype))
    assert int(loaded.steps) == 3
    assert loaded.head.weight is loaded.table.weight
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert verify(folder).ok
    assert verify(folder).checked == 4
    manifest = read_manifest(folder)
    assert manifest.recipe == {"seed": 1}
    assert manifest.tied == {"other.weight": "twin.weight", "head.weight": "table.weight"}
    assert manifest.skipped == dict(masks.skipped)


def test_packed_layers(tmp_path: Path) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", "packed")
    loaded = load_packed(folder, Net(seed=9).eval())
    assert isinstance(loaded.grouped, SparseConv2d)
    assert isinstance(loaded.fc, SparseLinear)
    assert type(loaded.line) is nn.Conv1d  # no sparse twin: its ordinary weight
    assert loaded.other.values is loaded.twin.values
    state = load_file(folder / "packed.safetensors")
    assert {"fc.weight.values", "fc.weight.codes", "table.weight"} <= set(state)
    assert "fc.weight" not in state
    dense = load_packed(folder, Net(seed=9).eval(), layers="dense")
    assert [type(m) for m in dense.modules()] == [type(m) for m in net.modules()]
    assert all(torch.equal(dense.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    same_outputs(net, dense, X)
    with pytest.raises(AspError, match="layers='sparce'; did you mean 'sparse'"):
        load_packed(folder, Net(), layers="sparce")


@pytest.mark.parametrize("layers", ["sparse", "dense"])
def test_packed_into_a_model_without_memory(tmp_path: Path, layers: str) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", "packed")
    with torch.device("meta"):
        empty = Net()
    loaded = load_packed(folder, empty.eval(), layers=layers)
    assert not any(t.is_meta for t in loaded.state_dict().values())
    assert loaded.head.weight is loaded.table.weight
    same_outputs(net, loaded, X)


def test_ties_are_restored_in_a_model_built_without_them(tmp_path: Path) -> None:
    net, masks = pruned()
    for format, load in LOAD.items():
        folder = export(net, masks, tmp_path / format, format)
        apart = Net(seed=4).eval()
        apart.head.weight = nn.Parameter(torch.zeros(5, 16))
        apart.other.weight = nn.Parameter(torch.zeros(16, 16))
        loaded = load(folder, apart)
        assert loaded.head.weight is loaded.table.weight
        same_outputs(net, loaded, X)


@pytest.mark.parametrize("pattern", ["1:4", "4:8", "3:8", "1:2"])
def test_other_patterns(tmp_path: Path, pattern: str) -> None:
    net, masks = pruned(pattern=pattern)
    folder = export(net, masks, tmp_path / "p", "packed")
    same_outputs(net, load_packed(folder, Net(seed=9).eval()), X)
    assert {entry.pattern for entry in read_manifest(folder).parameters.values()} == {pattern}


def test_packed_file_is_smaller(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()
    masks = prune(net, "2:4")
    dense, packed = (weights_bytes(export(net, masks, tmp_path / f, f)) for f in ("dense", "packed"))
    assert packed <= 0.6 * dense


def test_dense_file_has_positive_zeros_and_an_ordinary_state_dict(tmp_path: Path) -> None:
    net, masks = pruned()
    with torch.no_grad():
        net.fc.weight[~masks.masks["fc.weight"]] = -0.0
    folder = export(net, masks, tmp_path / "d")
    state = load_file(folder / "model.safetensors")
    dropped = state["fc.weight"][~masks.masks["fc.weight"]]
    assert not torch.signbit(dropped).any()
    assert torch.signbit(net.fc.weight[~masks.masks["fc.weight"]]).all()  # the model in memory keeps its own
    plain = Net(seed=9)
    plain.load_state_dict(state, strict=False)
    same_outputs(net, plain, X)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "asp_manifest.json"}
    entry = json.loads((folder / "asp_manifest.json").read_text())["parameters"]["grouped.weight"]
    assert entry["shape"] == [16, 4, 3, 3]
    assert (entry["axis"], entry["pattern"], entry["dtype"]) == (1, "2:4", "float32")
    assert entry["density"] == pytest.approx(0.5)


def test_checkpoint_that_is_sparse_already_exports_without_a_recipe(tmp_path: Path) -> None:
    net, _ = pruned()
    found = masks_from_zeros(net)
    assert sorted(found.masks) == sorted(PRUNED)
    assert verify(export(net, found, tmp_path / "p", "packed")).ok


def test_exporters_check_and_never_prune(tmp_path: Path) -> None:
    net, masks = pruned()
    dense = Net()
    for format in EXPORTERS:
        with pytest.raises(AspError, match=r"'grouped.weight': \d+ dropped entries are not zero; call masks.apply_"):
            export(dense, masks, tmp_path / "x", format)
        everything = MaskSet({"fc.weight": torch.ones(16, 32, dtype=torch.bool)}, {}, {"fc.weight": "2:4"})
        with pytest.raises(AspError, match=r"mask of 'fc.weight' is not 2:4"):
            export(dense, everything, tmp_path / "x", format)
        with pytest.raises(AspError, match=r"no such weight; did you mean 'fc.weight'"):
            export(
                net, MaskSet({"fc.wieght": masks.masks["fc.weight"]}, {}, {"fc.wieght": "2:4"}), tmp_path / "x", format
            )
        wrong = MaskSet({"fc.weight": masks.masks["twin.weight"]}, {}, {"fc.weight": "2:4"})
        with pytest.raises(AspError, match=r"mask of 'fc.weight': expected shape"):
            export(net, wrong, tmp_path / "x", format)
    with pytest.raises(AspError, match="unknown format 'pakced'; did you mean 'packed'"):
        export(net, masks, tmp_path / "x", "pakced")
    with pytest.raises(AspError, match="packed already"):
        export(load_packed(export(net, masks, tmp_path / "p", "packed"), Net()), masks, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_weight_that_is_spread_over_processes_is_not_exported(tmp_path: Path) -> None:
    import torch.distributed as processes
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    processes.init_process_group("gloo", store=processes.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(16, 8))
        spread = distribute_tensor(net[0].weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        net[0].weight = nn.Parameter(spread)
        masks = prune(net)
        assert verify(net, masks).ok
        with pytest.raises(AspError, match=r"'0.weight' is spread over processes; export a model that holds its whole"):
            export(net, masks, tmp_path / "x")
    finally:
        processes.destroy_process_group()


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "d")

    def fails(folder: Path, model: nn.Module) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        export(net, masks, folder, "packed", save_with=fails)
    assert read_manifest(folder).format == "dense"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(AspError, match="is not an export"):
        export(net, masks, tmp_path / "mine")


def test_auxiliary_files_are_kept_and_hashed(tmp_path: Path) -> None:
    net, masks = pruned()

    def tokenizer(folder: Path, model: nn.Module) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "vocab.txt").write_text("a b c")

    for format in EXPORTERS:
        folder = export(net, masks, tmp_path / format, format, save_with=tokenizer)
        assert "sub/vocab.txt" in read_manifest(folder).files
        (folder / "sub" / "vocab.txt").write_text("a b d")
        assert "sub/vocab.txt: its content has changed" in verify(folder).problems[0]
        with pytest.raises(AspError, match=r"vocab.txt: its content has changed"):
            LOAD[format](folder, Net())


def test_packed_file_is_refused_by_loaders_that_do_not_know_it(tmp_path: Path) -> None:
    net, masks = pruned()
    folder = export(net, masks, tmp_path / "p", "packed")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Net().load_state_dict(load_file(folder / "packed.safetensors"))


def test_swap_on_an_ordinary_model_by_the_packed_names(tmp_path: Path) -> None:
    from asp_kernels import PackedNM

    net, masks = pruned()
    state = load_file(export(net, masks, tmp_path / "p", "packed") / "packed.safetensors")
    packed = PackedNM(state["fc.weight.values"], state["fc.weight.codes"], (16, 32), 2, 4)
    copied = copy.deepcopy(net)
    swap_(copied, {"fc.weight": packed})
    same_outputs(net, copied, X)
    copied.load_state_dict({**copied.state_dict(), "fc.weight.values": state["fc.weight.values"]})


def test_parameters_that_are_views_of_one_storage(tmp_path: Path) -> None:
    net, masks = pruned()
    flat = torch.cat([torch.ones(1), *(p.detach().flatten() for p in net.parameters())])
    at = 1
    for parameter in net.parameters():
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    for format, load in LOAD.items():
        folder = export(net, masks, tmp_path / format, format)
        same_outputs(net, load(folder, Net(seed=9).eval()), X)
        assert weights_bytes(folder) < 1.2 * flat.nbytes
