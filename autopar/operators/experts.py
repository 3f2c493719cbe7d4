"""Matmuls of each row with the matrix of its own expert, without a copy of that matrix per row.

    y[r] = W[ids[r]] @ x[r]                               expert_linear
    y[r] = W_out[ids[r]] @ a(W_in[ids[r]] @ x[r] + b_in[ids[r]])         expert_mlp
    y[r] = W_out[ids[r]] @ a(W_gate[ids[r]] @ x[r], W_up[ids[r]] @ x[r])         expert_gated_mlp

with x [n, i], ids [n], W [e, o, i], or [e, i, o] if `transposed`; b_in may be missing. Activations
are in `gates.py`. They are gated if W_in makes twice as many features as W_out takes: gate and up
are the halves of h, or take turns in it if `interleaved`. Or each has a matrix of its own. A bias
of the results is added outside: ranks that have parts of the features sum their results.

`weight[ids]` would be n matrices. Here rows are sorted by expert, so each expert's are contiguous
(`SortedRows`), and one grouped matmul computes all (`F.grouped_mm`, where it has the dtype, device
and strides), else one matmul per expert. FLOPs and bytes are those of the rows alone.
`ExpertLinear` and `ExpertMlp` are the functions on sorted rows, both ways. Ranks run them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.operators.gates import activation_of
from autopar.operators.workspace import add_workspace

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Gradients = tuple[Tensor | None, ...]


# From here on, an exchange of a rank's rows is two: half of it hides behind matmuls. 8 MiB take
# some 170 us on InfiniBand, 20 us on NVLink: ten times the latency of another call, or as much.
SPLIT_BYTES = 1 << 23


def n_exchanges(size_bytes: int, n_local: int) -> int:
    """Of a mixture: how many a rank has that sends so much, and has so many experts."""
    return 2 if size_bytes >= SPLIT_BYTES and n_local > 1 else 1


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

    def each(self, values: Tensor, n_rows: int) -> Tensor:
        """e o -> n o: for each row, those of its expert."""
        experts = torch.arange(len(values), device=values.device)
        numbers = self.ends.diff(prepend=self.ends.new_zeros(1))
        return values[experts.repeat_interleave(numbers, output_size=n_rows)]

    def sums(self, rows: Tensor) -> Tensor:
        """n o -> e o: for each expert, the sum of its rows, by a matmul with ones: its order is
        always the same."""
        width = max(16 // rows.itemsize, 1)  # as `_is_aligned` wants it
        return self.outer(rows.new_ones(len(rows), width), rows)[:, 0].contiguous()

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
    """Two matmuls with an activation between them, of rows sorted by expert. Its weights are w_in
    and w_out; or w_gate, w_up and w_out, if gate and up are `apart`."""

    activation: str
    transposed: bool
    interleaved: bool = False
    apart: bool = False

    def forward(
        self, sorted_rows: SortedRows, rows: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The results, and what backward needs besides: the features before the activation. A bias
        of them is last, if there is one."""
        into, w_out, *biases = self._read(weights)
        hidden = self._features(sorted_rows, rows, into)
        for bias in biases:
            hidden += sorted_rows.each(bias, len(rows))
        gate, up = self._halves(hidden, w_out)
        activation = activation_of(self.activation)
        features = activation.act(gate)
        if up is not None:
            features.mul_(activation.factor(up))
        return sorted_rows.times(features, w_out, self.transposed), hidden

    def backward(
        self, sorted_rows: SortedRows, gradient: Tensor, rows: Tensor, kept: Tensor | None,
        wanted: Sequence[bool], *weights: Tensor,
    ) -> Gradients:  # fmt: skip
        """Of the rows, the weights, and the bias if there is one, where `wanted`: of rows, weights,
        ids, and perhaps the bias."""
        assert kept is not None
        into, w_out = self._read(weights)
        learns, of_bias = wanted[1 : 1 + len(into)], wanted[3 + len(into) :]
        activation = activation_of(self.activation)
        gate, up = self._halves(kept, w_out)
        of_rows = of_out = None
        of_into: list[Tensor | None] = [None] * len(into)
        activated = activation.act(gate) if wanted[1 + len(into)] or up is not None else gate
        if wanted[1 + len(into)]:
            features = activated if up is None else activated * activation.factor(up)
            of_out = sorted_rows.gradient(gradient, features, self.transposed)
            del features
        biases: list[Tensor] = []
        if wanted[0] or any(learns) or any(of_bias):
            of_hidden = torch.empty_like(kept)
            of_features = sorted_rows.times(gradient, w_out, not self.transposed)
            of_gate, of_up = self._halves(of_hidden, w_out)
            if up is not None and of_up is not None:
                torch.mul(of_features, activated, out=of_up)
                if activation.is_flat is not None:
                    of_up.masked_fill_(activation.is_flat(up), 0)
                of_features.mul_(activation.factor(up))
            del activated
            of_gate.copy_(activation.differentiate(of_features, gate))
            del of_features
            parts = of_hidden.chunk(len(into), 1)
            for part, w in zip(parts, into, strict=True) if wanted[0] else ():
                found = sorted_rows.times(part, w, not self.transposed)
                of_rows = found if of_rows is None else of_rows.add_(found)
            of_into = [
                sorted_rows.gradient(part, rows, self.transposed) if learn else None
                for part, learn in zip(parts, learns, strict=True)
            ]
            biases = [sorted_rows.sums(of_hidden)] if any(of_bias) else []
        return of_rows, *of_into, of_out, *(biases or (None for _ in of_bias))

    def _read(self, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        """Those into the features; that out of them; and the rest."""
        n = 1 + self.apart
        return weights[:n], *weights[n:]

    def _features(self, sorted_rows: SortedRows, rows: Tensor, into: Sequence[Tensor]) -> Tensor:
        """n i, e o i -> n (g o): of gate, then of up."""
        if len(into) == 1:
            return sorted_rows.times(rows, into[0], self.transposed)
        widths = [w.shape[2 if self.transposed else 1] for w in into]
        hidden = rows.new_empty(len(rows), sum(widths))
        for part, w in zip(hidden.split(widths, 1), into, strict=True):
            part.copy_(sorted_rows.times(rows, w, self.transposed))
        return hidden

    def _halves(self, hidden: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gate and up; without a gate, all of it."""
        n = w_out.shape[1 if self.transposed else 2]
        if hidden.shape[1] == n:
            return hidden, None
        if self.interleaved:
            return hidden[:, ::2], hidden[:, 1::2]
        return hidden[:, :n], hidden[:, n:]


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
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool,
    b_in: Tensor | None, interleaved: bool, w_up: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results, and the features before the activation, of rows sorted by expert."""
    of = ExpertMlp(activation, transposed, interleaved, w_up is not None)
    weights = [w for w in (w_in, w_up, w_out, b_in) if w is not None]
    y, hidden = _run_forward(of, x, ids, *weights)
    assert hidden is not None
    return y, hidden


@torch.library.custom_op("autopar::expert_mlp_backward", mutates_args=())
def expert_mlp_backward(
    gradient: Tensor, x: Tensor | None, w_in: Tensor, w_out: Tensor, ids: Tensor, hidden: Tensor,
    activation: str, transposed: bool, interleaved: bool, wanted: list[bool],
    w_up: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of rows, weights, bias and w_up; empty where they are not `wanted`: of rows,
    weights, ids, bias and w_up."""
    order, ends = sort_rows(ids, len(w_in))
    rows = gradient if x is None else x[order]  # no gradient reads them without x
    of_x, of_in, of_out, of_ids, of_bias, of_up = wanted
    ups = () if w_up is None else (w_up,)
    of_rows, for_in, *others = ExpertMlp(activation, transposed, interleaved, bool(ups)).backward(
        SortedRows(ends), gradient[order], rows, hidden,
        [of_x, of_in, *(of_up for _ in ups), of_out, of_ids, of_bias], w_in, *ups, w_out,
    )  # fmt: skip
    for_up = others.pop(0) if ups else None
    rows_back = None if of_rows is None else in_order(order, of_rows)
    nothing = gradient.new_empty(0)
    found = rows_back, for_in, *others, for_up
    return tuple(nothing.clone() if g is None else g for g in found)  # type: ignore[return-value]


torch.library.define(
    "autopar::expert_mlp",
    "(Tensor x, Tensor w_in, Tensor w_out, Tensor ids, str activation, bool transposed, "
    "Tensor? b_in=None, bool interleaved=False) -> Tensor",
)


@torch.library.impl("autopar::expert_mlp", "CompositeImplicitAutograd")
def expert_mlp(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool,
    b_in: Tensor | None = None, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """n i, e (g f) i, e o f, n, e (g f) -> n o; the weights are e i (g f), e f o if `transposed`.

    It is (f g) for (g f) if `interleaved`.
    """
    forward = torch.ops.autopar.expert_mlp_forward
    y: Tensor = forward(x, w_in, w_out, ids, activation, transposed, b_in, interleaved, None)[0]
    return y


torch.library.define(
    "autopar::expert_gated_mlp",
    "(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_out, Tensor ids, str activation, "
    "bool transposed) -> Tensor",
)


@torch.library.impl("autopar::expert_gated_mlp", "CompositeImplicitAutograd")
def expert_gated_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor, ids: Tensor, activation: str,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """n i, e f i, e f i, e o f, n -> n o; the weights are e i f, e i f, e f o if `transposed`."""
    forward = torch.ops.autopar.expert_mlp_forward
    y: Tensor = forward(x, w_gate, w_out, ids, activation, transposed, None, False, w_up)[0]
    return y


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, transposed: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@expert_outer.register_fake
def _(rows: Tensor, columns: Tensor, ids: Tensor, n_experts: int) -> Tensor:
    return rows.new_empty(n_experts, rows.shape[1], columns.shape[1])


@expert_mlp_forward.register_fake
def _(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, activation: str, transposed: bool,
    b_in: Tensor | None, interleaved: bool, w_up: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dim = 2 if transposed else 1
    n_features = w_in.shape[dim] + (0 if w_up is None else w_up.shape[dim])
    return x.new_empty(len(x), w_out.shape[dim]), x.new_empty(len(x), n_features)


@expert_mlp_backward.register_fake
def _(
    gradient: Tensor, x: Tensor | None, w_in: Tensor, w_out: Tensor, ids: Tensor, hidden: Tensor,
    activation: str, transposed: bool, interleaved: bool, wanted: list[bool],
    w_up: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shapes = (
        (len(gradient), w_in.shape[1 if transposed else 2]), w_in.shape, w_out.shape,
        (len(w_in), hidden.shape[1]), w_in.shape,
    )  # fmt: skip
    asked = [*wanted[:3], *wanted[4:]]
    return tuple(gradient.new_empty(s if w else 0) for s, w in zip(shapes, asked, strict=True))  # type: ignore[return-value]


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
    x, w_in, w_out, ids, activation, transposed, _, interleaved, w_up = inputs
    ctx.options = activation, transposed, interleaved
    ctx.mark_non_differentiable(output[1])
    reads_rows = ctx.needs_input_grad[1] or ctx.needs_input_grad[8]
    ctx.save_for_backward(x if reads_rows else None, w_in, w_out, ids, output[1], w_up)


def _backward_mlp(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad
    wanted = [*needed[:4], needed[6], needed[8]]
    *saved, w_up = ctx.saved_tensors
    found = torch.ops.autopar.expert_mlp_backward(gradient, *saved, *ctx.options, wanted, w_up)
    asked = [*wanted[:3], *wanted[4:]]
    *kept, of_bias, of_up = (
        g if is_asked else None for g, is_asked in zip(found, asked, strict=True)
    )
    return *kept, None, None, None, of_bias, None, of_up


expert_linear.register_autograd(_backward, setup_context=_keep)
expert_mlp_forward.register_autograd(_backward_mlp, setup_context=_keep_mlp)

EXPERT_LINEAR = torch.ops.autopar.expert_linear.default
EXPERT_MLP = torch.ops.autopar.expert_mlp.default
EXPERT_GATED_MLP = torch.ops.autopar.expert_gated_mlp.default


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
        x, w_in, w_out, _, activation, transposed, b_in, *_ = args
        n_inner, n_out = w_out.shape[1:] if transposed else w_out.mT.shape[1:]
        n_hidden = 0 if b_in is None else w_in.shape[2 if transposed else 1]  # a bias for each row
        n_between = max(n_hidden, n_inner * (1 + activation_of(activation).has_factor))
        n_features = max(x.shape[1] + max(n_inner, n_between - n_out), n_out)
    else:
        x, _, w_in, w_out, _, hidden, _, transposed, _, _, w_up = args
        n_in, n_inner = w_in.shape[1 if transposed else 2], w_out.shape[1 if transposed else 2]
        n_sums = 1 if w_up is None else 2  # of gradients of rows
        n_features = x.shape[1] + hidden.shape[1] + max(n_sums * n_in, 2 * n_inner)
    return len(x) * (16 + n_features * x.itemsize)


for _kernel in (EXPERT_LINEAR, _OUTER, _MLP, _MLP_BACKWARD):
    add_workspace(_kernel, partial(_workspace, _kernel))
