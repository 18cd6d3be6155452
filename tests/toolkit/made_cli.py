"""The command line called in this process, and what it is called on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from asp_toolkit.cli import main

TINY = """\
# A few steps on random images.
task:
  kind: image_classification
  model: {name: asp_toolkit.tasks.models:small_cnn}
  data: {source: synthetic, shape: [1, 28, 28], size: 16}
train:
  epochs: 1
  batch_size: 16
  optimizer: {lr: 0.01}
export: {bench: false}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Asp = Callable[..., Result]


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> Asp:
    """Calls `asp ARGUMENTS` in `folder`."""
    monkeypatch.chdir(folder)

    def call(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["asp", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call


def run_in(folder: Path) -> Path:
    """A run folder as `asp run` leaves it, as far as the commands read it."""
    from asp_toolkit import export, prune
    from asp_toolkit.recipe import dump, load
    from asp_toolkit.tasks import build_task

    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    recipe = load(folder / "tiny.yaml")
    (folder / "recipe.yaml").write_text(dump(recipe))
    model = build_task(recipe.task, recipe.seed).build().eval()
    masks = prune(model)
    for name in ("dense", "packed"):
        export(model, masks, folder / "exports" / name, name, recipe=recipe.model_dump(mode="json"))
    return folder
