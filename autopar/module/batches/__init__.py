"""Batches on their way to a parallel module: the rows that a rank reads, and loaders.

Read `local_rows.py` (the rows that a rank reads), then of loaders `assembly.py` (rows become a
batch), `loaded.py` (what a batch says to `pm.step`) and `loading.py` (the loader).
It may import `module/agreement`, `module/job.py` and what lies below `module`.
"""

from autopar.module.batches.assembly import Pad
from autopar.module.batches.loaded import Loaded, refuse_loaded, unwrapped
from autopar.module.batches.loading import Loader, Reader
from autopar.module.batches.local_rows import LocalRows

__all__ = [
    "Loaded",
    "Loader",
    "LocalRows",
    "Pad",
    "Reader",
    "refuse_loaded",
    "unwrapped",
]
