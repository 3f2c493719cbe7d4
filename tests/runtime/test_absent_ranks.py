"""State that all ranks gather, asked for on one rank only: refused by name, not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import autopar
from autopar import AbsentRanksError, Manual
from autopar.runtime.groups import rendezvous, together_in
from tests.helpers.jobs import machine, rank
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.pools import Pool

CALLS: dict[str, Callable[[autopar.ParallelModule, str], object]] = {
    "pm.full_state_dict()": lambda pm, _: pm.full_state_dict(),
    "pm.full_gradients()": lambda pm, _: pm.full_gradients(),
    "pm.load_state_dict(...)": lambda pm, _: pm.load_state_dict({}),
    "autopar.save(...)": lambda pm, path: autopar.save(pm, None, path),
    "autopar.load(...)": lambda pm, path: autopar.load(pm, None, path),
    "autopar.export_weights(...)": lambda pm, path: autopar.export_weights(pm, f"{path}-out"),
    "AsyncSaver.save(...)": lambda pm, path: autopar.AsyncSaver(path).save(pm, None, step=1),
}


def on_one_rank(name: str, path: str) -> tuple[str, set[str]]:
    """What rank 0 is told; then all ranks call it, as if nothing had happened."""
    module = autopar.parallelize(Tiny(), machine((1, 2)), batch(), manual=Manual(tp=2))
    module.step(**batch())
    message = ""
    if rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(rendezvous.TIMEOUT, "0.2")
            with pytest.raises(AbsentRanksError) as refusal:
                CALLS[name](module, path)
        message = str(refusal.value)
    dist.barrier()
    autopar.save(module, None, path)
    autopar.load(module, None, path)
    return message, {*module.full_state_dict(), *module.full_gradients()}


@pytest.mark.parametrize("name", CALLS)
def test_the_absent_rank_is_named(name: str, workers: Pool, tmp_path: Path) -> None:
    (message, names), (other, none) = workers(2).run(on_one_rank, name, str(tmp_path / "c"))
    assert message.startswith(f"{name}: rank 1 of 2 ranks did not call it within 0.2 s")
    assert "every rank must call it: take `if rank == 0` away" in message
    assert rendezvous.TIMEOUT in message
    assert (other, none) == ("", set())
    assert names == {"up.weight", "up.bias", "down.weight", "down.bias"}


def called(what: str) -> None:
    with together_in(what):
        pass


def other_calls() -> str:
    with pytest.raises(AbsentRanksError) as refusal:
        called("this" if rank() == 0 else "that")
    called("both")
    return str(refusal.value).splitlines()[0]


def test_other_calls_are_named(workers: Pool) -> None:
    assert workers(2).run(other_calls) == [
        "this: rank 1 called that instead", "that: rank 0 called this instead",
    ]  # fmt: skip


def late() -> int:
    """Rank 1 comes later. Meetings leave nothing in the store but the last."""
    store = dist.distributed_c10d._get_default_store()
    for k in range(4):
        time.sleep(0.1 * rank())
        called("here")
        dist.barrier()
        if k == 1:
            before = store.num_keys()
    dist.barrier()
    return store.num_keys() - before


def test_late_ranks_are_waited_for(workers: Pool) -> None:
    assert workers(2).run(late) == [0, 0]
