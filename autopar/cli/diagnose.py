"""`autopar diagnose`: what the ranks of a job did last."""

from __future__ import annotations

from pathlib import Path

from autopar.cli.shell import Result
from autopar.errors import OptionError
from autopar.runtime.flight import FOLDER, diagnosis, read_notes


def diagnose_result(folder: Path, n_ranks: int | None) -> Result:
    """The notes of all ranks in words; seconds count to the last note of any."""
    notes = read_notes(folder)
    if not any(notes.values()):
        raise OptionError(
            f"{folder} has no notes of ranks",
            hint=f"set {FOLDER} to a folder of this machine before the job starts",
        )
    last_s = max(of[-1]["time_s"] for of in notes.values() if of)
    count = max(max(notes) + 1, n_ranks or 0)
    return Result(diagnosis(notes, count, last_s), {"ranks": {str(r): n for r, n in notes.items()}})
