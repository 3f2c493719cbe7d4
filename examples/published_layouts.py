"""Published layouts beside the plan that the search finds: `make bench-layouts`, or for some runs

    python -m examples.published_layouts seqsel_t5_175B_full llama-8b-131k

A run is one of `cost/published/published_runs.json`, with its sources there, or one of `OTHERS`.
Both plans are of the same unmodified model in half precision, on the same GPUs, with the same
global batch; both steps are simulated. The layout is typed as `Manual`. Where it has several stages
a rank and does not fit, it is simulated with one. The search has two minutes, or the seconds
after `--limit`. Columns:

    published, layout, found  seconds of a step: as published, of the layout, of the plan found
    faster                    how much faster the plan found is than the layout
    cpu                       CPU seconds of the search, without capture

A run takes a minute or two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autopar.cost.published import read_row, read_runs
from autopar.errors import InfeasibleError
from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.binding.step_capture import capture_step
from autopar.planning.plan import Plan, plan_program
from autopar.units import format_seconds
from examples.bench_plan import Captured, causal

_LLAMA = {"heads": 32, "kv_heads": 8, "hidden": 4096, "ffn": 14336, "vocab": 128256, "layers": 32}
_H100 = {
    "hardware": "H100-80GB", "software": {"name": "transformer-engine"}, "dtype": "bf16",
    "metric": {},
}  # fmt: skip
_LAYOUT = {"interleave": 1, "sp": True, "zero": 1, "recompute": "none", "microbatch": 1}
# Layouts with cp. 8B and 70B at 8,192 tokens: NVIDIA/dgxc-benchmarking@143b90dd,
# llama3.1/README_8b.md and README_70b.md. 405B: README_405b.md there, without a step of this size.
# 8B at 131,072 tokens: NVIDIA/NeMo, docs/source/performance/performance_long_sequence.md (128K, on
# half as many B200s in float8); what it recomputes is not said. Mixtures: Qwen3 as the published
# run `bridge_qwen3_30B_h100_16_alltoall`; Mixtral: NVIDIA/NeMo@00138e21,
# nemo/collections/llm/recipes/mixtral_8x22b.py, on half of the ranks; DeepSeek-V3 as NVIDIA trains
# it on 1,024 H100s, NVIDIA-NeMo/Megatron-Bridge, docs/training/moe-optimization.md. Of these, the
# batches, and what is recomputed, are ours.
OTHERS: dict[str, dict[str, Any]] = {
    "llama-8b-8": {
        **_H100, **_LAYOUT, "gpus": 8, "global_batch": 128, "model": {**_LLAMA, "seq": 8192},
        "tp": 1, "cp": 2, "dp": 4, "pp": 1, "sp": False, "metric": {"iter_seconds": 12.91},
    },
    "llama-70b-64": {
        **_H100, **_LAYOUT, "gpus": 64, "global_batch": 128,
        "model": {**_LLAMA, "heads": 64, "hidden": 8192, "ffn": 28672, "layers": 80, "seq": 8192},
        "tp": 4, "cp": 2, "dp": 2, "pp": 4, "interleave": 5, "metric": {"iter_seconds": 14.72},
    },
    "llama-8b-131k": {
        **_H100, **_LAYOUT, "gpus": 64, "global_batch": 32, "model": {**_LLAMA, "seq": 131072},
        "tp": 2, "cp": 4, "dp": 8, "pp": 1, "recompute": "full",
    },
    "llama-405b-576": {
        **_H100, **_LAYOUT, "gpus": 576, "global_batch": 252,
        "model": {**_LLAMA, "heads": 128, "hidden": 16384, "ffn": 53248, "layers": 126,
                  "seq": 8192},
        "tp": 8, "cp": 2, "dp": 4, "pp": 9, "interleave": 7,
    },
    "qwen3-30b-a3b-16": {
        **_H100, "gpus": 16, "global_batch": 1024, "family": "qwen3_moe",
        "model": {"seq": 4096, "hidden_size": 2048, "num_hidden_layers": 48,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                  "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                  "vocab_size": 151936},
        **_LAYOUT, "tp": 1, "cp": 1, "dp": 16, "pp": 1, "ep": 16, "sp": False,
        "metric": {"iter_seconds": 41.25},
    },
    "mixtral-8x22b-64": {
        **_H100, "gpus": 64, "global_batch": 256, "family": "mixtral",
        "model": {"seq": 4096, "hidden_size": 6144, "num_hidden_layers": 56,
                  "num_attention_heads": 48, "num_key_value_heads": 8,
                  "intermediate_size": 16384, "num_local_experts": 8, "vocab_size": 32768},
        **_LAYOUT, "tp": 2, "cp": 2, "dp": 4, "pp": 4, "interleave": 14, "ep": 8,
    },
    "deepseek-v3-2048": {
        **_H100, "gpus": 2048, "global_batch": 8192, "family": "deepseek_v3",
        "model": {"seq": 4096},
        **_LAYOUT, "tp": 2, "cp": 1, "dp": 128, "pp": 8, "interleave": 4, "ep": 64, "etp": 1,
        "recompute": "full",
    },
}  # fmt: skip
RUNS = ("seqsel_t5_175B_full", "meg21_f12_int_B24", *OTHERS)
# Words of the sources -> profiles of `cost/hardware`.
_HARDWARE = {"A100-80GB": "a100-80gb", "H100-80GB": "h100-sxm"}
_N_LOCAL = 8


@dataclass(frozen=True)
class Compared:
    """Seconds of a step: as published, of the published layout simulated under the software that
    ran it and under autopar's, of the plan found.

    `cpu_s` is the search, `note` why the layout is not the published one.
    """

    name: str
    published_s: float | None
    theirs_s: float | None
    layout_s: float | None
    found_s: float
    chosen: str
    cpu_s: float
    note: str = ""


def model_of(run: Mapping[str, Any]) -> Captured:
    """A Llama if some heads share keys, a GPT-2 if none do; or its own `family`."""
    sizes, rows = run["model"], run["global_batch"]
    length, dtype = sizes["seq"], torch.float16 if run["dtype"] == "fp16" else torch.bfloat16
    if "family" in run:
        return causal(run["family"], rows, length, dtype, **{**sizes, "seq": None})
    if sizes["kv_heads"] == sizes["heads"]:
        return causal(
            "gpt2", rows, length, dtype, n_layer=sizes["layers"], n_embd=sizes["hidden"],
            n_head=sizes["heads"], n_inner=sizes["ffn"], vocab_size=sizes["vocab"],
            n_positions=length,
        )  # fmt: skip
    return causal(
        "llama", rows, length, dtype, num_hidden_layers=sizes["layers"],
        hidden_size=sizes["hidden"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"], intermediate_size=sizes["ffn"],
        vocab_size=sizes["vocab"], max_position_embeddings=length,
    )  # fmt: skip


def compare(run: Mapping[str, Any], name: str = "", limit_s: float = 120.0) -> Compared:
    """`limit_s`: what the search may take."""
    with torch.device("meta"):
        model, inputs, loss_fn = model_of(run)
    hardware = next(name for word, name in _HARDWARE.items() if word in run["hardware"])
    program = capture_step(model, inputs, Options.of(loss_fn=loss_fn))
    mesh = Mesh((run["gpus"] // _N_LOCAL, _N_LOCAL), hardware=hardware)

    def planned(**options: Any) -> Plan:
        asked = Options.of(loss_fn=loss_fn, time_limit_s=limit_s, **options)
        return plan_program(program, mesh, inputs, asked)

    began_s = time.process_time()
    found = planned()
    cpu_s, layout_s, theirs_s, note = time.process_time() - began_s, None, None, ""
    published_s = run["metric"].get("iter_seconds")
    if "tp" in run:
        layout = Manual(
            tp=run["tp"], pp=run["pp"], dp=run["dp"], cp=run["cp"], interleave=run["interleave"],
            ep=run.get("ep", 1), etp=run.get("etp"), sp=run["sp"], zero=run["zero"],
            recompute=run["recompute"], microbatch_size=run["microbatch"],
        )  # fmt: skip
        for of in dict.fromkeys((layout, replace(layout, interleave=1))):
            try:
                layout_s = planned(manual=of).data.objective_s
                if published_s is not None:
                    ran = run["software"]["name"] if name in OTHERS else read_row(run).software.name
                    theirs_s = planned(manual=of, software=ran).data.objective_s
                break
            except InfeasibleError as error:
                note = f"layout, interleave={of.interleave}: {error.what}"
    seconds = published_s, theirs_s, layout_s, found.data.objective_s
    return Compared(name or run["id"], *seconds, found.data.chosen, cpu_s, note)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("names", nargs="*", default=RUNS, help="runs; by default all of these")
    arguments.add_argument(
        "--limit", type=float, default=120.0, metavar="SECONDS", help="of each search"
    )
    given = arguments.parse_args()
    runs = {run["id"]: run for run in read_runs().runs} | OTHERS
    columns = "run", "published", "layout, its software", "layout", "found", "faster", "cpu", "plan"
    table = Table(*columns)
    for name in given.names:
        row = compare(runs[name], name, given.limit)
        known = row.published_s, row.theirs_s, row.layout_s
        times = ("-" if s is None else format_seconds(s) for s in known)
        faster = "-" if row.layout_s is None else f"{row.layout_s / row.found_s - 1:.1%}"
        table.add_row(
            name, *times, format_seconds(row.found_s), faster, f"{row.cpu_s:.0f}",
            "\n".join(text for text in (row.chosen, row.note) if text),
        )  # fmt: skip
        Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
