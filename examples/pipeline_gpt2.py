"""GPT-2 in two pipeline stages under `torch.distributed.pipelining`, written by hand.

It is the baseline of pipeline parallelism, and does not use autopar. Ranks are numbered with the
tensor-parallel index fastest: rank = stage · t + index in the stage's group of t ≥ 1 ranks. Inside
a stage the layers are those of `examples/megatron_gpt2.py`.

    stage 0    embeddings, the first half of the blocks            ids -> hidden states
    stage 1    the second half, the last norm, the head            hidden states -> logits
    between    the hidden states of a microbatch, whole on every rank of a stage: rank i of one
               stage sends them to rank i of the next

The head is not tied to the embedding. `torch.distributed.pipelining` does not add up the gradients
of a weight that two stages use; the user would have to write that sum, with one more collective a
step. So the model to compare with is a `GPT2LMHeadModel` with `tie_word_embeddings=False`.

The loss is the model's: the mean over all labels that are not ignored. A microbatch's loss is its
sum / the number of such labels in the whole batch, so losses and gradients add up over
microbatches. If all microbatches have equally many such labels, it is the mean of their means.

The shapes between stages are given to the stages. That saves torch a forward pass to find them.
Outputs are not collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from examples.megatron_gpt2 import (
    Block,
    ColumnParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    below,
    layer_norm,
    n_counted,
    next_tokens,
    vocab_parallel_cross_entropy,
)

N_STAGES = 2
ScheduleName = Literal["gpipe", "1f1b"]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class FirstStage(nn.Module):
    """Embeddings and the first half of the blocks: b s -> b s h.

    values: the state dict of a `GPT2LMHeadModel`; see `MegatronGPT2`.
    """

    def __init__(self, values: Mapping[str, Tensor], n_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(tp.part(values["transformer.wte.weight"], 0), tp)
        self.positions = nn.Parameter(values["transformer.wpe.weight"].detach().clone())
        self.blocks = half_of_blocks(values, 0, n_heads, tp)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.embedding(ids) + self.positions[: ids.shape[1]])
        return x


class LastStage(nn.Module):
    """The second half, the last norm and the head: b s h -> b s v/t."""

    def __init__(self, values: Mapping[str, Tensor], n_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.blocks = half_of_blocks(values, 1, n_heads, tp)
        self.norm = layer_norm(values, "transformer.ln_f.")
        self.head = ColumnParallelLinear(tp.part(values["lm_head.weight"], 0), None, tp)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def half_of_blocks(
    values: Mapping[str, Tensor], half: int, n_heads: int, tp: TensorParallel
) -> nn.Sequential:
    """The blocks of one half: of n blocks, half 0 has those with i < n // 2."""
    layers = below({name: v.detach() for name, v in values.items()}, "transformer.h.")
    n_layers = 1 + max(int(name.split(".")[0]) for name in layers)
    ids = range(n_layers // 2) if half == 0 else range(n_layers // 2, n_layers)
    return nn.Sequential(*(Block(below(layers, f"{i}."), n_heads, tp) for i in ids))


class PipelineGPT2:
    """This rank's stage, and the steps of its schedule.

    Every rank of the world must construct one at the same time. `n_tensor` ranks share a stage.
    `rows` and `length` are those of the global batch, which every rank gets whole.

    Raises `ValueError` if there are not `N_STAGES` · `n_tensor` ranks, or if microbatches would be
    uneven.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        n_heads: int,
        rows: int,
        length: int,
        n_microbatches: int,
        schedule: ScheduleName = "1f1b",
        n_tensor: int = 1,
    ) -> None:
        if dist.get_world_size() != N_STAGES * n_tensor:
            raise ValueError(f"{dist.get_world_size()} ranks are not {N_STAGES} x {n_tensor}")
        if rows % n_microbatches:
            raise ValueError(f"{n_microbatches} microbatches do not divide {rows} rows")
        self.index, place = divmod(dist.get_rank(), n_tensor)
        self.tp = TensorParallel(
            _own_group([[s * n_tensor + i for i in range(n_tensor)] for s in range(N_STAGES)])
        )
        pipeline = _own_group(
            [[s * n_tensor + i for s in range(N_STAGES)] for i in range(n_tensor)]
        )
        assert self.tp.rank == place
        self.module = (FirstStage, LastStage)[self.index](values, n_heads, self.tp)
        taken, given = self._boundary(values, rows // n_microbatches, length)
        stage = PipelineStage(
            self.module, self.index, N_STAGES, torch.device("cpu"), taken, given, group=pipeline
        )
        self._schedule = SCHEDULES[schedule](
            stage, n_microbatches, loss_fn=self._loss, scale_grads=False
        )
        self._n_counted = torch.ones(())

    def _boundary(
        self, values: Mapping[str, Tensor], rows: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Tensors shaped like the stage's input and output, for `PipelineStage`."""
        table = values["transformer.wte.weight"]
        hidden = torch.empty(rows, length, table.shape[1], dtype=table.dtype, requires_grad=True)
        if self.index == 0:
            return torch.empty(rows, length, dtype=torch.int64), hidden
        n_logits = values["lm_head.weight"].shape[0] // self.tp.size
        return hidden, torch.empty(rows, length, n_logits, dtype=table.dtype, requires_grad=True)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = vocab_parallel_cross_entropy(logits.flatten(0, 1), next_tokens(labels), self.tp)
        return total / self._n_counted

    def step(self, input_ids: Tensor, labels: Tensor) -> Tensor | None:
        """Forward and backward; gradients add to `.grad`. Only the last stage returns the loss."""
        if self.index == 0:
            self._schedule.step(input_ids, return_outputs=False)
            return None
        self._n_counted = n_counted(next_tokens(labels))
        losses: list[Tensor] = []
        self._schedule.step(target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().sum()


def _own_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """The group of this rank; all ranks together make a group for each set of ranks."""
    own, _ = dist.new_subgroups_by_enumeration(partition)
    assert own is not None
    return own
