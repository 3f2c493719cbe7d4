"""How long planning takes for every model of the zoo, on two profiles: `make bench-zoo`.

    python -m tests.parity.plan_zoo llama swin     these alone

CPU seconds, with capture; the slowest last. No model should take more than `MOST_S`.
"""

from __future__ import annotations

import itertools
import sys
import time

import autopar
from tests.parity.zoo import FAMILIES

MOST_S = 20.0
MESHES, PROFILES = ((1, 4), (2, 8), (8, 8)), ("cpu-local", "a100-80gb")


def seconds(family: str, shape: tuple[int, int], profile: str) -> tuple[float, str]:
    """CPU seconds of one planning, and what came."""
    entry = FAMILIES[family]
    kept = {name: entry.options[name] for name in ("batch_dims",) if name in entry.options}
    model, batch = entry.make(), entry.batch(0)
    begin_s = time.process_time()
    try:
        found = autopar.plan(model, autopar.Mesh(shape, hardware=profile), batch, **kept)
        gap = "" if found.gap is None else f", gap {found.gap:.0%}"
        what = found.explain().splitlines()[0] + gap
    except autopar.errors.AutoparError as error:
        what = f"{type(error).__name__}: {error.what}"
    return time.process_time() - begin_s, what


def main(families: list[str]) -> None:
    rows = []
    for of in itertools.product(families or FAMILIES, MESHES, PROFILES):
        taken_s, what = seconds(*of)
        rows.append((taken_s, *of, what))
        print(f"{taken_s:6.1f} s", *of, what[:80], sep="  ", flush=True)  # noqa: T201
    slow = sorted(row[:4] for row in rows if row[0] > MOST_S)
    print(f"{len(rows)} plans, {len(slow)} above {MOST_S:g} s:", *slow, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
