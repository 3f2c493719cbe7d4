"""Decides what is known of a rank when it hangs, dies or raises: what it did last.

Read `record.py` (what a rank notes, and where), `ranks.py` (the notes of all ranks, in words),
`watchdog.py` (a rank that hangs ends itself), `explaining.py` (errors of a rank), `pace.py` (how
long a rank computes) and `slow.py` (which ranks are slow). `environment.py` reads times that users
set. This is the lowest room of the runtime: it imports no other room of it.

Mainly hands on `FlightRecord`, `FOLDER`, `LAUNCHED`, `add_diagnosis`, `explained`, `read_notes`,
`diagnosis`, `watch`, `Pace` and `Comparison`.
"""

from autopar.runtime.flight.environment import seconds_in
from autopar.runtime.flight.explaining import LAUNCHED, add_diagnosis, explained
from autopar.runtime.flight.pace import Pace
from autopar.runtime.flight.ranks import diagnosis, longest_step_s, read_notes
from autopar.runtime.flight.record import FOLDER, FlightRecord, Note
from autopar.runtime.flight.slow import Comparison, OwnTimes
from autopar.runtime.flight.watchdog import TIMEOUT, watch

__all__ = [
    "FOLDER",
    "LAUNCHED",
    "TIMEOUT",
    "Comparison",
    "FlightRecord",
    "Note",
    "OwnTimes",
    "Pace",
    "add_diagnosis",
    "diagnosis",
    "explained",
    "longest_step_s",
    "read_notes",
    "seconds_in",
    "watch",
]
