"""Run checkpoints: everything a killed run needs to go on as if nothing had happened. Atomic, verified."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asp_toolkit.errors import AspError
from asp_toolkit.files import new_folder, remove_parts, sha256, write_text

State = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, numbers, texts and None: what `torch.load(weights_only=True)` reads."""

_STATE, _HASH, _FINAL = "state.pt", "state.sha256", "final"


def random_state() -> State:
    """The state of every random generator that training draws from."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # the old interface: users' transforms draw from it
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def seed_all(seed: int) -> None:
    """Seed every random generator that training draws from, users' transforms included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` saw."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: FOLDER/PHASE/step-00000123/ while a phase runs, FOLDER/PHASE/final/ when it is done.

    say: told about every damaged checkpoint and what is used instead.
    """

    folder: Path
    say: Callable[[str], None] = print

    def save(self, phase: str, step: int, state: State) -> None:
        """Write the state after `step`; the one before it is kept, older ones go.

        Later ones go too: a run that stands at `step` has found them damaged, and they must not outlive good ones.
        """
        newest = self.folder / phase / f"step-{step:08d}"
        self._write(newest, state)
        steps = self._steps(phase)
        at = steps.index(newest)
        for old in steps[: max(0, at - 1)] + steps[at + 1 :]:
            shutil.rmtree(old)

    def finish(self, phase: str, state: State) -> None:
        """Write the result of a whole phase; its newest step stays as the one to fall back on."""
        self._write(self.folder / phase / _FINAL, state)
        for old in self._steps(phase)[:-1]:
            shutil.rmtree(old)

    def final(self, phase: str) -> State | None:
        """The result of a phase, or None where it is not finished, or its file is damaged (which is said)."""
        path = self.folder / phase / _FINAL
        return self._read(path, "the phase goes on from its newest step") if path.exists() else None

    def latest(self, phase: str) -> State | None:
        """The newest undamaged state inside a phase, or None; every damaged one on the way is named."""
        steps = self._steps(phase)
        for index in reversed(range(len(steps))):
            after = f"{steps[index - 1].name} is used" if index else "the phase starts again"
            state = self._read(steps[index], after)
            if state is not None:
                return state
        return None

    def _steps(self, phase: str) -> list[Path]:
        return sorted((self.folder / phase).glob("step-*"))

    def _write(self, path: Path, state: State) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_parts(path.parent)
        try:
            with new_folder(path) as part:
                torch.save(state, part / _STATE)
                write_text(part / _HASH, sha256(part / _STATE) + "\n")
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            reason = str(error).splitlines()[0]
            raise AspError(f"checkpoint {path} cannot be written ({reason}); is the disk full?") from error

    def _read(self, path: Path, instead: str) -> State | None:
        try:
            if (path / _HASH).read_text().strip() != sha256(path / _STATE):
                raise AspError("its contents do not match its hash")
            state: State = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, AspError) as error:
            self.say(f"checkpoint {path} is damaged ({str(error).splitlines()[0]}): {instead}")
            return None
        return state
