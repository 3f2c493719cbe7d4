"""Rows times the matrices of their experts: the operator, its messages, how capture finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import operators
from autopar.errors import VerificationError
from autopar.mesh import Device, Link, LogicalMesh
from autopar.runtime.groups import CollectiveCall, Group, Recorder
from autopar.runtime.launch import ThreadWorld, run_threads
from tests.helpers.capture_harness import Module, check, targets
from tests.helpers.models.moe_models import FAMILIES, moe_model
from tests.helpers.samples.rule_samples import x

expert_linear = operators.experts.expert_linear._opoverload
IDS = torch.tensor([3, 0, 0, 1, 2, 3, 3, 0])


def looked_up(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    """The definition of the operator: one matrix is looked up per row."""
    matrices = weight[ids].mT if transposed else weight[ids]
    return torch.bmm(matrices, x.unsqueeze(-1)).squeeze(-1)


class TestOperator:
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("ids", [IDS, torch.tensor([2] * 8)], ids=["mixed", "one"])
    def test_value_and_gradients(self, ids: Tensor, transposed: bool) -> None:
        rows, weight = x(8, 6), x(4, 6, 3) if transposed else x(4, 3, 6)
        mine = expert_linear(rows, weight, ids, transposed)
        expected = looked_up(rows, weight, ids, transposed)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)
        upstream = torch.randn_like(mine)
        found = torch.autograd.grad(mine, (rows, weight), upstream)
        for a, b in zip(
            found, torch.autograd.grad(expected, (rows, weight), upstream), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)

    def test_a_row_without_an_expert_is_zero(self) -> None:
        rows, weight = x(3, 2), x(4, 5, 2)
        y = expert_linear(rows, weight, torch.tensor([1, 4, 0]))
        assert not y[1].any()
        assert y[0].all() and y[2].all()
        (gradient,) = torch.autograd.grad(y.sum(), rows)
        assert not gradient[1].any()

    @pytest.mark.parametrize("wrong", [5, -1])
    def test_an_id_that_is_no_expert_is_refused(self, wrong: int) -> None:
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|non-negative"):
            expert_linear(x(1, 2), x(4, 5, 2), torch.tensor([wrong]))

    def test_torch_finds_nothing_wrong_with_it(self) -> None:
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        for sample in ((x(8, 6), x(4, 3, 6), IDS), (x(8, 6), x(4, 6, 3), IDS, True)):
            torch.library.opcheck(expert_linear, sample, test_utils=checks)


def exchanged(world: ThreadWorld, n_received: Callable[[int], int]) -> list[CollectiveCall]:
    """Rank r sends r + 1 rows of 3 doubles to each of two ranks, which return them."""
    mesh = LogicalMesh((2,), ("ep",), (Link(1, 1),), Device(1, 1, 1))
    g: Group = world.make_groups(mesh)[(0,)]
    rows = torch.full((2 * (world.rank + 1), 3), float(world.rank), dtype=torch.float64)
    numbers = [world.rank + 1] * 2, [n_received(r) for r in range(2)]
    with Recorder() as recorder:
        came = g.send_rows(rows, *numbers)
        assert came[:, 0].tolist() == [0, 1, 1]
        assert torch.equal(g.return_rows(came, *numbers), rows)
    return recorder.calls


class TestExchange:
    def test_rows_are_counted_by_their_owner_both_ways(self) -> None:
        calls = run_threads(exchanged, 2, lambda r: r + 1)
        for rank, mine in enumerate(calls):
            size_bytes = 2 * (rank + 1) * 3 * 8
            assert mine == [CollectiveCall("all_to_all", ("ep",), size_bytes, "forward")] * 2

    def test_numbers_that_do_not_match_are_an_error(self) -> None:
        with pytest.raises(VerificationError, match=r"expects \[1, 1\] rows .* send it \[1, 2\]"):
            run_threads(exchanged, 2, lambda r: 1)


def experts(module: Module, rows: Tensor, ids: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """A loss of rows times the matrices of `module.experts` [4, 4, 4] chosen by `ids`."""
    return product(module.linear(rows), module.experts, ids).pow(2).sum()


def einsum_like(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return (w[ids] @ x[..., None])[..., 0]


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "column": looked_up,
    "row": lambda x, w, ids: torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1),
    "row, transposed after": lambda x, w, ids: torch.bmm(x.unsqueeze(1), w[ids].mT).squeeze(1),
    "transposed before": lambda x, w, ids: looked_up(x, w.transpose(1, 2), ids),
    "ids of two dims": lambda x, w, ids: einsum_like(x.view(2, 4, 4), w, ids.view(2, 4)),
    "index_select": lambda x, w, ids: w.index_select(0, ids).matmul(x.unsqueeze(2)),
}


class TestCapture:
    @pytest.mark.parametrize("form", FORMS)
    def test_a_product_with_a_matrix_per_row(self, form: str) -> None:
        module = Module(lambda m, rows, ids: experts(m, rows, ids, FORMS[form]))
        module.experts = nn.Parameter(torch.randn(4, 4, 4))
        program = check(module, (torch.randn(8, 4, dtype=torch.float64), IDS))
        found = targets(program)
        assert expert_linear in found
        assert torch.ops.aten.index.Tensor not in found

    def test_several_vectors_per_matrix_stay_a_product(self) -> None:
        several = lambda x, w, ids: w[ids] @ x.view(8, 4, 1).expand(8, 4, 2)  # noqa: E731
        module = Module(lambda m, rows, ids: experts(m, rows, ids, several))
        module.experts = nn.Parameter(torch.randn(4, 4, 4))
        program = check(module, (torch.randn(8, 4, dtype=torch.float64), IDS))
        assert expert_linear not in targets(program)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_block_of_transformers_equals_eager(self, family: str) -> None:
        """The eager form loops over experts, which cannot be traced; no matrix is gathered."""
        model: Any = moe_model(family)
        model.set_experts_implementation("eager")
        block = model.model.layers[0].mlp
        hidden = torch.randn(4, 4, 16, dtype=torch.float64)
        first = lambda out, _: (out[0] if isinstance(out, tuple) else out).pow(2).sum()  # noqa: E731
        program = check(block, (hidden,), loss_fn=first)
        assert Counter(targets(program))[expert_linear] == 2
        for node in program.operators:
            sizes = [v.shape for v in [node.meta["val"]] if isinstance(v, Tensor)]
            assert all(len(shape) < 3 or shape[0] != 32 for shape in sizes), node
