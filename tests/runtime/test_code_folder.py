"""Generated programs are run from a folder that only this user can write to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from autopar.errors import LaunchError
from autopar.runtime.execute import load_code
from autopar.runtime.execute.load import MAX_AGE_S, code_directory, write_code

SOURCE = "def forward():\n    return (None,), []\n"


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    monkeypatch.delenv("AUTOPAR_CODE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def own(tmp: Path) -> Path:
    return tmp / f"autopar-{os.getuid()}"


def test_the_folder_is_the_users_alone(tmp: Path) -> None:
    own(tmp).mkdir(mode=0o755)
    path = write_code("stage_0.py", SOURCE)
    assert own(tmp).stat().st_mode & 0o777 == 0o700
    assert path.parent.parent == own(tmp) and path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_refused(tmp: Path) -> None:
    (tmp / "elsewhere").mkdir()
    own(tmp).symlink_to(tmp / "elsewhere")
    with pytest.raises(LaunchError, match="a link or another user's"):
        write_code("stage_0.py", SOURCE)
    assert not list((tmp / "elsewhere").iterdir())


def test_another_users_folder_is_refused(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(LaunchError, match="hint: remove it, or set AUTOPAR_CODE_DIR"):
        code_directory()


def test_a_file_with_other_text_is_written_again(tmp: Path) -> None:
    path = write_code("stage_0.py", SOURCE)
    path.write_text("raise SystemExit")
    assert load_code("stage_0.py", SOURCE)[1].read_text() == SOURCE


def test_no_draft_follows_a_planted_link(tmp: Path) -> None:
    victim = tmp / "victim"
    victim.write_text("mine")
    path = write_code("stage_0.py", SOURCE)
    path.unlink()
    path.symlink_to(victim)
    write_code("stage_0.py", SOURCE)
    assert victim.read_text() == "mine" and not path.is_symlink()
    assert [p.name for p in path.parent.iterdir()] == ["stage_0.py"]


def test_old_programs_are_removed(tmp: Path) -> None:
    old = write_code("stage_0.py", SOURCE).parent
    (own(tmp) / "notes").mkdir()
    for folder in (old, own(tmp) / "notes"):
        os.utime(folder, (0, 0))
    new = write_code("stage_0.py", SOURCE + "\n").parent
    assert MAX_AGE_S > 0 and not old.exists() and new.exists()
    assert (own(tmp) / "notes").exists(), "what autopar did not write stays"


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CODE_DIR", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="set AUTOPAR_CODE_DIR to a folder that can be written"):
        write_code("stage_0.py", SOURCE)
