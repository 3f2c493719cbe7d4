"""Fits the constants and intervals of all software to the shipped runs, and writes them.

    python -m tests.helpers.software_fit            constants; the intervals stay
    python -m tests.helpers.software_fit intervals  both: each paper is left out once; ten minutes

`cost/published/fit.py` says how. Text above the first table of constants stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from autopar.cost.hardware import SOFTWARE_FOLDER, Quantity, load_software
from autopar.cost.published import (
    fit,
    fitted_constants,
    interval_ratios,
    leave_one_out,
    read_runs,
    score,
)


def main(has_intervals: bool) -> None:
    file = read_runs()
    rows = [entry.row for entry in score(file).entries if entry.row]
    groups = list(file.rank_groups.values())
    intervals: dict[str, dict[str, tuple[float, int]]] = {}
    if has_intervals:
        papers = leave_one_out(rows, groups).values()
        intervals = interval_ratios(rows, {k: e for errors in papers for k, e in errors.items()})
    for name in sorted({row.software.name for row in rows}):
        found, shipped = fit(name, rows, fitted_constants(), groups), load_software(name)
        constants = dict(shipped.constants)
        for constant in fitted_constants():
            constants[constant.name] = Quantity(
                float(f"{found.values[constant.name]:.4g}"),
                f"fit to {found.n_runs} published runs (cost/published/fit.py); prior "
                f"{constant.prior:g}: {constant.source}",
            )
        known = dict(shipped.intervals)
        for device, (ratio, n) in intervals.get(name, {}).items():
            source = (
                f"80% of {n} published runs, each left out of the fit with its paper "
                "(cost/published/fit.py)"
            )
            known[device] = Quantity(float(f"{ratio:.3g}"), source)
        _write(SOFTWARE_FOLDER / f"{name}.toml", constants, known)


def _write(
    path: Path, constants: Mapping[str, Quantity], intervals: Mapping[str, Quantity]
) -> None:
    text = path.read_text().split("\n[constants")[0].rstrip() + "\n"
    for table, quantities in (("constants", constants), ("intervals", intervals)):
        for name, found in quantities.items():
            value = f'value = {found.value:g}\nsource = "{found.source}"\n'
            text += f"\n[{table}.{name}]\n{value}"
    path.write_text(text)


if __name__ == "__main__":
    main("intervals" in sys.argv[1:])
