"""One call or more of every operator that has a rule: what the oracle runs.

Adding a rule adds one line here, and no test code. Shapes are small, with dims of 4 and 8
that 4 ranks or two axes of 2 divide; dims of 1, 3 and 6 are there where they matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Sample = tuple[tuple[Any, ...], dict[str, Any]]

_random = torch.Generator().manual_seed(0)


def restart() -> None:
    """What is drawn after this is always the same."""
    _random.manual_seed(0)


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def x(*shape: int) -> Tensor:
    """A tensor with gradient."""
    return torch.randn(shape, generator=_random, dtype=torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=_random, dtype=torch.float64) + 0.5).requires_grad_()


def fixed(*shape: int) -> Tensor:
    """A tensor without gradient."""
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_random)


def bools(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_random) < 0.5


def holes(labels: Tensor) -> Tensor:
    """Labels of which the first and the last are ignored."""
    flat = labels.flatten().clone()
    flat[0] = flat[-1] = -100
    return flat.view_as(labels)


ROW_AND_SCALAR = [call(x(4, 8), x(4, 8)), call(x(4, 8), x(8)), call(x(4, 8), 3)]
COMPARED = [call(ints(3, 4, 8), ints(3, 4, 8)), call(x(4, 8), x(4, 1)), call(x(4, 8), fixed())]
LOGICAL = [call(bools(4, 8), bools(4, 8)), call(bools(4, 1, 8), bools(4, 1))]
REDUCED = [call(x(4, 8), [1]), call(x(2, 4, 8), [0, -1], True), call(x(4, 8), [])]
ONE_DIM = [call(x(4, 8), 1), call(x(4, 8), -2, True), call(x(8, 1, 4), 1, True)]
SPREAD = [call(x(4, 8), [1]), call(x(2, 4, 8), [0, -1], keepdim=True), call(x(4, 8), None)]
ALONG = [call(x(4, 8), -1), call(x(4, 1, 8), 0), call(x(), 0)]
VIEWED = [
    call(x(4, 8), [32]),
    call(x(4, 24), [4, 3, 4, 2]),  # a fused projection: 3 x heads x head_dim
    call(x(8, 4, 2), [8, 8]),
    call(x(4, 6, 2), [4, 4, 3]),  # 6 x 2 against 4 x 3: only the batch is common
    call(x(6, 4, 8), [4, 6, 8]),  # 6 x 4 against 4 x 6
    call(x(1, 4, 1, 8), [4, 8, 1]),
    call(x(4, 8), [4, -1, 2]),
    call(ints(9, 4, 8), [2, 16]),
]
SPLIT = [
    call(x(4, 24), 8, -1),  # q, k, v
    call(x(8, 4), 4),
    call(x(4, 10), 4, 1),  # 4, 4 and 2
    call(x(4, 8), 8, 1),
]
FILLED = [call(x(4, 8), [4, 8]), call(x(8), [2, 4])]

MATMULS = [
    call(x(4, 8), x(8, 4)),
    call(x(2, 4, 8), x(8, 4)),
    call(x(4, 1, 2, 8), x(4, 8, 4)),  # both batches broadcast
    call(x(8), x(8)),
    call(x(4, 8), x(8)),
    call(x(8), x(8, 4)),
    call(x(8), x(4, 8, 2)),
    call(x(4, 2, 8), x(8)),
    call(x(4, 8), fixed(8, 4)),
]


def attention(
    q: tuple[int, ...], k: tuple[int, ...], mask: Tensor | None = None, **kwargs: Any
) -> Sample:
    """Values are one wider than keys."""
    return call(x(*q), x(*k), x(*k[:-1], k[-1] + 1), mask, **kwargs)


ATTENTIONS = [
    attention((4, 4, 4, 2), (4, 4, 8, 2)),
    attention((2, 4, 4, 2), (2, 4, 4, 2), is_causal=True),
    attention((2, 4, 4, 2), (2, 4, 8, 2), is_causal=True, scale=0.3),
    attention((4, 8, 2), (4, 4, 2), is_causal=True),  # the last ranks' rows see all keys
    attention((4, 2), (4, 2), is_causal=True),
    attention((2, 4, 4, 2), (2, 4, 4, 2), bools(4, 4) | torch.eye(4, dtype=torch.bool)),
    attention((2, 4, 4, 2), (2, 4, 4, 2), fixed(2, 1, 1, 4)),
    attention((2, 4, 4, 2), (2, 4, 4, 2), bools(2, 1, 4, 4) | torch.eye(4, dtype=torch.bool)),
    attention((2, 4, 4, 2), (2, 4, 4, 2), x(1, 4, 4, 4)),  # a learned bias per head
    attention((2, 4, 4, 2), (2, 4, 8, 2), x(4, 8)),
    attention((4, 4, 2), (4, 8, 2), x(4, 4, 8), scale=0.3),
    attention((4, 2), (8, 2), fixed(4, 8)),
    attention((1, 4, 4, 2), (4, 4, 4, 2), bools(4, 1, 1, 4) | torch.eye(4, dtype=torch.bool)),
    # Grouped queries: 8 heads over 4 and over 1, and masks of every form.
    attention((2, 8, 4, 2), (2, 4, 4, 2), enable_gqa=True),
    attention((2, 8, 4, 2), (2, 4, 4, 2), is_causal=True, enable_gqa=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), x(2, 8, 2, 4), enable_gqa=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), fixed(2, 1, 2, 4), enable_gqa=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), fixed(1, 1, 1, 4), enable_gqa=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), fixed(8, 1, 4), enable_gqa=True),
    attention((2, 8, 2, 2), (2, 2, 4, 2), fixed(2, 4), enable_gqa=True),
    attention((2, 4, 4, 2), (2, 1, 4, 2), enable_gqa=True),
    attention((2, 4, 4, 2), (2, 4, 4, 2), enable_gqa=True),
    attention((8, 4, 2), (4, 4, 2), enable_gqa=True),
]

UNARY: dict[str, Sample] = {
    f"aten.{name}.default": call(x(4, 8))
    for name in (
        "relu gelu silu tanh sigmoid exp abs erf sin cos reciprocal square leaky_relu elu softplus "
        "mish hardtanh hardswish hardsigmoid sign floor ceil round isnan isinf expm1 nan_to_num "
        "log_sigmoid"
    ).split()
}

SAMPLES: dict[str, list[Sample]] = {
    **{op: [sample] for op, sample in UNARY.items()},
    **{f"aten.{n}.default": [call(positive(4, 8))] for n in ("log", "sqrt", "rsqrt", "log1p")},
    **{f"aten.{n}.default": LOGICAL for n in ("logical_and", "logical_or", "logical_xor")},
    **{f"aten.{n}.Tensor": LOGICAL for n in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{f"aten.{n}.Tensor": COMPARED for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"aten.{n}.Scalar": [call(ints(3, 4, 8), 1)] for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten.logical_not.default": [call(bools(4, 8))],
    "aten.bitwise_not.default": [call(bools(4, 8))],
    "aten.bitwise_and.Scalar": [call(ints(9, 4, 8), 3)],
    "aten.bitwise_or.Scalar": [call(ints(9, 4, 8), 3)],
    "aten.clamp.default": [call(x(4, 8), -0.5, 0.5)],
    "aten.clamp_min.default": [call(x(4, 8), 0.0)],
    "aten.clamp_max.default": [call(x(4, 8), 0.0)],
    "aten.pow.Tensor_Scalar": [call(x(4, 8), 2), call(positive(4, 8), 0.5)],
    "aten.pow.Tensor_Tensor": [call(positive(4, 8), x(8)), call(positive(8), x(4, 1))],
    "aten.pow.Scalar": [call(2.0, x(4, 8))],
    "aten.to.dtype": [call(x(4, 8), torch.float64), call(bools(4, 8), torch.int64)],
    "aten.to.dtype_layout": [call(ints(9, 4, 8), dtype=torch.float64)],
    "aten.to.device": [call(x(4, 8), torch.device("cpu"), torch.float64)],
    "aten._to_copy.default": [call(x(4, 8), dtype=torch.float64)],
    "aten.type_as.default": [call(ints(9, 4, 8), fixed(4, 8)), call(ints(9, 8), fixed(8, 8, 3))],
    "aten.threshold.default": [call(x(4, 8), 0.1, 0.2)],
    "aten.zeros_like.default": [call(x(4, 8))],
    "aten.ones_like.default": [call(ints(9, 4, 8))],
    "aten.full_like.default": [call(x(4, 8), 7.0)],
    "aten.rsub.Scalar": [call(x(4, 8), 1.0)],
    "aten.remainder.Scalar": [call(x(4, 8), 0.7)],
    "aten.remainder.Tensor": [call(fixed(4, 8), fixed(8))],
    "aten.fmod.Scalar": [call(x(4, 8), 0.7)],
    "aten.floor_divide.default": [call(ints(9, 4, 8), ints(3, 8) + 1)],
    "aten.maximum.default": [call(x(4, 8), x(4, 8)), call(x(4, 8), x(4, 1))],
    "aten.minimum.default": [call(x(4, 8), x(4, 8))],
    "aten.atan2.default": [call(x(4, 8), x(8))],
    "aten.masked_fill.Scalar": [
        call(x(4, 8), bools(4, 8), 0.0),
        call(x(4, 8), bools(8), -1.5),
        call(x(8), bools(4, 1), 0),
    ],
    "aten.masked_fill.Tensor": [call(x(4, 8), bools(4, 1), x())],
    "aten.where.self": [call(bools(4, 8), x(4, 8), x(8)), call(bools(8), x(4, 1), fixed())],
    "aten.where.ScalarOther": [call(bools(4, 8), x(4, 8), 0.0)],
    "aten.where.ScalarSelf": [call(bools(4, 8), 1.5, x(4, 8))],
    "aten.where.Scalar": [call(bools(4, 8), 1.5, 0.0)],
    "aten.neg.default": [call(x(4, 8)), call(ints(9, 4, 8))],
    "aten.clone.default": [call(x(4, 8)), call(bools(4, 8))],
    "aten.contiguous.default": [call(x(4, 8))],
    "aten.detach.default": [call(x(4, 8))],
    "aten.alias.default": [call(x(4, 8))],
    "aten.add.Tensor": [
        *ROW_AND_SCALAR,
        call(x(4, 1, 8), x(2, 1), alpha=2),
        call(x(4, 8), fixed(4, 8)),
        call(ints(9, 4, 8), ints(9, 8)),
        call(ints(9, 4, 8), 1),
        call(bools(4, 8), bools(8)),
    ],
    "aten.sub.Tensor": [*ROW_AND_SCALAR, call(x(8), x(4, 8), alpha=3)],
    "aten.mul.Tensor": [
        *ROW_AND_SCALAR,
        call(x(4, 8), fixed(4, 1)),
        call(bools(4, 8), x(8)),
        call(ints(9, 4, 8), ints(9, 8)),
    ],
    "aten.div.Tensor": [
        call(x(4, 8), positive(8)),
        call(x(4, 8), 3.0),
        call(ints(9, 8), fixed(8)),
        call(bools(8), 3),
    ],
    "aten.div.Tensor_mode": [
        call(x(4, 8), 3.0, rounding_mode="floor"),
        call(x(4, 8), positive(8), rounding_mode=None),
        call(ints(9, 8), 2, rounding_mode="trunc"),
    ],
    "aten.add.Scalar": [call(x(4, 8), 1.0)],
    "aten.sub.Scalar": [call(x(4, 8), 1.0)],
    "aten.mul.Scalar": [call(x(4, 8), 2.0)],
    "aten.div.Scalar": [call(x(4, 8), 2.0)],
    "aten.sum.default": [call(x(4, 8)), call(ints(9, 4, 8)), call(bools(4, 8)), call(x())],
    "aten.sum.dim_IntList": [*REDUCED, call(x(4, 8), None), call(x(4, 1, 8), [1, 2])],
    "aten.mean.dim": [*REDUCED, call(x(4, 8), None)],
    "aten.mean.default": [call(x(4, 8))],
    "aten.amax.default": REDUCED,
    "aten.amin.default": [call(x(4, 8), -1, True), call(x(4, 8))],
    "aten.max.dim": ONE_DIM,
    "aten.min.dim": ONE_DIM,
    "aten.max.default": [call(x(4, 8))],
    "aten.min.default": [call(x(4, 8))],
    "aten.argmax.default": [call(x(4, 8)), call(x(4, 8), -1), call(x(4, 8), 0, True)],
    "aten.argmin.default": [call(x(4, 8)), call(x(4, 8), -1)],
    "aten.any.dim": [call(bools(4, 8), -1), call(bools(4, 8), 0, True)],
    "aten.all.dim": [call(bools(4, 8), -1), call(bools(4, 8), 0, True)],
    "aten.var.correction": SPREAD,
    "aten.std.correction": SPREAD,
    "aten.var.dim": SPREAD,
    "aten.std.dim": [call(x(4, 8), [0], False), call(x(4, 8), [0], True, True)],
    "aten.logsumexp.default": [call(x(4, 8), [1]), call(x(2, 4, 8), [0, -1], True)],
    "aten.prod.dim_int": ONE_DIM,
    "aten.linalg_vector_norm.default": [call(x(4, 8)), call(x(4, 8), 2, [-1], True)],
    "aten.softmax.int": ALONG,
    "aten._softmax.default": [call(x(4, 8), -1, False)],
    "aten.log_softmax.int": ALONG,
    "aten.cumsum.default": [call(x(4, 8), 1), call(ints(9, 4, 8), 0)],
    "aten.diff.default": [
        call(x(4, 8)),
        call(x(8, 4), 1, 0),
        call(x(4, 8), 2, -1),
        call(x(4, 8), 1, -1, x(4, 1)),
        call(ints(9, 4, 8), 1, 1, ints(9, 4, 1), ints(9, 4, 2)),
        call(bools(4, 8)),
    ],
    "aten.mm.default": [call(x(4, 8), x(8, 4)), call(x(1, 8), fixed(8, 4))],
    "aten.bmm.default": [call(x(4, 2, 8), x(4, 8, 4))],
    "aten.linear.default": [
        call(x(4, 8), x(4, 8)),
        call(x(2, 4, 8), x(24, 8)),
        call(x(8), x(4, 8)),
        call(fixed(4, 8), x(4, 8)),
    ],
    "aten.matmul.default": MATMULS,
    "aten.einsum.default": [
        call("bik,bkj->bij", [x(4, 2, 8), x(4, 8, 4)]),
        call("b i, o i, o -> b o", [x(4, 8), x(4, 8), fixed(4)]),
        call("ab->ba", [x(4, 8)]),
        call("ab,b->", [x(4, 8), x(1)]),
    ],
    "aten.scaled_dot_product_attention.default": ATTENTIONS,
    "aten.layer_norm.default": [
        call(x(4, 8), [8], x(8), x(8)),
        call(x(4, 2, 8), [8], x(8)),
        call(x(4, 2, 4), [2, 4], x(2, 4), x(2, 4)),
        call(x(4, 8), [8]),
    ],
    "aten.rms_norm.default": [call(x(4, 8), [8], x(8), 1e-6), call(x(2, 4, 8), [8])],
    "aten.embedding.default": [
        call(x(8, 4), ints(8, 4, 2)),
        call(x(8, 4), ints(3, 8), 1),  # the padding row is hit
        call(x(8, 4), ints(3, 8) + 5, 6),
        call(x(8, 4), ints(8)),
        call(x(8, 4), ints(3, 8), -1, True),  # gradients scaled by frequency
        call(fixed(8, 4), ints(8, 4)),
    ],
    "aten.gather.default": [
        call(x(4, 8), 1, ints(8, 4, 4)),
        call(x(8, 4), 0, ints(8, 4, 2)),  # shorter than the source in both dims
        call(x(4, 2, 8), -1, ints(8, 4, 2, 1)),
        call(fixed(4, 8), 1, ints(8, 4, 8)),
        call(ints(9, 4, 8), 0, ints(4, 4, 8)),
        call(x(), 0, ints(1, 4)[0]),
    ],
    "aten.cross_entropy_loss.default": [
        call(x(4, 8), ints(8, 4), None, 2),
        call(x(8, 8), holes(ints(8, 8)), None, 2),
        call(x(8, 8), holes(ints(8, 8)), None, 2, -100, 0.1),
        call(x(8, 4), ints(4, 8), None, 2, 1, 0.2),
        call(x(4, 8), holes(ints(8, 4)), None, 0),
        call(x(4, 8, 2), holes(ints(8, 4, 2)), None, 2, -100, 0.1),
        call(x(4, 8, 2), ints(8, 4, 2), None, 0),
        call(x(8), ints(8).view(()), None, 2),
    ],
    "autopar.padded_embedding.default": [
        call(x(8, 4), ints(7, 4, 2), n_valid=7),
        call(x(8, 4), ints(3, 8) + 2, 3, n_valid=5),  # the last of 4 ranks has only padding
    ],
    "autopar.padded_cross_entropy.default": [
        call(x(8, 8), holes(ints(7, 8)), None, 2, n_valid=7),
        call(x(8, 8), holes(ints(5, 8)), None, 2, -100, 0.1, n_valid=5),
        call(x(4, 8, 2), holes(ints(7, 4, 2)), None, 0, n_valid=7),
    ],
    "aten.view.default": VIEWED,
    "aten.reshape.default": VIEWED,
    "aten._unsafe_view.default": [call(x(4, 8), [2, 2, 8])],
    "aten.flatten.using_ints": [call(x(2, 4, 8), 1), call(x(4, 2, 2, 4), 1, 2)],
    "aten.unflatten.int": [call(x(4, 24), 1, [3, 4, 2]), call(x(8, 4), -2, [2, -1])],
    "aten.unsqueeze.default": [call(x(4, 8), 1), call(x(4, 8), -1)],
    "aten.squeeze.default": [call(x(4, 1, 2, 8))],
    "aten.squeeze.dim": [call(x(4, 1, 8), 1), call(x(4, 2, 8), 1)],
    "aten.squeeze.dims": [call(x(4, 1, 8), [1]), call(x(4, 1, 2), [1, 2])],
    "aten.permute.default": [call(x(2, 4, 8), [2, 0, -2])],
    "aten.transpose.int": [call(x(2, 4, 8), 1, -1)],
    "aten.t.default": [call(x(4, 8)), call(x(8))],
    "aten.numpy_T.default": [call(x(4, 8))],
    "aten.mT.default": [call(x(2, 4, 8))],
    "aten.expand.default": [call(x(4, 1), [2, 4, 8]), call(x(8), [4, -1]), call(fixed(1), [8])],
    "aten.split.Tensor": SPLIT,
    "aten.split_with_sizes.default": [
        call(x(4, 24), [8, 8, 8], 1),
        call(x(4, 16), [8, 4, 4], 1),  # grouped queries: q is twice as wide as k and v
        call(x(8, 4), [4, 4]),
    ],
    "aten.chunk.default": [call(x(4, 24), 3, -1), call(x(4, 10), 4, 1), call(x(8, 4), 2)],
    "aten.unbind.int": [call(x(3, 4, 8)), call(x(4, 3, 8), 1)],
    "aten.select.int": [call(x(4, 3, 8), 1, 2), call(x(4, 8), 0, -1)],
    "aten.slice.Tensor": [
        call(x(4, 24), 1, 8, 16),  # aligned: k of q, k, v
        call(x(4, 8), -1, 4, None),
        call(x(8, 4), 0, 1, 5),  # not aligned
        call(x(8, 4), 0, 0, 8, 2),
        call(x(8, 4), 0, 0, -1),
        call(x(8, 4), 0, -4, 9223372036854775807),
        call(x(8, 4), 0, 3, 4),
        call(x(8, 4), 0, 3, 3),
    ],
    "aten.slice_scatter.default": [
        call(x(4, 8), x(4, 7), 1, 1, 8),
        call(x(4, 8), x(4, 4), -1, 4, 9223372036854775807),
        call(x(8, 4), x(4, 4), 0, 0, 8, 2),
        call(x(8, 4), x(1, 4), 0, 3, 4),
    ],
    "aten.select_scatter.default": [call(x(4, 3, 8), x(4, 8), 1, 2), call(x(4, 8), x(8), 0, -1)],
    "aten.cat.default": [
        call([x(4, 4), x(4, 4)], -1),  # rotary halves
        call([x(4, 8), x(2, 8)]),
        call([x(4, 8), fixed(4, 8), x(4, 8)], 1),
        call([x(4, 8)], 1),
        call([ints(9, 4, 1), ints(9, 4, 8)], 1),
    ],
    "aten.stack.default": [call([x(4, 8), x(4, 8)], 1), call([x(4, 8)], -1)],
    "aten.pad.default": [
        call(x(4, 8), [1, 1]),
        call(x(4, 8), [1, -1]),
        call(x(4, 8), [0, 0, 2, 2]),
        call(x(2, 4, 5), [2, 1], "reflect"),
        call(x(2, 4, 5, 3), [1, 2, 0, 0], "replicate"),
        call(x(2, 4, 4), [1, 2], "circular"),
    ],
    "aten.constant_pad_nd.default": [call(x(4, 8), [0, 2], 1.5), call(x(4, 8), [-1, 1])],
    "aten.zeros.default": [call([4, 8]), call([])],
    "aten.ones.default": [call([4, 8])],
    "aten.full.default": [call([4, 8], 2.5)],
    "aten.new_zeros.default": FILLED,
    "aten.new_ones.default": FILLED,
    "aten.new_full.default": [call(x(4, 8), [4, 8], 2.5), call(x(3), [4, 1], 2)],
}
