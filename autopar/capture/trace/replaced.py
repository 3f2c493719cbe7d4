"""Replaces functions of torch that cannot be traced, or refuses them with advice.

`ctc_loss` becomes autopar's operator (`operators/ctc.py`), reduced as torch does. Lists of lengths
become tensors, targets without a batch a batch of one, targets that a mask selects rows again.
`gaussian_nll_loss`, `cov` and `corrcoef` ask for values, and are written without that; so is
`bincount` with `minlength`. `F.grouped_mm` becomes `expert_linear`, by the number of the group that
a row is in. `x.data`, a tensor that the trace does not know, is `x.detach()`. `x[i]` of an integer
tensor `i` without dims asks for its value; it becomes an index of one element.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import NotSupportedError
from autopar.operators.ctc import ctc_loss
from autopar.operators.experts import expert_linear

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Replaced(TorchFunctionMode):
    """In forward, torch's functions of the table below are others."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return _REPLACED.get(function, function)(*args, **(kwargs or {}))


def _functional_ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """What `torch.nn.functional.ctc_loss` computes."""
    number = torch.nn._reduction.get_enum(reduction)
    lengths = (input_lengths, target_lengths)
    return _ctc_loss(log_probs, targets, *lengths, blank, number, zero_infinity)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = MEAN, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """What `torch.ctc_loss` computes."""
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs = log_probs.unsqueeze(1)
        targets = targets if targets.dim() == 2 else targets.unsqueeze(0)
    n_rows = log_probs.shape[1]
    read = _lengths(input_lengths, n_rows)
    written = _lengths(target_lengths, n_rows)
    starts = written.cumsum(0) - written if targets.dim() == 1 else None
    losses: Tensor = ctc_loss(log_probs, targets, read, written, starts, blank, zero_infinity)
    if reduction == MEAN:
        return (losses / written.clamp_min(1)).mean()
    if reduction == SUM:
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


def _lengths(lengths: Any, n_rows: int) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.reshape(n_rows).long()
    values = [int(length) for length in lengths]
    if len({*values}) == 1:
        return torch.full((n_rows,), values[0])
    return torch.tensor(values)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """What `torch.nn.functional.gaussian_nll_loss` computes, without asking for the sign of `var`.

    torch clamps `var` in place with gradients off, so its gradient passes through.
    """
    reduced = torch.nn._reduction.get_enum(reduction)
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    lengths = zip(input.shape, var.shape, strict=False)
    differ = [n for length, n in lengths if length != n]
    if var.dim() != input.dim() or differ not in ([], [1]):
        raise ValueError("var is of incorrect size")
    var = torch.where(var < eps, eps + (var - var.detach()), var)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduced == NONE:
        return loss
    return loss.mean() if reduced == MEAN else loss.sum()


