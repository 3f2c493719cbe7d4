"""How many files and functions one `parallelize` visits: `python -m tests.unit.house.visits`.

Counted with `sys.setprofile` on a small model, on one process and on two ranks (each apart). The
call is made twice, and the second is counted, so imports are not. Comprehensions and lambdas do not
count as functions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn

import autopar

ROOT = Path(autopar.__file__).resolve().parents[1]


class Visits(NamedTuple):
    files: int
    functions: int


class Net(nn.Module):
    """Two linear layers; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.up(x).relu()).square().mean()
        return loss


def counted(n_ranks: int) -> Visits:
    """Of one call, on this rank."""
    found: set[tuple[Path, str, int]] = set()

    def visit(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            found.add((Path(code.co_filename).resolve(), code.co_qualname, code.co_firstlineno))

    batch = {"x": torch.zeros(8, 16)}
    autopar.parallelize(Net(), (1, n_ranks), example_inputs=batch)
    sys.setprofile(visit)
    try:
        autopar.parallelize(Net(), (1, n_ranks), example_inputs=batch)
    finally:
        sys.setprofile(None)
    folders = [ROOT / name for name in ("autopar", "passes", "cost", "runtime")]
    ours = {item for item in found if any(item[0].is_relative_to(f) for f in folders)}
    return Visits(len({file for file, *_ in ours}), len(ours))


if __name__ == "__main__":
    print("one process:", counted(1))  # noqa: T201
    for rank, visits in enumerate(autopar.launch(counted, 2, 2)):
        print(f"rank {rank} of 2:", visits)  # noqa: T201
