"""GPT-2 in tensor parallel, written by hand the way Megatron-LM does it.

It is the baseline that autopar is compared with (`examples/compare.py`), and does not use autopar.
The sharding is that of Shoeybi et al., arXiv:1909.08053, section 3:

    wte                  rows (vocabulary) cut; ids of other ranks give zero rows; g
    wpe, layer norms     whole on every rank, and so are the hidden states
    c_attn, c_fc         column parallel: outputs cut (c_attn by head), f before
    c_proj (both)        row parallel: inputs cut, g after, then the whole bias
    head                 wte again, column parallel; logits stay cut over the vocabulary
    loss                 vocabulary-parallel cross-entropy: three all_reduces of one number
                         per token

    f   nothing forward, all_reduce backward
    g   all_reduce forward, nothing backward

So a step of L layers over T tokens of width h has 2L + 1 all_reduces of T·h elements forward, as
many backward, and three of T elements. Gradients need no other synchronisation: a whole tensor has
the same gradient on every rank.

Weights are slices of a `GPT2LMHeadModel`'s state dict. With one rank, the ordinary operators run.
Left out: dropout, sequence parallelism, and the overlap of f's all_reduce with the gradient of the
weight. `examples/compare.py` also compares it with DTensor's `parallelize_module` on the same plan
(`examples/dtensor_gpt2.py`), because a baseline must not be a slow one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100  # label that the loss ignores, as in torch and Hugging Face
Phase = Literal["forward", "backward"]


class Call(NamedTuple):
    """One collective of this rank; `size_bytes` is the size of its buffer."""

    kind: str
    phase: str
    size_bytes: int


@dataclass
class TensorParallel:
    """The ranks that share one model, seen from one of them; counts its `calls`.

    A number that changes is a reason for `torch.compile` to compile again: compiled, count none.
    """

    group: dist.ProcessGroup
    calls: Counter[Call] = field(default_factory=Counter)
    is_counting: bool = True

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank(), self.group.size()

    def all_reduce(self, x: Tensor, phase: Phase, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce `x` in place, and return it."""
        if self.is_counting:
            self.calls[Call("all_reduce", phase, x.nbytes)] += 1
        dist.all_reduce(x, op=op, group=self.group)
        return x

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's contiguous shard of `x`, as a copy."""
        if x.shape[dim] % self.size:
            raise ValueError(
                f"{self.size} ranks do not divide dim {dim} of a weight of shape {tuple(x.shape)}"
            )
        return x.detach().chunk(self.size, dim)[self.rank].clone()


