"""Ranks that hold the same values are compared by hash: on request, and at every save."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import DivergenceError
from autopar.runtime.checkpoints.replicas import fingerprint
from autopar.runtime.tensors import local_of
from tests.helpers.jobs import MlpWithLoss, machine
from tests.helpers.pools import Pool


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


def compared(manual: Manual, name: str | None, folder: str) -> tuple[set[str], bool]:
    """What check and saves say after rank 1 changed one bit of `name`; is anything saved?"""
    pm = trained(manual)
    if name is not None and os.environ["RANK"] == "1":
        with torch.no_grad():
            local_of(dict(pm.named_parameters())[name]).view(torch.int32)[..., :1] ^= 1
    beside = autopar.AsyncSaver(f"{folder}/beside")
    found = {
        said(pm.check_replicas),
        said(lambda: autopar.save(pm, None, f"{folder}/alone", step=1)),
        said(lambda: beside.save(pm, None, step=1)),
    }
    beside.wait()
    return found, any(Path(folder).iterdir())


def buffers_apart() -> str:
    pm = trained(Manual(dp=2), norm=True)
    if os.environ["RANK"] == "0":
        dict(pm.named_buffers())["net.1.running_mean"] += 1.0
    return said(pm.check_replicas)


@pytest.mark.parametrize("manual", [Manual(dp=2), Manual(dp=2, zero=3), Manual(tp=2), Manual(pp=2)])
def test_parity_equal_replicas_pass(manual: Manual, tmp_path: Path, workers: Pool) -> None:
    for said_by_each, is_saved in workers(2).run(compared, manual, None, str(tmp_path)):
        assert said_by_each == {""} and is_saved


def test_parity_one_bit_of_one_rank_is_noticed(tmp_path: Path, workers: Pool) -> None:
    job = compared, Manual(dp=2), "net.2.weight", str(tmp_path)
    for (said_by_each,), is_saved in workers(2).run(*job):
        assert "`net.2.weight`: rank 0 has" in said_by_each and ", rank 1 has" in said_by_each
        assert "net.0" not in said_by_each and not is_saved


def test_parity_shards_that_one_rank_has_alone(tmp_path: Path, workers: Pool) -> None:
    job = compared, Manual(dp=2, zero=3), "net.2.weight", str(tmp_path)
    assert [said_by_each for said_by_each, _ in workers(2).run(*job)] == [{""}, {""}]


def test_parity_buffers_that_steps_change(workers: Pool) -> None:
    for check in workers(2).run(buffers_apart):
        assert "`net.1.running_mean`: rank 0 has" in check


@pytest.mark.parametrize("n", [1, 3, 8191, 8192, 100_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_hash_sees_each_bit_and_place(n: int, dtype: torch.dtype) -> None:
    value = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    found = fingerprint(value)
    assert found == fingerprint(value.clone())
    assert found == fingerprint(torch.cat([value[:1], value])[1:])  # at another alignment
    assert found == fingerprint(torch.stack([value, value], dim=1)[:, 0])  # strided
    width = 8 * value.itemsize
    for at in {0, n // 2, n - 1}:
        for bit in (0, width // 2, width - 1):
            changed = bytearray(value.clone().view(torch.uint8).numpy().tobytes())
            changed[at * value.itemsize + bit // 8] ^= 1 << bit % 8
            assert fingerprint(torch.frombuffer(changed, dtype=dtype)) != found
        other = (at + 1) % n
        swapped = value.clone()
        swapped[at], swapped[other] = value[other], value[at]
        assert (fingerprint(swapped) == found) == (n == 1)
