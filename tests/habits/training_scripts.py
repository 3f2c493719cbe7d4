"""Habits of nanoGPT's and minGPT's training scripts."""

from __future__ import annotations

import copy
import inspect
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import autopar
from autopar import CaptureError, NotSupportedError, OptionError
from tests.habits.state import in_layout, shared_folder
from tests.habits.table import LENGTH, ROWS, VOCABULARY, Batch, Run, Small, all_refused, habit, make
from tests.habits.table import STAGES_FIRST as ALL

SECTION = "Training scripts: nanoGPT, minGPT"


class Gpt(Small):
    """Methods and positions as nanoGPT's model has them; its head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(2 * LENGTH, self.embed.embedding_dim)
        self.head.weight = self.embed.weight

    def body(self, ids: Tensor) -> Tensor:
        positions = self.positions(torch.arange(ids.shape[1]))
        return self.head(self.hidden(self.embed(ids) + positions))

    def get_num_params(self, non_embedding: bool = True) -> int:
        n = sum(p.numel() for p in self.parameters())
        return n - self.positions.weight.numel() if non_embedding else n

    def configure_optimizers(self, weight_decay: float) -> torch.optim.Optimizer:
        held = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in held.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in held.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        assert "fused" in inspect.signature(torch.optim.AdamW).parameters
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)

    def crop_block_size(self, n: int) -> None:
        self.positions.weight = nn.Parameter(self.positions.weight[:n])


def rate_at(step: int) -> float:
    """nanoGPT's schedule: warm-up, then half a cosine."""
    if step < 2:
        return 1e-2 * (step + 1) / 3
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 2) / 4)) * 9e-3


def tokens_of(seed: int) -> Batch:
    """`get_batch`: random pieces of one text."""
    generator = torch.Generator().manual_seed(11)
    text = torch.randint(VOCABULARY, (100,), generator=generator)
    at = torch.randint(100 - LENGTH - 1, (ROWS,), generator=generator.manual_seed(seed)).tolist()
    pieces = torch.stack([text[i : i + LENGTH + 1] for i in at])
    return {"ids": pieces[:, :-1].contiguous(), "targets": pieces[:, 1:].contiguous()}


def estimated(m: Any, evaluate: Any) -> float:
    """`estimate_loss`: the mean over a few batches in evaluation mode."""
    m.eval()
    with torch.no_grad():
        losses = torch.zeros(2, dtype=torch.float64)
        for k in range(2):
            losses[k] = evaluate(**tokens_of(100 + k)).item()
    m.train()
    return losses.mean().item()


@habit(SECTION, "nanoGPT's loop: tied head, micro-steps, `estimate_loss`, rates by hand, clipping",
       "`weight=1 / n`, `pm.clip_grad_norm_(c)`", kind=Gpt, layouts=ALL)  # fmt: skip
def nano_loop(run: Run) -> None:
    optimizers = [Gpt.configure_optimizers(m, 0.1) for m in run.both()]
    best = math.inf
    for step in range(4):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
        found, wanted = (estimated(m, m) for m in run.both())
        assert abs(found - wanted) < 1e-10
        best = min(best, found)
        for micro in range(2):
            run.pm.require_backward_grad_sync = micro == 1
            run.backward(tokens_of(2 * step + micro), weight=0.5)
        norm = run.pm.clip_grad_norm_(0.5)
        assert abs(norm - nn.utils.clip_grad_norm_(run.alone.parameters(), 0.5)) < 1e-10
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@habit(SECTION, "`Gpt.get_num_params(pm)`: a method that needs only parameters", kind=Gpt)
def unbound_method(run: Run) -> None:
    found, wanted = (Gpt.get_num_params(m) for m in run.both())
    assert found == wanted


@habit(SECTION, "`pm.configure_optimizers(...)`, `pm.get_num_params()`, `pm.estimate_mfu(...)`",
       "`Gpt.configure_optimizers(pm, ...)`", kind=Gpt, layouts=ALL,
       refused=(NotSupportedError, "Gpt.configure_optimizers(pm)"))  # fmt: skip
def bound_method(run: Run) -> None:
    run.pm.configure_optimizers(0.1)


@habit(SECTION, "`model.configure_optimizers(...)` of the original model", "use `pm.parameters()`",
       kind=Gpt, layouts=ALL, refused=(OptionError, "pm.parameters()"))  # fmt: skip
def method_of_the_original(run: Run) -> None:
    assert run.pm.training
    optimizer = run.model.configure_optimizers(0.1)  # type: ignore[operator]
    run.pm.step(**run.batch(0))
    optimizer.step()


@habit(SECTION, "`model.crop_block_size(n)` before", kind=Gpt, layouts=ALL)
def cropped(run: Run) -> None:
    for m in (run.model, run.alone):
        m.crop_block_size(LENGTH)  # type: ignore[operator]
    run.train(run.optimizers())


@habit(SECTION, "`model.crop_block_size(n)` later", "crop it before", kind=Gpt, layouts=ALL,
       refused=(CaptureError, "`shape` of `positions.weight` changed"))  # fmt: skip
def cropped_later(run: Run) -> None:
    run.pm.step(**run.batch(0))
    run.model.crop_block_size(LENGTH)  # type: ignore[operator]
    run.pm.step(**run.batch(0))


