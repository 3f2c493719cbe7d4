"""Habits of alignment: reward models, references, value heads, state of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import CaptureError, NotSupportedError, PlanError
from tests.habits.alignment import SECTION, Policy, batch_of, few, logps_of, whitened
from tests.habits.table import (
    ALL,
    BOTH,
    WIDTH,
    Batch,
    Run,
    Small,
    captured_again,
    captured_anew,
    habit,
    make,
)
from tests.habits.tasks import LossFn, parallelize, train, trains


def pairs(seed: int) -> Batch:
    one, two = batch_of(seed), batch_of(seed + 100)
    return {"chosen": one["ids"], "rejected": two["ids"], "c_mask": one["mask"],
            "r_mask": two["mask"]}  # fmt: skip


@trains(SECTION, "a reward model: pairs, `scores[arange, last]`, a centering term", batches=pairs)
class Scored(Small):
    """A reward model: the score of the last token that is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def rewards(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.hidden(self.embed(ids))
        last = mask.sum(dim=1) - 1
        return self.score(h)[torch.arange(ids.shape[0], device=ids.device), last].squeeze(-1)

    def forward(  # type: ignore[override]
        self, chosen: Tensor, rejected: Tensor, c_mask: Tensor, r_mask: Tensor
    ) -> Any:
        good, bad = self.rewards(chosen, c_mask), self.rewards(rejected, r_mask)
        loss = -F.logsigmoid(good - bad - 0.1).mean() + 0.01 * ((good + bad) ** 2).mean()
        return {"loss": loss, "chosen": good, "rejected": bad}


@trains(SECTION, "a frozen reference inside of the model, `with torch.no_grad():`",
        batches=few())  # fmt: skip
class Together(Policy):
    """A policy with a frozen reference inside."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = Small().requires_grad_(False)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        with torch.no_grad():
            ref = logps_of(self.reference.body(ids), ids)
        logps = logps_of(self.body(ids), ids)
        ratio = ((logps - ref) * mask[:, 1:]).sum(1)
        chosen, rejected = ratio.chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def reference_and_loss() -> tuple[Any, LossFn]:
    """A frozen model, and a DPO loss that calls it."""
    reference: Any = make().requires_grad_(False).eval()

    def dpo(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        with torch.no_grad():
            ref = logps_of(reference.body(batch["ids"]), batch["ids"])
        ratio = ((logps_of(logits, batch["ids"]) - ref) * batch["mask"][:, 1:]).sum(1)
        chosen, rejected = ratio.chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return reference, dpo


@habit(SECTION, "a frozen reference that the loss calls", kind=Policy)
def reference_in_loss(run: Run) -> None:
    train(run, few(), reference_and_loss()[1])


@habit(SECTION, "a reference that moves: `p.mul_(0.9)`", kind=Policy)
def reference_moves(run: Run) -> None:
    reference, dpo = reference_and_loss()
    with captured_again():
        for _ in range(2):
            train(run, few(), dpo, n_steps=1)
            with torch.no_grad():
                for p in reference.parameters():
                    p.mul_(0.9)


@habit(SECTION, "a reference synchronised: `p.data.mul_(a).add_(q.data, alpha=b)` with `pm`'s `q`",
       "add `q.full_tensor()`", kind=Policy,
       refused=(NotSupportedError, "needs the whole"))  # fmt: skip
def reference_synced(run: Run) -> None:
    reference, dpo = reference_and_loss()
    train(run, few(), dpo, n_steps=1)
    for p, q in zip(reference.parameters(), run.pm.parameters(), strict=True):
        p.data.mul_(0.4).add_(q.data, alpha=0.6)


@habit(SECTION, "the same with `q.full_tensor()`", "captured again", kind=Policy)
def reference_loaded(run: Run) -> None:
    reference, dpo = reference_and_loss()
    with captured_again():
        train(run, few(), dpo, n_steps=1)
        for name, p in reference.named_parameters():
            q: Any = run.pm.get_parameter(name)
            p.data.mul_(0.4).add_(q.full_tensor(), alpha=0.6)
        train(run, few(), dpo)


class ActorCritic(Policy):
    """Returns the logits and a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.value = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        h = self.hidden(self.embed(ids))
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


@habit(SECTION, "a value head on `h.detach()`, clipped values; `module.p = 0` of every dropout",
       kind=ActorCritic, layouts=ALL)  # fmt: skip
def value_head(run: Run) -> None:
    for model in (run.model, run.alone):
        disable_dropout(model)
    train(run, batch_of, ppo)


@habit(SECTION, "`module.p = 0` of every dropout of the original later",
       "`autopar.parallelize` after it", kind=ActorCritic,
       refused=(PlanError, "parallelize again"))  # fmt: skip
def dropout_disabled_later(run: Run) -> None:
    parallelize(run, batch_of(0), loss_fn=ppo)
    with captured_again():
        disable_dropout(run.model)
        run.pm.step(**batch_of(0))


@habit(SECTION, "`module.p = 0` of every dropout of `pm`", "change the model before",
       kind=ActorCritic, refused=(NotSupportedError, "dropout.p"))  # fmt: skip
def dropout_of_pm(run: Run) -> None:
    parallelize(run, batch_of(0), loss_fn=ppo)
    disable_dropout(run.pm)


@trains(SECTION,
        "running moments of rewards in a plain tensor: `self.mean = 0.9 * self.mean + ...`",
        "a registered buffer", refused=(CaptureError, "self.mean"), batches=few(),
        layouts=BOTH)  # fmt: skip
class Moments(Small):
    """Keeps a running mean in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((), dtype=torch.float64)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        score = self.body(ids).mean(-1)
        self.mean = 0.9 * self.mean + 0.1 * score.detach().mean()
        return ((score - self.mean) ** 2).mean()


@trains(SECTION, "the same in a registered buffer", batches=few())
class BufferedMoments(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    forward: Any = Moments.forward


class Kept(Small):
    """Its head sees the last positions only."""

    def forward(self, ids: Tensor, mask: Tensor, logits_to_keep: int = 0) -> Any:
        h = self.hidden(self.embed(ids))
        logits, labels = self.head(h[:, -logits_to_keep:]), ids[:, -logits_to_keep:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@habit(SECTION, "`logits_to_keep`: a Python number in the batch", "captured anew", kind=Kept,
       layouts=ALL)  # fmt: skip
def logits_to_keep(run: Run) -> None:
    with captured_anew():
        for keep in (3, 2, 3):
            train(run, lambda seed, n=keep: {**few()(seed), "logits_to_keep": n})  # type: ignore[misc]
