"""A file of published runs: its format, and what is refused.

    {"runs": [{"id": ..., "model": {...}, ...}, ...],      or the list of runs alone
     "rank_groups": {name: [id, ...]},                     runs whose order is checked
     "activation_memory_pct": {...}, "layer_microbench": {...}}                   see `tables.py`

All but the runs are optional. A run without an id or a model makes the whole file wrong. `rows.py`
decides which values a run may lack, and which are impossible: then that run is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import OptionError

SHIPPED = Path(__file__).parent / "published_runs.json"
# Regression runs of Megatron-Core, with the peak bytes of one rank and every flag.
GOLDEN_MEMORY = Path(__file__).parent / "mcore_golden.json"
_HINT = 'it is a list of runs, or {"runs": [...]}, each run with an id and a model'


@dataclass(frozen=True)
class RunsFile:
    """The content of a file: its runs as written, and its tables."""

    runs: Sequence[Mapping[str, Any]]
    rank_groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    activation_memory_pct: Mapping[str, Any] = field(default_factory=dict)
    layer_microbench: Mapping[str, Any] = field(default_factory=dict)


def read_runs(path: Path = SHIPPED) -> RunsFile:
    """Read a file of runs.

    Raises `OptionError` if the file cannot be read, is not JSON, or has no valid runs.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"not JSON: {error}", where=str(path), hint=_HINT) from error
    tables = content if isinstance(content, dict) else {"runs": content}
    runs = tables.get("runs")
    if not isinstance(runs, list) or not runs:
        raise OptionError("there are no runs", where=str(path), hint=_HINT)
    for i, run in enumerate(runs, 1):
        if wrong := _why_wrong(run):
            raise OptionError(wrong, where=f"{path}, run {i}", hint=_HINT)
    names = ("rank_groups", "activation_memory_pct", "layer_microbench")
    found = {name: tables.get(name) or {} for name in names}
    for name, table in found.items():
        if not isinstance(table, dict):
            raise OptionError(f"{name} is no object but {table!r}", where=str(path))
    return RunsFile(runs, **found)


def _why_wrong(run: Any) -> str:
    if not isinstance(run, dict):
        return f"a run is no object but {run!r}"
    if missing := [name for name in ("id", "model") if name not in run]:
        return f"a run has no {' and no '.join(missing)}"
    is_object = isinstance(run["model"], dict | None)
    return "" if is_object else f"a model is no object but {run['model']!r}"


def is_runs_file(path: Path) -> bool:
    """Whether `path` is a file of runs."""
    try:
        read_runs(path)
    except OptionError:
        return False
    return True
