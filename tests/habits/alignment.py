"""Habits of alignment: losses on pairs, references, advantages, masks of completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar import CaptureError
from tests.habits.table import BOTH, LENGTH, VOCABULARY, Batch, Small
from tests.habits.tasks import trains

SECTION = "Alignment"
ROWS = 8


class Policy(Small):
    """Returns logits."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.body(ids)


def batch_of(seed: int) -> Batch:
    """Completions of several lengths, with what a rollout gives beside them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 2), generator=g)
    lengths = torch.randint(2, LENGTH + 2, (ROWS, 1), generator=g)
    mask = (torch.arange(LENGTH + 2) < lengths).long()
    shape = ROWS, LENGTH + 1
    return {
        "ids": ids,
        "mask": mask,
        "advantages": torch.randn(ROWS, generator=g, dtype=torch.float64),
        "old_logps": -3 + 0.1 * torch.randn(shape, generator=g, dtype=torch.float64),
        "ref_logps": -3 + 0.1 * torch.randn(shape, generator=g, dtype=torch.float64),
        "values": torch.randn(shape, generator=g, dtype=torch.float64),
    }


def few(*names: str) -> Any:
    return lambda seed: {n: v for n, v in batch_of(seed).items() if n in ("ids", "mask", *names)}


of_policy = partial(trains, SECTION, kind=Policy, batches=batch_of)


def logps_of(logits: Tensor, ids: Tensor) -> Tensor:
    """trl's `selective_log_softmax`."""
    logits, index = logits[:, :-1], ids[:, 1:]
    picked = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)


def logps_by_row(logits: Tensor, ids: Tensor) -> Tensor:
    """The same with a loop over rows, which keeps memory low."""
    logits, index = logits[:, :-1], ids[:, 1:]
    picked = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


