"""Rows times the matrices of their experts: the operator, its messages, how capture finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError, VerificationError
from autopar.mesh import Device, Link, LogicalMesh
from autopar.operators import experts
from autopar.runtime.groups import CollectiveCall, Group, Recorder
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.lowered import LOWERED
from tests.helpers.capture_harness import Module, check, targets
from tests.helpers.models.moe_models import FAMILIES, moe_model
from tests.helpers.samples.rule_samples import x

expert_linear = experts.EXPERT_LINEAR
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

    @pytest.mark.parametrize("wrong", [5, -1])
    def test_an_id_that_is_no_expert_is_refused(self, wrong: int) -> None:
        with pytest.raises(IndexError, match=f"expert {wrong} is out of range for 4 experts"):
            expert_linear(x(1, 2), x(4, 5, 2), torch.tensor([wrong]))

    def test_torch_finds_nothing_wrong_with_it(self) -> None:
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        for sample in ((x(8, 6), x(4, 3, 6), IDS), (x(8, 6), x(4, 6, 3), IDS, True)):
            torch.library.opcheck(expert_linear, sample, test_utils=checks)
        mixture = x(8, 6), x(4, 10, 6), x(4, 3, 5), IDS, "silu", False
        apart = x(8, 6), x(4, 5, 6), x(4, 3, 5), IDS, "silu", False
        for of, more in (
            (mixture, (None, False, None)),
            (mixture, (x(4, 10), True, None)),
            (apart, (None, False, x(4, 5, 6))),
        ):
            kernel = experts.expert_mlp_forward._opoverload
            torch.library.opcheck(kernel, (*of, *more), test_utils=checks)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}  # fmt: skip
CLAMPED = "clamped_swiglu 1.5 0.5"


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's, with other numbers, so that many features are clamped."""
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.5))


def mixture(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool,
    b_in: Tensor | None = None, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """The definition of a mixture, with `looked_up` matrices."""
    hidden = looked_up(x, w_in, ids, transposed)
    if b_in is not None:
        hidden = hidden + b_in[ids]
    gate, up = hidden, None
    if hidden.shape[1] != w_out.shape[1 if transposed else 2]:
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if interleaved else hidden.chunk(2, -1)
    if activation == CLAMPED:
        assert up is not None
        return looked_up(clamped(gate, up), w_out, ids, transposed)
    features = ACTIVATIONS[activation](gate)
    return looked_up(features if up is None else features * up, w_out, ids, transposed)


class TestMixture:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["loop", "grouped"])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("n_parts", [1, 2], ids=["plain", "gated"])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_value_and_gradients(
        self, dtype: torch.dtype, activation: str, n_parts: int, transposed: bool
    ) -> None:
        """`F.grouped_mm` has float32, not float64. Expert 2 has no rows."""
        torch.manual_seed(0)
        ids = torch.tensor([3, 0, 0, 1, 3, 3, 3, 0])
        tensors = [x(8, 4), x(4, 8 * n_parts, 4), x(4, 4, 8)]
        if transposed:
            tensors[1:] = (w.detach().mT.contiguous().requires_grad_() for w in tensors[1:])
        tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
        mine = experts.EXPERT_MLP(*tensors, ids, activation, transposed)
        expected = mixture(tensors[0], tensors[1], tensors[2], ids, activation, transposed)
        upstream = torch.randn_like(mine)
        pairs = [(mine, expected)]
        both = (torch.autograd.grad(y, tensors, upstream) for y in (mine, expected))
        # Gradients are up to 50, where a unit in the last place of float32 is 4e-6.
        atol, rtol = 1e-13 if dtype.itemsize == 8 else 1e-5, 8 * torch.finfo(dtype).eps
        for a, b in (*pairs, *zip(*both, strict=True)):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["loop", "grouped"])
    @pytest.mark.parametrize("activation", ["silu", CLAMPED])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_a_bias_and_columns_in_turns(
        self, dtype: torch.dtype, activation: str, interleaved: bool
    ) -> None:
        """As gpt-oss has them. Expert 2 has no rows, so its bias has no gradient."""
        ids = torch.tensor([3, 0, 0, 1, 3, 3, 3, 0])
        shapes = (8, 4), (4, 4, 16), (4, 8, 4), (4, 16)
        *tensors, bias = (x(*shape).detach().to(dtype).requires_grad_() for shape in shapes)
        options = activation, True, bias, interleaved
        rows, w_in, w_out = tensors
        mine = experts.EXPERT_MLP(rows, w_in, w_out, ids, *options)
        expected = mixture(rows, w_in, w_out, ids, *options)
        upstream = torch.randn_like(mine)
        both = (torch.autograd.grad(y, (*tensors, bias), upstream) for y in (mine, expected))
        close = 64 * torch.finfo(dtype).eps
        for a, b in ((mine, expected), *zip(*both, strict=True)):
            torch.testing.assert_close(a, b, rtol=close, atol=close)

    def test_what_is_frozen_gets_no_gradient(self) -> None:
        """As with adapters: weights do not learn, rows have gradients."""
        rows, w_in, w_out = x(8, 4), x(4, 16, 4).detach(), x(4, 4, 8).detach()
        loss = [
            f(rows, w_in, w_out, IDS, "silu", False).sum() for f in (experts.EXPERT_MLP, mixture)
        ]
        mine, expected = (torch.autograd.grad(y, rows)[0] for y in loss)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)


