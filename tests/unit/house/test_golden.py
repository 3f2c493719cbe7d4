"""The golden fixture itself: it must fail when a text differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import compare_golden


def test_any_difference_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        compare_golden(path, "one\n", update=False)
    path.write_text("one\ntwo\n")
    compare_golden(path, "one\ntwo\n", update=False)
    for text in ("one\ntwo", "one\r\ntwo\n", "one\ntwo\n\n"):
        with pytest.raises(pytest.fail.Exception):
            compare_golden(path, text, update=False)
    with pytest.raises(pytest.fail.Exception, match=r"-two\n\+three\n") as failure:
        compare_golden(path, "one\nthree\n", update=False)
    assert "make golden" in str(failure.value)


def test_update_writes_what_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.txt"
    compare_golden(path, "größe\n", update=True)
    compare_golden(path, "größe\n", update=False)
