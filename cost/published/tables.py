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

from autopar.cost.published.rows import read_row
from autopar.cost.transformer import Chunk, StepModel, kept_of_layer

_SHAPES = {  # layers, hidden, heads
    "22B": (48, 6144, 64), "175B": (96, 12288, 96),
    "530B": (105, 20480, 128), "1T": (128, 25600, 160),
}  # fmt: skip
# Sequence parallelism and recompute of each case, by the first table's names.
_CASES = {
    "none": (False, "none"), "seq": (True, "none"), "sel": (False, "selective"),
    "seqsel": (True, "selective"), "full": (False, "full"),
}  # fmt: skip
_TIMED = {  # by the second one's
    "baseline no recompute": "none", "sequence parallel": "seq", "full recompute": "full",
    "selective recompute": "sel", "selective + sequence parallel": "seqsel",
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
    cells = []
    for model, cases in table.get("values", {}).items():
        steps = {case: _step(model, case) for case in _CASES if model in _SHAPES}
        kept = {case: kept_of_layer(step.layer).kept_bytes for case, step in steps.items()}
        for case, published in cases.items():
            found = 100 * kept[case] / kept["none"] if case in kept else None
            cells.append(_cell(f"{model} {case}", "a model and case", published, found, 1.0))
    return cells


def layer_times(table: Mapping[str, Any]) -> list[Cell]:
    """Cells of `layer_microbench`: milliseconds by case and pass."""
    cells = []
    for row in table.get("rows", ()):
        case = row.get("case")
        found = layer_passes_s(_TIMED[case]) if case in _TIMED else {}
        for name in (name for name in ("fwd", "bwd", "total") if name in row):
            ms = 1e3 * found[name] if found else None
            cells.append(_cell(f"{case}, {name}", "a case", row[name], ms, row[name]))
    return cells


def layer_passes_s(case: str) -> dict[str, float]:
    """Seconds of forward ("fwd"), backward ("bwd") and both for a layer of the 22B model."""
    passes = _step("22B", case, 4).passes(Chunk(1, is_first=False, is_last=False))
    forward_s, backward_s = (work.duration().time_s for work in passes)
    return {"fwd": forward_s, "bwd": backward_s, "total": forward_s + backward_s}


def _step(model: str, case: str, batch: int = 1) -> StepModel:
    """A step on one tensor-parallel group with a single microbatch, to take a layer of."""
    (layers, hidden, heads), (has_sp, recompute) = _SHAPES[model], _CASES[case]
    row = {
        "id": f"a layer of {model}", "source": "arXiv 2205.05198", "profile": "a100-80gb",
        "model": {
            "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads,
            "ffn": 4 * hidden, "seq": 2048, "vocab": 51200,
        },
        "tp": 8, "pp": 1, "dp": 1, "sp": has_sp, "recompute": recompute, "zero": 0,
        "microbatch": batch, "global_batch": batch, "dtype": "fp16",
    }  # fmt: skip
    return read_row(row).step()


def _cell(name: str, what: str, published: float, found: float | None, unit: float) -> Cell:
    if found is None:
        return Cell(name, published, None, None, f"not {what} of arXiv 2205.05198")
    return Cell(name, published, found, (found - published) / unit)