class _Enter(torch.autograd.Function):
    """f: the ranks start to do different work with the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In place: the gradient is the fresh result of the one linear that reads f's output.
        return ctx.tp.all_reduce(gradient.contiguous(), "backward"), None


class _Leave(torch.autograd.Function):
    """g: the ranks' partial sums become one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.mark_dirty(x)
        return tp.all_reduce(x, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter(x: Tensor, tp: TensorParallel) -> Tensor:
    if tp.size == 1:
        return x
    out: Tensor = _Enter.apply(x, tp)
    return out


def leave(x: Tensor, tp: TensorParallel) -> Tensor:
    """Overwrites `x`, which must be contiguous and not saved by any operator."""
    if tp.size == 1:
        return x
    out: Tensor = _Leave.apply(x, tp)
    return out


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the outputs cut: * h -> * f/t. `weight` and `bias` are this rank's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.tp = nn.Parameter(weight), tp
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(enter(x, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the inputs cut: * f/t -> * h. The bias is whole, and added once."""

    def __init__(self, weight: Tensor, bias: Tensor, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias, self.tp = nn.Parameter(weight), nn.Parameter(bias), tp

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        return leave(F.linear(x, self.weight), self.tp) + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table cut along the vocabulary; `logits` uses it again as the output layer."""

    def __init__(self, weight: Tensor, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.tp = nn.Parameter(weight), tp

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local, others = _local_ids(ids, self.weight.shape[0], self.tp)
        rows = F.embedding(local, self.weight).masked_fill_(others.unsqueeze(-1), 0)
        return leave(rows, self.tp)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(enter(x, self.tp), self.weight)


def _local_ids(ids: Tensor, n_local: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank's shard (0 for ids of other ranks), and a mask of those others."""
    local = ids - tp.rank * n_local
    others = (local < 0) | (local >= n_local)
    return local.masked_fill(others, 0), others


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses per token, n v/t, n -> n:  log Σ exp(z − m) − (z_y − m),  m = max z."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorParallel) -> Tensor:
        peak = tp.all_reduce(logits.amax(dim=1), "forward", dist.ReduceOp.MAX)
        shifted = logits - peak.unsqueeze(1)
        local, others = _local_ids(labels, logits.shape[1], tp)
        local = local.unsqueeze(1)
        picked = shifted.gather(1, local).squeeze(1).masked_fill_(others, 0)
        tp.all_reduce(picked, "forward")
        softmax = shifted.exp_()
        total = tp.all_reduce(softmax.sum(dim=1), "forward")
        softmax.div_(total.unsqueeze(1))
        ctx.save_for_backward(softmax, local, others)
        return total.log_().sub_(picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, others = ctx.saved_tensors
        # In place, as in Megatron: backward runs once.
        hit = (~others).to(softmax.dtype).unsqueeze(1)
        softmax.scatter_add_(1, local, hit.neg_())
        return softmax.mul_(gradient.unsqueeze(1)), None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of losses over labels that are not ignored: n v/t, n -> scalar."""
    if tp.size == 1:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    counted = labels != IGNORED
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, labels.where(counted, 0), tp)
    return losses.mul(counted).sum()


def next_tokens(labels: Tensor) -> Tensor:
    """The label of a position is the next token; the last has none: b s -> b*s."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()


def n_counted(following: Tensor) -> Tensor:
    """The number of labels that the loss is the mean over."""
    return (following != IGNORED).sum()


class Attention(nn.Module):
    """Causal attention over this rank's heads."""

    def __init__(self, values: Mapping[str, Tensor], n_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        if n_heads % tp.size:
            raise ValueError(f"{tp.size} ranks do not divide {n_heads} heads")
        self.n_heads = n_heads // tp.size
        # Hugging Face stores q, k and v side by side; a rank takes its heads from each.
        weights = [tp.part(w.t(), 0) for w in values["c_attn.weight"].chunk(3, 1)]
        biases = [tp.part(b, 0) for b in values["c_attn.bias"].chunk(3)]
        self.qkv = ColumnParallelLinear(torch.cat(weights), torch.cat(biases), tp)
        out = tp.part(values["c_proj.weight"].t(), 1).contiguous()
        self.out = RowParallelLinear(out, values["c_proj.bias"].clone(), tp)

    def forward(self, x: Tensor) -> Tensor:
        n_rows, length, _ = x.shape
        q, k, v = (
            part.view(n_rows, length, self.n_heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(n_rows, length, -1))
        return y


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and with a residual."""

    activation: Callable[[Tensor], Tensor]

    def __init__(self, values: Mapping[str, Tensor], n_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.activation = partial(F.gelu, approximate="tanh")
        self.norm_1, self.norm_2 = layer_norm(values, "ln_1."), layer_norm(values, "ln_2.")
        self.attention = Attention(below(values, "attn."), n_heads, tp)
        up, down = values["mlp.c_fc.weight"].t(), values["mlp.c_proj.weight"].t()
        self.up = ColumnParallelLinear(
            tp.part(up, 0).contiguous(), tp.part(values["mlp.c_fc.bias"], 0), tp
        )
        self.down = RowParallelLinear(
            tp.part(down, 1).contiguous(), values["mlp.c_proj.bias"].clone(), tp
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.down(self.activation(self.up(self.norm_2(x))))
        return y


class MegatronGPT2(nn.Module):
    """One rank's part of a GPT-2; `forward` returns the loss, the same on every rank.

    values: the state dict of a `GPT2LMHeadModel` (layer norms with eps 1e-5, a tied head, and
    the tanh form of GELU, Hugging Face's "gelu_new" and "gelu_pytorch_tanh").
    """

    def __init__(self, values: Mapping[str, Tensor], n_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        values = below({name: v.detach() for name, v in values.items()}, "transformer.")
        n_layers = 1 + max(int(name.split(".")[1]) for name in values if name.startswith("h."))
        self.embedding = VocabParallelEmbedding(tp.part(values["wte.weight"], 0), tp)
        self.positions = nn.Parameter(values["wpe.weight"].clone())
        self.blocks = nn.Sequential(
            *(Block(below(values, f"h.{i}."), n_heads, tp) for i in range(n_layers))
        )
        self.norm = layer_norm(values, "ln_f.")
        self.tp = tp

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        logits = self.embedding.logits(self.norm(self.blocks(x)))
        following = next_tokens(labels)
        total = vocab_parallel_cross_entropy(logits.flatten(0, 1), following, self.tp)
        return total / n_counted(following)


def below(values: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)}


def layer_norm(values: Mapping[str, Tensor], prefix: str) -> nn.LayerNorm:
    weight, bias = values[f"{prefix}weight"], values[f"{prefix}bias"]
    norm = nn.LayerNorm(weight.shape, dtype=weight.dtype)
    norm.weight, norm.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return norm
