"""A model that draws in every way, a transformer with dropout, and jobs of real processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.helpers.jobs import N_STEPS, adamw, advance, gpt2, machine, squares

BATCH = SEQUENCE = WIDTH = 16  # equal, so that lengths do not tell which dim positions are of
HEADS, KEY_HEADS = 4, 2
P = 0.3


class Noisy(nn.Module):
    """Dropout of elements, weights of attention, channels and paths, and noise of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * KEY_HEADS * size)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + drop_path(self.attention(F.dropout(x, P))))
        h = F.rrelu(self.up(x), training=self.training)
        h = F.feature_alpha_dropout(F.alpha_dropout(h, P, self.training), P, self.training)
        x = x + F.dropout1d(self.down(h).transpose(1, 2), P).transpose(1, 2)
        return (x + noise(x)).pow(2).mean()

    def attention(self, x: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(
            heads(q), heads(k), heads(v), dropout_p=P, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)


def drop_path(x: Tensor) -> Tensor:
    """As vision models of transformers write it."""
    kept = 1 - P + torch.rand((x.shape[0], 1, 1), dtype=x.dtype)
    kept.floor_()
    return x.div(1 - P) * kept


def noise(x: Tensor) -> Tensor:
    gate = torch.bernoulli(torch.sigmoid(x)) + x.new_empty(x.shape[:2]).bernoulli_(P)[..., None]
    gumbel = -torch.empty_like(x).exponential_().log()
    jitter = torch.empty_like(x).uniform_(0.9, 1.1) + torch.randint(0, 3, x.shape[1:])
    return gate * jitter + 0.1 * torch.randn_like(x) + 0.1 * gumbel + torch.rand_like(x)


def rows(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, SEQUENCE, WIDTH)
    return {"x": torch.randn(shape, dtype=torch.float64, generator=generator)}


# -- jobs --------------------------------------------------------------------------------------


def dropped_gpt2(n_layers: int = 2, attention: str = "sdpa") -> nn.Module:
    """With the probabilities of its published configuration."""
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return gpt2(n_layers, **drop, attn_implementation=attention)


def eager_gpt2(n_layers: int = 2) -> nn.Module:
    """Its attention is matmuls, softmax and dropout, as the model writes them."""
    return dropped_gpt2(n_layers, "eager")


def parallel_mlp(seed: int) -> autopar.ParallelModule:
    """`seed`: of the random numbers of its steps."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(P), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(seed)
    return autopar.parallelize(
        model, machine((1, 2)), (rows(0)["x"][0],), precision="fp64", loss_fn=squares
    )


def train_interrupted(seed: int, path: str) -> tuple[list[float], list[float]]:
    """The losses of steps without interruption, and of those continued by another module."""
    torch.manual_seed(0)
    module = parallel_mlp(seed)
    optimizer = adamw(module.parameters())
    n_done = N_STEPS - 1
    _steps(module, optimizer, range(n_done))
    autopar.save(module, optimizer, path, n_done)
    straight = _steps(module, optimizer, range(n_done, 2 * N_STEPS))
    module = parallel_mlp(seed + 1)
    optimizer = adamw(module.parameters())
    first, _ = autopar.load(module, optimizer, path)
    return straight, _steps(module, optimizer, range(first, 2 * N_STEPS))


def _steps(
    module: autopar.ParallelModule, optimizer: torch.optim.Optimizer, numbers: range
) -> list[float]:
    losses = []
    for step in numbers:
        losses.append(module.step(rows(step)["x"][0]).item())
        advance(optimizer)
    return losses
