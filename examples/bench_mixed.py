"""Predict published runs in mixed precision with plans of unmodified models: `make bench-mixed`.

The layout is that of the run (`manual`), so only predictions are compared. Times are those of one
Python operator after the other: runs that were compiled, or that had fused kernels, are faster.

    run         id in `cost/published/published_runs.json`, which has source and software; or below
    measured    seconds of a step, as published
    predicted   the same of the plan, and by how much it is off
    waits       share of the predicted step in communication that compute does not hide
    pointwise   share of compute that operators without matmuls take
    memory      predicted peak, and published, of a rank
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Manual, Mesh, Plan
from autopar.program.lines import CallLine, line_counts

# torchtitan@b5bcd76c, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: vanilla tensor
# parallelism, torch.compile, full recompute; 16 rows a GPU, tokens per second and GPU.
LLAMA_70B_256: dict[str, Any] = {
    "id": "titan_70B_256_bf16_tp8", "gpus": 256, "profile": "h100-96gb",
    "model": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "seq": 8192,
              "vocab": 128256},
    "dp": 32, "tp": 8, "pp": 1, "sp": True, "zero": 3, "recompute": "full", "microbatch": 16,
    "global_batch": 512, "metric": {"tokens_per_sec_per_gpu": 597.3},
}  # fmt: skip
RUNS = Path(autopar.__file__).parent / "cost" / "published" / "published_runs.json"


def llama(model: dict[str, Any]) -> nn.Module:
    return made(
        "llama", num_hidden_layers=model["layers"], hidden_size=model["hidden"],
        num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"],
        intermediate_size=model["ffn"], vocab_size=model["vocab"],
        max_position_embeddings=model["seq"], tie_word_embeddings=False,
    )  # fmt: skip


def gpt(model: dict[str, Any]) -> nn.Module:
    return made(
        "gpt2", n_layer=model["layers"], n_embd=model["hidden"], n_head=model["heads"],
        n_positions=model["seq"], vocab_size=model["vocab"],
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def made(family: str, **sizes: Any) -> nn.Module:
    config = AutoConfig.for_model(family, use_cache=False, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """A published run, the model it trained, and the mesh."""

    run: str
    model: Callable[[dict[str, Any]], nn.Module]
    mesh: tuple[int, int]
    precision: str = "bf16-mixed"


CASES = (
    Case("titan_8B_8_FSDP", llama, (1, 8)),
    Case("titan_8B_8_FSDP+compile", llama, (1, 8)),
    Case("titan_8B_64_bf16_tp8", llama, (8, 8)),
    Case("titan_70B_256_bf16_tp8", llama, (32, 8)),
    Case("meg21_t2_ptd_175B_384", gpt, (48, 8), "fp16-mixed"),
)


def planned(case: Case, run: dict[str, Any]) -> Plan:
    ids = torch.empty(run["global_batch"], run["model"]["seq"], dtype=torch.int64, device="meta")
    layout = Manual(
        dp=run["dp"], tp=run["tp"], pp=run["pp"], sp=run["sp"], zero=run["zero"],
        recompute=run["recompute"],
    )  # fmt: skip
    return autopar.plan(
        case.model(run["model"]), Mesh(case.mesh, hardware=run["profile"]),
        {"input_ids": ids, "labels": ids}, manual=layout, precision=case.precision,
        microbatches=run["global_batch"] // (run["microbatch"] * run["dp"]),
    )  # fmt: skip


def measured_s(run: dict[str, Any]) -> float:
    if "derived_iter_seconds" in run:
        return float(run["derived_iter_seconds"])
    tokens = run["global_batch"] * run["model"]["seq"]
    return float(tokens / run["gpus"] / run["metric"]["tokens_per_sec_per_gpu"])


def pointwise(plan: Plan) -> float:
    """Share of operators without matmuls in the compute of the first stage."""
    assert plan.bound is not None
    program = plan.bound.pipeline.stages[0]
    seconds = [
        (line.flops == 0, (line.forward_s + line.backward_s) * n)
        for line, n in zip(program.body, line_counts(program), strict=True)
        if isinstance(line, CallLine)
    ]
    return sum(s for is_light, s in seconds if is_light) / sum(s for _, s in seconds)


def main() -> None:
    shipped = json.loads(RUNS.read_text())["runs"]
    runs = {run["id"]: run for run in (*shipped, LLAMA_70B_256)}
    table = Table(
        "run", "measured s", "predicted s", "off", "MFU", "waits", "pointwise", "memory GiB"
    )
    for case in CASES:
        run = runs[case.run]
        plan = planned(case, run)
        step_s, wanted_s = plan.predicted.step_time_s, measured_s(run)
        held = f"{plan.predicted.peak_bytes / 2**30:.1f}"
        published = run["metric"].get("mem_gib")
        table.add_row(
            case.run, f"{wanted_s:.2f}", f"{step_s:.2f}", f"{step_s / wanted_s - 1:+.1%}",
            f"{plan.predicted.mfu:.1%}", f"{plan.predicted.exposed_comm_s / step_s:.0%}",
            f"{pointwise(plan):.0%}",
            f"{held} ({published})" if published else held,
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
