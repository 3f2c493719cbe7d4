"""The golden fixture itself: it must fail when a text differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import compare_golden


def test_equal_text_passes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    compare_golden(tmp_path / "a.txt", "one\ntwo\n", update=False)


def test_difference_is_shown_as_a_diff(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(pytest.fail.Exception, match=r"-two\n\+three\n") as failure:
        compare_golden(tmp_path / "a.txt", "one\nthree\n", update=False)
    assert "make golden" in str(failure.value)


@pytest.mark.parametrize("text", ["one", "one\r\n", "one\n\n"])
def test_line_ends_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(pytest.fail.Exception):
        compare_golden(tmp_path / "a.txt", text, update=False)


def test_a_missing_file_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        compare_golden(tmp_path / "a.txt", "one\n", update=False)


def test_update_writes_what_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.txt"
    compare_golden(path, "größe\n", update=True)
    compare_golden(path, "größe\n", update=False)
