"""Finds what a graph holds of the user's Python state, and notices when it changes.

Read: `frozen.py` (recorded at capture, compared before each step); `reads.py` (attributes of
modules that a trace reads); `observe.py` with `code.py` (what else the code depends on);
`snapshot.py` (values as a flat list); `alike.py` (values of equal modules); `calls.py` (what
forward calls of torch); `hooks.py` (hooks: traced, or refused); `history.py` (tensors with a
history of autograd that modules keep).
May import `findings.py` of `capture`, and what `capture` may import.
Mainly hands on `checked_trace`, `check_hooks` and `freeze` for a capture, `Watch` and
`version_of` for what comes later, `with_history` for copies of the model.
"""

from autopar.capture.python_state.alike import Alike
from autopar.capture.python_state.calls import Calls
from autopar.capture.python_state.frozen import CACHE_HINT, Watch, checked_trace, freeze, shown
from autopar.capture.python_state.history import with_history
from autopar.capture.python_state.hooks import check_hooks
from autopar.capture.python_state.observe import Observation
from autopar.capture.python_state.reads import Recorder, Window, recorder_of, value_of
from autopar.capture.python_state.snapshot import Scalar, Snapshot, same, version_of

__all__ = [
    "CACHE_HINT",
    "Alike",
    "Calls",
    "Observation",
    "Recorder",
    "Scalar",
    "Snapshot",
    "Watch",
    "Window",
    "check_hooks",
    "checked_trace",
    "freeze",
    "recorder_of",
    "same",
    "shown",
    "value_of",
    "version_of",
    "with_history",
]
