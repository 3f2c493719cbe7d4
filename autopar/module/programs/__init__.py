"""The compiled programs of a parallel module: one for each mode, signature and state of the code.

Read `compiled_step.py` (one of them on this rank), `signatures.py` (which batches are alike),
`captures.py` (how many are kept), `variants.py` (what the user's Python values are now),
`row_counts.py` (outputs of microbatches) and `programs.py` (all of them).
It may import `module/batches`, `module/job.py` and what lies below `module`.
"""

from autopar.module.programs.compiled_step import Built, Kind, Links
from autopar.module.programs.programs import Programs
from autopar.module.programs.signatures import keys_of_model, warn_of_unread

__all__ = [
    "Built",
    "Kind",
    "Links",
    "Programs",
    "keys_of_model",
    "warn_of_unread",
]
