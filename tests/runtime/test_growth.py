"""A long run holds no more memory, descriptors or threads after many steps than after some."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import autopar
from autopar import Manual
from tests.helpers.jobs import advance, machine
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import sampled
from tests.helpers.pools import Pool

# (ranks, steps, most new bytes of resident memory): an allocator's pools grow for some hundred
# steps, so by day only the other counts tell something.
LENGTHS = [(1, 15, 2**30), (4, 150, 4 * 2**20), (4, 2000, 2 * 2**20)]


def held() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
    }


def trained(layout: Manual, folder: str, n_steps: int) -> list[dict[str, int]]:
    """What is held when the run is warm, and at its end; it saves, evaluates and clips."""
    torch.manual_seed(0)
    pm = autopar.parallelize(Tiny(), machine((1, layout.n_ranks)), batch(), manual=layout)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    found = []
    with autopar.AsyncSaver(folder, keep_last=1) as saver:
        for step in range(n_steps):
            pm.step(**batch(step))
            pm.clip_grad_norm_(1.0)
            advance(optimizer)
            if step % min(50, n_steps // 3) == 1:
                saver.save(pm, optimizer, step=step)
                pm.eval()
                pm(**batch(step))
                pm.train()
            if step in (n_steps // 2, n_steps - 1):
                saver.wait()
                found.append([held() for _ in range(3)][-1])  # the first looks take memory
    return found


@pytest.mark.parametrize(("n_ranks", "n_steps", "most_bytes"), sampled(LENGTHS, LENGTHS[:1]))
def test_nothing_grows(
    n_ranks: int,
    n_steps: int,
    most_bytes: int,
    workers: Pool,
    tmp_path: Path,
) -> None:
    layouts = [Manual(dp=4, zero=3), Manual(dp=2, pp=2, microbatch_size=2)]
    for k, layout in enumerate(layouts if n_ranks > 1 else [Manual()]):
        job = layout, str(tmp_path / str(k)), n_steps
        for warm, end in workers(n_ranks).run(trained, *job) if n_ranks > 1 else [trained(*job)]:
            assert end["bytes"] <= warm["bytes"] + most_bytes
            assert end["tensors"] <= warm["tensors"]
            assert end["descriptors"] <= warm["descriptors"]
            assert end["threads"] <= warm["threads"]
