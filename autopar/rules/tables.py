"""The rules of every supported operator, one line each.

Families (`families.py`, `views.py`) serve operators of any rank; everything else is a line
of notation. A function from here never touches a tensor.
"""

from __future__ import annotations

from autopar.rules import families as f
from autopar.rules import views as v
from autopar.rules.lowering import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING
from autopar.rules.rule import Family, LinearSets, Localise, OpCall, OpRule

ALONE: LinearSets = ((0,),)


def _scalar_or_mask_keeps_zero(call: OpCall) -> LinearSets:
    return ((0,),) if call.args.get("value") == 0 else ()


def _all_jointly(call: OpCall) -> LinearSets:
    return (tuple(range(len(call.inputs))),)


def _unless_rounding(call: OpCall) -> LinearSets:
    return () if call.args.get("rounding_mode") else ((0,),)


def _only_sum(call: OpCall) -> str | None:
    if call.args.get("weight") is not None:
        return "class weights in cross_entropy are not supported yet"
    if call.inputs[0][: len(call.inputs[1])] == call.inputs[1] and len(call.inputs[0]) == len(
        call.inputs[1]
    ):
        return "class probabilities as labels of cross_entropy are not supported yet"
    if call.args["reduction"] == 1:
        return "a cross_entropy mean that capture could not rewrite as sum / count"
    return None


def _dense_gradient(call: OpCall) -> str | None:
    return "sparse gradients of an embedding are not supported" if call.args["sparse"] else None


_DROPOUT_HINT = "set the dropout probabilities of the model to 0"


def _no_attention_dropout(call: OpCall) -> str | None:
    p = call.args["dropout_p"]
    return f"attention dropout of p={p} is not supported yet\n{_DROPOUT_HINT}" if p else None


def _no_dropout(call: OpCall) -> str | None:
    """Ranks that hold the same tensor would need the same mask, and those of shards their own."""
    p = call.args["p"]
    drops = call.args["train"] and p > 0
    return f"dropout of p={p} is not supported yet in training\n{_DROPOUT_HINT}" if drops else None


# Elementwise functions of one tensor that are not linear.
_UNARY = (
    "relu gelu silu tanh sigmoid exp log sqrt rsqrt abs erf sin cos reciprocal square "
    "leaky_relu elu softplus mish hardtanh hardswish hardsigmoid logical_not bitwise_not "
    "sign floor ceil round isnan isinf log1p expm1 clamp nan_to_num log_sigmoid"
).split()
_UNARY_OVERLOADS = (
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "clamp_min.default",
    "clamp_max.default", "to.dtype", "to.dtype_layout", "to.device", "_to_copy.default",
    "threshold.default", "zeros_like.default", "ones_like.default", "full_like.default",
    "rsub.Scalar", "remainder.Scalar", "floor_divide.default", "masked_fill.Tensor",
    "add.Scalar", "sub.Scalar",
)  # fmt: skip
# Elementwise functions of two tensors, or of a tensor and a scalar, that are not linear.
_COMPARE = "eq ne lt le gt ge".split()
_BINARY_OVERLOADS = (
    "maximum.default", "minimum.default", "logical_and.default", "logical_or.default",
    "logical_xor.default", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor",
    "bitwise_and.Scalar", "bitwise_or.Scalar", "__and__.Tensor", "__or__.Tensor",
    "__xor__.Tensor", "remainder.Tensor", "atan2.default", "fmod.Scalar", "where.ScalarOther",
    "where.ScalarSelf", "where.Scalar", "where.self",
)  # fmt: skip

