"""`python -m tests.fuzz.programs BASE NUMBER`: a program again, compared, made small, printed."""

from __future__ import annotations

import sys

from tests.fuzz.programs.check import cases, report
from tests.fuzz.programs.compare import RIGHT

if __name__ == "__main__":
    base, number = map(int, sys.argv[1:3])
    found = [
        (program, layout, result)
        for program, layout, result in cases(base, number, always_layouts=True)
    ]
    for program, layout, result in found:
        if result.what != RIGHT:
            sys.stdout.write(report(base, number, program, layout, result))
        else:
            sys.stdout.write(f"{layout}: {result.what} {result.key}\n")
    if all(result.what == RIGHT for *_, result in found):
        sys.stdout.write(found[0][0].text())
