"""Habits of language models: tied and resized embeddings, losses by token, contrast, caches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup
from transformers.trainer_pt_utils import get_parameter_names

from autopar import CaptureError, NotSupportedError
from tests.habits.table import (
    ALL,
    BOTH,
    STAGES_FIRST,
    VOCABULARY,
    WIDTH,
    Batch,
    Run,
    Small,
    batch_of,
    captured_again,
    captured_anew,
    habit,
)
from tests.habits.tasks import backward, parallelize, train, trains

SECTION = "Language models"


def padded(seed: int) -> Batch:
    """Sequences of several lengths, as a collator pads them."""
    batch = batch_of(seed, rows=8)
    lengths = torch.arange(8) % 3 + 2
    mask = (torch.arange(4) < lengths[:, None]).long()
    return {
        "ids": batch["ids"],
        "mask": mask,
        "labels": batch["targets"].masked_fill(mask == 0, -100),
    }


of_tokens = partial(trains, SECTION, batches=padded)


@trains(SECTION, "tied weights: `head.weight = embed.weight`",
        "one parameter, on every stage that uses it", layouts=STAGES_FIRST)  # fmt: skip
class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight


@habit(SECTION, "the same later, on the original model", "tie them before",
       refused=(CaptureError, "tied parameters"))  # fmt: skip
def tied_later(run: Run) -> None:
    run.pm.step(**run.batch(0))
    model: Any = run.model
    model.head.weight = model.embed.weight
    run.pm.step(**run.batch(0))


@trains(SECTION, "a layer that runs several times, as in ALBERT")
class Shared(Small):
    """One block, several times, as ALBERT."""

    def body(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for _ in range(3):
            h = self.blocks[0](h)
        return self.head(self.blocks[1](h))


def resize(model: Any, n: int) -> None:
    old = model.embed
    new = nn.Embedding(n, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        new.weight[: old.num_embeddings] = old.weight
        new.weight[old.num_embeddings :] = old.weight.mean(0)
    model.embed = new


@habit(SECTION, "`resize_token_embeddings` before: new rows are the mean of the others",
       layouts=ALL)  # fmt: skip
def resized(run: Run) -> None:
    for m in (run.model, run.alone):
        resize(m, VOCABULARY + 3)
    run.train(run.optimizers())


@habit(SECTION, "the same later: a module replaced by one of its class", "resize before",
       refused=(CaptureError, "module `embed`"))  # fmt: skip
def resized_later(run: Run) -> None:
    run.pm.step(**run.batch(0))
    resize(run.model, VOCABULARY + 3)
    run.pm.step(**run.batch(0))


@habit(SECTION, "the same on `pm`", "resize before",
       refused=(NotSupportedError, "needs the whole"))  # fmt: skip
def resized_pm(run: Run) -> None:
    resize(run.pm, VOCABULARY + 3)


class Counted(Small):
    def forward(  # type: ignore[override]
        self, ids: Tensor, mask: Tensor, labels: Tensor, num_items_in_batch: Tensor
    ) -> Any:
        loss = F.cross_entropy(self.body(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / num_items_in_batch


@habit(SECTION, "sums over accumulated batches over `num_items_in_batch`, a tensor", kind=Counted,
       layouts=ALL)  # fmt: skip
def counted(run: Run) -> None:
    def of(seed: int, n: int) -> Batch:
        return {**padded(seed), "num_items_in_batch": torch.tensor(n)}

    parallelize(run, of(0, 40))
    optimizers = run.optimizers()
    for first in (0, 2):
        n = sum(int((padded(s)["labels"] != -100).sum()) for s in (first, first + 1))
        for s in (first, first + 1):
            backward(run, of(s, n))
        run.update(optimizers)


@habit(SECTION, "the same, a Python number that changes", "captured anew for each number",
       kind=Counted, layouts=ALL)  # fmt: skip
def counted_int(run: Run) -> None:
    def of(seed: int) -> Batch:
        return {**padded(seed), "num_items_in_batch": 30 + seed}

    with captured_anew():
        train(run, of, n_steps=3)


class Masked(Small):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.body(ids)


@of_tokens("`LabelSmoother`: `nll.masked_fill_(padding, 0)`, a count of what is no padding",
           kind=Masked)  # fmt: skip
def label_smoothed(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """transformers' LabelSmoother"""
    log_probs = -F.log_softmax(logits, dim=-1)
    labels = batch["labels"].unsqueeze(-1)
    padding = labels.eq(-100)
    labels = torch.clamp(labels, min=0)
    nll = log_probs.gather(dim=-1, index=labels)
    smooth = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
    nll.masked_fill_(padding, 0.0)
    smooth.masked_fill_(padding, 0.0)
    n = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / n + 0.1 * smooth.sum() / (n * log_probs.shape[-1])


