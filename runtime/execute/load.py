"""Loads generated files: writes them where tracebacks find them, then compiles them."""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from autopar.errors import LaunchError
from autopar.runtime.execute.code import StageCode

# Folders of programs that nobody has loaded for so long are removed.
MAX_AGE_S = 30 * 86400.0


def code_directory() -> Path:
    """Where generated programs go: `AUTOPAR_CODE_DIR`, else this user's own folder in tmp.

    Python runs what is there, so nobody else may write to it. Raises `LaunchError` if the folder is
    a link or another user's.
    """
    given = os.environ.get("AUTOPAR_CODE_DIR")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(given)
    folder = Path(tempfile.gettempdir()) / f"autopar-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise LaunchError(
            f"generated programs would go to {folder}, which is a link or another user's",
            hint="remove it, or set AUTOPAR_CODE_DIR to a folder of your own",
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def write_code(name: str, source: str) -> Path:
    """Write one generated file into a folder named by its hash; returns its path.

    Safe when several ranks write at once: a file appears complete or not at all. Raises
    `LaunchError` if the folder cannot be written.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    try:
        root = code_directory()
        path = root / digest / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.is_file() and path.read_text() == source:
            os.utime(path.parent)
            return path
        _remove_old(root)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
            draft.write(source)
        os.replace(draft.name, path)
    except OSError as error:
        raise LaunchError(
            f"cannot write a generated program: {error}",
            hint="free space there, or set AUTOPAR_CODE_DIR to a folder that can be written",
        ) from error
    return path


def _remove_old(root: Path) -> None:
    """Remove the programs of `root` that nobody has loaded for `MAX_AGE_S`."""
    for folder in root.iterdir():
        is_ours = re.fullmatch(r"[0-9a-f]{12}", folder.name) and not folder.is_symlink()
        with suppress(FileNotFoundError):  # another rank has removed it
            if is_ours and time.time() - folder.stat().st_mtime > MAX_AGE_S:
                shutil.rmtree(folder, ignore_errors=True)


def load_code(name: str, source: str) -> tuple[StageCode, Path]:
    """Compile generated source; tracebacks show its lines."""
    path = write_code(name, source)
    linecache.checkcache(str(path))
    namespace: dict[str, object] = {"__name__": f"autopar_generated_{path.parent.name}"}
    exec(compile(source, str(path), "exec"), namespace)
    names = "forward", "backward", "backward_input", "backward_weight", "prologue", "loss"
    functions: dict[str, Any] = {name: namespace.get(name) for name in names}
    return StageCode(**functions, has_graphs="graphed" in namespace), path
