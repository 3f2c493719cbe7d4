"""The comparison of weights that tests of frameworks share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def check_equal(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float
) -> None:
    """The same names, and values that differ by no more than `tolerance`."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name] - value).abs().max().item()
        assert error <= tolerance, f"{name} is off by {error}"
