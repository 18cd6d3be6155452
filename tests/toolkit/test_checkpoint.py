"""A run goes on from its newest good checkpoint; damaged ones are named, with what is used instead."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asp_toolkit.checkpoint import Checkpoints, State, random_state, set_random_state
from asp_toolkit.files import sha256


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, said: list[str]) -> Checkpoints:
    return Checkpoints(tmp_path, said.append)


@pytest.fixture
def _same_randomness_afterwards() -> Iterator[None]:
    state = random_state()
    yield
    set_random_state(state)


def steps(checkpoints: Checkpoints, phase: str = "dense") -> list[str]:
    return sorted(entry.name for entry in (checkpoints.folder / phase).iterdir())


def state(step: int) -> State:
    return {"step": step, "model": {"w": torch.full((4,), float(step))}}


def test_nothing_saved_is_nothing_found(checkpoints: Checkpoints, said: list[str]) -> None:
    assert checkpoints.latest("dense") is None
    assert checkpoints.final("dense") is None
    assert said == []


def test_the_newest_state_comes_back_exactly(checkpoints: Checkpoints) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": random_state(),
        "rows": [{"phase": "dense", "loss": 0.1, "note": None}],
        "special": torch.tensor([float("nan"), -0.0, float("inf")]),
        "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    }
    checkpoints.save("dense", 3, saved)
    found = checkpoints.latest("dense")
    assert found is not None
    assert found.keys() == saved.keys()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in model.state_dict().items())
    assert found["rows"] == saved["rows"]
    assert torch.equal(found["special"].view(torch.int32), saved["special"].view(torch.int32))
    assert found["half"].dtype == torch.bfloat16
    fresh = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    fresh.load_state_dict(found["optimizer"])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_two_steps_are_kept_and_phases_do_not_mix(checkpoints: Checkpoints) -> None:
    for step in (9, 10, 100, 1000):
        checkpoints.save("dense", step, state(step))
    checkpoints.save("retrain", 5, state(5))
    assert steps(checkpoints) == ["step-00000100", "step-00001000"]
    assert (checkpoints.latest("dense") or {})["step"] == 1000
    assert (checkpoints.latest("retrain") or {})["step"] == 5


def test_finish_keeps_the_newest_step_to_fall_back_on(checkpoints: Checkpoints) -> None:
    checkpoints.save("dense", 1, state(1))
    checkpoints.save("dense", 2, state(2))
    checkpoints.finish("dense", state(3))
    assert steps(checkpoints) == ["final", "step-00000002"]
    assert (checkpoints.final("dense") or {})["step"] == 3


def truncate(folder: Path) -> None:
    data = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(data[: len(data) // 2])


def flip(folder: Path) -> None:
    data = bytearray((folder / "state.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "state.pt").write_bytes(bytes(data))


def lose_the_hash(folder: Path) -> None:
    (folder / "state.sha256").unlink()


def lose_the_state(folder: Path) -> None:
    (folder / "state.pt").unlink()


def scramble_the_hash(folder: Path) -> None:
    (folder / "state.sha256").write_bytes(b"\xff\xfe\x00")


def not_a_state(folder: Path) -> None:
    (folder / "state.pt").write_text("no pickle")
    (folder / "state.sha256").write_text(sha256(folder / "state.pt"))


def not_only_weights(folder: Path) -> None:
    torch.save({"call": shutil.rmtree}, folder / "state.pt")
    (folder / "state.sha256").write_text(sha256(folder / "state.pt"))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = [
    truncate, flip, lose_the_hash, lose_the_state, scramble_the_hash, not_a_state, not_only_weights, empty
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_named_and_the_one_before_used(
    checkpoints: Checkpoints, said: list[str], damage: Callable[[Path], None]
) -> None:
    checkpoints.save("dense", 1, state(1))
    checkpoints.save("dense", 2, state(2))
    newest = checkpoints.folder / "dense" / "step-00000002"
    damage(newest)
    assert (checkpoints.latest("dense") or {})["step"] == 1
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {newest} is damaged (")
    assert said[0].endswith("): step-00000001 is used")


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_all_are_damaged_the_phase_starts_again(
    checkpoints: Checkpoints, said: list[str], damage: Callable[[Path], None]
) -> None:
    for step in (1, 2):
        checkpoints.save("dense", step, state(step))
    for step in (1, 2):
        damage(checkpoints.folder / "dense" / f"step-0000000{step}")
    assert checkpoints.latest("dense") is None
    assert len(said) == 2
    assert said[1].endswith("the phase starts again")


def test_a_damaged_final_is_named_and_the_step_is_still_there(checkpoints: Checkpoints, said: list[str]) -> None:
    checkpoints.save("dense", 7, state(7))
    checkpoints.finish("dense", state(8))
    flip(checkpoints.folder / "dense" / "final")
    assert checkpoints.final("dense") is None
    assert "goes on from its newest step" in said[0]
    assert (checkpoints.latest("dense") or {})["step"] == 7


def test_good_steps_outlive_damaged_later_ones(checkpoints: Checkpoints) -> None:
    for step in (20, 30):
        checkpoints.save("dense", step, state(step))
        flip(checkpoints.folder / "dense" / f"step-000000{step}")
    checkpoints.save("dense", 10, state(10))  # the run started again
    assert (checkpoints.latest("dense") or {})["step"] == 10
    checkpoints.save("dense", 15, state(15))
    assert steps(checkpoints) == ["step-00000010", "step-00000015"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_flip_and_no_cut_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run"), said.append)
    checkpoints.save("dense", 1, state(1))
    path = checkpoints.folder / "dense" / "step-00000001" / "state.pt"
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[at:]
    path.write_bytes(bytes(whole))
    assert checkpoints.latest("dense") is None
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 on, where threads run
@pytest.mark.parametrize("function", ["fsync", "rename", "replace"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_kill_while_saving_leaves_the_step_before(checkpoints: Checkpoints, function: str, call: int) -> None:
    checkpoints.save("dense", 1, state(1))

    def child() -> None:
        real, left = getattr(os, function), [call]

        def dying(*args: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args)

        setattr(os, function, dying)
        checkpoints.save("dense", 2, state(2))
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, 9)
    expected = 1 if process.exitcode else 2
    assert (checkpoints.latest("dense") or {})["step"] == expected
    checkpoints.save("dense", 3, state(3))
    assert len(steps(checkpoints)) == 2  # nothing of the killed writer is left
    assert (checkpoints.latest("dense") or {})["step"] == 3


@pytest.mark.usefixtures("_same_randomness_afterwards")
def test_random_generators_go_on_where_they_stood(checkpoints: Checkpoints) -> None:
    def draw() -> list[float]:
        uniform, normal = np.random.rand(), np.random.randn()
        return [random.random(), random.gauss(0, 1), uniform, normal, torch.rand(()).item(), torch.randn(()).item()]

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # each generator now stands between the two numbers of a normal pair
    checkpoints.save("dense", 1, {"random": random_state()})
    expected = [draw() for _ in range(3)]
    found = checkpoints.latest("dense")
    assert found is not None
    set_random_state(found["random"])
    assert [draw() for _ in range(3)] == expected


@pytest.mark.usefixtures("_same_randomness_afterwards")
def test_looking_at_the_random_state_does_not_move_it() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    random_state()
    assert torch.rand(2).tolist() == expected
