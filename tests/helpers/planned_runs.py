"""Published runs priced twice under their software: by items of their dims, and as plans.

    python -m tests.helpers.planned_runs [RUN ...]    a table of both beside what was measured

Both take the software as it is shipped, without what a row says of its own. Attention is fused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autopar
from autopar import Manual, Mesh
from autopar.cost.hardware import load_software
from autopar.cost.published import PublishedRun, read_row, read_runs
from examples.bench_plan import Captured, causal

# Runs whose recipe a `Manual` one expresses: no layer runs again as a whole in Megatron's way, and
# no activations are sharded over tokens by torch, which copies them around each collective.
RUNS = (
    "titan_8B_8_FSDP", "titan_qwen3_32B_fsdp8_compile",
    "simumax_b200_llama3_70b_l12_tp1_pp2_dp4_mbc4", "simumax_b200_llama3_70b_tp2_pp1_dp4_l12_mbc4",
    "simumax_b200_llama3_70b_l12_tp4_pp1_dp2_mbc4", "simumax_b200_llama3_70b_l12_tp8_pp1_dp1_mbc4",
    "dgxc_llama31_8B_bf16_8", "dgxc_llama31_70B_bf16_64", "dgxc_llama31_405B_bf16_192_l42",
    "dgxc_gpt3_175B_bf16_512",
)  # fmt: skip


def read(run_id: str) -> PublishedRun:
    return read_row(next(run for run in read_runs().runs if run["id"] == run_id))


def by_items_s(run: PublishedRun) -> float:
    """Seconds of a step by the model of published runs."""
    return run.step(load_software(run.software.name)).step_time_s()


def as_plan_s(run: PublishedRun) -> float:
    """Seconds of a step of the plan with the run's layout."""
    recipe, software = run.recipe, load_software(run.software.name)
    words: dict[str, Any] = {"master_weights": True, "reduce_dtype": torch.float32}
    if software.fp32_parameters:
        words = {"precision": "bf16-mixed" if run.dtype == torch.bfloat16 else "fp16-mixed"}
    with torch.device("meta"):
        model, inputs, _ = model_of(run, torch.float32 if software.fp32_parameters else run.dtype)
    layout = Manual(
        tp=recipe.tp, pp=recipe.pp, dp=recipe.dp, cp=recipe.cp, interleave=recipe.interleave,
        sp=recipe.sp, zero=recipe.zero, recompute=recipe.recompute,
        microbatch_size=recipe.microbatch_size,
    )  # fmt: skip
    each = min(run.devices_per_node, recipe.n_ranks)
    mesh = Mesh((recipe.n_ranks // each, each), hardware=run.profile.name)
    plan = autopar.plan(
        model, mesh, inputs, manual=layout, software=software.name, memory_limit="1000TiB", **words
    )
    return plan.predicted.step_time_s


def model_of(run: PublishedRun, dtype: torch.dtype) -> Captured:
    """A Llama, or a Qwen3 where heads are normalised; a GPT-2 with GELU as one operator."""
    shape, batch = run.shape, run.recipe.global_batch
    if not shape.is_gated:
        return causal(
            "gpt2", batch, shape.seq, dtype, n_layer=shape.layers, n_embd=shape.hidden,
            n_head=shape.heads, n_inner=shape.ffn, vocab_size=shape.vocab, n_positions=shape.seq,
            activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    return causal(
        "qwen3" if shape.norms_heads else "llama", batch, shape.seq, dtype,
        num_hidden_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.ffn,
        vocab_size=shape.vocab, max_position_embeddings=shape.seq,
        tie_word_embeddings=bool(shape.ties_head),
    )  # fmt: skip


def main(names: list[str]) -> None:
    table = Table("run", "measured s", "by items", "as a plan", "apart", "software")
    for name in names or RUNS:
        run = read(name)
        items_s, plan_s = by_items_s(run), as_plan_s(run)
        measured = f"{run.step_time_s:.3f}" if run.step_time_s else "-"
        apart = f"{plan_s / items_s - 1:+.1%}"
        table.add_row(name, measured, f"{items_s:.3f}", f"{plan_s:.3f}", apart, run.software.name)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
