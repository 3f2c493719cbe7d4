"""Matmuls of each row with the matrix of its own expert, without a copy of that matrix per row.

    y[r] = W[ids[r]] @ x[r]                               expert_linear
    y[r] = W_out[ids[r]] @ a(W_in[ids[r]] @ x[r])         expert_mlp

with x [n, i], ids [n], W [e, o, i], or [e, i, o] if `transposed`. The activation is one of
`ACTIVATIONS`. It is gated if W_in makes twice as many features as W_out takes: a(h) = act(gate)·up
with gate and up the halves of h.

`weight[ids]` would be n matrices. Here rows are sorted by expert, so each expert's are contiguous
(`SortedRows`), and one grouped matmul computes all (`F.grouped_mm`, where it has the dtype, device
and strides), else one matmul per expert. FLOPs and bytes are those of the rows alone.
`ExpertLinear` and `ExpertMlp` are the functions on sorted rows, both ways. Ranks run them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.operators.workspace import add_workspace

aten = torch.ops.aten
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Gradients = tuple[Tensor | None, ...]


def sort_rows(ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """The positions of the rows, expert by expert and ascending; where each expert's end (int32).

    Raises `IndexError` for an id that is no expert; on GPUs, torch's error of the device.
    """
    ids, order = ids.sort(stable=True)
    if len(ids):
        is_valid = (ids[0] >= 0) & (ids[-1] < n_experts)
        if ids.device.type != "cpu":
            torch._assert_async(is_valid)  # without waiting for the device
        elif not is_valid:
            wrong = int(ids[0] if ids[0] < 0 else ids[-1])
            raise IndexError(f"expert {wrong} is out of range for {n_experts} experts")
    experts = torch.arange(n_experts, device=ids.device)
    return order, torch.searchsorted(ids, experts, right=True, out_int32=True)


@dataclass(frozen=True)
class SortedRows:
    """Where each expert's rows end, in rows that are sorted by expert; and how many each has, if
    the host knows."""

    ends: Tensor
    counts: Sequence[int] | None = None

    def times(self, rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """n i, e o i -> n o; the weight is e i o if `transposed`."""
        matrices = weight if transposed else weight.mT
        if _is_grouped(rows, matrices):
            return F.grouped_mm(rows, matrices, offs=self.ends).contiguous()
        y = rows.new_empty(len(rows), matrices.shape[2])
        for e, mine in self._each():
            torch.mm(rows[mine], matrices[e], out=y[mine])
        return y

    def outer(self, rows: Tensor, columns: Tensor) -> Tensor:
        """n o, n i -> e o i: for each expert, the sum of its rows' outer products."""
        if _is_grouped(rows.T, columns):
            return F.grouped_mm(rows.T, columns, offs=self.ends).contiguous()
        out = rows.new_zeros(len(self.ends), rows.shape[1], columns.shape[1])
        for e, mine in self._each():
            torch.mm(rows[mine].T, columns[mine], out=out[e])
        return out

    def gradient(self, gradient: Tensor, rows: Tensor, transposed: bool) -> Tensor:
        """Of the weight of `times`."""
        return self.outer(*((rows, gradient) if transposed else (gradient, rows)))

    def _each(self) -> list[tuple[int, slice]]:
        counts, found, start = self.counts, [], 0
        if counts is None:
            counts = self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()
        for e, n in enumerate(counts):
            if n:
                found.append((e, slice(start, start + n)))
            start += n
        return found


def _is_grouped(left: Tensor, right: Tensor) -> bool:
    """Does `F.grouped_mm` have this dtype, device and strides? It wants multiples of 16 bytes."""
    if left.dtype not in _GROUPED_DTYPES:
        return False
    if left.is_cuda and torch.cuda.get_device_capability(left.device) < (8, 0):
        return False
    return all(1 in t.stride()[-2:] and _is_aligned(t) for t in (left, right))


def _is_aligned(t: Tensor) -> bool:
    return t.data_ptr() % 16 == 0 and all(n * t.itemsize % 16 == 0 for n in t.stride() if n != 1)


ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, aten.silu_backward),
    "gelu": (F.gelu, aten.gelu_backward),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward, approximate="tanh"),
    ),
    "relu": (F.relu, lambda gradient, x: aten.threshold_backward(gradient, x, 0)),
}  # fmt: skip


