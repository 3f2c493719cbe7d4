"""Memory facts about operators, measured by running each once on fake tensors.

Read `fake_calls.py` (one run for all equal calls), `live_bytes.py` (a counter of live storages),
`saved.py` (what autograd keeps for backward), `workspace.py` (temporaries).
It may import `program`, `rules`, `options`, `placement`, `schedule`, `mesh` and the files below.
It mainly hands on `saved_for_backward`, `storage_owners` and `temporaries`.
"""

from autopar.measured.fake_calls import description
from autopar.measured.live_bytes import LiveBytes
from autopar.measured.saved import Saved, saved_for_backward, storage_owners
from autopar.measured.workspace import Temporaries, temporaries

__all__ = [
    "LiveBytes",
    "Saved",
    "Temporaries",
    "description",
    "saved_for_backward",
    "storage_owners",
    "temporaries",
]
