"""Measure what a user waits for, from a config.json to a plan: `make bench-config`, or for one case

    python -m examples.bench_config --repeats 3 llama-8b

Every repeat is `autopar plan config.json ...` in a new process: CPU seconds of user and system,
with imports, the model, capture, the search and what is printed. The cases take turns, so a machine
that slows down slows all of them. "imports" is what importing torch, transformers and the model's
module takes alone. Columns: the median, the least, the most, and the target.

Sizes: Llama 3 from Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3. The request is
64 H100s, four million tokens a step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

LLAMA_3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
REQUEST = (
    "--mesh", "8x8", "--hardware", "h100-sxm", "--batch", "512", "--seq", "8192",
    "--precision", "bf16-mixed",
)  # fmt: skip
# Name -> (configuration, target in CPU seconds).
CASES = {"llama-8b": (LLAMA_3_8B, 7.0), "llama-70b": (LLAMA_3_70B, 12.0)}
IMPORTS = (
    "-c",
    "import torch, transformers; from transformers import AutoConfig, LlamaForCausalLM",
)


def cpu_s(*arguments: str) -> float:
    """CPU seconds of Python with these arguments, in a new process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Case -> the CPU seconds of each repeat; those of the imports are of the case "imports".

    What is compiled once per installation is compiled before.
    """
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, tuple[str, ...]] = {"imports": IMPORTS}
        for name in names:
            path = Path(folder) / name / "config.json"
            path.parent.mkdir()
            path.write_text(json.dumps(CASES[name][0]))
            commands[name] = ("-m", "autopar.cli", "plan", str(path), *REQUEST)
        for command in commands.values():
            cpu_s(*command)
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                found[name].append(cpu_s(*command))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    words.add_argument("--repeats", type=int, default=5)
    given = words.parse_args(argv)
    unknown = [name for name in given.cases if name not in CASES]
    if unknown or given.repeats < 1:
        words.error(f"no case {unknown[0]!r}" if unknown else "--repeats is at least 1")
    names = given.cases or list(CASES)
    table = Table(title="from config.json to a plan, CPU seconds")
    for title in ("case", "median", "least", "most", "target"):
        table.add_column(title, justify="left" if title == "case" else "right")
    late = 0
    for name, seconds in measure(names, given.repeats).items():
        median = statistics.median(seconds)
        target = CASES[name][1] if name in CASES else None
        late += target is not None and median > target
        table.add_row(
            name, f"{median:.1f}", f"{min(seconds):.1f}", f"{max(seconds):.1f}",
            "" if target is None else f"{target:g}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(names) - late} of {len(names)} within their target")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
