"""`autopar doctor`: can this machine plan and run?

A check is *ok*, a *note* (something optional is missing) or a *problem* (planning or running will
fail). The last check starts two processes and sums a tensor over them. It needs what a training job
needs: spawning, a store, a backend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from autopar.cli.shell import Result

Status = Literal["ok", "note", "problem"]
N_RANKS = 2


@dataclass(frozen=True)
class Check:
    """The result of one check; `hint` says what to do if it is not ok."""

    name: str
    status: Status
    detail: str
    hint: str = ""


def examine() -> Result:
    """Run every check."""
    checks = [
        Check("python", "ok", platform.python_version()),
        *_packages(),
        _solvers(),
        *_devices(),
        _dot(),
        _all_reduce(),
    ]
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:8} {check.name:{width}}  {check.detail}")
        if check.hint:
            lines.append(f"{'':8} {'':{width}}  hint: {check.hint}")
    problems = [check.name for check in checks if check.status == "problem"]
    data = {"checks": [asdict(check) for check in checks], "problems": problems}
    return Result("\n".join(lines), data, ok=not problems)


def _packages() -> Iterator[Check]:
    for name, is_needed in (("torch", True), ("transformers", False), ("safetensors", True)):
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            why = "" if is_needed else "; only a config.json and the examples need it"
            status: Status = "problem" if is_needed else "note"
            yield Check(name, status, f"not installed{why}", f"pip install {name}")


def _solvers() -> Check:
    """HiGHS solves the integer programs that PuLP writes."""
    import pulp

    version = importlib.metadata.version("pulp")
    if "HiGHS" in pulp.listSolvers(onlyAvailable=True):
        return Check("solvers", "ok", f"PuLP {version} with HiGHS")
    return Check("solvers", "problem", f"PuLP {version} with no solver", "pip install highspy")


def _devices() -> Iterator[Check]:
    import torch
    import torch.distributed as dist

    from autopar.cost.hardware import detect

    n_gpus = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(n_gpus))
    yield Check("devices", "ok", names or "CPU only")
    yield Check("profile", "ok", f"{detect()} (the default of a mesh without hardware)")
    if not dist.is_available():
        yield Check("backends", "problem", "torch was built without distributed", "use pip's torch")
        return
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(name for name, is_there in backends.items() if is_there)
    needed = "nccl" if n_gpus else "gloo"
    hint = "" if backends[needed] else f"install a torch that has {needed}"
    yield Check("backends", "problem" if hint else "ok", found or "none", hint)


def _dot() -> Check:
    path = shutil.which("dot")
    if path:
        return Check("dot", "ok", path)
    return Check(
        "dot", "note", "not found; only pictures of graphs need it",
        "apt-get install graphviz, or brew install graphviz, or conda install graphviz",
    )  # fmt: skip


def _all_reduce() -> Check:
    from autopar.errors import AutoparError
    from autopar.runtime.launch import launch

    name = f"all_reduce over {N_RANKS} processes"
    expected = float(sum(range(1, N_RANKS + 1)))
    try:
        sums = launch(sum_over_ranks, N_RANKS)
    except AutoparError as error:
        last = str(error).strip().splitlines()[-1]
        return Check(name, "problem", last, "python -c 'import torch.distributed' and free ports")
    if sums != [expected] * N_RANKS:
        return Check(name, "problem", f"gave {sums}, expected {expected} on every rank")
    return Check(name, "ok", "the sum is right on every rank")


def sum_over_ranks() -> float:
    """The sum of rank + 1 over all ranks; each process runs this."""
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor(float(dist.get_rank() + 1), device=device)
    dist.all_reduce(value)
    return value.item()
