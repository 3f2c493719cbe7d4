"""Measure how long planning takes for models of real size: `make bench-plan`, or for some cases

    python -m examples.bench_plan llama-8b-1x8 t5-11b

Every case is planned in a process of its own. Only planning is timed, in CPU seconds. Capture is
not part of it. Lowering is not part of it either: programs are lowered when they are needed.
Columns of the table:

    seconds       CPU seconds of planning
    wall, target  seconds of wall-clock time; CPU seconds that planning should take on two cores
    variables     of the largest problem solved: with all blocks written out -> with one block
                  that represents its copies
    stages        stages that pipelines were searched of (ranges of layers x views x numbers of
                  microbatches), and how many problems were solved
    plans         plans that were considered
    objective     predicted seconds of a step, which were minimised
    gap           how far the step is above the bound on every plan (`plan.gap`)
    memory        peak memory of the process, and how much of it was added by planning
    phases        seconds in each part of planning

If both depths of `DEPTHS` were planned, it also prints how much longer 80 layers take than 8.

Sizes: Llama 3 from Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3; GPT-39B from
Narayanan et al., SC 2021, table 1; Mixtral 8x7B from Jiang et al., arXiv 2401.04088, table 1;
T5-11B from Raffel et al., JMLR 2020, section 3.7; ViT-22B from Dehghani et al., arXiv 2302.05442,
table 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, ViTModel

from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.binding.step_capture import capture_step
from autopar.passes.search.stats import PlanningStats
from autopar.planning.plan import plan_program
from autopar.units import format_bytes, format_seconds
from examples.joint_plan import LLAMA_3_8B

LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip

Captured = tuple[nn.Module, dict[str, Any], Callable[..., torch.Tensor] | None]


def of_tokens(batch: int, length: int) -> dict[str, Any]:
    ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def causal(
    family: str, batch: int, length: int, dtype: torch.dtype = torch.bfloat16, **sizes: Any
) -> Captured:
    config = AutoConfig.for_model(family, **{**sizes, "use_cache": False})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model, of_tokens(batch, length), None


def llama(sizes: Mapping[str, Any], batch: int) -> Captured:
    return causal("llama", batch, 4096, **sizes)


def gpt_39b() -> Captured:
    return causal(
        "gpt2", 1024, 1024, torch.float16, n_layer=48, n_embd=8192, n_head=64, vocab_size=51200,
        n_positions=1024,
    )  # fmt: skip


def mixtral() -> Captured:
    return causal(
        "mixtral", 256, 4096, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, vocab_size=32000,
        max_position_embeddings=32768,
    )  # fmt: skip


def t5_11b() -> Captured:
    config = AutoConfig.for_model(
        "t5", d_model=1024, d_ff=65536, num_layers=24, num_decoder_layers=24, num_heads=128,
        d_kv=128, vocab_size=32128, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)
    return model, of_tokens(512, 512), None


def vit_22b() -> Captured:
    config = AutoConfig.for_model(
        "vit", hidden_size=6144, intermediate_size=24576, num_hidden_layers=48,
        num_attention_heads=48, image_size=224, patch_size=14,
    )  # fmt: skip

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = output.last_hidden_state.float().square().mean()
        return loss

    model = ViTModel(config, add_pooling_layer=False).to(torch.bfloat16)
    images = torch.empty(4096, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    return model, {"pixel_values": images}, loss_fn


@dataclass(frozen=True)
class Case:
    """A model, the machine it is planned for, and the target for planning, in CPU seconds."""

    make: Callable[[], Captured]
    mesh: tuple[int, int]
    hardware: str
    aim_s: float


CASES = {
    "llama-8b-1x8": Case(lambda: llama(LLAMA_3_8B, 64), (1, 8), "a100-80gb", 1.0),
    "llama-8b-8x8": Case(lambda: llama(LLAMA_3_8B, 64), (8, 8), "a100-80gb", 2.0),
    "llama-70b-16x8": Case(lambda: llama(LLAMA_3_70B, 512), (16, 8), "a100-80gb", 5.0),
    "llama-70b-8-layers": Case(
        lambda: llama(LLAMA_3_70B | {"num_hidden_layers": 8}, 512), (16, 8), "a100-80gb", 5.0
    ),
    "llama-70b-128x8": Case(lambda: llama(LLAMA_3_70B, 2048), (128, 8), "a100-80gb", 15.0),
    "gpt-39b-8x8": Case(gpt_39b, (8, 8), "v100-32gb", 5.0),
    "mixtral-8x8": Case(mixtral, (8, 8), "a100-80gb", 8.0),
    "t5-11b-8x8": Case(t5_11b, (8, 8), "a100-80gb", 8.0),
    "vit-22b-8x8": Case(vit_22b, (8, 8), "a100-80gb", 8.0),
}

# The same model with 8 and with 80 layers, and the target for the ratio of their planning times.
DEPTHS, DEPTHS_AIM = ("llama-70b-8-layers", "llama-70b-16x8"), 1.5


@dataclass
class Measured:
    """The measurements of one case, planned once."""

    name: str
    plan_s: float
    phases_s: dict[str, float] = field(default_factory=dict)
    n_considered: int = 0
    chosen: str = ""
    objective_s: float = 0.0
    gap: float = 0.0
    memory_bytes: int = 0
    wall_s: float = 0.0
    peak_bytes: int = 0
    stats: PlanningStats = field(default_factory=PlanningStats)


class Phases:
    """CPU seconds by phase of planning, from progress texts; all pipelines are one phase."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self._now, self._began_s = "analysis", time.process_time()

    def __call__(self, text: str) -> None:
        ended_s = time.process_time()
        self.spent_s[self._now] = self.spent_s.get(self._now, 0.0) + ended_s - self._began_s
        words = text.split()
        self._now = "pipelines" if "stages" in words or "stages:" in words else words[0]
        self._began_s = ended_s


