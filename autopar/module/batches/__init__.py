"""Batches on their way to a parallel module: which rows a rank reads, and whether ranks agree.

Read `agreement.py` and `hashes.py` (do ranks pass the same batch), `local_rows.py` (the rows
that a rank reads), then of loaders `assembly.py` (rows become a batch), `loaded.py` (what a batch
says to `pm.step`) and `loading.py` (the loader).
It may import `module/job.py` and what lies below `module`.
"""

from autopar.module.batches.agreement import Agreement, Given
from autopar.module.batches.assembly import Pad
from autopar.module.batches.hashes import Fingerprint, fingerprints
from autopar.module.batches.loaded import Loaded, refuse_loaded, unwrapped
from autopar.module.batches.loading import Loader, Reader
from autopar.module.batches.local_rows import LocalRows

__all__ = [
    "Agreement",
    "Fingerprint",
    "Given",
    "Loaded",
    "Loader",
    "LocalRows",
    "Pad",
    "Reader",
    "fingerprints",
    "refuse_loaded",
    "unwrapped",
]
