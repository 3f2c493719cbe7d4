"""Terms of losses, and what a model returns."""

from __future__ import annotations

_WEIGHTS = "torch.arange(1.0, 5.0).double()"
_BUT_0 = "% ($v.shape[-1] - 1) + 1"  # labels of the classes of $v that are not the first
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
    f"F.multi_margin_loss($v.flatten(0, 1), labels.flatten() % 4, weight={_WEIGHTS})",
    "F.gaussian_nll_loss($v, torch.zeros_like($v), $v.exp(), full=True)",
    "F.gaussian_nll_loss($v.detach(), $v, $v[..., :1].exp(), reduction='none').mean()",
    f"F.cross_entropy($v.flatten(0, 1), labels.flatten() % 4, {_WEIGHTS})",
    f"F.cross_entropy($v.flatten(0, 1), $v.detach().softmax(-1).flatten(0, 1), {_WEIGHTS}, "
    "label_smoothing=0.1)",
    "F.cross_entropy($v.flatten(0, 1), torch.where(mask, labels % 4, -100).flatten(), "
    f"{_WEIGHTS}, label_smoothing=0.2)",
    f"F.nll_loss($v.log_softmax(-1).mT, torch.where(mask, labels % 4, -100), {_WEIGHTS})",
    "F.nll_loss($v.log_softmax(-1).mT, labels % 4, reduction='sum')",
    f"F.binary_cross_entropy_with_logits($v, $v.detach().sigmoid(), pos_weight={_WEIGHTS})",
    f"F.binary_cross_entropy($v.sigmoid(), $v.detach().sigmoid(), {_WEIGHTS})",
    *(f"F.ctc_loss($v.log_softmax(-1).transpose(0, 1), {targets}, {rest}, "
      "zero_infinity=True).sum()"
      for targets, rest in (
        (f"labels[:, :2] {_BUT_0}", "torch.full((8,), 4), torch.full((8,), 2)"),
        (f"labels {_BUT_0}", "torch.full((8,), 4), labels[:, 0] % 3, 0, 'sum'"),
        ("labels[:, :2] % 3", "[4] * 8, [2, 1] * 4, 3, 'none'"),
        (f"(labels[:, :2] {_BUT_0}).flatten()", "[4] * 8, [2] * 8"),
        (f"(labels {_BUT_0}).masked_select(mask)", "torch.full((8,), 4), mask.sum(-1)"),
      )),
)  # fmt: skip
RETURNS = (
    "", "", "", "$loss, $v", '{"loss": $loss, "logits": $v}',
)  # fmt: skip
