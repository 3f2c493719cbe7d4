"""Steps read no tensor on the host once the first ones are over: on a GPU that would wait for it.

CPUs cannot show the waiting, but run the operators that would cause it. Models here freeze
no tensors: the bits of those are summed on CPUs alone (`version_of`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.helpers.jobs import CASES
from tests.helpers.nightly import sampled

ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.is_nonzero, ATEN.equal, ATEN.masked_select}
N_FIRST = 5  # the first steps compare batches between ranks


class Reads(TorchDispatchMode):
    """Collects the operators that read values of tensors on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


CASES_BY_DAY = [("gpt2", "model"), ("tiny", "bf16-mixed"), ("tiny", "fp16-mixed")]


@pytest.mark.parametrize(
    ("name", "precision"),
    sampled([*CASES_BY_DAY, ("gpt2", "bf16-mixed"), ("gpt2", "fp16-mixed")], CASES_BY_DAY),
)
def test_a_step_reads_nothing_on_the_host(name: str, precision: str) -> None:
    case = CASES[name]
    pm = autopar.parallelize(
        case.model(), (1, 1), case.batch(0), precision=precision, microbatches=2
    )
    for seed in range(N_FIRST):
        pm.step(**case.batch(seed))
    with Reads() as reads:
        loss = pm.step(**case.batch(N_FIRST))
    assert reads.found == []
    with Reads() as reads:
        loss.item()
    assert reads.found, "the check sees no read at all"
