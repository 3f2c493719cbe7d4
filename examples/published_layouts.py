"""Published tensor x pipeline x interleaved layouts beside the plan that the search finds.

    python -m examples.published_layouts seqsel_t5_175B_full

Each run is one of `cost/published/published_runs.json`, with its sources there. Its layout is typed
as `Manual`. Both plans are of the same GPT-2 on the same GPUs with the same global batch, and both
steps are simulated. The last column is how much faster the plan found is. A run takes half a minute
to a few minutes; without arguments, those of `RUNS`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autopar.cost.published import read_runs
from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.binding.step_capture import capture_step
from autopar.planning.plan import Plan, plan_program
from autopar.units import format_seconds
from examples.bench_plan import causal

RUNS = ("seqsel_t5_175B_full", "meg21_f12_int_B24")
# Words of the sources -> profiles of `cost/hardware`.
_HARDWARE = {"A100-80GB": "a100-80gb", "H100-80GB": "h100-sxm"}
_N_LOCAL = 8


@dataclass(frozen=True)
class Compared:
    """Seconds of a step: as published, of the published layout simulated, of the plan found."""

    name: str
    published_s: float | None
    layout_s: float
    found_s: float
    chosen: str


def compare(run: Mapping[str, Any]) -> Compared:
    sizes = run["model"]
    dtype = torch.float16 if run["dtype"] == "fp16" else torch.bfloat16
    with torch.device("meta"):
        model, inputs, loss_fn = causal(
            "gpt2", run["global_batch"], sizes["seq"], dtype, n_layer=sizes["layers"],
            n_embd=sizes["hidden"], n_head=sizes["heads"], n_inner=sizes["ffn"],
            vocab_size=sizes["vocab"], n_positions=sizes["seq"],
        )  # fmt: skip
    hardware = next(name for word, name in _HARDWARE.items() if word in run["hardware"])
    program = capture_step(model, inputs, Options.of(loss_fn=loss_fn))
    mesh = Mesh((run["gpus"] // _N_LOCAL, _N_LOCAL), hardware=hardware)
    layout = Manual(
        tp=run["tp"], pp=run["pp"], dp=run["dp"], interleave=run["interleave"], sp=run["sp"],
        zero=run["zero"], recompute=run["recompute"], microbatch_size=run["microbatch"],
    )  # fmt: skip

    def planned(**options: Any) -> Plan:
        asked = Options.of(loss_fn=loss_fn, time_limit_s=3600.0, **options)
        return plan_program(program, mesh, inputs, asked)

    found, published = planned(), planned(manual=layout)
    published_s = run["metric"].get("iter_seconds")
    seconds = published.data.objective_s, found.data.objective_s
    return Compared(run["id"], published_s, *seconds, found.data.chosen)


def main(names: list[str]) -> int:
    runs = {run["id"]: run for run in read_runs().runs}
    table = Table("run", "published", "layout", "found", "faster", "plan found")
    for name in names or RUNS:
        row = compare(runs[name])
        published = "-" if row.published_s is None else format_seconds(row.published_s)
        table.add_row(
            name, published, format_seconds(row.layout_s), format_seconds(row.found_s),
            f"{row.layout_s / row.found_s - 1:.1%}", row.chosen,
        )  # fmt: skip
    Console(highlight=False, width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
