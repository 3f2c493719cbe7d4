"""The tables: the rules of all supported operators, one line each.

Operators of any rank use a family (`families.py`, `views.py`); the others have a line of notation.
No function here touches the values of a tensor.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.rules import families as f
from autopar.rules import views as v
from autopar.rules.bags import BAGS
from autopar.rules.convolutions import CONVOLUTIONAL
from autopar.rules.experts import EXPERT_MATMULS
from autopar.rules.indexing import INDEXING, refuse_sparse
from autopar.rules.losses import LOSSES, refuse_mean
from autopar.rules.lowering import (
    CAUSAL_ATTENTION,
    RING_ATTENTION,
    VOCABULARY_CROSS_ENTROPY,
    VOCABULARY_EMBEDDING,
)
from autopar.rules.normalisation import NORMALISATION
from autopar.rules.padded import PADDED
from autopar.rules.random import RANDOM
from autopar.rules.rule import Family, LinearSets, Localise, OpCall, OpRule

# A matmul -> the operator that computes it and adds a bias.
FUSED = {"aten.mm.default": "aten.addmm.default", "aten.linear.default": "aten.linear.default"}

ALONE: LinearSets = ((0,),)


def _scalar_or_mask_keeps_zero(call: OpCall) -> LinearSets:
    return ((0,),) if call.args.get("value") == 0 else ()


def _all_jointly(call: OpCall) -> LinearSets:
    return (tuple(range(len(call.inputs))),)


def _unless_rounding(call: OpCall) -> LinearSets:
    return () if call.args.get("rounding_mode") else ((0,),)


def _sum_over_classes(call: OpCall) -> str | None:
    scores, labels = call.inputs[:2]
    if scores == labels:
        return "class probabilities as labels of cross_entropy, which capture did not rewrite"
    return refuse_mean(call)


def _pads_with_zero(call: OpCall) -> LinearSets:
    """Or with elements of the tensor (reflected, repeated)."""
    return () if call.args.get("value") else ALONE


def _where_zero(call: OpCall) -> LinearSets:
    return ((1,),) if call.args["other"] == 0 else ()


# Elementwise, not linear, and without torch's tag; `derived.py` has those with the tag.
_POINTWISE = (
    "hardswish.default", "log_sigmoid.default", "to.dtype", "to.dtype_layout", "to.device",
    "_to_copy.default", "zeros_like.default", "ones_like.default", "full_like.default",
    "fill.Scalar", "zero.default", "floor_divide.default", "masked_fill.Tensor",
    "where.ScalarSelf", "where.Scalar", "polar.default", "complex.default",
    "_prelu_kernel.default",
)  # fmt: skip

POINTWISE = (
    *(OpRule(f"aten.{name}", f.pointwise) for name in _POINTWISE),
    OpRule("aten.type_as.default", f.pointwise_first),
    OpRule("aten.bucketize.Tensor", f.pointwise_first),
    OpRule("aten.isin.Tensor_Tensor", f.pointwise_first),
    OpRule("aten.neg.default", f.pointwise, linear=ALONE),
    OpRule("aten.clone.default", f.pointwise, linear=ALONE),
    OpRule("aten.contiguous.default", f.pointwise, linear=ALONE),
    OpRule("aten.detach.default", f.pointwise, linear=ALONE, view=True),
    OpRule("aten.alias.default", f.pointwise, linear=ALONE, view=True),
    OpRule("aten._conj_physical.default", f.pointwise, linear=ALONE),
    OpRule("aten.add.Tensor", f.pointwise, linear=f.tensors_linear_jointly),
    OpRule("aten.sub.Tensor", f.pointwise, linear=f.tensors_linear_jointly),
    OpRule("aten.rsub.Tensor", f.pointwise, linear=f.tensors_linear_jointly),
    OpRule("aten.mul.Tensor", f.pointwise, linear=f.tensors_linear_alone),
    OpRule("aten.mul.Scalar", f.pointwise, linear=ALONE),
    OpRule("aten.div.Tensor", f.pointwise, linear=ALONE),
    OpRule("aten.div.Scalar", f.pointwise, linear=ALONE),
    OpRule("aten.div.Tensor_mode", f.pointwise, linear=_unless_rounding),
    OpRule("aten.masked_fill.Scalar", f.pointwise, linear=_scalar_or_mask_keeps_zero),
    OpRule("aten.where.self", f.pointwise, linear=((1, 2),)),
    OpRule("aten.where.ScalarOther", f.pointwise, linear=_where_zero),
    OpRule("aten.view_as_real.default", "... -> ... c!", linear=ALONE, view=True),
    OpRule("aten.view_as_complex.default", "... c! -> ...", linear=ALONE, view=True),
)  # fmt: skip

REDUCTIONS = (
    OpRule("aten.sum.default", f.summed, linear=ALONE),
    OpRule("aten.sum.dim_IntList", f.summed, linear=ALONE),
    *(
        OpRule(f"aten.{name}", f.reduced_whole)
        for name in (
            "mean.dim", "mean.default", "nansum.default", "amax.default", "amin.default",
            "aminmax.default", "max.dim", "min.dim", "max.default", "min.default",
            "argmax.default", "argmin.default", "median.dim", "median.default", "mode.default",
            "kthvalue.default", "any.dim", "any.dims", "any.default", "all.dim", "all.dims",
            "all.default", "var.correction", "std.correction", "var.dim", "std.dim",
            "var_mean.correction", "std_mean.correction", "logsumexp.default", "prod.dim_int",
            "prod.default", "count_nonzero.dim_IntList", "count_nonzero.default",
            "linalg_vector_norm.default", "nanmedian.dim", "nanmedian.default", "norm.Scalar",
            "norm.ScalarOpt_dim", "trace.default",
        )
    ),
    *(
        OpRule(f"aten.{name}", f.along_dims)
        for name in (
            "softmax.int", "_softmax.default", "_safe_softmax.default", "log_softmax.int",
            "_log_softmax.default", "cumprod.default", "cummax.default", "cummin.default",
            "logcumsumexp.default", "sort.default", "sort.stable", "topk.default",
        )
    ),
    *(
        OpRule(f"aten.{name}", f.along_dims, linear=ALONE)
        for name in (
            "cumsum.default", "flip.default", "roll.default", "_fft_c2c.default",
            "_fft_r2c.default", "_fft_c2r.default",
        )
    ),
    OpRule("aten.diff.default", f.differences, linear=_all_jointly),
    OpRule("aten.cosine_similarity.default", f.pointwise_along_dim),
    OpRule("aten.linalg_cross.default", f.pointwise_along_dim, linear=f.tensors_linear_alone),
    OpRule("aten._cdist_forward.default", f.outer_pairs),
    OpRule("aten._euclidean_dist.default", f.outer_pairs),
    *(OpRule(f"aten.{name}.default", f.whole) for name in ("bincount", "dist")),
    OpRule("aten.histc.default", f.counted_in_bins),
    OpRule("aten.repeat_interleave.Tensor", f.whole),
    OpRule("aten.renorm.default", f.along_others),
)  # fmt: skip

MATRICES = (
    *(
        OpRule(f"aten.{name}.default", f.matrices)
        for name in (
            "linalg_inv_ex", "linalg_cholesky_ex", "linalg_qr", "linalg_matrix_exp",
            "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "_linalg_svd", "_linalg_solve_ex",
            "linalg_lu", "linalg_householder_product",
        )
    ),
    OpRule("aten.linalg_pinv.atol_rtol_tensor", f.matrices),
    OpRule("aten.cholesky_solve.default", f.systems),
    OpRule("aten.linalg_solve_triangular.default", f.systems),
    OpRule("aten.tril.default", f.matrices, linear=ALONE),
    OpRule("aten.triu.default", f.matrices, linear=ALONE),
)  # fmt: skip

MATMULS = (
    OpRule("aten.mm.default", "m k, k n -> m n", "2*m*k*n", ((0,), (1,))),
    OpRule("aten.bmm.default", "b m k, b k n -> b m n", "2*b*m*k*n", ((0,), (1,))),
    OpRule("aten.linear.default", "... i, o i -> ... o", "2*i*o", ((0,), (1,))),
    OpRule("aten.matmul.default", f.matmul, "2*m*k*n", ((0,), (1,))),
    OpRule("aten.mv.default", "m k, k -> m", "2*m*k", ((0,), (1,))),
    OpRule("aten.dot.default", "k, k ->", "2*k", ((0,), (1,))),
    OpRule("aten.vdot.default", "k, k ->", "2*k", ((0,), (1,))),
    OpRule("aten.einsum.default", f.einsum, "2", f.tensors_linear_alone),
    OpRule(
        "aten.scaled_dot_product_attention.default", f.attention, "4*s*c*t*e*g",
        lower={"c": CAUSAL_ATTENTION, "c t": RING_ATTENTION, "s t": RING_ATTENTION},
        paired=("t",), fused=True,
    ),
)  # fmt: skip

NETWORK = (
    OpRule("aten.layer_norm.default", f.layer_norm),
    OpRule("aten.rms_norm.default", f.layer_norm),
    OpRule(
        "aten.embedding.default",
        f.embedding,
        linear=ALONE,
        lower={"v": VOCABULARY_EMBEDDING},
        check=refuse_sparse,
    ),
    OpRule(
        "aten.cross_entropy_loss.default",
        f.cross_entropy,
        lower={"v": VOCABULARY_CROSS_ENTROPY},
        check=_sum_over_classes,
    ),
)


OVER_PADDING = tuple(
    replace(rule, op=str(PADDED[rule.op][0]), lower={"v": PADDED[rule.op][1]})
    for rule in NETWORK
    if rule.op in PADDED
)


def _view(name: str, notation: Family = v.view, localise: Localise | None = None) -> OpRule:
    """The rule of a view: it is linear and shares the memory of its input."""
    return OpRule(f"aten.{name}", notation, linear=ALONE, view=True, localise=localise)


VIEWS = (
    _view("view.default", localise=v.localise_size("size")),
    _view("reshape.default", localise=v.localise_size("shape")),
    _view("_unsafe_view.default", localise=v.localise_size("size")),
    _view("flatten.using_ints"),
    _view("unflatten.int", localise=v.localise_unflatten),
    _view("unsqueeze.default"),
    _view("squeeze.default", v.squeeze),
    _view("squeeze.dim", v.squeeze),
    _view("squeeze.dims", v.squeeze),
    _view("permute.default", v.permute),
    _view("transpose.int", v.transpose),
    _view("t.default", v.transpose),
    _view("numpy_T.default", v.reverse),
    _view("mT.default", v.transpose),
    _view("expand.default", v.expand, v.localise_size("size")),
    _view("split.Tensor", v.split, v.localise_split),
    _view("split_with_sizes.default", v.split, v.localise_split),
    _view("chunk.default", v.split),
    _view("diagonal.default", v.diagonal),
    _view("unfold.default", v.unfold),
    _view("unbind.int", v.unbind),
    _view("select.int", v.select),
    _view("slice.Tensor", v.slice_, v.localise_slice),
    OpRule("aten.slice_scatter.default", v.scattered, linear=_all_jointly),
    OpRule("aten.select_scatter.default", v.scattered, linear=_all_jointly),
    OpRule("aten.pad.default", v.pad, linear=_pads_with_zero),
    OpRule("aten.constant_pad_nd.default", v.pad, linear=_pads_with_zero),
    OpRule(
        "aten.unfold_backward.default", v.folded, linear=ALONE,
        localise=v.localise_size("input_sizes"),
    ),
    OpRule("aten.diag_embed.default", v.diagonal_embedded, linear=ALONE),
    OpRule("aten.cat.default", v.cat, linear=_all_jointly),
    OpRule("aten.stack.default", v.stack, linear=_all_jointly),
    *(
        OpRule(f"aten.{name}.default", v.created, localise=v.localise_size("size"))
        for name in ("zeros", "ones", "full")
    ),
    *(
        OpRule(f"aten.{name}.default", v.created_like, localise=v.localise_size("size"))
        for name in ("new_zeros", "new_ones", "new_full")
    ),
)  # fmt: skip

RULES = (
    *POINTWISE, *REDUCTIONS, *MATRICES, *MATMULS, *NETWORK, *OVER_PADDING, *LOSSES, *INDEXING,
    *BAGS, *VIEWS, *CONVOLUTIONAL, *NORMALISATION, *EXPERT_MATMULS, *RANDOM,
)  # fmt: skip