def exchanged_mixture(
    world: ThreadWorld, n_ranks: int, case: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """A rank's rows and experts of a whole mixture: results, and all gradients."""
    mesh = LogicalMesh((n_ranks,), ("ep",), (Link(1, 1),), Device(1, 1, 1))
    g: Group = world.make_groups(mesh)[(0,)]
    *tensors, bias, ids, upstream = (t.chunk(n_ranks)[world.rank] for t in case)
    *tensors, bias = (t.detach().requires_grad_() for t in (*tensors, bias))
    y = LOWERED["expert_exchange_mlp"](*tensors, ids, g, CLAMPED, False, bias, False)
    return y.detach(), *torch.autograd.grad(y, (*tensors, bias), upstream)


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("splits", [False, True], ids=["one", "two"])
def test_an_exchange_keeps_the_order_of_rows_and_so_all_bits(
    n_ranks: int, dtype: torch.dtype, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert has no rows, another most; also in two exchanges, the second beside matmuls."""
    monkeypatch.setattr(experts, "SPLIT_BYTES", 1 if splits else 1 << 30)
    generator = torch.Generator().manual_seed(0)
    n_experts = 8
    ids = torch.randint(0, n_experts, (64,), generator=generator)
    ids[ids == 1] = 3
    shapes = (64, 8), (n_experts, 32, 8), (n_experts, 8, 16), (n_experts, 32), (64, 8)
    *tensors, upstream = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    found = run_threads(exchanged_mixture, n_ranks, n_ranks, (*tensors, ids, upstream))
    for tensor in tensors:
        tensor.requires_grad_()
    *weights, bias = tensors
    y: Tensor = experts.EXPERT_MLP(*weights, ids, CLAMPED, False, bias)
    expected = y, *torch.autograd.grad(y, tensors, upstream)
    for whole, parts in zip(expected, zip(*found, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


def exchanged(world: ThreadWorld, n_received: Callable[[int], int]) -> list[CollectiveCall]:
    """Rank r sends r + 1 rows of 3 doubles to each of two ranks, which return them."""
    mesh = LogicalMesh((2,), ("ep",), (Link(1, 1),), Device(1, 1, 1))
    g: Group = world.make_groups(mesh)[(0,)]
    rows = torch.full((2 * (world.rank + 1), 3), float(world.rank), dtype=torch.float64)
    sent, received = [world.rank + 1] * 2, [n_received(r) for r in range(2)]
    with Recorder() as recorder:
        came = g.send_rows(rows, sent, received, rows.nbytes).wait()
        assert came[:, 0].tolist() == [0, 1, 1]
        assert torch.equal(g.send_rows(came, received, sent, rows.nbytes).wait(), rows)
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


def loss_of(module: Module, rows: Tensor, ids: Tensor, product: Callable[..., Tensor]) -> Tensor:
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
        module = Module(lambda m, rows, ids: loss_of(m, rows, ids, FORMS[form]))
        module.experts = nn.Parameter(torch.randn(4, 4, 4))
        program = check(module, (torch.randn(8, 4, dtype=torch.float64), IDS))
        found = targets(program)
        assert expert_linear in found
        assert torch.ops.aten.index.Tensor not in found

    def test_several_vectors_per_matrix_stay_a_product(self) -> None:
        several = lambda x, w, ids: w[ids] @ x.view(8, 4, 1).expand(8, 4, 2)  # noqa: E731
        module = Module(lambda m, rows, ids: loss_of(m, rows, ids, several))
        module.experts = nn.Parameter(torch.randn(4, 4, 4))
        program = check(module, (torch.randn(8, 4, dtype=torch.float64), IDS))
        assert expert_linear not in targets(program)

    @pytest.mark.parametrize(
        ("between", "is_joined"),
        [
            (lambda h: F.silu(h[:, :4]) * h[:, 4:], True),
            (lambda h: h.split(4, -1)[1] * F.gelu(h.chunk(2, -1)[0], approximate="tanh"), True),
            (lambda h: F.relu(h[:, :4]) * h[:, :4], False),
            (lambda h: F.silu(h[:, ::2]) * h[:, 1::2], True),
            (lambda h: F.silu(h[:, 1::2]) * h[:, ::2], False),
            (lambda h: F.silu(h[:, ::2]) * h[:, 4:], False),
            (lambda h: clamped(h[:, ::2], h[:, 1::2]), True),
            (lambda h: clamped(h[:, 4:], h[:, :4]), False),
            (lambda h: h[:, :4].clamp(max=3.0).sigmoid() * (h[:, 4:].clamp(-3.0, 3.0) + 1), False),
            (lambda h: (F.silu(h) + h)[:, :4], False),
            (lambda h: F.silu(h[:, :4]) * h[:, 4:] + h.sum(), False),
        ],
    )
    def test_which_mixtures_become_one_operator(
        self, between: Callable[[Tensor], Tensor], is_joined: bool
    ) -> None:
        """Gated by halves, if nothing else reads the features in between."""

        def forward(m: Any, rows: Tensor, ids: Tensor) -> Tensor:
            hidden = looked_up(m.linear(rows), m.into, ids)
            return looked_up(between(hidden), m.experts, ids).pow(2).sum()

        module = Module(forward)
        module.into = nn.Parameter(torch.randn(4, 8, 4))
        module.experts = nn.Parameter(torch.randn(4, 4, 4))
        found = targets(check(module, (torch.randn(8, 4, dtype=torch.float64), IDS)))
        assert (experts.EXPERT_MLP in found, expert_linear in found) == (is_joined, not is_joined)

    def test_a_bias_by_other_ids_is_not_of_the_mixture(self) -> None:
        def forward(m: Any, rows: Tensor, ids: Tensor, others: Tensor) -> Tensor:
            hidden = looked_up(m.linear(rows), m.experts, ids) + m.bias[others]
            return looked_up(F.silu(hidden), m.experts, ids).pow(2).sum()

        for others in (IDS, IDS.flip(0)):
            module = Module(forward)
            module.experts = nn.Parameter(torch.randn(4, 4, 4))
            module.bias = nn.Parameter(torch.randn(4, 4))
            batch = torch.randn(8, 4, dtype=torch.float64), IDS, others
            found = targets(check(module, batch))
            assert experts.EXPERT_MLP not in found

    def test_a_loop_over_experts_is_refused_with_a_way_out(self) -> None:
        def looped(m: Any, rows: Tensor, ids: Tensor) -> Tensor:
            parts = [rows[torch.where(ids == e)[0]] @ m.experts[e] for e in range(4)]
            return torch.cat(parts).pow(2).sum()

        module = Module(looped)
        module.experts = nn.Parameter(torch.randn(4, 4, 4))
        with pytest.raises(CaptureError, match=r"experts: torch.bmm\(weight\[ids\]"):
            capture(module, (torch.randn(8, 4), IDS))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_block_of_transformers_equals_eager(self, family: str) -> None:
        """The eager form loops over experts, which cannot be traced; no matrix is gathered."""
        model: Any = moe_model(family)
        model.set_experts_implementation("eager")
        block = model.model.layers[0].mlp
        hidden = torch.randn(4, 4, 16, dtype=torch.float64)
        first = lambda out, _: (out[0] if isinstance(out, tuple) else out).pow(2).sum()  # noqa: E731
        program = check(block, (hidden,), loss_fn=first)
        counts = Counter(targets(program))
        assert (counts[experts.EXPERT_MLP], counts[expert_linear]) == (1, 0)
        for node in program.operators:
            sizes = [v.shape for v in [node.meta["val"]] if isinstance(v, Tensor)]
            assert all(len(shape) < 3 or shape[0] != 32 for shape in sizes), node
