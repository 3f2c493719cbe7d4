"""What tests run on real processes: small models, their batches, plans by name, and workers.

A worker imports this module, so whatever it runs stands here at the top level. The machine is
abstract (`machine`), so that the planner shards even models this small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Device, Link, Manual, Mesh
from autopar.capture import reference_step, whole_buffers
from autopar.operators import Stream
from tests.helpers.captures import captured
from tests.helpers.models import tiny_model

BATCH, SEQUENCE, WIDTH, HEADS, VOCABULARY = 16, 8, 32, 4, 32
N_STEPS, LEARNING_RATE = 3, 1e-2
Batch = dict[str, Any]
LossFn = Callable[[Any, Mapping[str, Any]], Tensor]


def machine(shape: Sequence[int]) -> Mesh:
    """Unit links, one flop per second, free memory traffic: every time is a count."""
    return Mesh(shape, links=[Link(1.0, 1.0)] * len(shape), device=Device(1.0, 1e30, 1e15, 0.0))


# -- models ----------------------------------------------------------------------------------------


def stack(width: int, n_layers: int) -> nn.Sequential:
    layers = [m for _ in range(n_layers) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


class Mlp(nn.Module):
    """Returns predictions; the loss is a `loss_fn`'s."""

    def __init__(self, width: int = WIDTH, n_layers: int = 3) -> None:
        super().__init__()
        self.net = stack(width, n_layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class MlpWithLoss(nn.Module):
    """Returns its loss: `of` is "mse", "sum" or "mean" (of squares)."""

    def __init__(self, width: int = WIDTH, n_layers: int = 3, of: str = "mse") -> None:
        super().__init__()
        self.net, self.of = stack(width, n_layers), of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.of == "mse":
            return nn.functional.mse_loss(self.net(x), y)
        squares = (self.net(x) - y).pow(2)
        return squares.sum() if self.of == "sum" else squares.mean()


def squares(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """A mean that no label is part of: predictions alone."""
    return (outputs - 1.0).pow(2).mean()


def gpt2(n_layers: int = 2, **options: Any) -> nn.Module:
    """A language model whose head is tied to its embedding."""
    given: dict[str, Any] = {
        "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": SEQUENCE,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0, **options,
    }  # fmt: skip
    config = AutoConfig.for_model("gpt2", n_layer=n_layers, **given)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def llama(
    n_layers: int = 2, width: int = WIDTH, vocabulary: int = VOCABULARY, length: int = SEQUENCE
) -> nn.Module:
    """Rotary embedding, RMSNorm, a gated MLP, and two query heads per key head."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=n_layers, hidden_size=width, intermediate_size=2 * width,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, vocab_size=vocabulary,
        max_position_embeddings=length,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def rows(seed: int, *names: str, n_rows: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n_rows, WIDTH, generator=generator) for name in names}


def tokens(
    seed: int, n_rows: int = BATCH, length: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> Batch:
    """Ids, and labels ignored unevenly: a whole row, no label of another, some elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (n_rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)
    labels[0], labels[1] = -100, ids[1]
    return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True)
class Case:
    """A model, how to draw batches for it, and its loss where it has none of its own."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: LossFn | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, tokens),
    "llama": Case(llama, tokens),
    "mlp": Case(Mlp, lambda seed: rows(seed, "x"), squares),
    "mlp with loss": Case(MlpWithLoss, lambda seed: rows(seed, "x", "y")),
    "tiny": Case(tiny_model.Tiny, tiny_model.batch),
}

# -- plans by name -----------------------------------------------------------------------------

PLANS = ("auto", "megatron", "sequence", "ddp", "zero-1", "zero-2", "zero-3")


class AnyCell(Protocol):
    """What a rank trains, on which mesh, with which options of `parallelize`."""

    @property
    def case(self) -> Case: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def n_ranks(self) -> int: ...

    def options(self) -> dict[str, Any]: ...


class Cell(NamedTuple):
    """One entry of the parity table of one stage."""

    model: str
    shape: tuple[int, ...]
    plan: str
    microbatches: int

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.shape))
        return f"{self.model}, {mesh}, {self.plan}, {self.microbatches} microbatches"

    @property
    def case(self) -> Case:
        return CASES[self.model]

    @property
    def n_ranks(self) -> int:
        return machine(self.shape).n_ranks

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "precision": "fp64",
            "microbatches": self.microbatches,
            "loss_fn": self.case.loss_fn,
        }
        if self.plan != "auto":
            options["manual"] = recipe(self.plan, self.shape)
        return options


def recipe(plan: str, shape: Sequence[int]) -> Manual:
    """Tensor parallelism inside the node, or data parallelism over all ranks."""
    if plan in ("megatron", "sequence"):
        return Manual(dp=shape[0], tp=shape[1], sp=plan == "sequence")
    zero = 0 if plan == "ddp" else int(plan.removeprefix("zero-"))
    return Manual(dp=shape[0] * shape[1], zero=zero)


# -- training, sharded and not -----------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """`losses` per step; `gradients` of the first step, and `values` of parameters and of buffers
    that steps change after the last, whole.
    """

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    values: dict[str, Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW divides a gradient that is 0 but for rounding (1e-17: of a key's bias, of a bias that a
    layer norm takes away) by `eps`; torch's default of 1e-8 would make 1e-10 of it."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=1e-6)


def advance(*optimizers: torch.optim.Optimizer) -> None:
    """One step of each, and no gradients after it."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(cell: AnyCell) -> Trained:
    """The job of one rank; gradients and values are on rank 0."""
    case, mesh = cell.case, machine(cell.shape)
    module = autopar.parallelize(case.model(), mesh, case.batch(0), **cell.options())
    return train_module(module, case.batch)


def train_planned(cell: AnyCell, plan: str) -> tuple[Trained, dict[str, str]]:
    """`train` by a plan file, without example inputs; and the code that ran."""
    case = cell.case
    module = autopar.parallelize(
        case.model(), machine(cell.shape), plan=autopar.Plan.load(plan), loss_fn=case.loss_fn
    )
    return train_module(module, case.batch), module.plan.code()


def train_module(module: autopar.ParallelModule, batch: Callable[[int], Batch]) -> Trained:
    optimizer = adamw(module.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(N_STEPS):
        losses.append(module.step(**batch(step)).item())
        if step == 0:
            gradients = module.full_gradients()
        advance(optimizer)
    return Trained(tuple(losses), gradients, module.full_state_dict())


def reference(name: str) -> Trained:
    """`train_alone` of a case by name."""
    return train_alone(CASES[name])


@lru_cache
def train_alone(case: Case) -> Trained:
    """The same steps of the captured program in float64, on this process."""
    model, stream = case.model(), Stream(torch.initial_seed())
    program = captured(model, case.batch(0), precision="fp64", loss_fn=case.loss_fn)
    held = dict(model.named_parameters())
    values = {
        n: p.detach().to(torch.float64).requires_grad_(p.requires_grad) for n, p in held.items()
    }
    learned = {n: p for n, p in values.items() if p.requires_grad}
    buffers = whole_buffers(program, model)
    optimizer = adamw(learned.values())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(N_STEPS):
        loss, _ = reference_step(program, values, case.batch(step), buffers, stream.seed)
        stream.n_steps += 1
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: gradient(p).clone() for n, p in learned.items()}
        advance(optimizer)
    kept = {b.name: buffers[b.name] for b in program.buffers.values() if b.persistent}
    return Trained(tuple(losses), gradients, {n: p.detach() for n, p in values.items()} | kept)


def gradient(parameter: Tensor) -> Tensor:
    """A parameter that the loss does not depend on has gradient 0."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def errors(found: Sequence[Trained], wanted: Trained) -> dict[str, float]:
    """max|a - b| / max(1, max|b|) of every loss, gradient and value; infinite where absent."""
    whole = found[0]
    out = {
        f"loss of step {i} on rank {rank}": error(torch.tensor(a), torch.tensor(b))
        for rank, trained in enumerate(found)
        for i, (a, b) in enumerate(zip(trained.losses, wanted.losses, strict=True))
    }
    for what, given, right in (
        ("gradient", whole.gradients, wanted.gradients),
        ("value", whole.values, wanted.values),
    ):
        for name, tensor in right.items():
            absent = name not in given
            out[f"{what} of {name}"] = float("inf") if absent else error(given[name], tensor)
    return out


def error(a: Tensor, b: Tensor) -> float:
    """The parity law; NaN counts as infinite."""
    off = (a.double() - b.double()).abs().max().item()
    scale = max(1.0, b.double().abs().max().item())
    return off / scale if off == off else float("inf")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
