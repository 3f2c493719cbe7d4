"""The generators of this process: Python's, numpy's, torch's, and that of its GPU.

Dropout of a parallel module does not draw from them (`Stream`); data pipelines and scripts do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of all generators, for `trees.encoded`."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, np.array(numbers, dtype=np.uint32), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators; one whose device is absent is left alone."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(int(n) for n in numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
