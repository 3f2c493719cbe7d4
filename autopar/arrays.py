"""The numpy arrays of prices and solvers, by what they hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
# Places in other arrays, or sizes.
Indices = NDArray[np.int64]
# The class of every choice (`passes/solvers/problem/partitions.py`).
Codes = NDArray[np.intp]
