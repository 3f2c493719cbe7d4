"""Terms of losses, and what a model returns."""

from __future__ import annotations

LOSSES = (
    "$v.square().mean()", "$v.sin().sum()", "$v.mean()",
    "F.smooth_l1_loss($v, torch.ones_like($v))", "F.mse_loss($v, torch.zeros_like($v))",
    "F.huber_loss($v, torch.zeros_like($v), delta=0.5)", "F.l1_loss($v, torch.full_like($v, 0.3))",
    "$v.abs().mean()", "F.binary_cross_entropy_with_logits($v, ($v.detach() > 0).double())",
    "F.binary_cross_entropy($v.sigmoid(), ($v.detach() > 0.3).double())",
    "F.soft_margin_loss($v, $v.detach().sign())",
    "F.kl_div($v.log_softmax(-1), $v.detach().flip(-1).softmax(-1), reduction='batchmean')",
    "F.kl_div($v.log_softmax(-1), torch.softmax($v.detach() * 2, -1), reduction='sum')",
    "F.poisson_nll_loss($v, torch.ones_like($v))",
    "F.mse_loss($v, $v.detach().tanh(), reduction='sum')", "$v.logsumexp(-1).mean()", "$v.norm()",
    "F.huber_loss($v, $v.detach() * 0.5, reduction='sum')",
    "F.smooth_l1_loss($v, $v.detach() + 0.3, reduction='sum')",
    *("F.cross_entropy($v[..., :8].flatten(0, 1), labels.flatten() % 4)",) * 3,
    "F.cross_entropy($v.flatten(0, 1), labels.flatten() % 4, reduction='sum')",
    "F.cross_entropy($v.flatten(0, 1), labels.flatten().masked_fill(labels.flatten() > 2, -100))",
    "F.cross_entropy($v.mT, labels % 4)",
    "F.cross_entropy($v.flatten(0, 1), labels.flatten() % 4, label_smoothing=0.1)",
    "F.nll_loss($v.log_softmax(-1).flatten(0, 1), labels.flatten() % 4)",
    "F.nll_loss($v.log_softmax(-1).mT, labels % 4)",
    "F.cross_entropy($v.flatten(0, 1), $v.detach().softmax(-1).flatten(0, 1))",
    "(F.cross_entropy($v.flatten(0, 1), labels.flatten() % 4, reduction='none') * "
    "mask.flatten()).sum() / 8",
    "(($v * mask[..., None]).square().sum() / mask.sum())",
    "F.cosine_embedding_loss($v.flatten(1), $v.flatten(1).flip(1), "
    "torch.ones_like($v.flatten(1)[:, 0]))",
    "F.margin_ranking_loss($v, $v.flip(-1), $v.detach().sign())",
    "F.triplet_margin_loss($v.flatten(1), $v.flatten(1).flip(1), $v.flatten(1).roll(1, 1))",
    "F.hinge_embedding_loss($v, $v.detach().sign())",
    "F.multi_margin_loss($v.flatten(0, 1), labels.flatten() % 4)",
    "F.multi_margin_loss($v.flatten(0, 1), labels.flatten() % 4, reduction='sum')",
    "F.multilabel_margin_loss($v.flatten(0, 1), $v.flatten(0, 1).detach().argsort(-1))",
    "F.ctc_loss($v.log_softmax(-1).transpose(0, 1), labels[:, :2] % ($v.shape[-1] - 1) + 1, "
    "torch.full(($v.shape[0],), $v.shape[1]), torch.full(($v.shape[0],), 2), zero_infinity=True)",
)  # fmt: skip
RETURNS = (
    "", "", "", "$loss, $v", '{"loss": $loss, "logits": $v}',
)  # fmt: skip