@of_policy("labels of completions alone: `-100` elsewhere")
def sft(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@of_policy("GRPO: clipped ratios of given log-probabilities, a KL term, means by row")
def grpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    ratio = torch.exp(logps - batch["old_logps"])
    advantages = batch["advantages"].unsqueeze(1)
    clipped = torch.clamp(ratio, 0.8, 1.2) * advantages
    per_token = -torch.min(ratio * advantages, clipped)
    delta = batch["ref_logps"] - logps
    per_token = per_token + 0.04 * (torch.exp(delta) - delta - 1)
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


@of_policy("the mean over tokens, `torch.stack([logsumexp(row) for row in logits])`")
def bnpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_by_row(logits, batch["ids"]), batch["mask"][:, 1:]
    ratio = torch.exp(logps - logps.detach())
    per_token = -ratio * batch["advantages"].unsqueeze(1)
    return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


@of_policy("a sum over tokens divided by `per_token.size(0) * length`, with microbatches",
           microbatches=2)  # fmt: skip
def dr_grpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    per_token = -torch.exp(logps - batch["old_logps"]) * batch["advantages"].unsqueeze(1)
    return (per_token * mask).sum() / (per_token.size(0) * 16)


@of_policy("GSPO: ratios of whole sequences")
def sequence_level(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    ratio = logps - batch["old_logps"]
    weights = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1).exp()
    return -(weights * batch["advantages"].unsqueeze(1) * mask).sum(-1).mean()


@of_policy("advantages normalised by group: `rewards.view(-1, G).std(1)`", layouts=BOTH)
def rloo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Advantages of groups of two, normalised in the loss."""
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    grouped = batch["advantages"].view(-1, 2)
    mean = grouped.mean(dim=1).repeat_interleave(2, dim=0)
    std = grouped.std(dim=1).repeat_interleave(2, dim=0)
    advantages = (batch["advantages"] - mean) / (std + 1e-4)
    return -((logps * mask).sum(1) * advantages).mean()


@of_policy("PPO: advantages whitened over all tokens of the batch")
def whitened(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """PPO: advantages of unit variance over all tokens of the batch."""
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    rewards = batch["advantages"].unsqueeze(1) - 0.1 * (batch["old_logps"] - batch["ref_logps"])
    mean = (rewards * mask).sum() / mask.sum()
    centered = rewards - mean
    variance = (centered**2 * mask).sum() / mask.sum()
    variance = variance * mask.sum() / (mask.sum() - 1)
    advantages = (centered * torch.rsqrt(variance + 1e-8)).detach()
    ratio = torch.exp(logps - batch["old_logps"])
    loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))
    return (loss * mask).sum() / mask.sum()


def entropies(logits: Tensor) -> Tensor:
    """trl's `entropy_from_logits`, in chunks of rows."""
    flat = logits.reshape(-1, logits.shape[-1])
    found = []
    for chunk in flat.split(8, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(found, dim=0).reshape(logits.shape[:-1])


@of_policy("an entropy bonus, in chunks: `logits.split(n)`, `torch.cat`")
def with_entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch["mask"][:, 1:]
    bonus = (entropies(logits[:, :-1]) * mask).sum() / mask.sum()
    return bnpo(logits, batch) - 0.01 * bonus


@of_policy("a mask up to the first end: `eos_idx[is_eos.any(1)] = ...`",
           "`torch.where`", refused=(CaptureError, "torch.where"), layouts=BOTH)  # fmt: skip
def up_to_eos(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """GRPO's mask: everything after the first end of sequence."""
    ids = batch["ids"][:, 1:]
    is_eos = ids % 5 == 0
    eos_idx = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long)
    eos_idx[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
    indices = torch.arange(is_eos.size(1)).expand(is_eos.size(0), -1)
    mask = (indices <= eos_idx.unsqueeze(1)).int()
    return -(logps_of(logits, batch["ids"]) * mask).sum() / mask.sum()


@of_policy("the same with `torch.where(is_eos.any(1), is_eos.int().argmax(1), n)`")
def up_to_eos_where(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    ids = batch["ids"][:, 1:]
    is_eos = ids % 5 == 0
    eos_idx = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1), is_eos.size(1))
    indices = torch.arange(is_eos.size(1)).expand(is_eos.size(0), -1)
    mask = (indices <= eos_idx.unsqueeze(1)).int()
    return -(logps_of(logits, batch["ids"]) * mask).sum() / mask.sum()


@of_policy("tokens of high entropy: `torch.quantile(entropy[mask], 0.8)`",
           "masks of fixed shape", refused=(CaptureError, "torch.where"), layouts=BOTH)  # fmt: skip
def top_entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Tokens of the highest entropy only: a quantile of a selection."""
    mask, found = batch["mask"][:, 1:], entropies(logits[:, :-1]).detach()
    threshold = torch.quantile(found[mask.bool()], 0.8)
    mask = mask * (found >= threshold)
    return -(logps_of(logits, batch["ids"]) * mask).sum() / mask.sum().clamp(min=1)


def pair_logps(logits: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    logps = (logps_of(logits, batch["ids"]) * batch["mask"][:, 1:]).sum(1)
    chosen, rejected = logps.chunk(2, dim=0)
    return chosen, rejected


@of_policy("DPO: `logps.chunk(2)` of chosen and rejected rows, the reference in the batch")
def dpo_given(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The logps of the reference are part of the batch."""
    chosen, rejected = pair_logps(logits, batch)
    ref = (batch["ref_logps"] * batch["mask"][:, 1:]).sum(1)
    delta = (chosen - rejected) - (ref[: ROWS // 2] - ref[ROWS // 2 :])
    return (-F.logsigmoid(0.1 * delta) * 0.9 - F.logsigmoid(-0.1 * delta) * 0.1).mean()


@of_policy("ORPO: odds of means by length, beside a cross-entropy of half of the rows")
def orpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    mean = (logps * mask).sum(1) / mask.sum(1)
    chosen, rejected = mean.chunk(2)
    odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    nll = F.cross_entropy(
        logits[: ROWS // 2, :-1].transpose(1, 2),
        batch["ids"][: ROWS // 2, 1:].masked_fill(mask[: ROWS // 2] == 0, -100),
    )
    return nll - 0.1 * F.logsigmoid(odds).mean()


@of_policy("AOT: `torch.sort(logratios, dim=0)` over the rows of the batch")
def aot(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pair_logps(logits, batch)
    ref = (batch["ref_logps"] * batch["mask"][:, 1:]).sum(1)
    one, _ = torch.sort(chosen - rejected, dim=0)
    other, _ = torch.sort(ref[: ROWS // 2] - ref[ROWS // 2 :], dim=0)
    return -F.logsigmoid(0.1 * (one - other)).mean()


@of_policy("KTO: a baseline `ratio.mean().detach().clamp(min=0)`, `torch.where` by label")
def kto(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """A baseline over the batch, without gradient; desirable rows by sign."""
    mask = batch["mask"][:, 1:]
    ratio = ((logps_of(logits, batch["ids"]) - batch["ref_logps"]) * mask).sum(1)
    kl = ratio.mean().detach().clamp(min=0)
    good = batch["advantages"] > 0
    losses = torch.where(good, 1 - torch.sigmoid(ratio - kl), 1 - torch.sigmoid(kl - ratio))
    return losses.nanmean()


@of_policy("KTO with `ratio[good]`, `ratio[~good]`", "`torch.where`",
           refused=(CaptureError, "torch.where"), layouts=BOTH)  # fmt: skip
def kto_selected(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch["mask"][:, 1:]
    ratio = ((logps_of(logits, batch["ids"]) - batch["ref_logps"]) * mask).sum(1)
    good = batch["advantages"] > 0
    losses = torch.cat((1 - torch.sigmoid(ratio[good]), torch.sigmoid(ratio[~good])))
    return losses.mean()
