"""Measure what `compile="regions"` takes to compile: `make bench-compile`

    python -m examples.bench_compile [--layers 2,24] [--width 256]

A Llama of each depth takes two steps on one process, twice: with an empty folder of compiled
kernels (`TORCHINDUCTOR_CACHE_DIR`), and again, in a new process, with what the first left there.

    regions   functions that are compiled; they do not grow with depth, as equal blocks share theirs
    first     seconds by which the first step is longer than the second
    again     the same of the second process, and its share of the first
    cache     what is in the folder
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.units import format_bytes, format_seconds

N_ROWS, LENGTH, VOCABULARY = 4, 64, 256


def compile_once(n_layers: int, width: int) -> tuple[int, float]:
    """The regions of a model, and seconds that the first step takes more than the second."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=n_layers,
        num_attention_heads=4, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (N_ROWS, LENGTH))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    module = autopar.parallelize(LlamaForCausalLM(config), 1, batch, compile="regions")
    times_s = []
    for _ in range(2):
        began_s = time.perf_counter()
        module.step(**batch)
        times_s.append(time.perf_counter() - began_s)
    return module.code_path.read_text().count("@compiled"), times_s[0] - times_s[1]


def in_new_process(n_layers: int, width: int, cache: str) -> tuple[int, float]:
    words = [sys.executable, "-m", "examples.bench_compile", "--one", f"{n_layers},{width}"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    n_regions, compile_s = json.loads(done.stdout.splitlines()[-1])
    return n_regions, compile_s


def size_of(folder: str) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", default="2,24", help="depths, with commas between")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        n_layers, width = map(int, given.one.split(","))
        print(json.dumps(compile_once(n_layers, width)))
        return 0
    table = Table(title="compiling regions, one process, seconds of wall-clock time")
    for title in ("layers", "regions", "first", "again", "share", "cache"):
        table.add_column(title, justify="right")
    for n_layers in map(int, given.layers.split(",")):
        with tempfile.TemporaryDirectory() as cache:
            n_regions, first_s = in_new_process(n_layers, given.width, cache)
            _, again_s = in_new_process(n_layers, given.width, cache)
            times = [format_seconds(first_s), format_seconds(again_s), f"{again_s / first_s:.0%}"]
            table.add_row(str(n_layers), str(n_regions), *times, format_bytes(size_of(cache)))
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
