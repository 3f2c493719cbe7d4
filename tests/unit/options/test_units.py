"""Printed quantities, and the format of an error message."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import AutoparError, MeshError
from autopar.units import format_bytes, format_count, format_ranks, format_seconds

TEXTS: dict[Callable[[Any], str], dict[Any, str]] = {
    format_bytes: {
        0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 1024**2 - 1: "1.0 MiB", -(1024**2): "-1.0 MiB",
        40 * 1024**3: "40.0 GiB", 5000 * 1024**4: "5000.0 TiB",
    },
    format_seconds: {
        0.0: "0 s", 12345.0: "12345 s", 1.5: "1.5 s", 0.9999: "1 s", 0.00123: "1.23 ms",
        999.9e-6: "1 ms", 12e-6: "12 µs", 0.25e-9: "0.25 ns", -0.002: "-2 ms",
    },
    format_count: {
        0: "0", 7: "7", 999.9: "1 k", 124_439_808: "124 M", 1.5e9: "1.5 G", 2e15: "2000 T",
    },
    format_ranks: {
        (3,): "rank 3", (0, 1): "ranks 0, 1",
        tuple(range(10)): "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
    },
}  # fmt: skip


@pytest.mark.parametrize("function", TEXTS)
def test_printed_quantities(function: Callable[[Any], str]) -> None:
    assert {value: function(value) for value in TEXTS[function]} == TEXTS[function]


def test_an_error_says_what_where_and_the_way_out() -> None:
    error = AutoparError("no fit", where="model.py:88", hint="add devices")
    assert str(error) == "no fit\n  at model.py:88\n  hint: add devices"
    assert str(AutoparError("no fit")) == "no fit"


def test_an_error_survives_the_way_between_processes() -> None:
    error = MeshError("2 ranks", where="train.py:3", hint="use 4")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is MeshError
    assert str(copy) == str(error)
