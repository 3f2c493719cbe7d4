"""An error in a rank, explained: where all ranks were, if their notes can be read.

A rank whose peer dies sees only that a connection was closed. Under torchrun, where nobody else
puts the notes together, they are added to its error. `autopar.launch` does it itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from autopar.errors import AutoparError
from autopar.runtime.flight.ranks import diagnosis, read_notes
from autopar.runtime.flight.record import FOLDER

LAUNCHED = "AUTOPAR_LAUNCHED"  # set in the processes of `autopar.launch`
_SETTLE_S = 0.2  # until a peer that has just died is known as dead


@contextmanager
def explained(call: AbstractContextManager[None]) -> Iterator[None]:
    """A call of all ranks (`FlightRecord.meeting`, `together`); its errors get the diagnosis."""
    try:
        with call:
            yield
    except Exception as error:
        add_diagnosis(error)
        raise


def add_diagnosis(error: BaseException) -> None:
    """Add what every rank did last to an error that says nothing of ranks."""
    folder = os.environ.get(FOLDER)
    is_known = any("rank 0: " in note for note in getattr(error, "__notes__", ()))
    if not folder or LAUNCHED in os.environ or isinstance(error, AutoparError) or is_known:
        return
    time.sleep(_SETTLE_S)
    n_ranks = int(os.environ.get("WORLD_SIZE", 1))
    error.add_note(diagnosis(read_notes(Path(folder)), n_ranks, time.time()))
