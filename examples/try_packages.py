"""Whole models of other packages, tiny and with random weights, beside eager on one process.

    python -m examples.try_packages                  every model, one line for each layout
    python -m examples.try_packages FNO SchNet       some

Loss and every gradient are those of `model(**batch)` and `loss.backward()` to 1e-10 in float64: on
one rank, on two thread ranks that split rows, and on two that do not, so that they split weights.
A line says `same`, or the error by its name. A package that is not installed is named; then, and
where a line is not `same`, the exit code is 1. Each model has a process of its own, and `LIMIT_S`
CPU seconds.

Packages are installed without what they depend on, beside the torch that is there, and what is
missing then is added the same way: `pip install --no-deps --target FOLDER NAME`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autopar
from autopar import AutoparError, Device, Link, Mesh
from examples.package_models import SPACES, Case, Entry, to_float64, without_dropout
from examples.package_sequences import SEQUENCES

TOLERANCE, LIMIT_S = 1e-10, 180
ENTRIES: dict[str, Entry] = SPACES | SEQUENCES

# Slow devices and fast links, so that sharding pays even in models this small.
MACHINE = Mesh(
    (1, 2), links=[Link(4.0, 0.04), Link(1.0, 0.01)], device=Device(1.0, 1e30, 1e15, 0.0)
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows split": {"forbid": ["tensor", "sequence"]},
    "rows whole": {"forbid": ["data", "zero3"]},
}


def difference(value: Tensor, wanted: Tensor) -> float:
    return float((value - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


def one_rank(case: Case) -> str:
    """A step on one rank beside eager."""
    pm = autopar.parallelize(case.model, (1, 1), case.batch, loss_fn=case.loss_fn)
    loss = pm.step(**case.batch)
    found = pm.full_gradients()
    model = case.model
    outputs = model(**case.batch)
    if case.loss_fn is None:
        wanted = outputs if isinstance(outputs, Tensor) else outputs.loss
    else:
        wanted = case.loss_fn(outputs, case.batch)
    wanted.backward()
    errors = {"loss": difference(loss, wanted.detach())}
    for name, p in model.named_parameters():
        if p.requires_grad:
            zero = torch.zeros_like(p)
            given = found[name] if found.get(name) is not None else zero
            errors[name] = difference(given, zero if p.grad is None else p.grad)
    return verdict(errors)


def two_ranks(options: Mapping[str, Any], case: Case) -> str:
    """`autopar.verify` on two thread ranks."""
    report = autopar.verify(
        case.model, MACHINE, case.batch, loss_fn=case.loss_fn, precision="fp64", microbatches=1,
        **options,
    )  # fmt: skip
    return "same" if report.ok else f"WRONG: {report.text()}"


def verdict(errors: Mapping[str, float]) -> str:
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else 1e300)
    return "same" if errors[worst] <= TOLERANCE else f"WRONG: {worst} by {errors[worst]:.1e}"


def attempt(work: Callable[[Case], str], case: Case) -> str:
    try:
        return work(case)
    except AutoparError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 it is the result, so it is printed
        return f"RAW ERROR: {type(error).__name__}: {error}"


def outcomes(entry: Entry) -> dict[str, str]:
    """Layout -> what came of it, in this process."""
    torch.manual_seed(0)
    case = entry.make()
    case = case._replace(model=without_dropout(to_float64(case.model)))
    found = {"1 rank": attempt(one_rank, case)}
    for layout, options in LAYOUTS.items():
        found[f"2 ranks, {layout}"] = attempt(partial(two_ranks, options), case)
    return found


def version(entry: Entry) -> str | None:
    """The installed version of an entry's package; None if there is none."""
    try:
        return importlib.metadata.version(entry.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))


def report(name: str) -> bool:
    """Print what came of a model in a process of its own; is it the same everywhere?"""
    entry, found = ENTRIES[name], version(ENTRIES[name])
    if found is None:
        print(f"{name}: {entry.package} IS NOT INSTALLED", flush=True)
        return False
    command = [sys.executable, "-W", "ignore", "-m", "examples.try_packages", "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited)
    text = done.stdout.strip().replace("\n", "\n    ")
    if done.returncode < 0:
        text += f"\n    ended by signal {-done.returncode}, after {LIMIT_S} CPU seconds at most"
    elif not text:
        text = f"FAILED: {done.stderr.strip()[-600:]}"
    print(f"{name} ({entry.package} {found}, {entry.field})\n    {text}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ENTRIES))
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args()
    if not given.here:
        reports = [report(name) for name in given.names]
        return int(not all(reports))
    same = True
    for name in given.names:
        for layout, outcome in outcomes(ENTRIES[name]).items():
            print(f"{layout}: {outcome}", flush=True)
            same = same and outcome == "same"
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
