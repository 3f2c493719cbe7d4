"""A GPT-2 whose activations are most of its memory, and plans of it that may recompute."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Device, Link, Mesh, Plan
from tests.helpers.machines import one_node
from tests.helpers.plans import bound_of

N_LAYERS, BATCH, SEQUENCE, WIDTH, WORDS = 4, 16, 32, 64, 256


def model(kind: str, n_layers: int = N_LAYERS) -> torch.nn.Module:
    """Attention is fused if `kind` is "plain", fused with dropout of its weights if "dropped", and
    primitives with dropout if "eager"."""
    torch.manual_seed(0)
    drop = 0.0 if kind == "plain" else 0.1
    config = AutoConfig.for_model(
        "gpt2", n_layer=n_layers, n_embd=WIDTH, n_head=4, vocab_size=WORDS, n_positions=SEQUENCE,
        resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager" if kind == "eager" else "sdpa",
    )  # fmt: skip
    found: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return found


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def slow_links(n_ranks: int) -> Mesh:
    """Shards of parameters are expensive to gather."""
    device = Device(1e12, 1e11, 1e10, 1e-9)
    return Mesh((1, n_ranks), links=[Link(1e-7, 1e-9)] * 2, device=device)


@cache
def planned_gpt2(
    n: int, limit: int | None, recompute: str = "auto", forbid: str = "", n_layers: int = 2
) -> Plan:
    """On one device, or on several with slow links. With one microbatch, so that more of them
    cannot save memory."""
    return autopar.plan(
        model("plain", n_layers), one_node(1) if n == 1 else slow_links(n), batch(),
        precision="fp64", stages=1, microbatches=1, memory_limit=limit, recompute=recompute,
        forbid=forbid.split(),
    )  # fmt: skip


def modes_of(plan: Plan) -> Counter[str]:
    return Counter(item.mode for s in bound_of(plan).stages for item in s.strategy.recomputed)
