"""Calls of operators that look up, write, sort and move by place, and of losses and transforms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.helpers.samples.rule_samples import (
    REDUCED,
    SPREAD,
    Sample,
    bools,
    call,
    fixed,
    holes,
    ints,
    positive,
    x,
)

NONE_AND_SUM = (0, 2)  # capture rewrites means
_random = torch.Generator().manual_seed(1)


def distinct(high: int, *shape: int) -> Tensor:
    """Every index at most once along dim 0: what is written twice is undefined."""
    n_columns = math.prod(shape[1:])
    columns = [torch.randperm(high, generator=_random)[: shape[0]] for _ in range(n_columns)]
    return torch.stack(columns, -1).view(shape)


def complexes(*shape: int) -> Tensor:
    return torch.complex(fixed(*shape), fixed(*shape)).requires_grad_()


INDEXED = [
    call(x(8, 4), [ints(8, 4, 2)]),
    call(x(4, 8), [None, ints(8, 4)]),
    call(x(4, 6, 8), [ints(4, 8), ints(6, 8)]),  # a token of every row
    call(x(4, 6, 8), [ints(4, 4, 1), ints(6, 1, 8)]),
    call(x(4, 6, 8), [None, ints(6, 2, 4), ints(8, 4)]),
    call(x(4, 6, 8), [ints(4, 4), None, ints(8, 4)]),  # apart: the block comes first
    call(x(4, 8), [ints(4, 1)[0]]),
    call(fixed(8, 4), [ints(8, 4)]),
    call(ints(9, 8, 4), [ints(8, 4)]),
]
WRITTEN = [
    call(x(8, 4), [distinct(8, 4)], x(4, 4)),
    call(x(8, 4), [ints(8, 4)], x(4, 4), True),
    call(x(8, 4), [distinct(8, 4)], x(4)),
    call(x(4, 8, 4), [None, distinct(8, 2)], x()),
    call(x(4, 8), [bools(4, 8)], x()),
    call(x(8), [distinct(8, 8)], fixed(8)),
    call(ints(9, 8), [distinct(8, 8)], ints(9, 8)),
]
SCATTERED = [
    call(x(4, 8), 1, distinct(8, 8, 4).T, x(4, 8)),
    call(x(8, 4), 0, distinct(8, 3, 4), x(3, 4)),
    call(x(8, 4), 0, distinct(8, 2, 2), x(2, 2)),  # shorter than the target in both dims
    call(x(8, 4), 0, distinct(8, 2, 2), fixed(4, 4)),
    call(x(4, 2, 8), -1, distinct(8, 1, 8).view(4, 2, 1), x(4, 2, 1)),
    call(fixed(4, 8), 1, distinct(8, 8, 4).T, x(4, 8)),
]
ADDED = [call(x(4, 8), 0, ints(4, 6, 8), x(6, 8)), call(x(4, 8), 1, ints(8, 4, 2), fixed(4, 4))]
ROWS = [call(x(8, 4), 0, distinct(8, 4), x(4, 4)), call(x(4, 6, 8), 1, distinct(6, 2), x(4, 2, 8))]
SORTED = [call(x(4, 8)), call(x(8, 4), 0, True), call(x())]
FOURIER = [call(complexes(4, 8), [1], 0, True), call(complexes(4, 2, 8), [0, 2], 1, False)]
MATRICES = [call(x(4, 3, 3)), call(x(3, 3)), call(x(2, 4, 2, 2))]
SYMMETRIC = [call(m @ m.mT + torch.eye(3)) for m in (fixed(4, 3, 3), fixed(3, 3))]
ALL_DIMS = [call(x(4, 8))]
ROLLED = [call(x(4, 8), [1], [0]), call(x(4, 2, 8), [1, 2], [0, -1]), call(x(4, 8), [3])]


def losses(*inputs: Tensor, **kwargs: object) -> list[Sample]:
    return [call(*inputs, reduction=reduction, **kwargs) for reduction in NONE_AND_SUM]


CHANCES = (positive(4, 8).detach() / 2).requires_grad_()
PAIR = (x(4, 8), fixed(4, 8))
SPOKEN = x(8, 4, 3).detach().log_softmax(-1).requires_grad_()
LENGTHS = (torch.tensor([8, 6, 7, 8]), torch.tensor([3, 2, 3, 1]))
LIKELIHOODS = [
    call(x(4, 8), holes(ints(8, 4)), None, 2),
    call(x(4, 8), ints(8, 4), fixed(8), 2, 1),
    call(x(4, 8), holes(ints(8, 4)), fixed(8), 0),
    call(x(8), ints(8, 1)[0], None, 2),
]
BEFORE = fixed(4, 3)
BAGS = (torch.tensor([0, 2, 2, 5]), torch.tensor([2, 2, 5, 6]))  # the second is empty

PLACE_SAMPLES: dict[str, list[Sample]] = {
    "aten.index.Tensor": INDEXED,
    "aten.index_put.default": WRITTEN,
    "aten.scatter.src": SCATTERED,
    "aten.scatter.value": [
        call(x(4, 8), 1, ints(8, 4, 2), 0),
        call(x(4, 8), 0, ints(4, 2, 8), 1.5),
        call(bools(4, 8), 1, ints(8, 4, 2), True),
    ],
    "aten.scatter_add.default": ADDED,
    "aten.scatter_reduce.two": [
        call(x(4, 8), 1, ints(8, 4, 6), x(4, 6), "sum"),
        call(x(4, 8), 0, ints(4, 6, 8), x(6, 8), "mean", include_self=False),
        call(x(4, 8), 1, ints(8, 4, 6), x(4, 6), "amax"),
    ],
    "aten.index_add.default": [*ROWS, call(x(4, 8), 1, ints(8, 6), x(4, 6), alpha=2)],
    "aten.index_copy.default": ROWS,
    "aten.index_fill.int_Scalar": [
        call(x(8, 4), 0, ints(8, 2), 0),
        call(x(8, 4), 1, ints(4, 2), 1.5),
    ],
    "aten.index_fill.int_Tensor": [call(x(8, 4), 0, ints(8, 2), x())],
    "aten._embedding_bag.default": [
        call(x(8, 4), ints(8, 6), torch.tensor([0, 2, 3, 5])),
        call(x(8, 4), ints(8, 6), torch.tensor([0, 2]), False, 0, False, x(6)),
        call(x(8, 4), ints(8, 6), torch.tensor([0, 2]), False, 2),
    ],
    "autopar.embedding_bag.default": [
        call(x(8, 4), ints(8, 4, 2)),
        call(x(8, 4), ints(8, 8, 4), None, None, None, 3),
        call(x(8, 4), ints(8, 4, 2), None, None, x(4, 2)),
        call(x(8, 4), ints(8, 4, 2), None, None, fixed(4, 2), 0),
        call(x(8, 4), ints(8, 6), *BAGS),
        call(x(8, 4), ints(8, 6), *BAGS, x(6), 5),
    ],
    "autopar.embedding_bag_max.default": [
        call(x(8, 4), ints(8, 4, 2)),
        call(x(8, 4), ints(8, 8, 4), None, None, 3),
        call(x(8, 4), ints(8, 6), *BAGS),
    ],
    "aten.masked_scatter.default": [call(x(4, 8), bools(4, 1), x(32))],
    "aten.sort.default": SORTED,
    "aten.sort.stable": [call(x(4, 8), stable=True), call(ints(3, 4, 8), stable=True, dim=0)],
    "aten.topk.default": [call(x(4, 8), 2), call(x(8, 4), 3, 0), call(x(4, 8), 8, -1, False)],
    "aten.kthvalue.default": [call(x(4, 8), 3), call(x(4, 8), 2, 0, True)],
    "aten.median.dim": [call(x(4, 7), 1), call(x(3, 8), 0, True)],
    "aten.median.default": [call(x(3, 5))],
    "aten.nanmedian.dim": [call(x(4, 7), 1)],
    "aten.nanmedian.default": [call(x(3, 5))],
    "aten.renorm.default": [call(x(4, 8), 2, 0, 1.0), call(x(4, 2, 8), 1, 2, 1.0)],
    "aten.mode.default": [call(x(4, 7), 1)],
    "aten.cummax.default": [call(x(4, 8), 1)],
    "aten.cummin.default": [call(x(4, 8), 0)],
    "aten.cumprod.default": [call(x(4, 8), 1)],
    "aten.logcumsumexp.default": [call(x(4, 8), 1)],
    "aten._log_softmax.default": [call(x(4, 8), -1, False)],
    "aten._safe_softmax.default": [call(x(4, 8), -1), call(x(8, 4), 0)],
    "aten.flip.default": [call(x(4, 2, 8), [1]), call(x(4, 8), [0, 1])],
    "aten.roll.default": ROLLED,
    "aten.diagonal.default": [call(x(4, 8)), call(x(4, 2, 8), 1, 2, 0), call(x(4, 2), 1)],
    "aten.diag_embed.default": [call(x(4, 8)), call(x(4, 8), 1, 0, -1), call(x(4, 1))],
    "aten.unfold.default": [call(x(4, 8), 1, 4, 2), call(x(8, 4), 0, 2, 2), call(x(), 0, 1, 1)],
    "aten.unfold_backward.default": [
        call(x(4, 3, 4), [4, 8], 1, 4, 2),
        call(x(4, 4, 2), [8, 4], 0, 2, 2),
    ],
    "aten.tril.default": [*MATRICES, call(x(4, 3, 3), -1)],
    "aten.triu.default": [*MATRICES, call(bools(4, 3, 3), 1)],
    "aten.linalg_inv_ex.default": MATRICES,
    "aten.linalg_cholesky_ex.default": SYMMETRIC,
    "aten.linalg_qr.default": MATRICES[:2],
    "aten.linalg_matrix_exp.default": MATRICES[:2],
    "aten._linalg_det.default": MATRICES[:2],
    "aten._linalg_slogdet.default": MATRICES[:2],
    "aten._linalg_eigh.default": SYMMETRIC,
    "aten._linalg_svd.default": MATRICES[:2],
    "aten.linalg_lu.default": MATRICES[:2],
    "aten.linalg_householder_product.default": [call(x(4, 3, 2), x(4, 2))],
    "aten.linalg_pinv.atol_rtol_tensor": MATRICES[:2],
    "aten.cholesky_solve.default": [
        call(x(4, 3, 2), fixed(4, 3, 3).tril() + 3 * torch.eye(3)),
        call(x(4, 4, 2), fixed(4, 4).tril() + 3 * torch.eye(4)),
    ],
    "aten.linalg_solve_triangular.default": [
        call(fixed(4, 3, 3).tril() + 3 * torch.eye(3), x(4, 3, 2), upper=False),
        call(fixed(4, 4, 4).triu() + 3 * torch.eye(4), x(4, 4), upper=True),
        call(fixed(4, 4).tril() + 3 * torch.eye(4), x(4, 2, 4), upper=False, left=False),
    ],
    "aten._linalg_solve_ex.default": [
        call(x(4, 3, 3), x(4, 3, 2)),
        call(x(4, 3, 3), x(4, 3)),
        call(x(3, 3), x(3, 2)),
    ],
    "aten._fft_c2c.default": FOURIER,
    "aten._fft_r2c.default": [call(x(4, 8), [1], 0, True), call(x(4, 8), [0], 0, False)],
    "aten._fft_c2r.default": [call(complexes(4, 5), [1], 2, 8)],
    "aten._conj_physical.default": [call(complexes(4, 8))],
    "aten.view_as_real.default": [call(complexes(4, 8)), call(complexes())],
    "aten.view_as_complex.default": [call(x(4, 8, 2))],
    "aten.polar.default": [call(x(4, 8), x(4, 8))],
    "aten.complex.default": [call(x(4, 8), x(4, 1))],
    "aten.cosine_similarity.default": [
        call(x(4, 8), x(4, 8), -1),
        call(x(4, 1, 8), x(2, 8), 2),
        call(x(8, 4), x(8, 4), 0),
    ],
    "aten.linalg_cross.default": [call(x(4, 3), x(4, 3)), call(x(3, 8), x(3, 1), dim=0)],
    "aten._cdist_forward.default": [call(x(2, 4, 3), x(2, 8, 3), 1.0, None)],
    "aten._euclidean_dist.default": [call(x(2, 4, 3), x(2, 8, 3)), call(x(4, 3), x(8, 3))],
    "aten.dist.default": [call(x(4, 8), x(8))],
    "aten.bincount.default": [call(ints(4, 8), None, 4)],
    "aten.repeat_interleave.Tensor": [call(ints(3, 8), output_size=None)],
    "aten.bucketize.Tensor": [call(fixed(4, 8), fixed(4).sort()[0])],
    "aten.segment_reduce.default": [
        call(x(4, 8), "sum", lengths=torch.tensor([1, 3])),
        call(x(4, 6, 2), "max", lengths=torch.tensor([[2, 4]] * 4), axis=1),
    ],
    "aten.searchsorted.Tensor": [
        call(fixed(4).sort()[0], fixed(4, 8)),
        call(fixed(4, 2, 3).sort()[0], fixed(4, 2, 8), right=True),
        call(BEFORE, fixed(4, 8), sorter=BEFORE.argsort()),
        call(fixed(4).sort()[0], fixed()),
    ],
    "aten.isin.Tensor_Tensor": [call(ints(9, 4, 8), ints(9, 3))],
    "aten.aminmax.default": [call(x(4, 8), dim=1), call(x(4, 8))],
    "aten.nansum.default": REDUCED,
    "aten.any.default": [call(bools(4, 8))],
    "aten.all.default": [call(bools(4, 8))],
    "aten.any.dims": [call(bools(4, 8), [0, 1]), call(bools(4, 2, 8), [1], True)],
    "aten.all.dims": [call(bools(4, 8), None)],
    "aten.count_nonzero.dim_IntList": [call(ints(2, 4, 8), [1])],
    "aten.histc.default": [call(fixed(8, 4), 4, 0, 1), call(fixed(8), 4)],
    "aten.count_nonzero.default": [call(ints(2, 4, 8), 1), call(ints(2, 4, 8))],
    "aten.prod.default": ALL_DIMS,
    "aten.trace.default": ALL_DIMS,
    "aten.var_mean.correction": SPREAD,
    "aten.std_mean.correction": SPREAD,
    "aten.norm.Scalar": ALL_DIMS,
    "aten.norm.ScalarOpt_dim": [call(x(4, 8), 2, [1]), call(x(4, 8), 1, [0], True)],
    "aten.smooth_l1_loss.default": losses(*PAIR),
    "aten.huber_loss.default": losses(*PAIR, delta=0.5),
    "aten.soft_margin_loss.default": losses(*PAIR),
    "aten.kl_div.default": losses(x(4, 8), positive(4, 8)),
    "aten.binary_cross_entropy.default": [
        *losses(CHANCES, bools(4, 8).double()),
        call(CHANCES, bools(4, 8).double(), fixed(8), 2),
    ],
    "aten.binary_cross_entropy_with_logits.default": [
        *losses(x(4, 8), bools(4, 8).double()),
        call(x(4, 8), fixed(4, 8), None, fixed(8), 2),
        call(x(4, 8), fixed(4, 8), fixed(4, 1), fixed(8), 0),
    ],
    "autopar.ctc_loss.default": [
        call(SPOKEN, ints(2, 4, 3) + 1, *LENGTHS),
        call(SPOKEN, ints(2, 9) + 1, *LENGTHS, LENGTHS[1].cumsum(0) - LENGTHS[1]),
        call(SPOKEN, ints(2, 4, 3), *LENGTHS, None, 2, True),
    ],
    "aten.multi_margin_loss.default": [
        *losses(x(4, 8), ints(8, 4)),
        *losses(x(8), ints(8)),
        *losses(x(), ints(1)),
        call(x(4, 8), ints(8, 4), 2, 0.5, fixed(8), 2),
    ],
    "aten.multilabel_margin_loss_forward.default": [
        *losses(x(4, 8), ints(8, 4, 8)),
        *losses(x(8), ints(8, 8)),
        *losses(x(), ints(1)),
    ],
    "aten.nll_loss.default": LIKELIHOODS,
    "aten.nll_loss_nd.default": [*LIKELIHOODS, call(x(4, 8, 2), ints(8, 4, 2), fixed(8), 2)],
    "aten.mv.default": [call(x(4, 8), x(8))],
    "aten.dot.default": [call(x(8), x(8))],
    "aten.vdot.default": [call(x(8), x(8))],
    "aten.rsub.Tensor": [call(x(4, 8), x(8), alpha=2)],
    "aten._prelu_kernel.default": [call(x(4, 8), x(1, 8)), call(x(4, 8), x(1, 1))],
    "aten.fill.Scalar": [call(x(4, 8), 2.0)],
    "aten.zero.default": [call(x(4, 8))],
}
