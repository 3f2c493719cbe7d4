"""Do two versions of autopar make the same plans? Writes them as text, to compare byte for byte.

    python -m tests.parity.same_plans FOLDER [WORDS ...]           writes the plans of this version
    python -m tests.parity.same_plans --against REV [WORDS ...]    and of another; says what differs

A change that should not move numbers proves it so. Of every case it writes the plan (JSON), the
generated program of each stage, what is predicted, and every collective. Cases: each family of the
zoo on one stage and on two, the models of `make bench-plan`, and Llama under options. WORDS choose
cases: those whose name has one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar import Manual, Mesh, Plan
from examples.bench_plan import CASES, llama
from examples.joint_plan import LLAMA_3_8B
from tests.parity.zoo.cells import ZooCell, zoo_cells

LAYERS_8 = LLAMA_3_8B | {"num_hidden_layers": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "megatron": {"manual": Manual(dp=2, tp=4)},
    "zero3": {"manual": Manual(dp=8, zero=3)},
    "pipeline": {"manual": Manual(pp=2, dp=2, tp=2)},
    "two-stages": {"stages": 2},
    "gpipe": {"stages": 2, "schedule": "gpipe", "microbatches": 8},
    "as-given": {"mesh_shape": "as-given", "microbatches": 4},
    "tight": {"memory_limit": 24 * 2**30},
    "full-recompute": {"recompute": "full"},
    "no-tensor": {"forbid": ["tensor"]},
    "sgd": {"optimizer": "sgd", "forbid": ["zero3"]},
}


def zoo_plan(cell: ZooCell) -> Plan:
    return autopar.plan(cell.case.model(), cell.machine, cell.case.batch(0), **cell.options())


def bench_plan(name: str) -> Plan:
    case = CASES[name]
    with torch.device("meta"):
        model, inputs, loss_fn = case.make()
    mesh = Mesh(case.mesh, hardware=case.hardware)
    return autopar.plan(model, mesh, inputs, loss_fn=loss_fn)


def llama_plan(name: str) -> Plan:
    with torch.device("meta"):
        model, inputs, _ = llama(LAYERS_8, 64)
    return autopar.plan(model, Mesh((1, 8), hardware="a100-80gb"), inputs, **OPTIONS[name])


def every_case() -> dict[str, Callable[[], Plan]]:
    """Name -> the plan."""
    cells = [c for c in zoo_cells() if (c.place, c.plan) in {("2x2", "auto"), ("2-stages", "auto")}]
    found: dict[str, Callable[[], Plan]] = {}
    for cell in cells:
        found[str(cell).replace(" ", "-")] = lambda cell=cell: zoo_plan(cell)  # type: ignore[misc]
    for name in OPTIONS:
        found[f"llama-8-layers-{name}"] = lambda name=name: llama_plan(name)  # type: ignore[misc]
    for name in CASES:
        found[f"bench-{name}"] = lambda name=name: bench_plan(name)  # type: ignore[misc]
    return found


def write(folder: Path, plan: Plan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    for file, text in plan.code().items():
        (folder / file).write_text(text)
    predicted = {key: repr(value) for key, value in asdict(plan.predicted).items()}
    (folder / "predicted.json").write_text(json.dumps(predicted, indent=1))
    calls = "\n".join(map(repr, plan.collectives()))
    (folder / "collectives.txt").write_text(calls + "\n")


def write_all(folder: Path, words: Sequence[str]) -> None:
    for name, make in every_case().items():
        if not words or any(word in name for word in words):
            print(name, flush=True)  # noqa: T201
            write(folder / name, make())


def differences(one: Path, other: Path) -> list[str]:
    """The files that differ, or that only one of the folders has."""
    files = {f.relative_to(folder) for folder in (one, other) for f in folder.rglob("*.*")}

    def read(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return sorted(str(f) for f in files if read(one / f) != read(other / f))


def against(revision: str, words: Sequence[str]) -> list[str]:
    """What differs between this tree and a revision, which is cloned."""
    with tempfile.TemporaryDirectory() as folder:
        there, then, now = (Path(folder) / name for name in ("clone", "then", "now"))
        subprocess.run(["git", "clone", "-q", ".", str(there)], check=True)
        subprocess.run(["git", "checkout", "-q", revision], cwd=there, check=True)
        command = [sys.executable, "-m", "tests.parity.same_plans", str(then), *words]
        environment = os.environ | {"PYTHONPATH": str(there)}
        subprocess.run(command, cwd=there, env=environment, check=True)
        write_all(now, words)
        return differences(then, now)


def main(argv: Sequence[str]) -> int:
    if argv[0] != "--against":
        write_all(Path(argv[0]), argv[1:])
        return 0
    found = against(argv[1], argv[2:])
    print("\n".join(found) or "the same")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
