"""What the checks of a step take: `make bench-checks`.

The demo's GPT-2 trains on two processes. Of every step of module and optimizer, the time inside
the checks is taken: Python values that the trace read, the batch's signature, hooks and gradients
handed to parameters, the optimizer's parameters, and whether the loss is finite. So both are
measured in the same steps. Then the same where ranks compare batches and learning rates in every
step; by default they do in every hundredth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import Any

import torch

import autopar
from autopar import Manual
from autopar.capture import Watch
from autopar.module import (
    feeding,
    finite,
    layers,
    optimizers,
    originals,
    parameters,
)
from autopar.module.agreement import Agreement, Hyperparameters
from autopar.module.programs import programs
from examples.train_gpt2 import batches, make_model

LAYOUTS = {"tp": Manual(tp=2), "zero3": Manual(dp=2, zero=3)}
N_FIRST = 5  # steps that compare batches between ranks, and warm up
CHECKS: tuple[tuple[Any, str], ...] = (
    (Watch, "changed"),
    (Agreement, "check"),
    (programs, "signature_of_call"),
    (feeding, "check_inputs"),
    (layers.Modes, "check"),
    (layers.Holders, "check"),
    (originals.Originals, "check"),
    (originals.ConstantBuffers, "check"),
    (parameters.StepGradients, "before"),
    (parameters.StepGradients, "after"),
    (finite.FiniteCheck, "before"),
    (finite.FiniteCheck, "after"),
    (finite.FiniteCheck, "before_optimizer"),
    (Hyperparameters, "check"),
    (optimizers, "_shadow"),
    (optimizers, "_check"),
    (optimizers, "_take_back"),
)


class Clock:
    """Seconds inside the functions that it times."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.elapsed_s += time.perf_counter() - begun

        return run


def job(layout: str, n_steps: int, check_every: int | None) -> list[tuple[float, float]]:
    """(seconds of a step, seconds of its checks) of every step after the first."""
    clock = Clock()
    for owner, name in CHECKS:
        setattr(owner, name, clock.timed(getattr(owner, name)))
    data: list[dict[str, Any]] = [*batches(N_FIRST + n_steps)]
    options: dict[str, Any] = {"manual": LAYOUTS[layout], "check_every": check_every}
    module = autopar.parallelize(make_model(), (1, 2), data[0], **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    found = []
    for batch in data:
        clock.elapsed_s = 0.0
        begun = time.perf_counter()
        module.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        found.append((time.perf_counter() - begun, clock.elapsed_s))
    return found[N_FIRST:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    n_steps = parser.parse_args().steps
    for layout, check_every in product(LAYOUTS, (None, 1)):
        found = autopar.launch(job, 2, layout, n_steps, check_every)[0]
        shares = sorted(100 * checks_s / step_s for step_s, checks_s in found)
        low, high = shares[len(shares) // 10], shares[-1 - len(shares) // 10]
        step_ms = 1e3 * statistics.median(step_s for step_s, _ in found)
        what = f"{layout}, ranks compared" if check_every else layout
        print(
            f"{what}: checks take {statistics.median(shares):.2f}% of a step "
            f"(80% of steps: {low:.2f} to {high:.2f}%), {step_ms:.0f} ms a step"
        )


if __name__ == "__main__":
    main()
