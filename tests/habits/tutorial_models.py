"""Habits of PyTorch's tutorials and recipes: models and losses."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from autopar import CaptureError, NotSupportedError, PlanError
from tests.habits.data import Logits, cross_entropy
from tests.habits.table import (
    ALL,
    BOTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Batch,
    Run,
    Small,
    adamw,
    captured_again,
    habit,
)
from tests.habits.tasks import parallelize, trains

SECTION = "Models and losses of tutorials"


def numbers(seed: int, *names: str) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = 2 * ROWS, WIDTH
    return {n: torch.randn(shape, dtype=torch.float64, generator=generator) for n in names}


def layers(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, width))


@trains(SECTION,
        "label smoothing, class weights, `ignore_index`, `reduction=`, focal, hardest "
        "examples, distillation, InfoNCE",
        layouts=BOTH)  # fmt: skip
class Losses(Small):
    """The sum of losses that tutorials use, each over all rows."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, t = self.body(ids).flatten(0, 1), targets.flatten()
        weight = torch.linspace(0.5, 1.5, VOCABULARY, dtype=x.dtype)
        each = F.cross_entropy(x, t, reduction="none")
        hot = F.one_hot(t, VOCABULARY).to(x.dtype)
        units = F.normalize(x, dim=-1)
        return (
            F.cross_entropy(x, t, label_smoothing=0.1)
            + F.cross_entropy(x, t, weight=weight)
            + F.cross_entropy(x, torch.where(t % 3 == 0, -100, t), ignore_index=-100)
            + F.cross_entropy(x, t, reduction="sum") / t.numel()
            + (each * (t > 3)).sum() / (t > 3).sum()
            + ((1 - torch.exp(-each)) ** 2 * each).mean()
            + each.topk(4).values.mean()
            + F.nll_loss(F.log_softmax(x, -1), t)
            + F.kl_div(F.log_softmax(x / 2, -1), F.softmax(x.detach(), -1), reduction="batchmean")
            + F.binary_cross_entropy_with_logits(x, hot)
            + F.cross_entropy(units @ units.flip(0).T / 0.1, torch.arange(len(x)))
        )


class Gan(nn.Module):
    """Generator and discriminator; `turn` says whose loss it is."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d, self.turn = layers(WIDTH), layers(1), "d"

    def of_d(self, fake: Tensor, real: Tensor) -> Tensor:
        a, b = self.d(real), self.d(fake.detach())
        found = F.binary_cross_entropy_with_logits(a, torch.ones_like(a))
        return found + F.binary_cross_entropy_with_logits(b, torch.zeros_like(b))

    def of_g(self, fake: Tensor) -> Tensor:
        return F.softplus(-self.d(fake)).mean()

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.g(noise)
        return self.of_d(fake, real) if self.turn == "d" else self.of_g(fake)


class GanOfBoth(Gan):
    """The same, with the turn as an input: a tensor, or a name."""

    def forward(self, noise: Tensor, real: Tensor, turn: Any) -> Tensor:  # type: ignore[override]
        if isinstance(turn, str):
            self.turn = turn
            return super().forward(noise, real)
        fake = self.g(noise)
        return torch.where(turn, self.of_d(fake, real), self.of_g(fake))


@habit(SECTION, 'a GAN whose forward has other operators when `model.turn = "g"`',
       "both losses, and a tensor that says which", kind=Gan, layouts=ALL,
       refused=(PlanError, "`turn` of the model changed"))  # fmt: skip
def gan(run: Run) -> None:
    parallelize(run, numbers(0, "noise", "real"))
    run.pm.step(**numbers(0, "noise", "real"))
    with captured_again():
        run.model.turn = "g"  # type: ignore[assignment]
        run.pm.step(**numbers(0, "noise", "real"))


def turns(run: Run, toggles: bool = False) -> None:
    """Two optimizers step in turns; a toggled one freezes what is not its own."""

    def batch(seed: int, turn: str) -> Batch:
        return numbers(seed, "noise", "real") | {"turn": torch.tensor(turn == "d")}

    parallelize(run, batch(0, "d"))
    pairs = {t: [adamw(getattr(m, t).parameters()) for m in run.both()] for t in "dg"}
    for seed in range(2):
        for turn, optimizers in pairs.items():
            for m in run.both():
                for name, p in m.named_parameters():
                    p.requires_grad = not toggles or name.startswith(turn)
            run.backward(batch(seed, turn))
            for optimizer in optimizers:
                optimizer.step()
            for m in run.both():
                m.requires_grad_(True).zero_grad()


@habit(SECTION, "a GAN of `torch.where(turn, loss_d, loss_g)`, with two optimizers",
       kind=GanOfBoth)  # fmt: skip
def gan_of_both(run: Run) -> None:
    turns(run)


def played(seed: int) -> Batch:
    state = numbers(seed, "state")
    return state | {"action": torch.arange(len(state["state"])) % 4, "reward": state["state"][:, 0]}


@trains(SECTION, "REINFORCE: `Categorical(logits=...)` in forward", batches=played, layouts=BOTH)
class Policy(nn.Module):
    """REINFORCE with an entropy bonus; torch checks arguments until `torch.compile` is called."""

    checks = True

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(4)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.net(state), validate_args=self.checks)
        return -(policy.log_prob(action) * reward).mean() - 0.01 * policy.entropy().mean()


@trains(SECTION, "the same with `validate_args=False`", batches=played)
class Unchecked(Policy):
    checks = False


@habit(SECTION, "DQN: a soft update, `target[k] = tau * policy[k] + (1 - tau) * target[k]`",
       layouts=ALL)  # fmt: skip
def soft_update(run: Run) -> None:
    optimizers = run.optimizers()
    targets = [copy.deepcopy(m) for m in run.both()]
    for seed in range(2):
        run.train(optimizers, 1, first=seed)
        for target, m in zip(targets, run.both(), strict=True):
            values, new = target.state_dict(), m.state_dict()
            for name in new:
                values[name] = 0.3 * new[name] + 0.7 * values[name]
            target.load_state_dict(values)
    run.check()
    run.losses.clear()
    run.pm, run.alone = targets


class Recurrent(nn.Module):
    """The language model of the word_language_model example; returns its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor, h: Tensor, c: Tensor) -> Any:
        out, (h, c) = self.rnn(self.embed(ids), (h, c))
        return F.cross_entropy(self.head(out).flatten(0, 1), targets.flatten()), h, c