def _cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `torch.cov` computes."""
    if fweights is not None or aweights is not None or x.dim() > 2:
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / max(rows.shape[1] - correction, 0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    """What `torch.corrcoef` computes."""
    found = _cov(x)
    if found.dim() == 0 or found.is_complex():
        return found / found if found.dim() == 0 else torch.corrcoef(x)
    deviations = found.diagonal().sqrt()
    return (found / deviations[:, None] / deviations[None, :]).clip(-1, 1)


def _read_at(x: Tensor, key: Any) -> Any:
    """`x[key]`."""
    keys = key if isinstance(key, tuple) else (key,)
    for dim, place in zip(_dims_of(x, keys), keys, strict=True):
        if _is_place(place):
            x = x[(*[slice(None)] * dim, place.reshape(1))]
    return x[tuple(0 if _is_place(each) else each for each in keys)]


def _write_at(x: Tensor, key: Any, value: Any) -> None:
    """`x[key] = value`; places stand side by side, and no other tensor is in `key`."""
    keys = key if isinstance(key, tuple) else (key,)
    places = [n for n, each in enumerate(keys) if _is_place(each)]
    n_tensors = sum(isinstance(each, (Tensor, list)) for each in keys)
    if not places or n_tensors > len(places) or places[-1] - places[0] >= len(places):
        x[key] = value
        return
    last = places[-1]
    n_behind = x.dim() - 1 - _dims_of(x, keys)[last]  # dims of x[key] behind the place
    n_behind += sum((each is None) - isinstance(each, int) for each in keys[last + 1 :])
    if isinstance(value, Tensor) and value.dim() > n_behind:
        value = value.unsqueeze(value.dim() - n_behind)
    x[tuple(each.reshape(1) if _is_place(each) else each for each in keys)] = value


def _is_place(key: Any) -> bool:
    """Is `key` an integer that a tensor holds?"""
    return isinstance(key, Tensor) and not key.dim() and key.dtype in _INTEGERS


def _dims_of(x: Tensor, keys: Sequence[Any]) -> list[int]:
    """The dim of `x` that each of the keys begins at."""
    n_read = [_n_dims_read(each) for each in keys]
    rest = x.dim() - sum(n_read)
    n_read = [rest if each is ... else n for each, n in zip(keys, n_read, strict=True)]
    return [sum(n_read[:n]) for n in range(len(keys))]


def _n_dims_read(key: Any) -> int:
    if isinstance(key, Tensor) and key.dtype == torch.bool:
        return key.dim()
    return 0 if key is None or key is ... or isinstance(key, bool) else 1


def _grouped_mm(
    rows: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """What `F.grouped_mm` computes of rows and a stack of matrices, which torch traces in bfloat16
    alone: row r has the matrix of the group that it is in."""
    is_stack = (rows.dim(), matrices.dim(), bias) == (2, 3, None)
    is_one_dtype = rows.dtype == matrices.dtype == (out_dtype or rows.dtype)
    if offs is None or not is_stack or not is_one_dtype or len(offs) != len(matrices):
        return F.grouped_mm(rows, matrices, offs=offs, bias=bias, out_dtype=out_dtype)
    places = torch.arange(len(rows), dtype=offs.dtype, device=offs.device)
    y: Tensor = expert_linear(rows, matrices, torch.searchsorted(offs, places, right=True), True)
    return y


def _bincount(ids: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """What `torch.bincount` computes, for ids below `minlength`; others are an error in a step."""
    if not minlength:
        return torch.bincount(ids, weights)
    if weights is None:
        added = torch.ones_like(ids, dtype=torch.int64)
    else:
        added = weights if weights.dtype == torch.float32 else weights.double()
    return added.new_zeros(minlength).scatter_add(0, ids.long(), added)


def _pack(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedError(
        "the shape of a packed sequence depends on the lengths",
        hint="run the RNN over the padding, and mask what it gives there; what a forward direction "
        "gives before the padding does not depend on it",
    )


def _set_data(*_: Any) -> NoReturn:
    raise NotSupportedError(
        "`x.data = ...` in forward, which the trace would not see",
        hint="x.copy_(...) for a buffer; parameters are updated after the step",
    )


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.ctc_loss: _functional_ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.ctc_loss: _ctc_loss,
    torch.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    F.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
    torch.Tensor.cov: _cov,
    torch.Tensor.corrcoef: _corrcoef,
    torch._VF._pack_padded_sequence: _pack,
    Tensor.__getitem__: _read_at,
    Tensor.__setitem__: _write_at,
    Tensor.data.__get__: lambda x, *_: x.detach(),  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}


def targets_in_rows(graph: fx.Graph) -> None:
    """`labels.masked_select(mask)` as targets of CTC, with `mask.sum(-1)` as their lengths, becomes
    rows of labels: the selected ones of each row first. So the shape is known, and rows are free.
    """
    for node in list(graph.nodes):
        if node.target is not ctc_loss._opoverload:
            continue
        log_probs, selected, read, written, *rest = node.args  # defaults at the end are left out
        lengths = _before_casts(written)
        if selected.target is not aten.masked_select.default or len(lengths.args) < 2:
            continue
        labels, mask = selected.args
        shape = labels.meta["val"].shape
        is_table = len(shape) == 2 and shape == mask.meta["val"].shape
        if not is_table or (lengths.target, *lengths.args[:2]) not in _counts_of(mask):
            continue
        with graph.inserting_before(selected):
            others = insert_like(graph, selected, aten.logical_not.default, mask)
            order = insert_like(graph, selected, aten.sort.stable, others, stable=True, dim=-1)
            places = insert_like(graph, selected, operator.getitem, order, 1)
            rows = insert_like(graph, selected, aten.gather.default, labels, 1, places)
        node.args = (log_probs, rows, read, written, None, *rest[1:])


def _counts_of(mask: fx.Node) -> list[tuple[Any, ...]]:
    return [(aten.sum.dim_IntList, mask, [dim]) for dim in (-1, 1)]


def _before_casts(node: fx.Node) -> fx.Node:
    same = (aten.to, aten._to_copy, aten.reshape, aten.view)
    while getattr(node.target, "overloadpacket", None) in same:
        node = node.all_input_nodes[0]
    return node


def insert_like(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call at the place of `like`, with its fake value."""
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    with pytree.tree_leaves(like.meta["val"])[0].fake_mode:
        node.meta = {**like.meta, "val": target(*values, **kwargs)}
    return node
