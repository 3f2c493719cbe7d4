"""Ranks that hold the same values are compared by hash: on request, and at every save."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import DivergenceError
from autopar.runtime.launch.processes import WorkerPool
from autopar.runtime.tensors import local_of
from tests.helpers.jobs import MlpWithLoss, machine

Workers = Callable[[int], WorkerPool]


def trained(manual: Manual, norm: bool = False) -> autopar.ParallelModule:
    torch.manual_seed(0)
    model = MlpWithLoss()
    if norm:
        model.net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    torch.manual_seed(1)
    batch: dict[str, Any] = {"x": torch.randn(16, 32), "y": torch.randn(16, 32)}
    pm = autopar.parallelize(model, machine((1, 2)), batch, manual=manual)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.step(**batch)
    optimizer.step()
    return pm


def said(do: Any) -> str:
    try:
        do()
    except DivergenceError as error:
        return str(error)
    return ""


def compared(manual: Manual, name: str | None, folder: str) -> tuple[str, str, bool]:
    """What check_replicas and save say after rank 1 changed one bit of `name`; is it saved?"""
    pm = trained(manual)
    if name is not None and os.environ["RANK"] == "1":
        with torch.no_grad():
            local_of(dict(pm.named_parameters())[name]).view(torch.int32)[..., :1] ^= 1
    found = said(pm.check_replicas), said(lambda: autopar.save(pm, None, folder, step=1))
    return *found, Path(folder).exists()


def buffers_apart() -> str:
    pm = trained(Manual(dp=2), norm=True)
    if os.environ["RANK"] == "0":
        dict(pm.named_buffers())["net.1.running_mean"] += 1.0
    return said(pm.check_replicas)


@pytest.mark.parametrize("manual", [Manual(dp=2), Manual(dp=2, zero=3), Manual(tp=2), Manual(pp=2)])
def test_parity_equal_replicas_pass(manual: Manual, tmp_path: Path, workers: Workers) -> None:
    for check, save, is_saved in workers(2).run(compared, manual, None, str(tmp_path / "c")):
        assert check == save == "" and is_saved


def test_parity_one_bit_of_one_rank_is_noticed(tmp_path: Path, workers: Workers) -> None:
    for found in workers(2).run(compared, Manual(dp=2), "net.2.weight", str(tmp_path / "c")):
        check, save, is_saved = found
        assert "`net.2.weight`: rank 0 has" in check and ", rank 1 has" in check
        assert "net.0" not in check and save == check and not is_saved


def test_parity_shards_that_one_rank_has_alone(tmp_path: Path, workers: Workers) -> None:
    job = compared, Manual(dp=2, zero=3), "net.2.weight", str(tmp_path / "c")
    assert [check for check, _, _ in workers(2).run(*job)] == ["", ""]


def test_parity_buffers_that_steps_change(workers: Workers) -> None:
    for check in workers(2).run(buffers_apart):
        assert "`net.1.running_mean`: rank 0 has" in check