def measure(name: str) -> Measured:
    """Capture and plan a case in this process."""
    case = CASES[name]
    with torch.device("meta"):
        model, inputs, loss_fn = case.make()
    program = capture_step(model, inputs, Options.of(loss_fn=loss_fn))
    before_bytes = _most_held_bytes()
    phases = Phases()
    began_s, wall_s = time.process_time(), time.perf_counter()
    options = Options.of(loss_fn=loss_fn, progress=phases)
    plan = plan_program(program, Mesh(case.mesh, hardware=case.hardware), inputs, options)
    plan_s, wall_s = time.process_time() - began_s, time.perf_counter() - wall_s
    phases("done")
    return Measured(
        name, plan_s, phases.spent_s, len(plan.data.alternatives), plan.data.chosen,
        plan.objective_s, plan.gap or 0.0, _most_held_bytes() - before_bytes, wall_s,
        _most_held_bytes(), plan.stats or PlanningStats(),
    )  # fmt: skip


def _most_held_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_process(name: str) -> Measured:
    """Capture and plan a case in a process of its own."""
    command = [sys.executable, "-m", "examples.bench_plan", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(**found | {"stats": PlanningStats(**found["stats"])})


def table_of(rows: Sequence[Measured]) -> Table:
    table = Table(title="planning, seconds of CPU time")
    table.add_column("case")
    numbers = (
        "seconds",
        "wall",
        "target",
        "variables",
        "stages",
        "plans",
        "objective",
        "gap",
        "memory",
    )
    for title in numbers:
        table.add_column(title, justify="right")
    table.add_column("chosen, and phases")
    for row in rows:
        phases = ", ".join(f"{text} {s:.1f}" for text, s in row.phases_s.items() if s >= 0.05)
        table.add_row(
            row.name, f"{row.plan_s:.1f}", f"{row.wall_s:.1f}", f"{CASES[row.name].aim_s:g}",
            f"{row.stats.n_written_out} -> {row.stats.n_variables}",
            f"{row.stats.n_configurations}, {row.stats.n_solved} solved", str(row.n_considered),
            format_seconds(row.objective_s), f"{row.gap:.1%}",
            f"{format_bytes(row.peak_bytes)}, {format_bytes(row.memory_bytes)}",
            f"{row.chosen}\n{phases}",
        )  # fmt: skip
    return table


def depths_text(rows: Sequence[Measured]) -> str | None:
    """How planning time grows with layers; None unless both depths were planned."""
    seconds = {row.name: row.plan_s for row in rows}
    if not seconds.keys() >= set(DEPTHS):
        return None
    ratio = seconds[DEPTHS[1]] / seconds[DEPTHS[0]]
    return f"8 -> 80 layers: {ratio:.2f} times the seconds, the target is {DEPTHS_AIM:g}"


def main(argv: Sequence[str] | None = None) -> int:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    words.add_argument("--one", action="store_true", help="in this process, printed as JSON")
    given = words.parse_args(argv)
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        words.error(f"no case {unknown[0]!r}: there are {', '.join(CASES)}")
    if given.one:
        for name in given.cases:
            print(json.dumps(asdict(measure(name))))
        return 0
    console, rows = Console(highlight=False), []
    for name in given.cases or CASES:
        with console.status(f"planning {name}"):
            rows.append(in_process(name))
    console.print(table_of(rows))
    if (depths := depths_text(rows)) is not None:
        console.print(depths)
    late = [row.name for row in rows if row.plan_s > CASES[row.name].aim_s]
    console.print(f"{len(rows) - len(late)} of {len(rows)} within their target")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
