"""Verification for users: one sharded step against the same step on one process.

    sharded program on all ranks      ==  captured program       (sharding is right)
    captured program on one process   ==  the user's own module  (capture is right)

`verify` checks both lines: the loss, every gradient and every buffer that the step changes.
Read: `report.py` (errors and tolerances), `alone.py` (the captured program on one process),
`eager.py` (the module itself), `captured.py` (the second line), `sharded.py` (the first line on
threads), `verify_step.py` (both, on threads or in a job).
May import every room except `cli` and `calibration`. Mainly hands on `verify` and `Report`.
"""

from autopar.parity.alone import reference, whole_parameters
from autopar.parity.captured import tolerance_of
from autopar.parity.report import Report
from autopar.parity.sharded import thread_errors
from autopar.parity.verify_step import verify

__all__ = ["Report", "reference", "thread_errors", "tolerance_of", "verify", "whole_parameters"]
