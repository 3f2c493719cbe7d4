"""measured."""

from autopar.measured.fake_calls import description
from autopar.measured.saved import Saved, saved_for_backward, storage_owners
from autopar.measured.workspace import Temporaries, temporaries

__all__ = [
    "Saved",
    "Temporaries",
    "description",
    "saved_for_backward",
    "storage_owners",
    "temporaries",
]
