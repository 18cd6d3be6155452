"""A run killed with SIGKILL goes on when the same command is repeated, and ends in the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = """\
precision: fp32
device: cpu
task:
  kind: image_classification
  model: {name: "asp_toolkit.tasks.models:small_cnn", options: {channels: [8, 16, 16], hidden: 32, image_size: 16}}
  data: {source: synthetic, size: 640, classes: 10, shape: [1, 16, 16]}
  transform: {flip: true, random_crop_padding: 2}
train:
  epochs: 4
  batch_size: 16
  optimizer: {name: adamw, lr: 0.003, weight_decay: 0.01}
  clip_norm: 1.0
  ema: 0.9
  checkpoint_every: 0.1
  log_every: 1
prune: {schedule: {name: straight_through, decay: 0.01, hysteresis: 0.1, until: 0.8}}
retrain: {control: true}
export: {bench: false}
"""


def start(folder: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asp_toolkit.cli", "run", str(folder / "tiny.yaml"), "--out", str(out), "--quiet"]
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def lines(out: Path) -> int:
    log = out / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def bits(out: Path) -> dict[str, bytes]:
    files = [*out.glob("exports/*/*.safetensors"), out / "masks.safetensors"]
    assert len(files) == 3
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "tiny.yaml").write_text(RECIPE)
    out = folder / "whole"
    process = start(folder, out)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    return folder, out


def test_killed_at_random_moments_ends_in_the_same_bits(whole: tuple[Path, Path]) -> None:
    folder, reference = whole
    out = folder / "killed"
    total = lines(reference)
    moments = random.Random(7)
    marks = [*sorted(moments.sample(range(1, total), 4)), total]  # the last kill falls into export and report
    killed = 0
    for mark in marks:
        process = start(folder, out)
        while process.poll() is None and lines(out) < mark:
            time.sleep(0.005)
        time.sleep(moments.random() * 0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
    assert killed >= 3
    process = start(folder, out)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    assert bits(out) == bits(reference)
    ours, theirs = (json.loads((path / "report.json").read_text()) for path in (out, reference))
    for phase in ("dense", "pruned", "retrained", "control"):
        assert ours["phases"][phase]["loss"] == theirs["phases"][phase]["loss"], phase
    steps = [(row["phase"], row["step"]) for row in ours["history"] if "train_loss" in row]
    assert steps == sorted(set(steps), key=steps.index), "a step is logged once"
    assert len(steps) == len([row for row in theirs["history"] if "train_loss" in row])


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole: tuple[Path, Path]) -> None:
    folder, reference = whole
    out = folder / "damaged"
    process = start(folder, out)
    while process.poll() is None and len(list((out / "checkpoints" / "retrained").glob("step-*"))) < 2:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = sorted((out / "checkpoints" / "retrained").glob("step-*"))[-1]
    damaged = newest / "state.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    process = start(folder, out)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    assert newest.name in errors.decode()
    assert "damaged" in errors.decode()
    assert bits(out) == bits(reference)


def test_the_saved_recipe_reproduces_the_run(whole: tuple[Path, Path]) -> None:
    folder, reference = whole
    (folder / "again.yaml").write_text((reference / "recipe.yaml").read_text())
    command = [
        sys.executable,
        "-m",
        "asp_toolkit.cli",
        "run",
        str(folder / "again.yaml"),
        "--out",
        str(folder / "again"),
        "--quiet",
    ]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=300)
    assert bits(folder / "again") == bits(reference)
