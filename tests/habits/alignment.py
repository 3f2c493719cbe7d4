"""Habits of alignment: losses on pairs, references, advantages, masks of completions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import CaptureError, NotSupportedError
from tests.habits.adapters import captured_again
from tests.habits.table import ALL, BOTH, LENGTH, VOCABULARY, WIDTH, Batch, Run, Small, habit, make
from tests.habits.tasks import backward, parallelize, train

SECTION = "Alignment"
ROWS = 8


class Policy(Small):
    """Returns logits."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
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


def sft(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def grpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    ratio = torch.exp(logps - batch["old_logps"])
    advantages = batch["advantages"].unsqueeze(1)
    clipped = torch.clamp(ratio, 0.8, 1.2) * advantages
    per_token = -torch.min(ratio * advantages, clipped)
    delta = batch["ref_logps"] - logps
    per_token = per_token + 0.04 * (torch.exp(delta) - delta - 1)
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def bnpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_by_row(logits, batch["ids"]), batch["mask"][:, 1:]
    ratio = torch.exp(logps - logps.detach())
    per_token = -ratio * batch["advantages"].unsqueeze(1)
    return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


def dr_grpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    per_token = -torch.exp(logps - batch["old_logps"]) * batch["advantages"].unsqueeze(1)
    return (per_token * mask).sum() / (per_token.size(0) * 16)


def sequence_level(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    ratio = logps - batch["old_logps"]
    weights = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1).exp()
    return -(weights * batch["advantages"].unsqueeze(1) * mask).sum(-1).mean()


def rloo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Advantages of groups of two, normalised in the loss."""
    logps, mask = logps_of(logits, batch["ids"]), batch["mask"][:, 1:]
    grouped = batch["advantages"].view(-1, 2)
    mean = grouped.mean(dim=1).repeat_interleave(2, dim=0)
    std = grouped.std(dim=1).repeat_interleave(2, dim=0)
    advantages = (batch["advantages"] - mean) / (std + 1e-4)
    return -((logps * mask).sum(1) * advantages).mean()


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


def with_entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch["mask"][:, 1:]
    bonus = (entropies(logits[:, :-1]) * mask).sum() / mask.sum()
    return bnpo(logits, batch) - 0.01 * bonus


def up_to_eos(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """GRPO's mask: everything after the first end of sequence."""
    ids = batch["ids"][:, 1:]
    is_eos = ids % 5 == 0
    eos_idx = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long)
    eos_idx[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
    indices = torch.arange(is_eos.size(1)).expand(is_eos.size(0), -1)
    mask = (indices <= eos_idx.unsqueeze(1)).int()
    return -(logps_of(logits, batch["ids"]) * mask).sum() / mask.sum()


def up_to_eos_where(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    ids = batch["ids"][:, 1:]
    is_eos = ids % 5 == 0
    eos_idx = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1), is_eos.size(1))
    indices = torch.arange(is_eos.size(1)).expand(is_eos.size(0), -1)
    mask = (indices <= eos_idx.unsqueeze(1)).int()
    return -(logps_of(logits, batch["ids"]) * mask).sum() / mask.sum()


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