POINTWISE = (
    *(OpRule(f"aten.{name}.default", f.pointwise) for name in _UNARY),
    *(OpRule(f"aten.{name}", f.pointwise) for name in (*_UNARY_OVERLOADS, *_BINARY_OVERLOADS)),
    *(OpRule(f"aten.{name}.Tensor", f.pointwise) for name in _COMPARE),
    *(OpRule(f"aten.{name}.Scalar", f.pointwise) for name in _COMPARE),
    OpRule("aten.type_as.default", f.pointwise_first),
    OpRule("aten.neg.default", f.pointwise, linear=ALONE),
    OpRule("aten.clone.default", f.pointwise, linear=ALONE),
    OpRule("aten.contiguous.default", f.pointwise, linear=ALONE),
    OpRule("aten.detach.default", f.pointwise, linear=ALONE, view=True),
    OpRule("aten.dropout.default", f.pointwise, linear=ALONE, check=_no_dropout),
    OpRule("aten.alias.default", f.pointwise, linear=ALONE, view=True),
    OpRule("aten.add.Tensor", f.pointwise, linear=f.tensors_linear_jointly),
    OpRule("aten.sub.Tensor", f.pointwise, linear=f.tensors_linear_jointly),
    OpRule("aten.mul.Tensor", f.pointwise, linear=f.tensors_linear_alone),
    OpRule("aten.mul.Scalar", f.pointwise, linear=ALONE),
    OpRule("aten.div.Tensor", f.pointwise, linear=ALONE),
    OpRule("aten.div.Scalar", f.pointwise, linear=ALONE),
    OpRule("aten.div.Tensor_mode", f.pointwise, linear=_unless_rounding),
    OpRule("aten.masked_fill.Scalar", f.pointwise, linear=_scalar_or_mask_keeps_zero),
)  # fmt: skip

REDUCTIONS = (
    OpRule("aten.sum.default", f.summed, linear=ALONE),
    OpRule("aten.sum.dim_IntList", f.summed, linear=ALONE),
    *(
        OpRule(f"aten.{name}", f.reduced_whole)
        for name in (
            "mean.dim", "mean.default", "amax.default", "amin.default", "max.dim", "min.dim",
            "max.default", "min.default", "argmax.default", "argmin.default", "any.dim", "all.dim",
            "var.correction", "std.correction", "var.dim", "std.dim", "logsumexp.default",
            "prod.dim_int", "linalg_vector_norm.default",
        )
    ),
    OpRule("aten.softmax.int", f.along_dim),
    OpRule("aten._softmax.default", f.along_dim),
    OpRule("aten.log_softmax.int", f.along_dim),
    OpRule("aten.cumsum.default", f.along_dim),
    OpRule("aten.diff.default", f.differences, linear=_all_jointly),
)  # fmt: skip

PRODUCTS = (
    OpRule("aten.mm.default", "m k, k n -> m n", "2*m*k*n", ((0,), (1,))),
    OpRule("aten.bmm.default", "b m k, b k n -> b m n", "2*b*m*k*n", ((0,), (1,))),
    OpRule("aten.linear.default", "... i, o i -> ... o", "2*i*o", ((0,), (1,))),
    OpRule("aten.matmul.default", f.matmul, "2*m*k*n", ((0,), (1,))),
    OpRule(
        "aten.einsum.default", f.einsum, "2", f.tensors_linear_alone, check=f.explicit_einsum
    ),
    OpRule(
        "aten.scaled_dot_product_attention.default", f.attention, "4*s*t*e*g",
        check=_no_attention_dropout,
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
        check=_dense_gradient,
    ),
    OpRule("aten.gather.default", f.gather, linear=ALONE),
    OpRule(
        "aten.cross_entropy_loss.default",
        f.cross_entropy,
        lower={"v": VOCABULARY_CROSS_ENTROPY},
        check=_only_sum,
    ),
)


def _view(name: str, notation: Family = v.view, localise: Localise | None = None) -> OpRule:
    """Moves elements, linear in all of them, and shares their memory."""
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
    _view("unbind.int", v.unbind),
    _view("select.int", v.select),
    _view("slice.Tensor", v.slice_, v.localise_slice),
    OpRule("aten.slice_scatter.default", v.scattered, linear=_all_jointly),
    OpRule("aten.select_scatter.default", v.scattered, linear=_all_jointly),
    OpRule("aten.pad.default", v.pad),
    OpRule("aten.constant_pad_nd.default", v.pad),
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

RULES = (*POINTWISE, *REDUCTIONS, *PRODUCTS, *NETWORK, *VIEWS)
