"""Tests of this folder are marked `gpu`, and fail where there is no GPU: nothing is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.fail("this machine has no GPU that torch can use: `make test-gpu` needs one")
    return torch.device("cuda", 0)
