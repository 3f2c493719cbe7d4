"""Captures of several threads of one process: one after another, each as if alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from autopar.capture import capture


def captured(n: int) -> str:
    model = nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2))
    rows = (torch.randn(2, 4),)
    return str(capture(model, rows, loss_fn=lambda out, _: out.square().mean()).graph)


def test_threads_capture_as_one_does() -> None:
    sizes = (3, 5, 7)
    with ThreadPoolExecutor(len(sizes)) as threads:
        assert list(threads.map(captured, sizes)) == [captured(n) for n in sizes]
