"""Do ranks agree? Each check is one small collective; if it fails, the rank that differs is named.

Read `hashes.py` (a tensor as a number), `meeting.py` (one comparison), then what is compared:
`settings.py` (how `autopar.parallelize` is called), `batches.py`, `constants.py` (tensors that are
neither parameters nor inputs) and `hyperparameters.py` (of optimizers).
It may import what lies below `module`.
"""

from autopar.module.agreement.batches import N_CHECKED, Agreement, Given, Rows
from autopar.module.agreement.constants import agreed_program, agreed_values
from autopar.module.agreement.hashes import Fingerprint, fingerprints
from autopar.module.agreement.hyperparameters import Hyperparameters
from autopar.module.agreement.meeting import compared, has_others
from autopar.module.agreement.settings import compare_settings

__all__ = [
    "N_CHECKED",
    "Agreement",
    "Fingerprint",
    "Given",
    "Hyperparameters",
    "Rows",
    "agreed_program",
    "agreed_values",
    "compare_settings",
    "compared",
    "fingerprints",
    "has_others",
]
