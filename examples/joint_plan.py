"""Plan Llama-3-8B for 16 GPUs, on a machine that has none: `python -m examples.joint_plan`.

The model is on `meta`, so nothing is allocated. One search decides where the model is cut into
stages, which devices each stage has, how every operator is sharded there, and how many microbatches
there are. The plan is drawn, and printed with the alternatives (data parallelism, ZeRO-3, Megatron
recipes with and without stages) and their predicted step times.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.units import format_seconds

# Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3; vocabulary from section 3.2.
LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "use_cache": False,
}  # fmt: skip


def llama(n_layers: int) -> torch.nn.Module:
    """The model in bf16 on meta, with its authors' sizes except for the number of layers."""
    config = AutoConfig.for_model("llama", **{**LLAMA_3_8B, "num_hidden_layers": n_layers})
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--layers", type=int, default=32)
    words.add_argument("--batch", type=int, default=512, help="sequences of one step")
    words.add_argument("--seq", type=int, default=4096)
    words.add_argument("--mesh", default="2x8", help="nodes x devices per node")
    words.add_argument("--hardware", default="a100-80gb")
    words.add_argument("--report", type=Path, default=Path("llama_plan.html"))
    given = words.parse_args()
    ids = torch.empty(given.batch, given.seq, dtype=torch.int64, device="meta")
    mesh = autopar.Mesh(tuple(map(int, given.mesh.split("x"))), hardware=given.hardware)
    start_s = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    with console.status("capturing") as status:
        plan = autopar.plan(
            llama(given.layers), mesh, {"input_ids": ids, "labels": ids}, progress=status.update
        )
    console.print(plan.explain(), markup=False)
    console.print(f"\nplanned in {format_seconds(time.monotonic() - start_s)} on this machine")
    files = plan.report(given.report)
    console.print(f"page: {files.page}, graph: {files.dot}", markup=False)


if __name__ == "__main__":
    main()