@habit(SECTION, "truncated BPTT: an LSTM's state of one batch is an input of the next",
       'from `pm(**batch, gather="all")`', kind=Recurrent)  # fmt: skip
def truncated(run: Run) -> None:
    zero = torch.zeros(1, ROWS, WIDTH, dtype=torch.float64)
    ours: Batch = {"h": zero, "c": zero}
    alone = ours
    parallelize(run, run.batch(0) | ours)
    optimizers = run.optimizers()
    for seed in range(3):
        run.pm.eval()
        _, h, c = run.pm(**run.batch(seed), **ours, gather="all")
        run.pm.train()
        found = run.pm.step(**run.batch(seed), **ours)
        wanted, *hidden = run.alone(**run.batch(seed), **alone)
        wanted.backward()
        run.losses.append((found.item(), wanted.item()))
        run.update(optimizers)
        ours, alone = {"h": h, "c": c}, dict(zip("hc", (t.detach() for t in hidden), strict=True))


@trains(SECTION,
        "`checkpoint_sequential`, `use_reentrant=True`, `context_fn=`, only in training",
        layouts=BOTH)  # fmt: skip
class Regions(Small):
    """Every form of `torch.utils.checkpoint`."""

    def body(self, ids: Tensor) -> Tensor:
        def kept(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = operator is torch.ops.aten.mm.default
            return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

        first, second = self.blocks
        contexts = partial(create_selective_checkpoint_contexts, kept)
        h = checkpoint(first, self.embed(ids), use_reentrant=True)
        h = checkpoint_sequential(list(self.blocks), 2, h, use_reentrant=False)
        h = checkpoint(second, h, use_reentrant=False, context_fn=contexts)
        h = checkpoint(lambda x: first(x) * 0.5, h, use_reentrant=False, preserve_rng_state=False)
        if self.training and torch.is_grad_enabled():
            h = checkpoint(second, h, use_reentrant=False)
        return self.head(h)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Square(Small):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.normed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, ids: Tensor) -> Tensor:
        return self.head(self.normed(self.square(self.embed(ids))))


@habit(SECTION, "`register_parametrization(layer, \"weight\", Symmetric())`, `spectral_norm`, "
       "`with parametrize.cached():`", kind=Square)  # fmt: skip
def own_parametrization(run: Run) -> None:
    for model in (run.model, run.alone):
        torch.manual_seed(1)
        parametrize.register_parametrization(model.square, "weight", Symmetric())  # type: ignore[arg-type]
        parametrizations.spectral_norm(model.normed)  # type: ignore[arg-type]
    with parametrize.cached():
        run.backward(run.batch(0))
    run.train(run.optimizers(), 2, first=1)


@habit(SECTION, "`prune.l1_unstructured(model.head, ...)` before", "multiply by a mask after steps",
       layouts=ALL, refused=(CaptureError, "head.weight"))  # fmt: skip
def pruned_before(run: Run) -> None:
    prune.l1_unstructured(run.model.head, "weight", 0.3)
    run.parallelize()


@habit(SECTION, "`prune.l1_unstructured(pm.head, ...)`", "multiply by a mask after steps",
       refused=(NotSupportedError, "weight_orig"))  # fmt: skip
def pruned_later(run: Run) -> None:
    prune.l1_unstructured(run.pm.head, "weight", 0.3)


@trains(SECTION, "a part of the loss in an attribute: `loss + model.penalty`", "return it",
        layouts=BOTH, refused=(CaptureError, "return the tensor"))  # fmt: skip
class Kept(Small):
    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        self.penalty = h.pow(2).mean()
        return self.head(self.blocks[0](h))


class Scaled(nn.Module):
    """A criterion that learns: a temperature, as CLIP has; or weights of several losses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(self.scale * outputs, batch)


@habit(SECTION, "a criterion with parameters: `loss_fn=Scaled()`", "make it a part of the model",
       kind=Logits, layouts=ALL, refused=(CaptureError, "`Scaled.scale`"))  # fmt: skip
def learning_criterion(run: Run) -> None:
    run.parallelize(loss_fn=Scaled())


@habit(SECTION, "weight decay in `loss_fn`, of `model.parameters()`", "put it into forward",
       kind=Logits, layouts=ALL, refused=(CaptureError, "give it no gradient"))  # fmt: skip
def decay_in_criterion(run: Run) -> None:
    model = run.model

    def criterion(outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch) + sum(p.pow(2).sum() for p in model.parameters())

    run.parallelize(loss_fn=criterion)


@habit(SECTION, "FGSM, layers before the model: an input that requires grad",
       "make them parts of the model", kind=Unchecked, layouts=ALL,
       refused=(NotSupportedError, "input `state` requires grad"))  # fmt: skip
def input_gradient(run: Run) -> None:
    parallelize(run, played(0))
    batch = played(0)
    batch["state"].requires_grad_(True)
    run.pm.step(**batch)
