"""Loads generated files: writes them where tracebacks find them, then compiles them."""

from __future__ import annotations

import hashlib
import linecache
import os
import tempfile
from pathlib import Path

from autopar.runtime.execute.executor import StageCode


def code_directory() -> Path:
    """Where generated programs go: `AUTOPAR_CODE_DIR`, else this user's folder in tmp."""
    given = os.environ.get("AUTOPAR_CODE_DIR")
    if given:
        return Path(given)
    return Path(tempfile.gettempdir()) / f"autopar-{os.getuid()}"


def write_code(name: str, source: str) -> Path:
    """Write one generated file into a folder named by its hash; returns its path.

    Safe when several ranks write at once: a file appears complete or not at all.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    folder = code_directory() / digest
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if not path.exists():
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_text(source)
        draft.replace(path)
    return path


def load_code(name: str, source: str) -> tuple[StageCode, Path]:
    """Compile generated source; tracebacks show its lines."""
    path = write_code(name, source)
    linecache.checkcache(str(path))
    namespace: dict[str, object] = {"__name__": f"autopar_generated_{path.parent.name}"}
    exec(compile(source, str(path), "exec"), namespace)
    names = "forward", "backward", "prologue", "loss"
    return StageCode(*(namespace.get(name) for name in names)), path  # type: ignore[arg-type]
