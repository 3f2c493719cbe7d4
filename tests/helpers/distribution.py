"""Which of pytest's workers runs a file: files that use worker processes share one, and come first,
since a pool's processes import for seconds; files that capture the same large models share one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DEEP = "abridge alike layers optimality recompute_search repeated".split()


class PoolsTogether(LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile`, with the files that use the fixture `workers` as one, and `DEEP` ones."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if uses_workers(ROOT / file):
            return "workers"
        return "deep" if Path(file).stem.removeprefix("test_") in DEEP else file


def turn(file: Path) -> int:
    """Files come in this order: those that use worker processes; those that plan nothing, while the
    first of the others has machine code made of the planner's loops; all others."""
    if uses_workers(file):
        return 0
    return 1 if file.name.startswith("test_rule_") else 2


@lru_cache
def uses_workers(file: Path) -> bool:
    """Whether tests of this file ask for pools of processes."""
    text = file.read_text(encoding="utf-8")
    return "workers(" in text or '"workers"' in text
