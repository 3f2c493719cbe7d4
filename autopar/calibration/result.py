"""A calibrated machine: its samples and fits, as a profile and as a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.calibration.fit import (
    LinkFit,
    MemoryFit,
    ProductFit,
    Residual,
    StepFit,
    fit_link,
    fit_memory,
    fit_products,
    fit_steps,
    median_error,
)
from autopar.calibration.machine import LocalMachine
from autopar.calibration.profile import ProfileNumbers
from autopar.calibration.samples import Samples
from autopar.cost.hardware import Quantity
from autopar.units import format_seconds


@dataclass(frozen=True)
class Calibration:
    """A machine's samples, and the constants fitted to them.

    `link` is None for one rank; `steps` is None if no whole steps were timed.
    """

    machine: LocalMachine
    samples: Samples
    memory: MemoryFit
    products: ProductFit
    link: LinkFit | None
    steps: StepFit | None = None

    @staticmethod
    def of(samples: Samples, machine: LocalMachine) -> Calibration:
        """Fit every law. Raises `CalibrationError` if no positive constants fit."""
        memory = fit_memory([s for s in samples.operators if not s.dtype])
        products = fit_products([s for s in samples.operators if s.dtype], memory)
        link = fit_link(samples.transfers) if samples.transfers else None
        steps = fit_steps(samples.steps) if samples.steps else None
        return Calibration(machine, samples, memory, products, link, steps)

    @cached_property
    def quantities(self) -> dict[str, Quantity]:
        """Every number of the profile with its source, by dotted key."""
        return ProfileNumbers(
            self.machine, self.samples, self.memory, self.products, self.link, self.steps
        ).all()

    def toml(self, name: str = "calibrated") -> str:
        """The profile, as `Mesh(hardware="path.toml")` reads it."""
        lines = [
            f"# Measured by `autopar calibrate` on {self.machine.device}.",
            f"name = {json.dumps(name)}",
        ]
        for key, quantity in self.quantities.items():
            lines += ["", f"[{key}]", f"value = {quantity.value:.6g}"]
            lines += [f"source = {json.dumps(quantity.source, ensure_ascii=False)}"]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile, named after the file."""
        Path(path).write_text(self.toml(Path(path).stem), encoding="utf-8")

    def text(self) -> str:
        """The constants, and how well each law fits the measurements."""
        width = max(map(len, self.quantities))
        lines = [self.machine.device, ""]
        lines += [f"  {key:{width}}  {q.value:.4g}" for key, q in self.quantities.items()]
        for title, residuals in self._fits():
            lines += ["", f"{title}: median error of the fit {median_error(residuals):.0%}"]
            lines += _table(residuals)
        if self.steps is not None:
            lines += ["", f"time in whole steps / time alone: {_ratios_text(self.steps)}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "machine": asdict(self.machine),
            "quantities": {key: asdict(q) for key, q in self.quantities.items()},
            "turns": [{"n_ranks": n, "times_as_long": ratio} for n, ratio in self.samples.turns],
            "in_steps_times_as_long": _ratios(self.steps) if self.steps is not None else {},
            "fits": {
                title: {
                    "median_error": median_error(residuals),
                    "residuals": [asdict(r) | {"error": r.error} for r in residuals],
                }
                for title, residuals in self._fits()
            },
        }

    def _fits(self) -> Iterator[tuple[str, Sequence[Residual]]]:
        yield "memory-bound and small operators", self.memory.residuals
        yield "products", self.products.residuals
        if self.link is not None:
            yield "collectives and messages", self.link.residuals
        if self.steps is not None:
            yield "whole training steps", self.steps.residuals


def _ratios(steps: StepFit) -> dict[str, float]:
    return {
        "products and memory": steps.work_ratio,
        "launches": steps.launch_ratio,
        "collectives": steps.transfer_ratio,
    }


def _ratios_text(steps: StepFit) -> str:
    return ", ".join(f"{what} {ratio:.2f}" for what, ratio in _ratios(steps).items())


def _table(residuals: Sequence[Residual]) -> list[str]:
    """One line per sample: measured, fitted, and the error of the fit."""
    name_width = max(len(r.name) for r in residuals)
    size_width = max(len(r.size) for r in residuals)
    return [
        f"  {r.name:{name_width}}  {r.size:>{size_width}}  {format_seconds(r.measured_s):>8}"
        f"  {format_seconds(r.fitted_s):>8}  {r.error:+.0%}"
        for r in residuals
    ]