@dataclass(frozen=True)
class ExpertLinear:
    """One matmul, of rows sorted by expert."""

    transposed: bool

    def forward(
        self, sorted_rows: SortedRows, rows: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The results, and what backward needs besides."""
        return sorted_rows.times(rows, weight, self.transposed), None

    def backward(
        self, sorted_rows: SortedRows, gradient: Tensor, rows: Tensor, kept: Tensor | None,
        wanted: Sequence[bool], weight: Tensor,
    ) -> Gradients:  # fmt: skip
        """Of the rows and the weight, where `wanted`."""
        of_rows = sorted_rows.times(gradient, weight, not self.transposed) if wanted[0] else None
        of_weight = sorted_rows.gradient(gradient, rows, self.transposed) if wanted[1] else None
        return of_rows, of_weight


@dataclass(frozen=True)
class ExpertMlp:
    """Two matmuls with an activation between them, of rows sorted by expert."""

    activation: str
    transposed: bool

    def forward(
        self, sorted_rows: SortedRows, rows: Tensor, w_in: Tensor, w_out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The results, and what backward needs besides: the features before the activation."""
        hidden = sorted_rows.times(rows, w_in, self.transposed)
        gate, up = self._halves(hidden, w_out)
        features = ACTIVATIONS[self.activation][0](gate)
        if up is not None:
            features.mul_(up)
        return sorted_rows.times(features, w_out, self.transposed), hidden

    def backward(
        self, sorted_rows: SortedRows, gradient: Tensor, rows: Tensor, kept: Tensor | None,
        wanted: Sequence[bool], w_in: Tensor, w_out: Tensor,
    ) -> Gradients:  # fmt: skip
        """Of the rows and both weights, where `wanted`."""
        assert kept is not None
        activate, differentiate = ACTIVATIONS[self.activation]
        gate, up = self._halves(kept, w_out)
        of_rows = of_in = of_out = None
        activated = activate(gate) if wanted[2] or up is not None else gate
        if wanted[2]:
            features = activated if up is None else activated * up
            of_out = sorted_rows.gradient(gradient, features, self.transposed)
            del features
        if wanted[0] or wanted[1]:
            of_hidden = torch.empty_like(kept)
            of_features = sorted_rows.times(gradient, w_out, not self.transposed)
            of_gate, of_up = self._halves(of_hidden, w_out)
            if up is not None and of_up is not None:
                torch.mul(of_features, activated, out=of_up)
                of_features.mul_(up)
            del activated
            of_gate.copy_(differentiate(of_features, gate))
            del of_features
            if wanted[0]:
                of_rows = sorted_rows.times(of_hidden, w_in, not self.transposed)
            if wanted[1]:
                of_in = sorted_rows.gradient(of_hidden, rows, self.transposed)
        return of_rows, of_in, of_out

    def _halves(self, hidden: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gate and up; without a gate, all of it."""
        n = w_out.shape[1 if self.transposed else 2]
        return (hidden, None) if hidden.shape[1] == n else (hidden[:, :n], hidden[:, n:])


def in_order(order: Tensor, rows: Tensor) -> Tensor:
    """Sorted rows, back at their positions."""
    return rows.new_empty(rows.shape).index_copy_(0, order, rows)


def _run_forward(
    of: ExpertLinear | ExpertMlp, x: Tensor, ids: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    order, ends = sort_rows(ids, len(weights[0]))
    y, kept = of.forward(SortedRows(ends), x[order], *weights)
    return in_order(order, y), kept


@torch.library.custom_op("autopar::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    """n i, e o i, n -> n o; the weight is e i o if `transposed`."""
    return _run_forward(ExpertLinear(transposed), x, ids, weight)[0]


@torch.library.custom_op("autopar::expert_outer", mutates_args=())
def expert_outer(rows: Tensor, columns: Tensor, ids: Tensor, n_experts: int) -> Tensor:
    """n o, n i, n -> e o i: for each expert, the sum of its rows' outer products."""
    order, ends = sort_rows(ids, n_experts)
    return SortedRows(ends).outer(rows[order], columns[order])


@torch.library.custom_op("autopar::expert_mlp_forward", mutates_args=())
def expert_mlp_forward(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool
) -> tuple[Tensor, Tensor]:
    """The results, and the features before the activation, of rows sorted by expert."""
    y, hidden = _run_forward(ExpertMlp(activation, transposed), x, ids, w_in, w_out)
    assert hidden is not None
    return y, hidden


@torch.library.custom_op("autopar::expert_mlp_backward", mutates_args=())
def expert_mlp_backward(
    gradient: Tensor, x: Tensor | None, w_in: Tensor, w_out: Tensor, ids: Tensor, hidden: Tensor,
    activation: str, transposed: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of rows and weights; empty where they are not `wanted`."""
    order, ends = sort_rows(ids, len(w_in))
    rows = gradient if x is None else x[order]  # no gradient reads them without x
    of_rows, of_in, of_out = ExpertMlp(activation, transposed).backward(
        SortedRows(ends), gradient[order], rows, hidden, wanted, w_in, w_out
    )
    of_x = None if of_rows is None else in_order(order, of_rows)
    nothing = gradient.new_empty(0)
    return tuple(nothing.clone() if g is None else g for g in (of_x, of_in, of_out))  # type: ignore[return-value]


torch.library.define(
    "autopar::expert_mlp",
    "(Tensor x, Tensor w_in, Tensor w_out, Tensor ids, str activation, bool transposed) -> Tensor",
)


@torch.library.impl("autopar::expert_mlp", "CompositeImplicitAutograd")
def expert_mlp(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool
) -> Tensor:
    """n i, e (g f) i, e o f, n -> n o; the weights are e i (g f), e f o if `transposed`."""
    forward = torch.ops.autopar.expert_mlp_forward
    y: Tensor = forward(x, w_in, w_out, ids, activation, transposed)[0]
    return y


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@expert_outer.register_fake
def _(rows: Tensor, columns: Tensor, ids: Tensor, n_experts: int) -> Tensor:
    return rows.new_empty(n_experts, rows.shape[1], columns.shape[1])


@expert_mlp_forward.register_fake
def _(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool
) -> tuple[Tensor, Tensor]:
    dim = 2 if transposed else 1
    return x.new_empty(len(x), w_out.shape[dim]), x.new_empty(len(x), w_in.shape[dim])


@expert_mlp_backward.register_fake
def _(
    gradient: Tensor, x: Tensor | None, w_in: Tensor, w_out: Tensor, ids: Tensor, hidden: Tensor,
    activation: str, transposed: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shapes = (len(gradient), w_in.shape[1 if transposed else 2]), w_in.shape, w_out.shape
    return tuple(gradient.new_empty(s if w else 0) for s, w in zip(shapes, wanted, strict=True))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ids, ctx.transposed = inputs
    ctx.n_experts = weight.shape[0]
    of_x, of_weight = ctx.needs_input_grad[:2]  # each gradient needs the other tensor
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None, ids)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, ids = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.autopar.expert_linear(gradient, weight, ids, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (x, gradient) if ctx.transposed else (gradient, x)
        of_weight = torch.ops.autopar.expert_outer(*pair, ids, ctx.n_experts)
    return of_x, of_weight, None, None


def _keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_in, w_out, ids, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w_in, w_out, ids, output[1])


def _backward_mlp(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = torch.ops.autopar.expert_mlp_backward(
        gradient, *ctx.saved_tensors, *ctx.options, wanted
    )
    kept = (g if is_wanted else None for g, is_wanted in zip(found, wanted, strict=True))
    return *kept, None, None, None


expert_linear.register_autograd(_backward, setup_context=_keep)
expert_mlp_forward.register_autograd(_backward_mlp, setup_context=_keep_mlp)

EXPERT_LINEAR = torch.ops.autopar.expert_linear.default
EXPERT_MLP = torch.ops.autopar.expert_mlp.default


_OUTER = torch.ops.autopar.expert_outer.default
_MLP = torch.ops.autopar.expert_mlp_forward.default
_MLP_BACKWARD = torch.ops.autopar.expert_mlp_backward.default


def _workspace(operator: Any, args: Sequence[Any]) -> int:
    """Of each row, at their peak: its position and its id (int64), and how many features."""
    if operator is EXPERT_LINEAR:
        x, weight, _, *transposed = args
        n_features = max(x.shape[1], weight.shape[2 if any(transposed) else 1])
    elif operator is _OUTER:
        x = args[0]
        n_features = x.shape[1] + args[1].shape[1]
    elif operator is _MLP:
        x, _, w_out, *_, transposed = args
        n_inner, n_out = w_out.shape[1:] if transposed else w_out.mT.shape[1:]
        n_features = max(x.shape[1] + n_inner, n_out)
    else:
        x, _, w_in, w_out, _, hidden, _, transposed, _ = args
        n_in, n_inner = w_in.shape[1 if transposed else 2], w_out.shape[1 if transposed else 2]
        n_features = x.shape[1] + hidden.shape[1] + max(n_in, 2 * n_inner)
    return len(x) * (16 + n_features * x.itemsize)


for _kernel in (EXPERT_LINEAR, _OUTER, _MLP, _MLP_BACKWARD):
    add_workspace(_kernel, partial(_workspace, _kernel))
