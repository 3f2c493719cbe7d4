"""GPT-2 in pipeline stages under `torch.distributed.pipelining`, written by hand.

It is the baseline of pipeline parallelism, and does not use autopar. There are two pipeline ranks.
Ranks are numbered with the tensor-parallel index fastest: rank = pipeline rank · t + index in its
group of t ≥ 1 ranks. Inside a stage the layers are those of `examples/megatron_gpt2.py`.

    stage 0       embeddings, the first blocks          ids -> hidden states
    others        blocks                                hidden states -> hidden states
    last stage    blocks, the last norm, the head       hidden states -> logits
    between       the hidden states of a microbatch, whole on every rank of a stage: rank i of one
                  stage sends them to rank i of the next

    gpipe, 1f1b, zero-bubble    a stage on each rank
    interleaved                 two: stages 0 and 2, 1 and 3
    zero-bubble-v               two, in a V: stages 0 and 3, 1 and 2

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
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

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

N_PIPELINE = 2
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]
# The stages of each pipeline rank.
STAGES: Mapping[ScheduleName, tuple[tuple[int, ...], ...]] = {
    "gpipe": ((0,), (1,)),
    "1f1b": ((0,), (1,)),
    "interleaved": ((0, 2), (1, 3)),
    "zero-bubble": ((0,), (1,)),
    "zero-bubble-v": ((0, 3), (1, 2)),
}

_SCHEDULES: Mapping[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}


class Stage(nn.Module):
    """Stage `index` of `n_stages`: its blocks, and what only the first or the last stage has.

    values: the state dict of a `GPT2LMHeadModel`; see `MegatronGPT2`. Of n blocks, the stage has
    those from index n // n_stages on.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        index: int,
        n_stages: int,
        n_heads: int,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        if self.is_first:
            table = tp.part(values["transformer.wte.weight"], 0)
            self.embedding = VocabParallelEmbedding(table, tp)
            self.positions = nn.Parameter(values["transformer.wpe.weight"].detach().clone())
        layers = below({name: v.detach() for name, v in values.items()}, "transformer.h.")
        n_layers = 1 + max(int(name.split(".")[0]) for name in layers)
        own = range(index * n_layers // n_stages, (index + 1) * n_layers // n_stages)
        self.blocks = nn.Sequential(*(Block(below(layers, f"{i}."), n_heads, tp) for i in own))
        if self.is_last:
            self.norm = layer_norm(values, "transformer.ln_f.")
            self.head = ColumnParallelLinear(tp.part(values["lm_head.weight"], 0), None, tp)

    def forward(self, x: Tensor) -> Tensor:
        """b s of ids, or b s h -> b s h, or b s v/t of the last stage."""
        if self.is_first:
            x = self.embedding(x) + self.positions[: x.shape[1]]
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.is_last else x


class PipelineGPT2:
    """This rank's stages, and the steps of its schedule.

    Every rank of the world must construct one at the same time. `n_tensor` ranks share a stage.
    `rows` and `length` are those of the global batch, which every rank gets whole.

    Raises `ValueError` if there are not `N_PIPELINE` · `n_tensor` ranks, or if microbatches would
    be uneven.
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
        if dist.get_world_size() != N_PIPELINE * n_tensor:
            raise ValueError(f"{dist.get_world_size()} ranks are not {N_PIPELINE} x {n_tensor}")
        if rows % n_microbatches:
            raise ValueError(f"{n_microbatches} microbatches do not divide {rows} rows")
        pipeline_rank, place = divmod(dist.get_rank(), n_tensor)
        self.tp = TensorParallel(
            _own_group([[p * n_tensor + i for i in range(n_tensor)] for p in range(N_PIPELINE)])
        )
        pipeline = _own_group(
            [[p * n_tensor + i for p in range(N_PIPELINE)] for i in range(n_tensor)]
        )
        assert self.tp.rank == place
        own = STAGES[schedule][pipeline_rank]
        n_stages = N_PIPELINE * len(own)
        self.module = nn.ModuleList(Stage(values, k, n_stages, n_heads, self.tp) for k in own)
        self.is_first, self.is_last = 0 in own, n_stages - 1 in own
        ends = self._boundaries(values, rows // n_microbatches, length, n_stages)
        stages = [
            PipelineStage(
                module, k, n_stages, torch.device("cpu"), ends[k], ends[k + 1], group=pipeline
            )
            for k, module in zip(own, self.module, strict=True)
        ]
        takes_one = schedule in ("gpipe", "1f1b")
        self._schedule = _SCHEDULES[schedule](
            stages[0] if takes_one else stages, n_microbatches,
            loss_fn=self._loss, scale_grads=False,
        )  # fmt: skip
        self._n_counted = torch.ones(())

    def _boundaries(
        self, values: Mapping[str, Tensor], rows: int, length: int, n_stages: int
    ) -> list[Tensor]:
        """Tensors shaped like what enters stage k, for `PipelineStage`; the last is what leaves."""
        table = values["transformer.wte.weight"]
        n_logits = values["lm_head.weight"].shape[0] // self.tp.size
        widths = [table.shape[1]] * (n_stages - 1) + [n_logits]
        return [
            torch.empty(rows, length, dtype=torch.int64),
            *(torch.empty(rows, length, n, dtype=table.dtype, requires_grad=True) for n in widths),
        ]

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = vocab_parallel_cross_entropy(logits.flatten(0, 1), next_tokens(labels), self.tp)
        return total / self._n_counted

    def step(self, input_ids: Tensor, labels: Tensor) -> Tensor | None:
        """Forward and backward; gradients add to `.grad`. Only ranks of the last stage return the
        loss."""
        ids = (input_ids,) if self.is_first else ()
        if not self.is_last:
            self._schedule.step(*ids, return_outputs=False)
            return None
        self._n_counted = n_counted(next_tokens(labels))
        losses: list[Tensor] = []
        self._schedule.step(*ids, target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().sum()


def _own_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """The group of this rank; all ranks together make a group for each set of ranks."""
    own, _ = dist.new_subgroups_by_enumeration(partition)
    assert own is not None
    return own