def dpo_given(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The logps of the reference are part of the batch."""
    chosen, rejected = pair_logps(logits, batch)
    ref = (batch["ref_logps"] * batch["mask"][:, 1:]).sum(1)
    delta = (chosen - rejected) - (ref[: ROWS // 2] - ref[ROWS // 2 :])
    return (-F.logsigmoid(0.1 * delta) * 0.9 - F.logsigmoid(-0.1 * delta) * 0.1).mean()


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


def aot(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    chosen, rejected = pair_logps(logits, batch)
    ref = (batch["ref_logps"] * batch["mask"][:, 1:]).sum(1)
    one, _ = torch.sort(chosen - rejected, dim=0)
    other, _ = torch.sort(ref[: ROWS // 2] - ref[ROWS // 2 :], dim=0)
    return -F.logsigmoid(0.1 * (one - other)).mean()


def kto(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """A baseline over the batch, without gradient; desirable rows by sign."""
    mask = batch["mask"][:, 1:]
    ratio = ((logps_of(logits, batch["ids"]) - batch["ref_logps"]) * mask).sum(1)
    kl = ratio.mean().detach().clamp(min=0)
    good = batch["advantages"] > 0
    losses = torch.where(good, 1 - torch.sigmoid(ratio - kl), 1 - torch.sigmoid(kl - ratio))
    return losses.nanmean()


def kto_selected(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch["mask"][:, 1:]
    ratio = ((logps_of(logits, batch["ids"]) - batch["ref_logps"]) * mask).sum(1)
    good = batch["advantages"] > 0
    losses = torch.cat((1 - torch.sigmoid(ratio[good]), torch.sigmoid(ratio[~good])))
    return losses.mean()


def try_loss(run: Run, loss_fn: Any, *names: str, **options: Any) -> None:
    train(run, few(*names), loss_fn, **options)


@habit(SECTION, "labels of completions alone: `-100` elsewhere", kind=Policy, layouts=ALL)
def completions_only(run: Run) -> None:
    try_loss(run, sft)


@habit(SECTION, "GRPO: clipped ratios of given log-probabilities, a KL term, means by row",
       kind=Policy, layouts=ALL)  # fmt: skip
def group_relative(run: Run) -> None:
    try_loss(run, grpo, "old_logps", "ref_logps", "advantages")


@habit(SECTION, "the mean over tokens, `torch.stack([... for row in logits])`", kind=Policy,
       layouts=BOTH)  # fmt: skip
def token_mean(run: Run) -> None:
    try_loss(run, bnpo, "advantages")


@habit(SECTION, "token_mean pp", kind=Policy, layouts=("pp",))
def token_mean_pp(run: Run) -> None:
    try_loss(run, bnpo, "advantages")


@habit(SECTION, "a sum over tokens divided by `per_token.size(0) * length`", kind=Policy,
       layouts=ALL)  # fmt: skip
def fixed_divisor(run: Run) -> None:
    try_loss(run, dr_grpo, "old_logps", "advantages")


@habit(SECTION, "fixed microbatches", kind=Policy, layouts=ALL)
def fixed_divisor_microbatches(run: Run) -> None:
    try_loss(run, dr_grpo, "old_logps", "advantages", microbatches=2)


@habit(SECTION, "GSPO: ratios of whole sequences", kind=Policy, layouts=ALL)
def sequence_ratio(run: Run) -> None:
    try_loss(run, sequence_level, "old_logps", "advantages")


@habit(SECTION, "advantages by group of rows", kind=Policy, layouts=ALL)
def grouped_advantages(run: Run) -> None:
    try_loss(run, rloo, "advantages")


@habit(SECTION, "PPO whitening", kind=Policy, layouts=ALL)
def whitening(run: Run) -> None:
    try_loss(run, whitened, "old_logps", "ref_logps", "advantages")


@habit(SECTION, "entropy bonus chunks", kind=Policy, layouts=ALL)
def entropy_bonus(run: Run) -> None:
    try_loss(run, with_entropy, "advantages")


@habit(SECTION, "mask by boolean assignment", kind=Policy, layouts=ALL, refused=(CaptureError, "hint"))
def eos_assigned(run: Run) -> None:
    try_loss(run, up_to_eos)


@habit(SECTION, "mask by where", kind=Policy, layouts=ALL)
def eos_where(run: Run) -> None:
    try_loss(run, up_to_eos_where)


@habit(SECTION, "quantile of selection", kind=Policy, layouts=ALL, refused=(CaptureError, "hint"))
def entropy_quantile(run: Run) -> None:
    try_loss(run, top_entropy)


@habit(SECTION, "DPO with given reference", kind=Policy, layouts=ALL)
def preference_given(run: Run) -> None:
    try_loss(run, dpo_given, "ref_logps")


@habit(SECTION, "ORPO", kind=Policy, layouts=ALL)
def odds_ratio(run: Run) -> None:
    try_loss(run, orpo)


@habit(SECTION, "AOT sort", kind=Policy, layouts=ALL)
def sorted_rows(run: Run) -> None:
    try_loss(run, aot, "ref_logps")


@habit(SECTION, "KTO", kind=Policy, layouts=ALL)
def desirable_rows(run: Run) -> None:
    try_loss(run, kto, "ref_logps", "advantages")


@habit(SECTION, "KTO selected", kind=Policy, layouts=ALL, refused=(CaptureError, "hint"))
def selected_rows(run: Run) -> None:
    try_loss(run, kto_selected, "ref_logps", "advantages")


class Scored(Small):
    """A reward model: the score of the last token that is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def rewards(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        last = mask.sum(dim=1) - 1
        return self.score(h)[torch.arange(ids.shape[0], device=ids.device), last].squeeze(-1)

    def forward(self, chosen: Tensor, rejected: Tensor, c_mask: Tensor, r_mask: Tensor) -> Any:  # type: ignore[override]
        good, bad = self.rewards(chosen, c_mask), self.rewards(rejected, r_mask)
        loss = -F.logsigmoid(good - bad - 0.1).mean() + 0.01 * ((good + bad) ** 2).mean()
        return {"loss": loss, "chosen": good, "rejected": bad}


def pairs(seed: int) -> Batch:
    one, two = batch_of(seed), batch_of(seed + 100)
    return {"chosen": one["ids"], "rejected": two["ids"], "c_mask": one["mask"], "r_mask": two["mask"]}


@habit(SECTION, "a reward model: pairs, `scores[arange, last]`, a centering term", kind=Scored,
       layouts=ALL)  # fmt: skip
def reward_model(run: Run) -> None:
    train(run, pairs)


@habit(SECTION, "reward: accuracy from outputs", kind=Scored, layouts=BOTH)
def reward_outputs(run: Run) -> None:
    parallelize(run, pairs(0))
    kept: list[Any] = []
    run.pm.step(**pairs(0), outputs=kept.append)
    want = run.alone(**pairs(0))
    print({k: v.shape for k, v in kept[0].items()})
    run.alone(**pairs(0))["loss"].backward()


class Together(Policy):
    """A policy with a frozen reference inside."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = Small().requires_grad_(False)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        with torch.no_grad():
            ref = logps_of(self.reference.body(ids), ids)
        logps = logps_of(self.body(ids), ids)
        ratio = ((logps - ref) * mask[:, 1:]).sum(1)
        chosen, rejected = ratio.chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@habit(SECTION, "frozen reference inside", kind=Together, layouts=ALL)
def reference_inside(run: Run) -> None:
    train(run, few())


REFERENCE = make().requires_grad_(False).eval()
OUTER: list[Any] = [REFERENCE]


def dpo_with_model(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    reference: Any = OUTER[0]
    with torch.no_grad():
        ref = logps_of(reference.body(batch["ids"]), batch["ids"])
    ratio = ((logps_of(logits, batch["ids"]) - ref) * batch["mask"][:, 1:]).sum(1)
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@habit(SECTION, "reference in the loss", kind=Policy, layouts=ALL)
def reference_in_loss(run: Run) -> None:
    OUTER[0] = make().requires_grad_(False).eval()
    try_loss(run, dpo_with_model)


@habit(SECTION, "reference updated between steps", kind=Policy, layouts=BOTH)
def reference_moves(run: Run) -> None:
    OUTER[0] = make().requires_grad_(False).eval()
    with captured_again():
        for i in range(3):
            try_loss(run, dpo_with_model, n_steps=1)
            with torch.no_grad():
                for p in OUTER[0].parameters():
                    p.mul_(0.9)


@habit(SECTION, "reference synced from pm by zip of parameters", kind=Policy, layouts=BOTH, refused=(NotSupportedError, "hint"))
def reference_synced(run: Run) -> None:
    OUTER[0] = make().requires_grad_(False).eval()
    try_loss(run, dpo_with_model, n_steps=1)
    for target, copy_ in zip(OUTER[0].parameters(), run.pm.parameters()):
        target.data.mul_(0.4).add_(copy_.data, alpha=0.6)


@habit(SECTION, "reference from full_state_dict", kind=Policy, layouts=BOTH)
def reference_loaded(run: Run) -> None:
    OUTER[0] = make().requires_grad_(False).eval()
    with captured_again():
        try_loss(run, dpo_with_model, n_steps=1)
        for (n, target) in OUTER[0].named_parameters():
            target.data.copy_(run.pm.get_parameter(n).full_tensor())
        train(run, few(), dpo_with_model, n_steps=2)


@habit(SECTION, "plain.load_state_dict(pm.state_dict())", kind=Policy, layouts=BOTH, refused=(NotSupportedError, "hint"))
def plain_from_pm(run: Run) -> None:
    parallelize(run, few()(0), loss_fn=sft)
    make(Policy).load_state_dict(run.pm.state_dict())


class ActorCritic(Policy):
    """Returns the logits and a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.value = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h), self.value(self.dropout(h.detach())).squeeze(-1)


def ppo(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    logits, values = outputs
    mask, values = batch["mask"][:, 1:], values[:, :-1]
    clipped = torch.clamp(values, batch["values"] - 0.2, batch["values"] + 0.2)
    returns = batch["values"] + batch["advantages"].unsqueeze(1)
    worst = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    losses = {"value": 0.5 * (worst * mask).sum() / mask.sum(), "policy": whitened(logits, batch)}
    return losses["policy"] + 0.1 * losses["value"]


def disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0


@habit(SECTION, "disable dropout, value head", kind=ActorCritic, layouts=ALL)
def value_head(run: Run) -> None:
    for model in (run.model, run.alone):
        disable_dropout(model)
    try_loss(run, ppo, "old_logps", "ref_logps", "advantages", "values")


@habit(SECTION, "disable dropout of original later", kind=ActorCritic, layouts=BOTH)
def dropout_disabled_later(run: Run) -> None:
    names = "old_logps", "ref_logps", "advantages", "values"
    parallelize(run, few(*names)(0), loss_fn=ppo)
    with captured_again():
        for model in (run.model, run.alone):
            disable_dropout(model)
        train(run, few(*names), ppo)


@habit(SECTION, "disable dropout of pm", kind=ActorCritic, layouts=BOTH, refused=(NotSupportedError, "hint"))
def dropout_of_pm(run: Run) -> None:
    names = "old_logps", "ref_logps", "advantages", "values"
    parallelize(run, few(*names)(0), loss_fn=ppo)
    disable_dropout(run.pm)


class Moments(Small):
    """running reward moments in a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((), dtype=torch.float64)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        score = self.body(ids).mean(-1)
        self.mean = 0.9 * self.mean + 0.1 * score.detach().mean()
        return ((score - self.mean) ** 2).mean()


@habit(SECTION, "running mean in plain tensor", kind=Moments, refused=(CaptureError, "hint"))
def running_mean(run: Run) -> None:
    train(run, few())


class Moments2(Moments):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(()))

@habit(SECTION, "running mean in a buffer", kind=Moments2, layouts=ALL)
def running_mean_buffer(run: Run) -> None:
    train(run, few())


class Kept(Small):
    """`logits_to_keep`."""
    def forward(self, ids: Tensor, mask: Tensor, logits_to_keep: int = 0) -> Any:  # type: ignore[override]
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h[:, -logits_to_keep:])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, -logits_to_keep:].flatten())

@habit(SECTION, "logits_to_keep int", kind=Kept, layouts=ALL)
def logits_to_keep(run: Run) -> None:
    with captured_again():
        import warnings
        warnings.filterwarnings("ignore", message="captured a batch")
        parallelize(run, {**few()(0), "logits_to_keep": 3})
        for keep in (3, 2, 3):
            train(run, lambda seed: {**few()(seed), "logits_to_keep": keep})
