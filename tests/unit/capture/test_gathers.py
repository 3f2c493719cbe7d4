"""Gathers at constant indices: views where they only move dims, apart by rows where they can be.

transformers gathers from masks and positions that are inputs. As views, they are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.capture_harness import Module, check, targets

aten = torch.ops.aten


def moves_of(gather: Callable[[Tensor], Tensor], *shape: int) -> list[Any]:
    """Checks the captured gather against eager; returns its operators that move elements."""

    def body(self: Any, x: Tensor) -> dict[str, Tensor]:
        taken = gather(x * self.linear.weight.sum())
        places = torch.arange(taken.numel(), dtype=torch.float64).view(taken.shape)
        return {"loss": (taken * places).sum(), "taken": taken}

    x = torch.randn(shape or (4, 3, 5), dtype=torch.float64)
    return [t for t in targets(check(Module(body), (x,))) if t in (INDEX, PERMUTE, RESHAPE)]


def places(n: int) -> Callable[..., Tensor]:
    return lambda *shape: torch.arange(n).view(shape)


rows, columns, layers = map(places, (4, 3, 5))
INDEX, PERMUTE, RESHAPE = aten.index.Tensor, aten.permute.default, aten.reshape.default
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "one dim": (lambda x: x[rows(4)], []),
    "in order": (lambda x: x[rows(4, 1), columns(1, 3)], []),
    "a dim between": (lambda x: x[rows(4, 1, 1), columns(1, 1, 3)], [RESHAPE]),
    "unit dims in front": (lambda x: x[rows(1, 4, 1), columns(3)], [RESHAPE]),
    "transposed": (lambda x: x[rows(4), columns(3, 1)], [PERMUTE]),
    "all dims": (lambda x: x[rows(4), columns(3, 1), layers(5, 1, 1)], [PERMUTE]),
    "later dims": (lambda x: x[:, columns(3), layers(5, 1)], [PERMUTE]),
    "a later dim alone": (lambda x: x[:, :, layers(1, 5, 1)], [RESHAPE]),
    "apart, so in front": (lambda x: x[rows(4, 1), :, layers(5)], [PERMUTE]),
    "of size 1": (lambda x: x[:, :1][:, torch.zeros(1, dtype=torch.int64)], []),
    "of size 1, both": (
        lambda x: x[:1, :1][torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1).long()[:1]],
        [],
    ),
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_gather_that_only_moves_dims_is_a_view(case: str) -> None:
    gather, expected = VIEWS[case]
    assert moves_of(gather) == expected


def order(x: Tensor) -> Tensor:
    return x[..., 0].argsort(1)


GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: x[3 - rows(4)],
    "a part": lambda x: x[torch.arange(3)],
    "repeated": lambda x: x[rows(4, 1).expand(4, 2)],
    "negative": lambda x: x[rows(4) - 4],
    "rows in another order": lambda x: x[3 - rows(4), order(x)[:, 0]],
    "rows along another dim": lambda x: x[rows(4), order(x)[:, :1]],
    "a part of the rows": lambda x: x[columns(3), order(x)[:3, 0]],
    "of every row, and later": lambda x: x[rows(4), order(x)[:, 0], order(x)[:, 1]],
    "from the data": lambda x: x[x[:, 0, 0].argsort()],
}


@pytest.mark.parametrize("case", GATHERS)
def test_a_gather_that_does_more_stays(case: str) -> None:
    assert INDEX in moves_of(GATHERS[case])


OF_EVERY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "one place": lambda x: x[rows(4), order(x)[:, 0]],
    "counted from the end": lambda x: x[rows(4), order(x)[:, 0] - 2],
    "in 32 bits": lambda x: x[rows(4).int(), order(x)[:, 0].int()],
    "some places": lambda x: x[rows(4, 1), order(x)[:, :2]],
    "a place twice": lambda x: x[rows(4, 1), order(x)[:, :1].expand(4, 2)],
    "a block of places": lambda x: x[rows(4, 1, 1), order(x).view(4, 1, 3) - 1],
    "the same in all rows": lambda x: x[rows(4, 1), order(x)[0, :2]],
    "of numbers": lambda x: x[..., 0][rows(4), order(x)[:, 0]],
    "a diagonal": lambda x: x[:3][columns(3), columns(3)],
}


@pytest.mark.parametrize("case", OF_EVERY_ROW)
def test_a_gather_of_every_row_at_its_own_places_keeps_the_rows_apart(case: str) -> None:
    assert INDEX not in moves_of(OF_EVERY_ROW[case])


def test_a_gather_at_a_buffers_places_stays() -> None:
    """A buffer may have other values when the program runs."""
    model = Module(lambda self, x: (x * self.linear.weight.sum())[self.rows].square().sum())
    model.register_buffer("rows", torch.arange(4))
    assert INDEX in targets(check(model, (torch.randn(4, 3, dtype=torch.float64),)))


def test_a_large_gather_is_not_looked_into() -> None:
    assert moves_of(lambda x: x[torch.arange(2**20)], 2**20) == []
    assert moves_of(lambda x: x[torch.arange(2**20 + 1)], 2**20 + 1) == [INDEX]
