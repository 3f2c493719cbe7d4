"""GPT-2 in tensor parallel by DTensor's `parallelize_module`, sharded like the hand-written one.

It checks the baseline: `examples/megatron_gpt2.py` must not be slower than what PyTorch itself
offers for the same sharding.

    embedding         RowwiseParallel: rows (vocabulary) cut, then all_reduce
    qkv, up           ColwiseParallel: outputs cut; all_reduce of the input's gradient
    out, down         RowwiseParallel: inputs cut, then all_reduce
    head              the embedding's table again, ColwiseParallel; logits stay cut
    loss              `loss_parallel`: cross-entropy over logits cut along the vocabulary
    all else          plain tensors, whole on every rank

ColwiseParallel cuts a weight into contiguous rows. The rows of q, k and v are therefore regrouped
by head, so that a rank gets q, k and v of its own heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from examples.megatron_gpt2 import IGNORED, Call, Phase, below, layer_norm, next_tokens

PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.qkv": ColwiseParallel(),
    "blocks.*.out": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(use_local_output=False),
}


class Block(nn.Module):
    """Attention over the heads in the output of `qkv`, and an MLP."""

    def __init__(self, values: Mapping[str, Tensor], n_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = layer_norm(values, "ln_1."), layer_norm(values, "ln_2.")
        weight, bias = values["attn.c_attn.weight"].t(), values["attn.c_attn.bias"]
        self.head_width = weight.shape[1] // n_heads
        self.qkv = linear(
            weight.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(0, 2),
            bias.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(),
        )
        self.out = linear(values["attn.c_proj.weight"].t(), values["attn.c_proj.bias"])
        self.up = linear(values["mlp.c_fc.weight"].t(), values["mlp.c_fc.bias"])
        self.down = linear(values["mlp.c_proj.weight"].t(), values["mlp.c_proj.bias"])

    def forward(self, x: Tensor) -> Tensor:
        # b s (heads 3 width) -> 3 of b heads s width
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return y


class DTensorGPT2(nn.Module):
    """One rank's part of a GPT-2 with a tied head; `values` as for `MegatronGPT2`."""

    def __init__(self, values: Mapping[str, Tensor], n_heads: int, mesh: DeviceMesh) -> None:
        super().__init__()
        values = below({name: v.detach() for name, v in values.items()}, "transformer.")
        n_layers = 1 + max(int(name.split(".")[1]) for name in values if name.startswith("h."))
        table = values["wte.weight"]
        self.embedding = nn.Embedding.from_pretrained(table.clone(), freeze=False)
        self.positions = nn.Parameter(values["wpe.weight"].clone())
        self.blocks = nn.Sequential(
            *(Block(below(values, f"h.{i}."), n_heads) for i in range(n_layers))
        )
        self.norm = layer_norm(values, "ln_f.")
        self.head = linear(table, None)
        parallelize_module(self, mesh, PLAN)
        self.head.weight = self.embedding.weight  # both are cut along the vocabulary

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), next_tokens(labels), ignore_index=IGNORED)

    def forward_backward(self, calls: Counter[Call] | None = None, **batch: Any) -> Tensor:
        """The loss, detached; gradients add to `.grad`. `calls` counts collectives."""
        with loss_parallel():
            with _Recorder(calls, "forward"):
                loss = self(**batch)
            with _Recorder(calls, "backward"):
                loss.backward()
        assert isinstance(loss, DTensor)
        return loss.to_local().detach()


class _Recorder(TorchDispatchMode):
    """Counts the collectives that DTensor makes; does nothing if `calls` is None."""

    def __init__(self, calls: Counter[Call] | None, phase: Phase) -> None:
        super().__init__()
        self.calls, self.phase = calls, phase

    def __enter__(self) -> Any:
        return self if self.calls is None else super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.calls is not None:
            super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls again with operators on local tensors
        if func.namespace == "_c10d_functional":
            name = func._schema.name.partition("::")[2].removesuffix("_")
            if name != "wait_tensor" and not name.startswith("_"):
                assert self.calls is not None
                self.calls[Call(name, self.phase, args[0].nbytes)] += 1
        return func(*args, **(kwargs or {}))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """f h (and f) -> a layer with a copy of them."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer
