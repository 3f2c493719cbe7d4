"""`autopar diagnose`: what the ranks of a job did last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.cli.shell import Result
from autopar.errors import OptionError
from autopar.runtime.flight import FOLDER, Note, diagnosis, read_notes
from autopar.units import format_ranks


def diagnose_result(folders: Sequence[Path], n_ranks: int | None) -> Result:
    """The notes of all ranks in words; seconds count to the last note of any."""
    notes: dict[int, list[Note]] = {}
    for folder in folders:
        found = read_notes(folder)
        if twice := sorted(found.keys() & notes.keys()):
            raise OptionError(
                f"{format_ranks(twice)} left notes in {folder} and in a folder before",
                hint="give the folders of one job, one of each host",
            )
        notes |= found
    if not any(notes.values()):
        raise OptionError(
            f"{', '.join(map(str, folders))} has no notes of ranks",
            hint=f"set {FOLDER} to a folder of this machine before the job starts",
        )
    last_s = max(of[-1]["time_s"] for of in notes.values() if of)
    count = max(max(notes) + 1, n_ranks or 0)
    return Result(diagnosis(notes, count, last_s), {"ranks": {str(r): n for r, n in notes.items()}})
