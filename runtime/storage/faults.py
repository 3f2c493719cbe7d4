"""What went wrong with a checkpoint's files, and what to do about it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import StateError
from autopar.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class DamagedError(StateError):
    """A checkpoint whose files are not those that were written; an earlier one may be whole."""


@contextmanager
def disk_faults(doing: str, folder: Path) -> Iterator[None]:
    """Raise what the file system refuses as `StateError`, with the reason and what to do."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        raise StateError(
            f"{doing} {folder} failed: {error.strerror or error} ({place})",
            hint=_advice(error.errno, folder),
        ) from error


def _advice(number: int | None, folder: Path) -> str:
    if number in _FULL:
        return f"{_free(folder)}free space or save elsewhere; what was saved before is untouched"
    if number in _REFUSED:
        return f"let this process write to {folder.parent}, or use another path"
    return "check that the path exists, on every node, and that its disk works"


def _free(folder: Path) -> str:
    for place in (folder, *folder.parents):
        if place.is_dir():
            return f"{format_bytes(shutil.disk_usage(place).free)} are free there: "
    return ""
