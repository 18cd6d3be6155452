"""Files are whole or not there, whatever stops the writer."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from asp_toolkit import files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 on, where threads run


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def killed_at(call: str, count: int, body: Callable[[], None]) -> None:
    """Run `body` in a process that dies, with nothing cleaned up, at the `count`th call of os.`call`."""

    def child() -> None:
        real, left = getattr(os, call), [count]

        def dying(*args: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args)

        setattr(os, call, dying)
        body()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 9


def test_sha256_is_the_usual_one(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 7)  # more than one piece
    (tmp_path / "f").write_bytes(data)
    assert files.sha256(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_write_text_makes_folders_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "f.txt"
    files.write_text(path, "one")
    files.write_text(path, "zwölf\n")
    assert path.read_bytes() == "zwölf\n".encode()
    assert names(path.parent) == ["f.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_write_text_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.txt"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "x" * 100_000 + "\ud800")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["f.txt"]


def test_a_killed_write_text_leaves_the_old_file_and_a_part_that_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    files.write_text(path, "old")
    killed_at("replace", 1, lambda: files.write_text(path, "new"))
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    files.remove_parts(tmp_path)
    assert names(tmp_path) == ["f.txt"]


def test_write_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    files.write_json(path, {"a": [1, None, "ü"]})
    assert json.loads(path.read_text()) == {"a": [1, None, "ü"]}
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": [1, None, "ü"]}


def fill(path: Path, text: str) -> None:
    with files.new_folder(path) as part:
        (part / "sub").mkdir()
        (part / "sub" / "f").write_text(text)
        (part / "g").write_text(text)


def test_new_folder_appears_complete_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x"
    with files.new_folder(path) as part:
        (part / "only-in-the-first").touch()
        assert not path.exists()
    fill(path, "second")
    assert names(path) == ["g", "sub"]
    assert (path / "sub" / "f").read_text() == "second"
    assert names(path.parent) == ["x"]
    assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("there", [True, False])
def test_new_folder_that_fails_leaves_what_was_there(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "x"
    if there:
        fill(path, "old")

    def fail() -> None:
        with files.new_folder(path) as part:
            (part / "g").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == (["x"] if there else [])
    assert not there or (path / "g").read_text() == "old"


@pytest.mark.parametrize("there", [True, False])
def test_a_killed_new_folder_is_never_seen_half_filled(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "x"
    if there:
        fill(path, "old")
    killed_at("rename", 1, lambda: fill(path, "new"))
    assert path.exists() == there
    assert not there or (path / "g").read_text() == "old"
    files.remove_parts(tmp_path)
    assert names(tmp_path) == (["x"] if there else [])
    fill(path, "newer")
    assert (path / "sub" / "f").read_text() == "newer"


def test_remove_parts_removes_its_own_alone(tmp_path: Path) -> None:
    kept = [".hidden", "a.part", "b.old", "run.txt"]
    for name in [*kept, ".f.txt.abc.part"]:
        (tmp_path / name).touch()
    for name in (".x.abc.part", ".x.def.old"):
        (tmp_path / name / "sub").mkdir(parents=True)
    files.remove_parts(tmp_path)
    assert names(tmp_path) == sorted(kept)
    files.remove_parts(tmp_path / "none")