@of_tokens("z-loss: `logsumexp(logits).pow(2)` over tokens that count", kind=Masked)
def z_loss(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    ce = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    keep = batch["labels"] != -100
    z = (torch.logsumexp(logits, -1).pow(2) * keep).sum() / keep.sum()
    return ce + 1e-2 * z


@of_tokens("several losses in a dict", "`loss_fn=`", layouts=BOTH,
           refused=(CaptureError, "could be the loss"))  # fmt: skip
class Several(Small):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = self.body(ids)
        return {
            "loss_ce": F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "loss_z": 1e-2 * torch.logsumexp(logits, -1).pow(2).mean(),
        }


@of_tokens("the same with `loss_fn=lambda losses, batch: sum(losses.values())`", kind=Several)
def several(outputs: Any, batch: Mapping[str, Any]) -> Any:
    return sum(outputs.values())


@of_tokens("masked positions alone: `logits[labels != -100]`", "`ignore_index`",
           kind=Masked, refused=(CaptureError, "torch.where"), layouts=BOTH)  # fmt: skip
def mlm_selected(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    keep = batch["labels"] != -100
    return F.cross_entropy(logits[keep], batch["labels"][keep])


class Contrast(Small):
    """Both losses of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        h = self.hidden(self.embed(ids))
        m = mask.unsqueeze(-1)
        pooled = (h * m).sum(1) / m.sum(1).clamp(min=1e-9)
        a = F.normalize(pooled, dim=-1)
        b = F.normalize(self.other(self.embed(labels.clamp(min=0)).mean(1)), dim=-1)
        logits = self.logit_scale.exp() * a @ b.T
        target = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@habit(SECTION, "contrast of all pairs of a batch, `a @ b.T`; `logit_scale.clamp_` after the step",
       kind=Contrast)  # fmt: skip
def contrastive(run: Run) -> None:
    parallelize(run, padded(0))
    optimizers = run.optimizers()
    for seed in range(2):
        backward(run, padded(seed))
        run.update(optimizers)
        for m in run.both():
            m.logit_scale.data = torch.clamp(m.logit_scale.data, 0, 2.6)
            with torch.no_grad():
                m.logit_scale.clamp_(0, 2.5)


@of_tokens("multiple choice: `ids.view(-1, n)`, scores `.view(-1, choices)`", layouts=BOTH)
class Choice(Small):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        n = ids.shape[1] // 2
        flat = ids.view(-1, 2, n).reshape(-1, n)
        scores = self.body(flat).mean((1, 2)).view(-1, 2)
        return F.cross_entropy(scores, labels[:, 0].clamp(min=0) % 2)


@of_tokens("T5: labels shifted into a new tensor, `shifted[..., 1:] = ...`, `masked_fill_`")
class Shifted(Small):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        shifted[..., 0] = 1
        shifted.masked_fill_(shifted == -100, 0)
        return F.cross_entropy(self.body(shifted).flatten(0, 1), labels.flatten())


@habit(SECTION, "`get_parameter_names(pm, [nn.LayerNorm])`, `get_cosine_schedule_with_warmup`")
def decay_names(run: Run) -> None:
    def make(m: Any) -> Any:
        names = get_parameter_names(m, [nn.LayerNorm], ["bias", "layernorm", "rmsnorm"])
        named = dict(m.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n in names], "weight_decay": 0.5},
            {"params": [p for n, p in named.items() if n not in names], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    optimizers = [make(m) for m in run.both()]
    schedules = [get_cosine_schedule_with_warmup(o, 1, 4) for o in optimizers]
    run.train(optimizers, 3, plans=schedules)


@habit(SECTION, "frozen embeddings that are tied to the head", kind=Tied, layouts=STAGES_FIRST)
def frozen_tied(run: Run) -> None:
    for m in (run.model, run.alone):
        m.embed.requires_grad_(False)
    run.train(run.optimizers())


def gpt2() -> Any:
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=8, n_head=2, vocab_size=VOCABULARY, n_positions=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def models_of(run: Run) -> tuple[Any, Any]:
    return run.model, run.alone


class Gpt2(nn.Module):
    def __new__(cls) -> Any:
        return gpt2()


def shifted_loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )


def tokens(seed: int) -> Batch:
    return {"input_ids": batch_of(seed, rows=8)["ids"]}


@habit(SECTION, "`model.gradient_checkpointing_enable()`, `model.config.use_cache = False`",
       kind=Gpt2, layouts=ALL)  # fmt: skip
def checkpointing(run: Run) -> None:
    for m in models_of(run):
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m.config.use_cache = False
    train(run, tokens, shifted_loss)


@habit(SECTION, "the same with `use_reentrant=True`, `model.enable_input_require_grads()`",
       kind=Gpt2, layouts=ALL)  # fmt: skip
def input_grads_gpt2(run: Run) -> None:
    for m in models_of(run):
        m.gradient_checkpointing_enable({"use_reentrant": True})
        m.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(run, tokens, shifted_loss)


@habit(SECTION, "`model.config.use_cache = False` later", kind=Gpt2, layouts=ALL)
def use_cache_later(run: Run) -> None:
    train(run, tokens, shifted_loss)
    with captured_again():
        for m in models_of(run):
            m.config.use_cache = False
        train(run, tokens, shifted_loss)


@habit(SECTION, "`pm.gradient_checkpointing_enable()`", "on the model before", kind=Gpt2,
       refused=(NotSupportedError, "part or method of"))  # fmt: skip
def checkpointing_pm(run: Run) -> None:
    parallelize(run, tokens(0), loss_fn=shifted_loss)
    run.pm.gradient_checkpointing_enable()


@habit(SECTION, "text while it trains: `pm.unsharded().generate(ids)`", "works, on rank 0",
       kind=Gpt2, layouts=ALL)  # fmt: skip
def generating(run: Run) -> None:
    train(run, tokens, shifted_loss)
    whole = run.pm.unsharded()
    if whole is not None:
        prompt = tokens(3)["input_ids"][:, :4]
        found, expected = (
            model.generate(prompt, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
            for model in (whole, run.alone.eval())
        )
        assert torch.equal(found, expected)
    run.alone.train()
    train(run, tokens, shifted_loss)


@habit(SECTION, "`pm.save_pretrained(folder)`", "`autopar.export_weights`, or `pm.unsharded()`",
       kind=Gpt2, refused=(NotSupportedError, "export_weights"))  # fmt: skip
def save_pretrained(run: Run) -> None:
    parallelize(run, tokens(0), loss_fn=shifted_loss)
    run.pm.save_pretrained("/nonexistent")