@habit(SECTION, "`with ctx:`, a `nullcontext` or `autocast(enabled=False)`", kind=Gpt, layouts=ALL)
def no_context(run: Run) -> None:
    optimizers = run.optimizers()
    contexts: tuple[Any, ...] = nullcontext(), torch.autocast("cpu", enabled=False)
    for seed, context in enumerate(contexts):
        with context:
            run.backward(run.batch(seed))
        run.update(optimizers)


@habit(SECTION, "`with torch.autocast(...): pm.step(...)`, `pm(...)`, `pm.loss(...)`",
       '`precision="bf16-mixed"`', kind=Gpt, layouts=ALL,
       refused=(OptionError, "precision="))  # fmt: skip
def autocast(run: Run) -> None:
    batch = run.batch(0)
    run.pm.step(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        all_refused(
            OptionError,
            lambda: run.pm.step(**batch),
            lambda: run.pm.loss(**batch),
            lambda: run.pm.eval()(**batch),
        )


@habit(SECTION, "`raw_model = pm.module`, `pm.no_sync()`", "leave them out", kind=Gpt, layouts=ALL,
       refused=(NotSupportedError, "as DistributedDataParallel has"))  # fmt: skip
def wrapper_attributes(run: Run) -> None:
    assert not hasattr(run.pm, "module")
    with run.pm.no_sync():
        run.pm.step(**run.batch(0))


@habit(SECTION, "the best checkpoint by validation loss, and resuming from it",
       "`autopar.save(..., extra=)`", kind=Gpt, layouts=ALL)  # fmt: skip
def best_checkpoint(run: Run) -> None:
    optimizers = [Gpt.configure_optimizers(m, 0.1) for m in run.both()]
    folder, best = shared_folder(), math.inf
    for step in range(3):
        run.train(optimizers, 1, first=step)
        loss = estimated(run.pm, run.pm)
        if loss < best or step == 0:
            best, kept = loss, copy.deepcopy((run.alone.state_dict(), optimizers[1].state_dict()))
            extra = {"iter_num": step, "best_val_loss": best, "config": {"n_layer": 2}}
            autopar.save(run.pm, optimizers[0], folder / str(step), step=step, extra=extra)
            last = folder / str(step)
    other = in_layout(run, run.layout)
    other.alone.load_state_dict(kept[0])
    alone = Gpt.configure_optimizers(other.alone, 0.1)  # type: ignore[arg-type]
    alone.load_state_dict(kept[1])
    found = Gpt.configure_optimizers(other.pm, 0.1)  # type: ignore[arg-type]
    step, extra = autopar.load(other.pm, found, last)
    assert extra["best_val_loss"] == best
    other.train([found, alone], 2, first=step + 1)
    other.check()


@habit(SECTION, "weights of rank 0 into a new model: `{\"model\": pm.full_state_dict(), "
       "\"model_args\": ...}`", kind=Gpt, layouts=ALL)  # fmt: skip
def sampled_from(run: Run) -> None:
    run.train(run.optimizers())
    path, whole = shared_folder() / "ckpt.pt", run.pm.full_state_dict()
    loss = run.pm.loss(**run.batch(9))
    if dist.get_rank() == 0:
        torch.save({"model": whole, "model_args": {"n_layer": 2}, "best_val_loss": loss}, path)
        found = torch.load(path, map_location="cpu")
        new = make(Gpt)
        new.load_state_dict(found["model"])
        new.eval()
        with torch.no_grad():
            assert abs(new(**run.batch(9)) - found["best_val_loss"]) < 1e-10


@habit(SECTION, "early stopping: `best = copy.deepcopy(pm.state_dict())`, and back", layouts=ALL)
def early_stopping(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 1)
    best = [copy.deepcopy(m.state_dict()) for m in run.both()]
    run.train(optimizers, 2, first=1)
    for m, values in zip(run.both(), best, strict=True):
        m.load_state_dict(values)


@habit(SECTION, "minGPT's trainer: `RandomSampler(replacement=True)`, `iter` anew, callbacks",
       layouts=ALL)  # fmt: skip
def min_trainer(run: Run) -> None:
    whole = run.batch(0, rows=2 * ROWS)
    data = TensorDataset(whole["ids"], whole["targets"])
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(data, replacement=True, num_samples=2 * ROWS, generator=generator)
    loader: Any = DataLoader(data, sampler=sampler, batch_size=ROWS, pin_memory=False)
    optimizers, seen = run.optimizers(), []
    callbacks = {"on_batch_end": [lambda loss: seen.append(loss.item())]}
    batches = iter(loader)
    for _ in range(5):
        try:
            ids, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            ids, targets = next(batches)
        loss = run.pm.step(ids, targets)
        wanted = run.alone(ids, targets)
        wanted.backward()
        run.losses.append((loss.item(), wanted.item()))
        for callback in callbacks["on_batch_end"]:
            callback(loss)
        run.update(optimizers)
    assert len(seen) == 5


def ignored() -> Batch:
    """Every label is ignored, so the mean loss is 0 / 0."""
    batch = tokens_of(7)
    return batch | {"targets": torch.full_like(batch["targets"], -100)}


@habit(SECTION, "`if not loss.isfinite(): optimizer.zero_grad(); continue`", layouts=ALL)
def skipped_by_hand(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 1)
    loss = run.pm.step(**ignored())
    run.alone(**ignored()).backward()
    assert loss.isnan()
    for optimizer in optimizers:
        optimizer.zero_grad()
    run.train(optimizers, 2, first=1)
