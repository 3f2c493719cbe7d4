"""Mixtures of experts as users write them: one model, with experts in several forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, FEATURES, N_EXPERTS, CHOSEN, N_TOKENS = 8, 16, 4, 2, 8


class Mixture(nn.Module):
    """A layer, a mixture of gated experts beside it, a layer and a loss."""

    n_experts = N_EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, self.n_experts, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.make_experts()

    def make_experts(self) -> None:
        raise NotImplementedError

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        """The mixture of rows `x`; `gates` and `ids` [tokens, chosen]."""
        raise NotImplementedError

    def hidden(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gates, ids = self.router(x).softmax(-1).topk(CHOSEN)
        out: Tensor = self.last(x + self.mix(x, gates / gates.sum(-1, keepdim=True), ids))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x).pow(2).mean()


class Deep(nn.Module):
    """Layers of mixtures."""

    def __init__(self, mixture: type[Mixture], n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mixture() for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Mixture)
            x = layer.hidden(x)
        return x.pow(2).mean()


class _Three(Mixture):
    def make_experts(self) -> None:
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.randn(N_EXPERTS, *shape) / 4)
            for shape in ((FEATURES, WIDTH), (WIDTH, FEATURES), (FEATURES, WIDTH))
        )


class Grouped(_Three):
    """Three stacks of matrices and `F.grouped_mm`, as torchtitan."""

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.flatten().float(), bins=N_EXPERTS, min=0, max=N_EXPERTS)
        order = torch.argsort(ids.flatten(), stable=True)
        token = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
        rows, ends = torch.gather(x, 0, token), torch.cumsum(counts, 0, dtype=torch.int32)
        gate = F.silu(F.grouped_mm(rows, self.w1.transpose(-2, -1), offs=ends))
        up = F.grouped_mm(rows, self.w3.transpose(-2, -1), offs=ends)
        y = F.grouped_mm(gate * up, self.w2.transpose(-2, -1), offs=ends)
        y = y * gates.flatten()[order].reshape(-1, 1)
        return torch.zeros_like(x).scatter_add(0, token, y)


class Counted(_Three):
    """The same with other words: `bincount`, look-ups, and rows put back before they are added."""

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        ends = torch.bincount(ids.view(-1), minlength=N_EXPERTS).cumsum(0).to(torch.int32)
        rows = x[order // CHOSEN]
        gate = F.silu(torch._grouped_mm(rows, self.w1.mT, ends))
        y = torch._grouped_mm(gate * torch._grouped_mm(rows, self.w3.mT, ends), self.w2.mT, ends)
        back = torch.zeros_like(y)
        back[order] = y
        return torch.bmm(gates.unsqueeze(1), back.view(-1, CHOSEN, WIDTH)).squeeze(1)


class Batched(_Three):
    """Three batched matmuls, with a matrix for each row."""

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        rows, flat = x.repeat_interleave(CHOSEN, 0).unsqueeze(-1), ids.flatten()
        gate, up = (torch.bmm(w[flat], rows).squeeze(-1) for w in (self.w1, self.w3))
        y = torch.bmm(self.w2[flat], (F.silu(gate) * up).unsqueeze(-1))
        return (y.view(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


class Halves(Mixture):
    """Two stacks of matrices and `F.grouped_mm`; gate and up are halves of the features."""

    def make_experts(self) -> None:
        self.into = nn.Parameter(torch.randn(N_EXPERTS, WIDTH, 2 * FEATURES) / 4)
        self.out = nn.Parameter(torch.randn(N_EXPERTS, FEATURES, WIDTH) / 4)

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        numbers, order = ids.flatten().sort()
        ends = torch.searchsorted(numbers, torch.arange(N_EXPERTS), right=True).int()
        rows = x.repeat_interleave(CHOSEN, 0)[order]
        gate, up = F.grouped_mm(rows, self.into, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.out, offs=ends)
        return (y[order.argsort()].view(-1, CHOSEN, WIDTH) * gates[..., None]).sum(1)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, FEATURES, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FEATURES, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Loop(Mixture):
    """A loop over modules that adds up their rows, as Mixtral in transformers 4."""

    def make_experts(self) -> None:
        self.experts = nn.ModuleList(Expert() for _ in range(self.n_experts))

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = F.one_hot(ids, N_EXPERTS).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(chosen[e])
            rows = x[None, token].reshape(-1, WIDTH)
            out.index_add_(0, token, expert(rows) * gates[token, slot, None])
        return out


class Masked(Loop):
    """A loop that writes rows by masks, as DeepSeek's."""

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        rows, flat = x.repeat_interleave(CHOSEN, dim=0), ids.view(-1)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(rows[flat == e])
        return (y.view(-1, CHOSEN, WIDTH) * gates.unsqueeze(-1)).sum(1)


class Added(Loop):
    """A loop with `+=`, as in Mistral's reference."""

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out[token] += gates[token, slot, None] * expert(x[token])
        return out


class Biased(Loop):
    """A loop over plain experts with biases."""

    def make_experts(self) -> None:
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, FEATURES), nn.GELU(), nn.Linear(FEATURES, WIDTH), nn.Dropout(0.0)
            )
            for _ in range(N_EXPERTS)
        )

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        for e, expert in enumerate(self.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * gates[token, slot].unsqueeze(1))
        return out


class LoopOfStacks(Halves):
    """A loop over the matrices of stacks."""

    def mix(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(N_EXPERTS):
            token, slot = torch.where(ids == e)
            gate, up = (x[token] @ self.into[e]).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ self.out[e]
            out.index_put_((token,), y * gates[token, slot, None], accumulate=True)
        return out


MIXTURES: tuple[type[Mixture], ...] = (
    Grouped, Counted, Batched, Halves, Loop, Masked, Added, Biased, LoopOfStacks,
)  # fmt: skip
