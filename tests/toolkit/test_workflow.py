"""The whole story in one process, on data made up in place."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asp_toolkit import AspError, MaskSet, run_recipe, verify
from asp_toolkit.patterns import NM
from asp_toolkit.recipe import from_mapping, load
from asp_toolkit.report import check
from asp_toolkit.tasks import build_task

TINY: dict[str, Any] = {
    "device": "cpu",
    "task": {
        "kind": "image_classification",
        "model": {
            "name": "asp_toolkit.tasks.models:small_cnn",
            "options": {"channels": [8, 16, 16], "hidden": 32, "image_size": 8},
        },
        "data": {"source": "synthetic", "size": 96, "shape": [1, 8, 8]},
    },
    "train": {"epochs": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
    "export": {"bench": False},
}


def tiny(**changes: Any) -> Any:
    return from_mapping({**TINY, **changes})


def test_a_run_leaves_checked_exports_masks_and_a_report(tmp_path: Path) -> None:
    report = run_recipe(tiny(retrain={"control": True}), tmp_path / "run", quiet=True)
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == check(report) == report
    assert set(report["phases"]) == {"dense", "pruned", "retrained", "control"}
    assert report["phases"]["retrained"]["steps"] == report["phases"]["dense"]["steps"] == 6
    assert report["density"]["pruned_parameters"] == 0.5
    masks = MaskSet.load(tmp_path / "run" / "masks.safetensors")
    weights = load_file(tmp_path / "run" / "exports" / "dense" / "model.safetensors")
    assert sorted(masks.masks) == ["12.weight", "14.weight", "4.weight", "8.weight"]
    for name, mask in masks.masks.items():
        rows = mask.movedim(1, -1).reshape(-1, mask.shape[1])  # groups of four input channels
        assert NM(2, 4).holds(rows)
        assert torch.equal(weights[name][~mask].view(torch.int32), torch.zeros(int((~mask).sum()), dtype=torch.int32))
    assert report["sizes"]["packed"] < report["sizes"]["dense"]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert verify(tmp_path / "run").ok
    skipped = {row["name"]: row["skipped"] for row in report["layers"] if row["skipped"]}
    assert "contraction length 1 is not a multiple of 4" in skipped["0.weight"]
    assert len(skipped) + len(masks.masks) == len(report["layers"])


def test_pruning_happens_between_dense_and_retrained_weights(tmp_path: Path) -> None:
    run_recipe(tiny(retrain={"epochs": 0}), tmp_path, quiet=True)
    dense = torch.load(tmp_path / "checkpoints" / "dense" / "final" / "state.pt", weights_only=True)["model"]
    one_shot = load_file(tmp_path / "exports" / "dense" / "model.safetensors")
    masks = MaskSet.load(tmp_path / "masks.safetensors")
    for name, mask in masks.masks.items():
        assert torch.equal(one_shot[name], torch.where(mask, dense[name], torch.zeros(())))


def test_same_seed_same_weights_another_seed_others(tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run_recipe(tiny(seed=seed), tmp_path / name, quiet=True)
        runs[name] = (tmp_path / name / "exports" / "packed" / "packed.safetensors").read_bytes()
    assert runs["a"] == runs["b"] != runs["c"]


def test_a_finished_run_is_not_run_again_unless_fresh(tmp_path: Path) -> None:
    first = run_recipe(tiny(), tmp_path, quiet=True)
    assert run_recipe(tiny(), tmp_path, quiet=True) == first
    assert (
        run_recipe(tiny(), tmp_path, quiet=True, fresh=True)["phases"]["dense"]["loss"]
        == first["phases"]["dense"]["loss"]
    )


def test_a_folder_of_another_recipe_is_refused_and_left_alone(tmp_path: Path) -> None:
    first = run_recipe(tiny(), tmp_path, quiet=True)
    with pytest.raises(AspError, match=r"another recipe \(seed: 0 there, 1 here\)"):
        run_recipe(tiny(seed=1), tmp_path, quiet=True)
    assert json.loads((tmp_path / "report.json").read_text()) == first


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(AspError, match="not empty and holds no run"):
            run_recipe(tiny(), tmp_path, quiet=True, fresh=fresh)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_corrected_recipe_may_use_the_folder_of_the_refused_one(tmp_path: Path) -> None:
    with pytest.raises(AspError, match="matches no layer name"):
        run_recipe(tiny(prune={"rules": [{"include": ["conv*"]}]}), tmp_path, quiet=True)
    run_recipe(tiny(), tmp_path, quiet=True)


def test_what_only_the_model_can_refuse_is_answered_with_file_and_line(tmp_path: Path) -> None:
    recipe = {**TINY, "prune": {"rules": [{"include": ["conv*"]}]}}
    file = tmp_path / "wrong.yaml"
    file.write_text(json.dumps(recipe, indent=1))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if '"include"' in text)
    with pytest.raises(AspError, match=rf"wrong\.yaml:{line} prune\.rules\.0\.include: 'conv\*' matches no layer"):
        run_recipe(file, tmp_path / "run", quiet=True)
    with pytest.raises(
        AspError, match=r"override train\.optimizer\.name: train\.optimizer\.name: unknown optimizer 'sdg'"
    ):
        run_recipe(
            file,
            tmp_path / "run",
            ["train.optimizer.name=sdg", "train.optimizer.momentum=null", "prune={}"],
            quiet=True,
        )


def test_convolutions_of_one_pixel_export_the_same_bits(tmp_path: Path) -> None:
    model = {"name": "mobilenet_v3_small", "options": {"num_classes": 10}}
    task = {**TINY["task"], "model": model, "data": {"source": "synthetic", "size": 16, "shape": [3, 32, 32]}}
    train = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 0.01}}
    assert run_recipe(tiny(task=task, train=train), tmp_path, quiet=True)["exports"][1]["verified"]


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AspError, match="another run is working"):
            run_recipe(tiny(), tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": {"formats": ["pakced"]}}, "did you mean 'packed'"),
        ({"prune": {"rules": [{"include": ["conv*"]}]}}, "matches no layer name"),
        ({"prune": {"rules": [{"score": "magnitud"}]}}, "did you mean 'magnitude'"),
        ({"train": {"optimizer": {"name": "adamw", "lr": 0.1, "momentum": 0.9}}}, "belong to sgd, not to adamw"),
        ({"train": {"optimizer": {"name": "adagrad", "lr": 0.1, "options": {"betas": [0, 1]}}}}, "takes no 'betas'"),
        ({"device": "cuda"}, "cuda was asked for"),
    ],
)
def test_what_can_be_refused_is_refused_before_training(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(AspError, match=message):
        run_recipe(tiny(**changes), tmp_path, quiet=True)
    assert not (tmp_path / "checkpoints").exists()


def test_trained_weights_are_pruned_and_only_retrained(tmp_path: Path) -> None:
    given = build_task(tiny().task, 0).build().state_dict()
    save_file(given, tmp_path / "given.safetensors")
    task = {**TINY["task"], "model": {**TINY["task"]["model"], "weights": str(tmp_path / "given.safetensors")}}
    report = run_recipe(tiny(task=task, train={**TINY["train"], "skip": True}), tmp_path / "run", quiet=True)
    assert report["phases"]["dense"]["steps"] == 0
    assert report["phases"]["retrained"]["steps"] == 6
    dense = torch.load(tmp_path / "run" / "checkpoints" / "dense" / "final" / "state.pt", weights_only=True)["model"]
    assert all(torch.equal(dense[name], given[name]) for name in given)


def test_precisions_follow_each_other_in_one_process(tmp_path: Path) -> None:
    losses = {
        p: run_recipe(tiny(precision=p), tmp_path / p, quiet=True)["phases"]["dense"]["loss"] for p in ("bf16", "fp32")
    }
    assert losses["bf16"] != losses["fp32"]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    threads, where, environ = threading.active_count(), Path.cwd(), dict(os.environ)
    run_recipe(tiny(), tmp_path, quiet=True)
    assert threading.active_count() == threads
    assert Path.cwd() == where
    assert dict(os.environ) == environ
    assert not [entry for entry in tmp_path.rglob("*") if entry.name.endswith((".part", ".old"))]


def test_overrides_reach_the_saved_recipe(tmp_path: Path) -> None:
    run_recipe("quickstart", tmp_path / "run", [*_tiny_overrides(), "train.epochs=1", "seed=5"], quiet=True)
    saved = load(tmp_path / "run" / "recipe.yaml")
    assert (saved.train.epochs, saved.seed) == (1, 5)


def _tiny_overrides() -> list[str]:
    return [f"task={json.dumps(TINY['task'])}", "export.bench=false", "retrain.control=false", "train.batch_size=32"]


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """DistributedDataParallel on the CPU: one run folder, masks hold, and the whole test set is counted once."""
    (tmp_path / "two.json").write_text(json.dumps(TINY))
    code = (
        "import json, sys, pathlib, torch\n"
        "from asp_toolkit import run_recipe\n"
        "from asp_toolkit.recipe import from_mapping\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "run_recipe(from_mapping(json.loads((folder / 'two.json').read_text())), folder / 'run', quiet=True)\n"
        "torch.distributed.destroy_process_group()\n"
    )
    (tmp_path / "two.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(tmp_path / "two.py"), str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["phases"]["retrained"]["samples"] == 96
    assert report["phases"]["retrained"]["steps"] == 2  # 3 batches an epoch, two processes: one step, two epochs
    assert report["density"]["pruned_parameters"] == 0.5
    assert verify(tmp_path / "run").ok
