"""Two tables of one transformer layer (Korthikanti et al., arXiv 2205.05198), predicted.

    activation_memory_pct    bytes that a layer keeps for backward on tp=8, as a percentage of those
                             with tensor parallelism alone; error in points
    layer_microbench         milliseconds of a layer's forward and backward on tp=8; relative error

The models are those of the paper's table 3. `rows.py` reads them as any other run, so the same
rules derive their software.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost.published.predict import step_model
from autopar.cost.published.rows import PublishedRun, read_row
from autopar.cost.transformer import Chunk, StepModel, kept_of_layer

_TP = 8
_MICROBENCH_MODEL, _MICROBENCH_BATCH = "22B", 4
_SHAPES = {  # layers, hidden, heads
    "22B": (48, 6144, 64), "175B": (96, 12288, 96),
    "530B": (105, 20480, 128), "1T": (128, 25600, 160),
}  # fmt: skip
# Sequence parallelism and recompute of each case.
_MEMORY_CASES = {
    "none": (False, "none"), "seq": (True, "none"), "sel": (False, "selective"),
    "seqsel": (True, "selective"), "full": (False, "full"),
}  # fmt: skip
_TIME_CASES = {
    "baseline no recompute": (False, "none"), "sequence parallel": (True, "none"),
    "full recompute": (False, "full"), "selective recompute": (False, "selective"),
    "selective + sequence parallel": (True, "selective"),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One number of a table. error: predicted / published - 1, or points of a percentage.

    skipped: why there is no prediction.
    """

    name: str
    published: float
    predicted: float | None
    error: float | None
    skipped: str | None = None


def activation_memory(table: Mapping[str, Any]) -> list[Cell]:
    """Cells of `activation_memory_pct`: percentages by model and case."""
    return [
        _percentage(model, case, float(published))
        for model, cases in table.get("values", {}).items()
        for case, published in cases.items()
    ]


def layer_times(table: Mapping[str, Any]) -> list[Cell]:
    """Cells of `layer_microbench`: milliseconds by case and pass."""
    cells = []
    for row in table.get("rows", ()):
        case = str(row.get("case"))
        predicted_s = layer_passes_s(*_TIME_CASES[case]) if case in _TIME_CASES else {}
        cells += [
            _milliseconds(f"{case}, {name}", float(row[name]), predicted_s.get(name))
            for name in ("fwd", "bwd", "total")
            if name in row
        ]
    return cells


def kept_bytes(model: str, has_sp: bool, recompute: str) -> float:
    """Bytes that a layer of one of the paper's models keeps of one sequence."""
    return kept_of_layer(_layer_step(model, has_sp, recompute, 1).layer).kept_bytes


def layer_passes_s(has_sp: bool, recompute: str) -> dict[str, float]:
    """Seconds of forward ("fwd"), backward ("bwd") and both for a layer of the 22B model."""
    step = _layer_step(_MICROBENCH_MODEL, has_sp, recompute, _MICROBENCH_BATCH)
    middle = Chunk(n_layers=1, is_first=False, is_last=False)
    forward_s, backward_s = (
        spent.compute_s + spent.stalled_s + spent.comm_s for spent in step.passes(middle)
    )
    return {"fwd": forward_s, "bwd": backward_s, "total": forward_s + backward_s}


def _layer_step(model: str, has_sp: bool, recompute: str, batch: int) -> StepModel:
    return step_model(_layer_run(model, has_sp, recompute, batch))


def _layer_run(model: str, has_sp: bool, recompute: str, batch: int) -> PublishedRun:
    """A run on one tensor-parallel group with a single microbatch, to take a layer of."""
    layers, hidden, heads = _SHAPES[model]
    return read_row(
        {
            "id": f"a layer of {model}", "source": "arXiv 2205.05198", "profile": "a100-80gb",
            "model": {
                "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads,
                "ffn": 4 * hidden, "seq": 2048, "vocab": 51200,
            },
            "tp": _TP, "pp": 1, "dp": 1, "sp": has_sp, "recompute": recompute, "zero": 0,
            "microbatch": batch, "global_batch": batch, "dtype": "fp16",
        }
    )  # fmt: skip


def _percentage(model: str, case: str, published: float) -> Cell:
    name = f"{model} {case}"
    if model not in _SHAPES or case not in _MEMORY_CASES:
        return Cell(name, published, None, None, "not a model and case of arXiv 2205.05198")
    share = kept_bytes(model, *_MEMORY_CASES[case]) / kept_bytes(model, *_MEMORY_CASES["none"])
    return Cell(name, published, 100 * share, 100 * share - published)


def _milliseconds(name: str, published: float, predicted_s: float | None) -> Cell:
    if predicted_s is None:
        return Cell(name, published, None, None, "not a case of arXiv 2205.05198, table 4")
    return Cell(name, published, 1e3 * predicted_s, 1e3 * predicted_s / published - 1)
